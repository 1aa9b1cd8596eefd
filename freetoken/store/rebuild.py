"""The database made anew from the run folders, which are the truth.

A run folder holds `launch.json`, `plan.json`, `events.jsonl`, `keeper.json` and, once it was proven, `facts.jsonl`:
one line for each time that something was recorded; `results.jsonl` has a line for each measurement after that.
What a study measured and found belongs to no single run: it stands in the study's own file beside its status.
A folder or a line that cannot be read is left out and named; nothing in the folders is changed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from freetoken.errors import BadFileError
from freetoken.hardware.model import Hardware
from freetoken.store import database
from freetoken.store.results import Store, open_store
from freetoken.store.rows import EventRow, ResultRow, Row, RunFacts, RunRow, make_timestamp

FACTS_FILE, RESULTS_FILE = "facts.jsonl", "results.jsonl"
#: What the rows of a study are kept in, after the study's name.
STUDY_SUFFIX = ".results.jsonl"


class RebuildReport(Row):
    """What was read, and what was left out, one sentence each."""

    runs: int
    events: int
    results: int
    set_aside: str | None = None
    skipped: tuple[str, ...] = ()


class StudyFact(Row):
    """A row of a study with the machine that it was measured on, a line of the study's file."""

    fingerprint: str
    hardware: Hardware
    result: ResultRow


def append_facts(run_dir: Path, facts: RunFacts) -> None:
    """Appends a line to the run's `facts.jsonl`, with one write. Raises OSError."""
    _append(run_dir / FACTS_FILE, facts)


def append_result(run_dir: Path, row: ResultRow) -> None:
    """Appends a measurement to the run's `results.jsonl`, with one write. Raises OSError."""
    _append(run_dir / RESULTS_FILE, row)


def append_study_fact(tune_dir: Path, study: str, fact: StudyFact) -> None:
    """Appends a row to the file of `study`, with one write. Raises OSError."""
    tune_dir.mkdir(parents=True, exist_ok=True)
    _append(tune_dir / f"{study}{STUDY_SUFFIX}", fact)


def _append(path: Path, row: Row) -> None:
    line = row.model_dump_json().encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def rebuild_from_runs(runs_dir: Path, path: Path, tune_dir: Path | None = None) -> RebuildReport:
    """Sets the database at `path` aside and makes a new one from the folders in `runs_dir` and the studies' files.

    Rows of studies that stand in the old database alone are counted among what was left out.

    A database of a newer tool is refused with BadFileError like everywhere else: it is not damaged.
    """
    from filelock import FileLock

    _refuse_newer(path)
    with database.in_words(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.rebuild.lock", timeout=database.LOCK_TIMEOUT_S):
            fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
            _remove_with_journal(fresh)
            with open_store(fresh) as store:
                report = _fill(store, runs_dir)
                report = _fill_studies(store, tune_dir, report)
                report = _count_lost(store, path, report)
                # One file is to be renamed: what stands in the journal goes into it first.
                store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            set_aside = _swap(fresh, path)
    return report.model_copy(update={"set_aside": str(set_aside) if set_aside else None})


def _refuse_newer(path: Path) -> None:
    try:
        database.check_header(path)
    except BadFileError as error:
        if "version" in error.message:
            raise


def _swap(fresh: Path, path: Path) -> Path | None:
    kept: Path | None = None
    if path.exists():
        kept = path.with_name(f"{path.name}.{make_timestamp()[:19].replace(':', '')}.old")
        os.replace(path, kept)
    for suffix in ("-wal", "-shm"):
        journal = Path(f"{path}{suffix}")
        if kept is not None and journal.exists():
            os.replace(journal, Path(f"{kept}{suffix}"))
        journal.unlink(missing_ok=True)
    os.replace(fresh, path)
    _remove_with_journal(fresh)
    return kept


def _remove_with_journal(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", ".lock"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _fill(store: Store, runs_dir: Path) -> RebuildReport:
    skipped: list[str] = []
    counts = {"runs": 0, "events": 0, "results": 0}
    folders = sorted(one for one in runs_dir.iterdir() if one.is_dir()) if runs_dir.is_dir() else []
    for folder in folders:
        run = _read_run(folder)
        if run is None:
            skipped.append(f"{folder.name}: no `launch.json` or `plan.json` that can be read")
            continue
        store.record_run(run)
        machine_id = None
        for facts in _read_facts(folder, run):
            machine_id = store.record_facts(facts)
            counts["results"] += len(facts.results)
        for result in _read_results(folder):
            store.record_result(result.model_copy(update={"machine_id": machine_id}))
            counts["results"] += 1
        events = list(_read_events(folder))
        store.record_events(events)
        counts["runs"] += 1
        counts["events"] += len(events)
    return RebuildReport(**counts, skipped=tuple(skipped))


def _fill_studies(store: Store, tune_dir: Path | None, report: RebuildReport) -> RebuildReport:
    files = sorted(tune_dir.glob(f"*{STUDY_SUFFIX}")) if tune_dir is not None and tune_dir.is_dir() else []
    facts, skipped = [], []
    for file in files:
        bad = 0
        for line in _read_lines(file):
            try:
                facts.append(StudyFact.model_validate_json(line))
            except ValidationError:
                bad += 1  # the last line of a study that was killed may be half a line
        if bad:
            skipped.append(f"{file.name}: {bad} line{'s' if bad > 1 else ''} that cannot be read")
    for one in sorted(facts, key=lambda one: one.result.measured_at):
        machine_id = store.record_machine(one.hardware, one.fingerprint)
        store.record_result(one.result.model_copy(update={"id": None, "machine_id": machine_id}))
    results = report.results + len(facts)
    return report.model_copy(update={"results": results, "skipped": (*report.skipped, *skipped)})


def _count_lost(store: Store, old_path: Path, report: RebuildReport) -> RebuildReport:
    """Names the rows of studies that stand in the old database and in no file: an older tool kept them there alone."""
    try:
        with contextlib.closing(sqlite3.connect(f"{old_path.absolute().as_uri()}?mode=ro", uri=True)) as old:
            query = "SELECT COUNT(*) FROM results WHERE kind IN ('trial', 'tuned', 'confirm')"
            before, after = (one.execute(query).fetchone()[0] for one in (old, store.connection))
    except sqlite3.Error:
        return report  # there is none, or it cannot be read
    if before <= after:
        return report
    lost = f"{before - after} row{'s' if before - after > 1 else ''} of `ft tune` that no file keeps"
    return report.model_copy(update={"skipped": (*report.skipped, f"{lost}; the old database has them")})


def _read_run(folder: Path) -> RunRow | None:
    launch, plan, keeper = (_read_json(folder / f"{name}.json") for name in ("launch", "plan", "keeper"))
    if launch is None or plan is None:
        return None
    outcome = {"stopped": "stopped", "failed": "failed", "ready": "ready"}.get(
        str((keeper or {}).get("state")), "running"
    )
    keeper = keeper or {}
    row = {
        "id": folder.name,
        "deployment": launch.get("name") or plan.get("recipe_name"),
        "engine": plan.get("engine"),
        "engine_version": plan.get("engine_version"),
        "model_name": plan.get("model_name"),
        "started_at": launch.get("created_at") or keeper.get("started_at") or make_timestamp(),
        "ended_at": keeper.get("ended_at"),
        "outcome": outcome,
        "exit_code": keeper.get("exit_code"),
        "error": keeper.get("cause") or None,
        "plan": plan,
    }
    try:
        return RunRow.model_validate(row)
    except ValidationError:
        return None


def _read_facts(folder: Path, run: RunRow) -> Iterator[RunFacts]:
    # How the run ended is known after the proof, so the keeper's word replaces that of the facts.
    ending = {"id": folder.name, "outcome": run.outcome, "ended_at": run.ended_at, "exit_code": run.exit_code,
              "error": run.error}  # fmt: skip
    for line in _read_lines(folder / FACTS_FILE):
        try:
            facts = RunFacts.model_validate_json(line)
        except ValidationError:
            continue
        yield facts.model_copy(update={"run": facts.run.model_copy(update=ending)})


def _read_results(folder: Path) -> Iterator[ResultRow]:
    for line in _read_lines(folder / RESULTS_FILE):
        try:
            row = ResultRow.model_validate_json(line)
        except ValidationError:
            continue
        yield row.model_copy(update={"id": None, "run_id": folder.name})


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _read_events(folder: Path) -> Iterator[EventRow]:
    for line in _read_lines(folder / "events.jsonl"):
        try:
            value = json.loads(line)
            yield EventRow(
                run_id=folder.name, at=value["at"], kind=value["kind"],
                message=value.get("message", ""), data=value.get("data", {}),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # The last line of a run that was killed may be half a line.


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
