"""`Store`: typed rows in and out of `ft.db`, and the calibration that earlier launches give the planner.

One `Store` belongs to one thread; any number of processes may hold one on the same file. Judging figures and
printing them is done elsewhere.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from freetoken import paths
from freetoken.hardware.model import Hardware
from freetoken.planner.plan import Calibration, Residual
from freetoken.store import database
from freetoken.store.rows import (
    DeploymentRow,
    EventRow,
    LineContext,
    MachineRow,
    MeasuredLine,
    ResultRow,
    Row,
    RunFacts,
    RunRow,
    make_timestamp,
)

if TYPE_CHECKING:
    from sqlite_utils import Database

R = TypeVar("R", bound=Row)
T = TypeVar("T")

#: Launches that a residual is averaged over, newest first: old drivers and settings fade out.
RESIDUAL_RUNS = 8
#: Lines that come with an engine, a driver and a GPU generation, whatever the model.
ENGINE_LINES = ("cuda_context", "allocator", "cuda_graphs", "autotune_scratch", "attention_workspace", "runtime")
#: Lines that are a count times a size, or tensors of the checkpoint: an engine that has them as planned proves nothing.
COUNTED_LINES = ("expert_slots", "kv_cache", "dense_weights", "shared_experts", "embedding", "head", "expert_banks")
_JSON_COLUMNS = frozenset({"hardware", "recipe", "plan", "data", "settings", "metrics"})


def open_store(path: Path | None = None) -> Store:
    """The store at `path` (else the state folder's `ft.db`), made and migrated where needed.

    Raises BadFileError where the database is damaged or newer than this tool, FtError where it cannot be written.
    """
    target = path or paths.database_path()
    return Store(target, database.open_connection(target))


def read_store(path: Path | None = None) -> Store | None:
    """The same for reading only: makes no file, and is None where nothing was stored yet."""
    target = path or paths.database_path()
    connection = database.open_for_reading(target)
    return Store(target, connection) if connection is not None else None


def read_calibration(
    context: LineContext, fingerprint: str | None = None, *, model_name: str | None = None, path: Path | None = None
) -> Calibration:  # fmt: skip
    """What earlier launches say, or an empty calibration where there were none. Makes no file."""
    store = read_store(path)
    if store is None:
        return Calibration()
    with store:
        return store.read_calibration(context, fingerprint, model_name)


def read_tuned(
    fingerprint: str, *, engine: str, model_name: str, workload: str, path: Path | None = None
) -> ResultRow | None:  # fmt: skip
    """The newest confirmed settings of this machine for a model and a workload; None where none was confirmed."""
    store = read_store(path)
    if store is None:
        return None
    with store:
        return store.read_tuned(fingerprint, engine=engine, model_name=model_name, workload=workload)


class Store:
    """An open `ft.db`. Every `record_` method is one transaction: all of it is kept, or nothing."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Closes the connection; the last one out folds the WAL into the file."""
        self.connection.close()

    # --- writing

    def record_machine(self, hardware: Hardware, fingerprint: str) -> int:
        """The id of the machine with `fingerprint`; its description and `last_seen` are brought up to date."""
        return self._write(lambda: self._put_machine(hardware, fingerprint))

    def record_deployment(self, row: DeploymentRow) -> int:
        """The id of the new row."""
        return self._write(lambda: self._insert("deployments", row))

    def record_run(self, row: RunRow) -> None:
        """Keeps `row`; a run that is known by its id is replaced."""
        self._write(lambda: self._tables["runs"].insert(_dump(row), replace=True))

    def record_outcome(
        self, run_id: str, outcome: str, *, ready_s: float | None = None, exit_code: int | None = None,
        error: str | None = None,
    ) -> None:  # fmt: skip
        """Updates how the run stands. `stopped` and `failed` set `ended_at`. An unknown run stays unknown."""
        fresh: dict[str, Any] = {"outcome": outcome}
        fresh |= {
            key: value
            for key, value in (("ready_s", ready_s), ("exit_code", exit_code), ("error", error))
            if value is not None
        }
        if outcome in ("stopped", "failed"):
            fresh["ended_at"] = make_timestamp()
        names = ", ".join(f"{name} = ?" for name in fresh)
        self._write(lambda: self.connection.execute(f"UPDATE runs SET {names} WHERE id = ?", (*fresh.values(), run_id)))

    def record_event(self, row: EventRow) -> None:
        """Keeps `row`; one that is known already (same run, time, kind and message) is not kept twice."""
        self.record_events((row,))

    def record_events(self, rows: Iterable[EventRow]) -> None:
        """The same for several, in one transaction."""
        dumped = [_dump(row) for row in rows]
        if dumped:
            self._write(lambda: self._tables["events"].insert_all(dumped, ignore=True))

    def record_facts(self, facts: RunFacts) -> int:
        """Keeps all that a run says of itself in one transaction; the id of its machine.

        Recording the same facts again changes nothing but `last_seen`.
        """

        def change() -> int:
            machine_id = self._put_machine(facts.hardware, facts.fingerprint)
            known = self._one("SELECT started_at FROM runs WHERE id = ?", (facts.run.id,))
            started_at = min(known["started_at"], facts.run.started_at) if known is not None else facts.run.started_at
            run = facts.run.model_copy(update={"machine_id": machine_id, "started_at": started_at})
            self._tables["runs"].insert(_dump(run), replace=True)
            declared = facts.deployment
            if declared is not None and not self._has("deployments", run_id=run.id, declared_at=declared.declared_at):
                self._insert("deployments", declared.model_copy(update={"id": None, "run_id": run.id}))
            self._put_lines(run.id, facts.lines, facts.context, machine_id)
            for result in facts.results:
                if not self._has("results", run_id=run.id, kind=result.kind, measured_at=result.measured_at):
                    fresh = {"id": None, "run_id": run.id, "machine_id": machine_id}
                    self._insert("results", result.model_copy(update=fresh))
            return machine_id

        return self._write(change)

    def record_result(self, row: ResultRow) -> int:
        """The id of the new row."""
        return self._write(lambda: self._insert("results", row))

    def record_measured_lines(
        self, run_id: str, lines: Sequence[MeasuredLine], context: LineContext, *, machine_id: int | None = None
    ) -> None:  # fmt: skip
        """Keeps planned and measured bytes of a launch; a second reading of the same line replaces the first."""
        self._write(lambda: self._put_lines(run_id, lines, context, machine_id))

    # --- reading

    def list_machines(self) -> tuple[MachineRow, ...]:
        """All machines, the one seen last first."""
        return self._rows(MachineRow, "SELECT * FROM machines ORDER BY last_seen DESC, id DESC")

    def list_deployments(self, name: str | None = None, *, limit: int = 100) -> tuple[DeploymentRow, ...]:
        """What was declared, newest first."""
        where, values = _where(name=name)
        return self._rows(DeploymentRow, f"SELECT * FROM deployments{where} ORDER BY id DESC LIMIT ?", (*values, limit))

    def list_runs(self, deployment: str | None = None, *, limit: int = 100) -> tuple[RunRow, ...]:
        """Runs, newest first."""
        where, values = _where(deployment=deployment)
        return self._rows(
            RunRow, f"SELECT * FROM runs{where} ORDER BY started_at DESC, id DESC LIMIT ?", (*values, limit)
        )

    def read_run(self, run_id: str) -> RunRow | None:
        """The run with this id, or None."""
        rows = self._rows(RunRow, "SELECT * FROM runs WHERE id = ?", (run_id,))
        return rows[0] if rows else None

    def list_events(self, run_id: str, *, limit: int = 1000) -> tuple[EventRow, ...]:
        """The last `limit` events of a run, in the order in which they happened."""
        rows = self._rows(
            EventRow, "SELECT * FROM events WHERE run_id = ? ORDER BY at DESC, id DESC LIMIT ?", (run_id, limit)
        )
        return rows[::-1]

    def list_results(
        self, *, recipe: str | None = None, workload: str | None = None, engine: str | None = None,
        kind: str | None = None, run_id: str | None = None, limit: int = 100,
    ) -> tuple[ResultRow, ...]:  # fmt: skip
        """Results that match every filter given, newest first."""
        where, values = _where(recipe_name=recipe, workload=workload, engine=engine, kind=kind, run_id=run_id)
        return self._rows(
            ResultRow, f"SELECT * FROM results{where} ORDER BY measured_at DESC, id DESC LIMIT ?", (*values, limit)
        )

    def read_all(self, table: Literal["machines", "runs", "results"], kind: type[R]) -> tuple[R, ...]:
        """Every row of `table`. Raises what pydantic raises for a row that cannot be read."""
        return self._rows(kind, f"SELECT * FROM {table}")

    def read_tuned(self, fingerprint: str, *, engine: str, model_name: str, workload: str) -> ResultRow | None:
        """The newest confirmed result of kind `tuned` for this machine, engine, model and workload; None without one.

        A later study of the same knows more than an earlier one, so the newest counts and not the fastest; but a row
        without its gain over the baseline was never held against one, and counts for nothing.
        """
        query = """
            SELECT results.* FROM results JOIN machines ON machines.id = results.machine_id
            WHERE results.kind = 'tuned' AND results.invalid_because = '' AND machines.fingerprint = ?
              AND results.engine = ? AND results.model_name = ? AND results.workload = ?
              AND json_extract(results.metrics, '$.gain_ratio') IS NOT NULL
            ORDER BY results.measured_at DESC, results.id DESC LIMIT 1
        """
        rows = self._rows(ResultRow, query, (fingerprint, engine, model_name, workload))
        return rows[0] if rows else None

    def list_measured_lines(self, run_id: str) -> tuple[MeasuredLine, ...]:
        """Planned and measured bytes of one run."""
        names = ", ".join(MeasuredLine.model_fields)
        return self._rows(
            MeasuredLine, f"SELECT {names} FROM measured_lines WHERE run_id = ? ORDER BY ledger, key", (run_id,)
        )

    def read_calibration(
        self, context: LineContext, fingerprint: str | None = None, model_name: str | None = None
    ) -> Calibration:  # fmt: skip
        """Residuals of earlier launches under the same `context`, and how far off plans on this machine have been.

        A residual is the mean of measured - (planned - correction) over the newest `RESIDUAL_RUNS` launches. Without
        an attention backend in `context`, which is the case before one is chosen, launches with any count. With
        `model_name`, other models' launches count for the lines alone that every model shares (`ENGINE_LINES`).
        """
        machine = self._one("SELECT id FROM machines WHERE fingerprint = ?", (fingerprint,)) if fingerprint else None
        error_ratio, launches = (
            self._read_error(machine["id"] if machine else None) if machine or not fingerprint else (None, 0)
        )
        return Calibration(
            residuals=self._read_residuals(context, model_name), mean_error_ratio=error_ratio, launches=launches
        )

    def _read_residuals(self, context: LineContext, model_name: str | None) -> tuple[Residual, ...]:
        facts = context.model_dump(exclude={"attention"} if context.attention is None else None)
        same = " AND ".join(f"{name} IS ?" for name in facts)
        values = list(facts.values())
        if model_name is not None:
            shared = ", ".join("?" for _ in ENGINE_LINES)
            same += f" AND (key IN ({shared}) OR run_id IN (SELECT id FROM runs WHERE model_name = ?))"
            values += [*ENGINE_LINES, model_name]
        query = f"""
            SELECT key, CAST(ROUND(AVG(measured_bytes - planned_bytes + correction_bytes)) AS INTEGER) AS bytes,
                   CAST(ROUND(AVG(MAX(0, planned_bytes - correction_bytes))) AS INTEGER) AS planned_bytes,
                   COUNT(*) AS runs
            FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY key ORDER BY recorded_at DESC) AS age
                  FROM measured_lines WHERE {same})
            WHERE age <= {RESIDUAL_RUNS} GROUP BY key ORDER BY key
        """
        with database.in_words(self.path):
            rows = self.connection.execute(query, tuple(values)).fetchall()
        return tuple(
            Residual(key=row["key"], bytes=row["bytes"], runs=row["runs"], planned_bytes=row["planned_bytes"])
            for row in rows
        )

    def _read_error(self, machine_id: int | None) -> tuple[float | None, int]:
        # The ledger that decides: VRAM where the launch had one, RAM on a CPU-only device. A launch that was only seen
        # to hold what can be counted beforehand is no evidence of how good plans are.
        where, values = _where(machine_id=machine_id)
        counted = ", ".join("?" for _ in COUNTED_LINES)
        query = f"""
            SELECT AVG(ABS(measured - planned) * 1.0 / measured) AS error, COUNT(*) AS launches
            FROM (SELECT run_id, ledger, SUM(measured_bytes) AS measured, SUM(planned_bytes) AS planned,
                         ROW_NUMBER() OVER (
                             PARTITION BY run_id ORDER BY ledger = 'vram' DESC, ledger = 'ram' DESC) AS rank
                  FROM measured_lines{where} GROUP BY run_id, ledger
                  HAVING SUM(key NOT IN ({counted})) > 0 OR SUM(ABS(correction_bytes)) > 0
                      OR SUM(measured_bytes) <> SUM(planned_bytes))
            WHERE rank = 1 AND measured > 0
        """
        row = self._one(query, (*values, *COUNTED_LINES))
        return (row["error"], row["launches"]) if row is not None else (None, 0)

    # --- plumbing: called inside a transaction

    def _put_machine(self, hardware: Hardware, fingerprint: str) -> int:
        row = MachineRow(fingerprint=fingerprint, name=hardware.name, hardware=hardware)
        known = self._one("SELECT id FROM machines WHERE fingerprint = ?", (fingerprint,))
        if known is None:
            return self._insert("machines", row)
        fresh = {"name": row.name, "hardware": _dump(row)["hardware"], "last_seen": row.last_seen}
        self._tables["machines"].update(known["id"], fresh)
        return int(known["id"])

    def _put_lines(
        self, run_id: str, lines: Sequence[MeasuredLine], context: LineContext, machine_id: int | None
    ) -> None:  # fmt: skip
        facts = {"run_id": run_id, "machine_id": machine_id, "recorded_at": make_timestamp(), **context.model_dump()}
        dumped = [{**facts, **line.model_dump()} for line in lines]
        if dumped:
            self._tables["measured_lines"].insert_all(dumped, replace=True)

    def _has(self, table: str, **filters: Any) -> bool:
        where, values = _where(**filters)
        return self._one(f"SELECT 1 FROM {table}{where} LIMIT 1", values) is not None

    @cached_property
    def _tables(self) -> Database:
        from sqlite_utils import Database

        return Database(self.connection, execute_plugins=False)

    def _write(self, change: Callable[[], T]) -> T:
        return database.write(self.connection, self.path, change)

    def _insert(self, table: str, row: Row) -> int:
        return int(self._tables[table].insert(_dump(row)).last_pk)

    def _one(self, query: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        with database.in_words(self.path):
            row: sqlite3.Row | None = self.connection.execute(query, values).fetchone()
            return row

    def _rows(self, kind: type[R], query: str, values: Sequence[Any] = ()) -> tuple[R, ...]:
        with database.in_words(self.path):
            rows = self.connection.execute(query, values).fetchall()
        return tuple(kind.model_validate(_parse(row)) for row in rows)


def _dump(row: Row) -> dict[str, Any]:
    """The row as columns: nested values as JSON, no `id` where the database gives one."""
    columns = row.model_dump(mode="json")
    if columns.get("id", 0) is None:
        del columns["id"]
    return {key: json.dumps(value) if key in _JSON_COLUMNS else value for key, value in columns.items()}


def _parse(row: sqlite3.Row) -> dict[str, Any]:
    return {key: json.loads(row[key]) if key in _JSON_COLUMNS else row[key] for key in row.keys()}  # noqa: SIM118


def _where(**filters: Any) -> tuple[str, tuple[Any, ...]]:
    """A WHERE clause over the filters that are not None. Names come from this file, values are bound."""
    given = {name: value for name, value in filters.items() if value is not None}
    clause = " WHERE " + " AND ".join(f"{name} = ?" for name in given) if given else ""
    return clause, tuple(given.values())
