"""`launch.json` and `keeper.json`: what is to be started, written before it is, and what became of it.

Plain dataclasses rather than pydantic values: the keeper reads and writes these, and must stay small. No secret is
ever in them; `secret_env` names variables whose values are inherited.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from freetoken.supervisor.files import format_now, read_json, write_json
from freetoken.supervisor.policy import KeeperPolicy as KeeperPolicy
from freetoken.supervisor.process import ProcessId

LAUNCH_FILE, KEEPER_FILE, EVENTS_FILE, LOG_FILE = "launch.json", "keeper.json", "events.jsonl", "engine.log"
KEEPER_LOCK_FILE, KEEPER_LOG_FILE = "keeper.lock", "keeper.log"
#: Written once the launch is proven; until then a crash is a failed start and not restarted.
REPORT_FILE, PLAN_FILE, RECIPE_FILE = "report.json", "plan.json", "recipe.yaml"
EngineState = Literal["starting", "ready", "stopping", "stopped", "failed"]
#: Why an engine ended, where that was not asked for.
EndKind = Literal[
    "",
    "crash",
    "hang",
    "idle",
    "dead_port",
    "not_ready",
    "log_full",
    "spawn",
    "restart_cap",
    "abandoned",
    "foreign_port",
]
T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """One launch: the command line with all that the keeper needs, and whose deployment it is."""

    run_id: str
    name: str
    engine: str
    argv: tuple[str, ...]
    port: int
    host: str = "127.0.0.1"
    extra_ports: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    unset_env: tuple[str, ...] = ()
    secret_env: tuple[str, ...] = ()
    cwd: str | None = None
    ready_path: str = "/health"
    api_key_env: str | None = None
    stall_timeout_s: float = 600.0
    ready_timeout_s: float = 3600.0
    grace_s: float = 10.0
    #: Relative to the run folder; a device for tests of a full disk.
    log: str = LOG_FILE
    policy: KeeperPolicy = field(default_factory=KeeperPolicy)
    #: Pattern of a log line that says a request was cut short to fit the KV pool; "" where the engine refuses instead.
    shortened_log: str = ""
    model: str = ""
    state_dir: str = ""
    runtime_dir: str = ""
    gpu: str | None = None
    planned_vram_bytes: int = 0
    planned_ram_bytes: int = 0
    #: Bytes of the GPU that this launch found free, what it replaced counted in; 0 where there is none.
    vram_available_bytes: int = 0
    #: What every other process held of it then, by pid.
    vram_others: dict[str, int] = field(default_factory=dict)
    is_forced: bool = False
    #: The `ft` that wrote this; a run that was never proven and whose owner is gone is adopted or ended.
    owner: ProcessId | None = None
    created_at: str = ""
    #: What was declared (recipe and tuned values): equal declarations need no new plan.
    declared: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As written to `launch.json`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Launch:
        """The launch in `value`; keys of a newer version are passed over. Raises KeyError, TypeError or ValueError."""
        known = _pick(cls, value)
        for key in ("argv", "unset_env", "secret_env"):
            known[key] = tuple(str(one) for one in known.get(key, ()))
        known["extra_ports"] = tuple(int(one) for one in known.get("extra_ports", ()))
        known["policy"] = KeeperPolicy(**_pick(KeeperPolicy, known.get("policy") or {}))
        known["owner"] = ProcessId.from_dict(known.get("owner"))
        return cls(**known)

    def make_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The engine's environment on top of `base`."""
        env = {key: value for key, value in base.items() if key not in self.unset_env}
        return {**env, **self.env}

    def log_path(self, run_dir: Path) -> Path:
        """Where the engine's output goes."""
        return run_dir / self.log


def write_launch(run_dir: Path, launch: Launch) -> None:
    """Writes the intent, durably, before anything is spawned. Raises OSError."""
    write_json(run_dir / LAUNCH_FILE, launch.to_dict())


def read_launch(run_dir: Path) -> Launch | None:
    """The intent of a run; None where there is none that can be read."""
    value = read_json(run_dir / LAUNCH_FILE)
    try:
        return Launch.from_dict(value) if value is not None else None
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True)
class KeeperState:
    """`keeper.json`: the state of a run as its keeper last wrote it."""

    run_id: str
    state: EngineState = "starting"
    keeper: ProcessId | None = None
    engine: ProcessId | None = None
    #: Engine starts of this run that followed a crash.
    restarts: int = 0
    kind: EndKind = ""
    cause: str = ""
    exit_code: int | None = None
    #: The engine was found alive by a new keeper, which is not its parent.
    is_adopted: bool = False
    health: dict[str, Any] = field(default_factory=dict)
    #: Why the engine was last ended and started again, with the time; "" where it never was.
    last_restart: str = ""
    #: What is wrong without being the end: no space for the log, say.
    problems: tuple[str, ...] = ()
    started_at: str = ""
    ready_at: str | None = None
    ended_at: str | None = None
    updated_at: str = ""

    @property
    def is_final(self) -> bool:
        """True when nothing will change it any more."""
        return self.state in ("stopped", "failed")

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> KeeperState:
        """The state in `value`. Raises KeyError, TypeError or ValueError."""
        known = _pick(cls, value)
        known["keeper"] = ProcessId.from_dict(known.get("keeper"))
        known["engine"] = ProcessId.from_dict(known.get("engine"))
        known["problems"] = tuple(known.get("problems", ()))
        return cls(**known)


def write_state(run_dir: Path, state: KeeperState, *, fallback_dir: Path | None = None) -> KeeperState:
    """Writes `keeper.json`, or `fallback_dir` where the run folder is full. Raises OSError when both are."""
    stamped = replace(state, updated_at=format_now())
    try:
        write_json(run_dir / KEEPER_FILE, asdict(stamped))
    except OSError:
        if fallback_dir is None:
            raise
        fallback_dir.mkdir(parents=True, exist_ok=True)
        write_json(fallback_dir / f"{state.run_id}.json", asdict(stamped))
    return stamped


def read_state(run_dir: Path, *, fallback_dir: Path | None = None) -> KeeperState | None:
    """The newest state that was written for a run; None where there is none."""
    candidates = [run_dir / KEEPER_FILE]
    if fallback_dir is not None:
        candidates.append(fallback_dir / f"{run_dir.name}.json")
    found = []
    for path in candidates:
        value = read_json(path)
        try:
            if value is not None:
                found.append(KeeperState.from_dict(value))
        except (KeyError, TypeError, ValueError):
            continue
    return max(found, key=lambda one: one.updated_at, default=None)


def make_base_environment() -> dict[str, str]:
    """The environment of this process without the markers of a run that it may itself be part of."""
    return {key: value for key, value in os.environ.items() if not key.startswith("FT_RUN_")}


def describe_exit(code: int | None, *, is_adopted: bool = False) -> str:
    """`code 3`, `SIGKILL (-9)`; an adopted engine is not our child, so nobody tells us its code."""
    if code is None:
        return "an unknown code (it was adopted)" if is_adopted else "an unknown code"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"{signal.Signals(-code).name} ({code})"
    return f"code {code}"


def _pick(cls: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(cls)}
    return {key: one for key, one in value.items() if key in names}
