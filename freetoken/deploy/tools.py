"""What the apply loop needs from other rooms, passed in as one value so that tests can put fakes in its place.

Everything is imported when it is called: `ft plan` must not pay for the control client or the downloader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.supervisor.policy import KeeperPolicy

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.adapters.control import ControlClient
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Plan, PlanRequest, Refusal
    from freetoken.recipe.model import EngineRef, ModelRef


@dataclass(frozen=True)
class Step:
    """One line of progress: the phase, what is happening, and bytes where they are known."""

    phase: str
    message: str
    done_bytes: int = 0
    total_bytes: int = 0
    #: True for a line that only updates the one before it.
    is_update: bool = False


Progress = Callable[[Step], None]


def ignore_progress(step: Step) -> None:
    """For callers that show nothing."""


def _find_adapter(name: str) -> EngineAdapter:
    from freetoken.adapters import get_adapter

    return get_adapter(name)


def _probe(path: Path | None) -> Hardware:
    from freetoken.hardware.probe import probe_hardware

    return probe_hardware(path)


def _locate(ref: ModelRef, base_dir: Path) -> Any:
    from freetoken.checkpoint.locate import locate_model

    return locate_model(ref, base_dir)


def _fetch(ref: ModelRef, progress: Callable[[Any], None] | None) -> Path:
    from freetoken.checkpoint.fetch import fetch_model

    return fetch_model(ref, progress=progress)


def _install(ref: EngineRef, adapter: EngineAdapter, progress: Progress) -> bool:
    from freetoken.deploy.engine_install import install_missing

    return install_missing(ref, adapter, progress)


def _make_plan(request: PlanRequest, adapter: EngineAdapter, force: bool) -> Plan | Refusal:
    from freetoken.planner.solve import make_plan

    return make_plan(request, adapter, force=force)


def _connect(base_url: str, api_key: str | None) -> ControlClient:
    from freetoken.adapters.control import ControlClient

    return ControlClient(base_url, api_key, timeout_s=30.0)


@dataclass(frozen=True)
class Tools:
    """Ways into the other rooms, and how much the keeper and the recovery may do."""

    find_adapter: Callable[[str], EngineAdapter] = _find_adapter
    probe: Callable[[Path | None], Hardware] = _probe
    locate: Callable[[ModelRef, Path], Any] = _locate
    fetch: Callable[[ModelRef, Callable[[Any], None] | None], Path] = _fetch
    #: Installs the engine of a recipe where it is missing and can be; True where it did.
    install: Callable[[EngineRef, EngineAdapter, Progress], bool] = _install
    make_plan: Callable[[PlanRequest, EngineAdapter, bool], Plan | Refusal] = _make_plan
    connect: Callable[[str, str | None], ControlClient] = _connect
    keeper_policy: KeeperPolicy = field(default_factory=KeeperPolicy)
    #: Where engines write, relative to the run folder.
    log: str = "engine.log"
    #: Further starts after a failed one whose cause is understood.
    max_retries: int = 3
    #: Longest prompt of a proof, tokens; None = the full prefill chunk.
    most_proof_tokens: int | None = None


DEFAULT_TOOLS = Tools()
