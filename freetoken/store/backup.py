"""The database copied, put back and checked, while other processes use it.

SQLite's own online backup copies a consistent state page by page; writers are not stopped, and a page that changes
meanwhile is copied again. A copy and a restored database are read through before anybody relies on them.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from freetoken.errors import BadFileError, FtError, UsageError
from freetoken.store import database
from freetoken.store.results import Store
from freetoken.store.rows import MachineRow, ResultRow, Row, RunRow, make_timestamp
from freetoken.store.schema import VERSION

#: Pages copied at once; between two steps the source is free for writers.
_PAGES = 256
#: A source that is written to all the time is copied in one step after so many restarts.
_MAX_STEPS = 10_000


#: What every version of the database has.
_KNOWN = "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND name IN ('machines', 'runs', 'results')"


class DatabaseReport(Row):
    """What is in a database file: rows of each table, and a digest over all of them."""

    path: str
    version: int
    tables: dict[str, int]
    sha256: str
    bytes: int = 0
    #: Where the database that a restore replaced was put.
    kept: str | None = None

    def describe(self) -> str:
        """One line for people."""
        counts = ", ".join(f"{count:,} {name}" for name, count in self.tables.items())
        return f"{self.path}: version {self.version}, {counts}; nothing is wrong with it"


def backup(source: Path, target: Path) -> DatabaseReport:
    """Copies the database at `source` into the new file `target`, which is checked; what it holds.

    Raises UsageError where `target` exists, or nothing was stored yet.
    """
    if target.exists():
        raise UsageError(f"{target} exists already")
    if not source.is_file():
        raise UsageError(f"there is no database yet: {source}")
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise FtError(f"{target} cannot be written: {error.strerror}") from error
    try:
        _copy(source, partial)
        check(partial)
        os.replace(partial, target)
    finally:
        _remove(partial)
    return check(target)


def restore(source: Path, target: Path) -> DatabaseReport:
    """Puts what `source` holds in the place of what `target` holds, which is kept under another name.

    The pages are written into the living database in one transaction, so that a process that has it open sees either
    the old one or the new one; only a target that is no database any more is moved away.
    """
    from filelock import FileLock

    check(source)
    kept: Path | None = None
    with database.in_words(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=database.LOCK_TIMEOUT_S):
            if target.exists():
                kept = target.with_name(f"{target.name}.{make_timestamp()[:19].replace(':', '')}.old")
                _set_aside(target, kept)
            with closing(_open(source)) as origin, closing(sqlite3.connect(target, timeout=30.0)) as live:
                origin.backup(live)
    # An older database gets its migrations, WAL is switched on: it is the live one from now on.
    database.open_connection(target).close()
    return check(target).model_copy(update={"kept": str(kept) if kept is not None else None})


def _set_aside(target: Path, kept: Path) -> None:
    """A copy of the database where it is one; the file itself where it is not."""
    try:
        _copy(target, kept)
    except FtError:
        for suffix in ("", "-wal", "-shm"):
            if Path(f"{target}{suffix}").exists():
                os.replace(f"{target}{suffix}", f"{kept}{suffix}")


def check(path: Path) -> DatabaseReport:
    """Reads every page, every foreign key and every row of a database.

    Raises UsageError where there is none, BadFileError where it is damaged, newer than this `ft`, or holds rows that
    nobody can read.
    """
    if not path.is_file():
        raise UsageError(f"there is no database {path}")
    database.check_header(path)
    with database.in_words(path), closing(_open(path)) as connection:
        version = database.read_version(connection)
        wrong = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(5)") if row[0] != "ok"]
        wrong += [f"a row of `{row[0]}` points nowhere" for row in connection.execute("PRAGMA foreign_key_check")]
        if wrong:
            raise BadFileError(f"{path} is damaged: {wrong[0]}", details=tuple(wrong[1:6]))
        if version == 0 or connection.execute(_KNOWN).fetchone()[0] != 3:
            raise BadFileError(f"{path} is no database of `ft`: it has none of its tables")
        if version == VERSION:
            _read_rows(Store(path, connection), path)
        tables, digest = _digest(connection)
    return DatabaseReport(path=str(path), version=version, tables=tables, sha256=digest, bytes=path.stat().st_size)


def _read_rows(store: Store, path: Path) -> None:
    from pydantic import ValidationError

    kinds: tuple[tuple[Literal["machines", "runs", "results"], type[Row]], ...] = (
        ("machines", MachineRow),
        ("runs", RunRow),
        ("results", ResultRow),
    )
    for table, kind in kinds:
        try:
            store.read_all(table, kind)
        except (ValidationError, ValueError) as error:
            raise BadFileError(f"{path} holds a row in `{table}` that cannot be read: {str(error)[:200]}") from error


def _digest(connection: sqlite3.Connection) -> tuple[dict[str, int], str]:
    """Rows of each table, and a hash over all of them in the order of their rows."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    names = [row[0] for row in connection.execute(query)]
    digest, counts = hashlib.sha256(), {}
    for name in names:
        counts[name] = 0
        for row in connection.execute(f'SELECT * FROM "{name}" ORDER BY 1, 2, 3'):
            counts[name] += 1
            digest.update(repr((name, tuple(row))).encode())
    return counts, digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    _remove(target)
    with database.in_words(source), closing(_open(source)) as origin, closing(sqlite3.connect(target)) as copy:
        steps = 0

        def count(status: int, remaining: int, total: int) -> None:
            nonlocal steps
            steps += 1
            if steps > _MAX_STEPS:
                raise TimeoutError

        try:
            origin.backup(copy, pages=_PAGES, progress=count, sleep=0.002)
        except TimeoutError:
            origin.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")


def _open(path: Path) -> sqlite3.Connection:
    return database.open_for_checking(path)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
