"""The rows of `ft.db` as typed values: what goes in is what comes out.

Times are ISO 8601 in UTC. A row's `id` is None until the store has given it one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from freetoken.hardware.model import Hardware

Outcome = Literal["running", "ready", "stopped", "failed"]


def make_timestamp() -> str:
    """Now, in UTC, to the microsecond: `2031-05-04T09:30:00.000000+00:00`."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Row(BaseModel):
    """Base of all rows: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MachineRow(Row):
    """A machine by its fingerprint, as it was last seen."""

    id: int | None = None
    fingerprint: str
    name: str
    hardware: Hardware
    first_seen: str = Field(default_factory=make_timestamp)
    last_seen: str = Field(default_factory=make_timestamp)


class DeploymentRow(Row):
    """What was declared under a name: one row each time that `ft apply` changed it."""

    id: int | None = None
    name: str
    run_id: str | None = None
    engine: str
    model_name: str
    #: The recipe as it was carried out, all parents and overrides merged in.
    recipe: dict[str, Any]
    action: Literal["launch", "resize", "restart", "adopt", "rollback", "stop"] = "launch"
    declared_at: str = Field(default_factory=make_timestamp)


class RunRow(Row):
    """One start of an engine; `id` is the name of its run folder."""

    id: str
    deployment: str
    machine_id: int | None = None
    engine: str
    engine_version: str | None = None
    model_name: str
    started_at: str = Field(default_factory=make_timestamp)
    ended_at: str | None = None
    outcome: Outcome = "running"
    #: Seconds from the spawn to the first proven answer.
    ready_s: float | None = None
    exit_code: int | None = None
    error: str | None = None
    #: `Plan.model_dump()` of what was launched.
    plan: dict[str, Any] = {}


class EventRow(Row):
    """Something that happened in a run: a line of its `events.jsonl`."""

    id: int | None = None
    run_id: str
    at: str = Field(default_factory=make_timestamp)
    kind: str
    message: str = ""
    data: dict[str, Any] = {}


class ResultRow(Row):
    """Figures measured on a running engine, with the settings and the workload they belong to."""

    id: int | None = None
    run_id: str | None = None
    machine_id: int | None = None
    recipe_name: str
    workload: str
    engine: str
    engine_version: str | None = None
    model_name: str
    #: What was measured: `proof`, `bench`, `trial`; what a study confirmed is `tuned`, with its `gain_ratio`, or
    #: `confirm`, a baseline that stayed.
    kind: str = "bench"
    #: Effective settings by field name of `ResolvedSettings`.
    settings: dict[str, Any] = {}
    #: Figures by name with the unit in it: `decode_tps`, `ttft_ms`, `hit_ratio`, ...
    metrics: dict[str, float] = {}
    #: True where counts did not come from `usage`.
    is_estimated: bool = False
    #: Why the figures must not be compared; empty where they may.
    invalid_because: str = ""
    measured_at: str = Field(default_factory=make_timestamp)


class MeasuredLine(Row):
    """A ledger line of a launch: planned and measured bytes. `key` is the planner's line key."""

    ledger: Literal["vram", "ram", "disk"]
    key: str
    planned_bytes: int = Field(ge=0)
    measured_bytes: int = Field(ge=0)
    #: What earlier residuals had added to `planned_bytes`; the residual is measured against the rest.
    correction_bytes: int = 0


class LineContext(Row):
    """What a residual holds for: another engine version, backend, GPU generation or OS has its own."""

    engine: str
    engine_version: str | None = None
    attention: str | None = None
    #: Compute capability such as `8.6`; None on the CPU.
    gpu_generation: str | None = None
    #: `linux`, `wsl`, ...
    os: str = "linux"


class RunFacts(Row):
    """What a run folder keeps for the store, a line of `facts.jsonl`: every table can be made again from it."""

    fingerprint: str
    hardware: Hardware
    run: RunRow
    deployment: DeploymentRow | None = None
    context: LineContext
    lines: tuple[MeasuredLine, ...] = ()
    results: tuple[ResultRow, ...] = ()
