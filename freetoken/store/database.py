"""Opening `ft.db`: version check, file lock, migrations, WAL, and transactions that several processes share.

Rules (DESIGN section 1): opening and migrating happens under a file lock, WAL is switched on outside migrations,
and every write is a `BEGIN IMMEDIATE` transaction: a deferred one that turns into a write fails with `database is
locked` whatever the time-out. What SQLite says is turned into words here. Reads import neither sqlite-utils nor
filelock, so that `ft plan` stays fast.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from freetoken.errors import BadFileError, FtError
from freetoken.store.schema import MIGRATIONS, VERSION

T = TypeVar("T")

#: How long SQLite itself waits for another writer, and how often a write that still failed is tried again.
BUSY_TIMEOUT_S = 10.0
BUSY_RETRIES = 5
LOCK_TIMEOUT_S = 60.0
_MAGIC = b"SQLite format 3\x00"
_REBUILD_HINT = "`ft results --rebuild` sets it aside and makes a new one from the run folders"


def open_connection(path: Path) -> sqlite3.Connection:
    """A connection to the database at `path`, made and migrated where needed.

    Raises BadFileError where it is newer than this tool (it is not touched then) or damaged, FtError where the
    folder cannot be written.
    """
    check_header(path)
    with in_words(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = _connect(path)
        try:
            version = read_version(connection)
            _refuse_newer(path, version)
            if version < VERSION:
                _migrate_under_lock(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def open_for_reading(path: Path) -> sqlite3.Connection | None:
    """A connection that cannot write, or None where there is no database of this version yet. Makes no file."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    check_header(path)
    with in_words(path):
        connection = _connect_for_reading(path)
        if read_version(connection) < VERSION:
            connection.close()
            return None
        return connection


def open_for_checking(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, to a database of any version up to ours."""
    return _connect_for_reading(path)


def _connect_for_reading(path: Path) -> sqlite3.Connection:
    # Even a reader of a WAL database makes two files beside it; where it may not, nobody can be writing either.
    for option in ("mode=ro", "mode=ro&immutable=1"):
        uri = f"{path.absolute().as_uri()}?{option}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        try:
            _refuse_newer(path, read_version(connection))
            return connection
        except sqlite3.OperationalError as error:
            connection.close()
            is_refused = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
            if not is_refused or option != "mode=ro":
                raise
        except BaseException:
            connection.close()
            raise
    raise AssertionError("the second way in returns or raises")


def check_header(path: Path) -> None:
    """Refuses, by the first 100 bytes alone, a file that is no SQLite database or of a newer `ft`."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        return
    except OSError as error:
        raise FtError(f"{path} cannot be read: {error.strerror}") from error
    if not header:
        return  # SQLite takes an empty file as a new database.
    if not header.startswith(_MAGIC) or len(header) < 100:
        raise BadFileError(f"{path} is not a SQLite database", hint=_REBUILD_HINT)
    _refuse_newer(path, int.from_bytes(header[60:64], "big"))


def read_version(connection: sqlite3.Connection) -> int:
    """How many migrations the database has seen."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _refuse_newer(path: Path, version: int) -> None:
    if version > VERSION:
        raise BadFileError(
            f"{path} has version {version}, this `ft` knows versions up to {VERSION}; it was left untouched",
            hint="use the newer `ft` that wrote it, or another state folder: `ft --state FOLDER`",
        )


def _connect(path: Path) -> sqlite3.Connection:
    # isolation_level None: the driver begins no transaction of its own, every one here is explicit.
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _migrate_under_lock(connection: sqlite3.Connection, path: Path) -> None:
    from filelock import FileLock, Timeout

    try:
        with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            with transaction(connection):
                version = read_version(connection)  # Another process may have been faster.
                _refuse_newer(path, version)
                _apply(connection, version)
    except Timeout as error:
        raise FtError(f"{path} has been locked by another `ft` for {LOCK_TIMEOUT_S:.0f} s") from error


def _apply(connection: sqlite3.Connection, version: int) -> None:
    from sqlite_utils import Database

    database = Database(connection, execute_plugins=False)
    for migration in MIGRATIONS[version:]:
        migration(database)
    connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A `BEGIN IMMEDIATE` transaction: committed at the end, rolled back on any error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    try:
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def write(connection: sqlite3.Connection, path: Path, change: Callable[[], T]) -> T:
    """What `change` gives, run in one transaction; tried again a bounded number of times where SQLite is busy."""
    with in_words(path):
        for attempt in range(BUSY_RETRIES):
            try:
                with transaction(connection):
                    return change()
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or attempt == BUSY_RETRIES - 1:
                    raise
                time.sleep(0.05 * 2**attempt)
        raise AssertionError("the loop returns or raises")


def _is_busy(error: sqlite3.Error) -> bool:
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Turns what SQLite and the file system say about the database into an FtError."""
    try:
        yield
    except sqlite3.Error as error:
        raise _describe(error, path) from error
    except OSError as error:
        hint = "give a folder of yours: `ft --state FOLDER`"
        raise FtError(f"{error.filename or path}: {error.strerror or error}", hint=hint) from error


def _describe(error: sqlite3.Error, path: Path) -> FtError:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return BadFileError(f"{path} is damaged: {error}", hint=_REBUILD_HINT)
    if name.startswith("SQLITE_FULL"):
        return FtError(
            f"{path} cannot grow: the disk is full", hint=f"free space in {path.parent}, nothing was written"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return FtError(f"{path} cannot be written: {error}", hint="give a folder of yours: `ft --state FOLDER`")
    if _is_busy(error):
        return FtError(f"{path} is held by another process: {error}", hint="`ft status` shows what runs; try again")
    if name.startswith("SQLITE_IOERR"):
        return FtError(
            f"{path} could not be read or written: {error}",
            hint=f"is the disk that holds {path.parent} full, or failing?",
        )
    return FtError(f"{path}: {error}")
