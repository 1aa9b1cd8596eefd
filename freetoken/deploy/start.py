"""One start of an engine: ports, intent on disk, keeper, and the wait until it answers.

Order matters: the run folder and the register know of a launch before anything is spawned, so an `ft` that is
killed at any point leaves nothing that the next command could not find.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.deploy import runs
from freetoken.deploy.recover import StartFailure
from freetoken.deploy.tools import Progress, Step, Tools
from freetoken.deploy.watch_policy import read_policy
from freetoken.errors import FtError, UsageError
from freetoken.supervisor import life, logs, register
from freetoken.supervisor.files import format_now
from freetoken.supervisor.health import HealthLook, probe_health
from freetoken.supervisor.launch import KeeperState, Launch, read_state
from freetoken.supervisor.ports import PortHolder, can_bind, find_port_holder
from freetoken.supervisor.process import (
    ProcessId,
    identify_self,
    is_alive,
)

if TYPE_CHECKING:
    from freetoken.adapters.base import LaunchSpec
    from freetoken.hardware.model import Gpu
    from freetoken.planner.plan import Plan, PlanRequest
    from freetoken.recipe.model import Recipe

_POLL_S, _PROGRESS_S = 0.1, 0.5
#: Phases of `/health` that say little to a reader; `other` is all that is not weights, imports above all.
_PHASE_WORDS = {"other": "loading", "expert_banks": "filling the expert banks"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Run:
    """A launch that is on its way or up."""

    run_dir: Path
    launch: Launch
    plan: Plan
    recipe: Recipe
    #: The keeper as a child; None where it was started by an `ft` that is gone.
    keeper: subprocess.Popen[bytes] | None = None

    @property
    def run_id(self) -> str:
        """The id: the name of the run folder."""
        return self.launch.run_id

    @property
    def record(self) -> register.Deployment:
        """What the register is told of it."""
        return register.make_record(self.launch, self.run_dir)

    @property
    def base_url(self) -> str:
        """Where the engine answers."""
        return self.record.base_url

    @property
    def api_key(self) -> str | None:
        """The key that the engine asks for, from this process's environment."""
        return os.environ.get(self.launch.api_key_env) if self.launch.api_key_env else None


def make_launch(
    name: str, recipe: Recipe, plan: Plan, spec: LaunchSpec, tools: Tools, run_id: str, declared: dict[str, Any],
    request: PlanRequest,
) -> Launch:  # fmt: skip
    """The launch of `spec` as it is written down; `request` is what `plan` answers."""
    gpu = _find_gpu(request, plan)
    free = gpu.vram_free_bytes + request.reclaimable_vram_bytes if gpu is not None else 0
    return Launch(
        run_id=run_id,
        name=name,
        engine=plan.engine,
        model=plan.served_model_name or plan.model_name,
        argv=spec.argv,
        env=dict(spec.env),
        unset_env=spec.unset_env,
        secret_env=spec.secret_env,
        cwd=spec.cwd,
        host=spec.host,
        port=spec.port,
        extra_ports=spec.extra_ports,
        ready_path=spec.ready_path,
        api_key_env=recipe.serve.api_key_env,
        stall_timeout_s=spec.stall_timeout_s,
        ready_timeout_s=spec.ready_timeout_s,
        grace_s=spec.grace_s,
        log=tools.log,
        policy=read_policy(tools.keeper_policy),
        shortened_log=spec.shortened_log,
        state_dir=str(paths.state_dir()),
        runtime_dir=str(paths.runtime_dir()),
        gpu=plan.settings.gpu,
        planned_vram_bytes=plan.vram.peak_bytes if plan.vram else 0,
        planned_ram_bytes=plan.ram.peak_bytes,
        vram_available_bytes=min(free, gpu.vram_total_bytes) if gpu is not None else 0,
        vram_others={str(one.pid): one.used_bytes for one in gpu.holders} if gpu is not None else {},
        is_forced=plan.is_forced,
        owner=identify_self(),
        created_at=format_now(),
        declared=declared,
    )


def _find_gpu(request: PlanRequest, plan: Plan) -> Gpu | None:
    try:
        return request.hardware.pick_gpu(plan.settings.gpu) if plan.settings.gpu is not None else None
    except KeyError:  # a pinned plan of a card that is gone; who starts it will say so
        return None


def check_secrets(recipe: Recipe, spec: LaunchSpec) -> None:
    """Raises UsageError where a variable that the engine needs is not set, or an open address has no key."""
    missing = [name for name in spec.secret_env if not os.environ.get(name)]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise UsageError(f"the engine needs {names}, which is not set", hint=f"`export {missing[0]}=...` first")
    if spec.host not in _LOOPBACK and not recipe.serve.api_key_env:
        raise UsageError(
            f"`serve.host` is {spec.host}, which others can reach, and no API key is asked for",
            hint="`--set serve.api_key_env=FT_API_KEY`, or keep `serve.host: 127.0.0.1`",
        )


def check_ports(spec: LaunchSpec) -> None:
    """Raises FtError, naming every port of `spec` that is taken and who has it."""
    found = [holder for port in (spec.port, *spec.extra_ports) if (holder := find_port_holder(spec.host, port))]
    if not found:
        return
    words = [describe_holder(holder) for holder in found]
    free = find_free_port(spec.host, 1 + len(spec.extra_ports))
    raise FtError(words[0], details=tuple(words[1:]), hint=f"`--set serve.port={free}`, or stop what holds it")


def describe_holder(holder: PortHolder, *, but: str | None = None) -> str:
    """Who holds the port: a deployment by its name, else the process; "" for the deployment called `but`."""
    for one in life.examine_all():
        if one.is_living and holder.port in (one.record.port, *one.record.extra_ports):
            if one.record.name == but:
                return ""
            return f"port {holder.port} is taken by the deployment `{one.record.name}` (`ft stop {one.record.name}`)"
    return holder.describe()


def find_free_port(host: str, count: int) -> int:
    """A port from which `count` ports in a row can be bound."""
    for port in range(1919, 1919 + 2000, count):
        if all(can_bind(host, port + index) for index in range(count)):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def launch_run(run: Run) -> Run:
    """Writes the intent, registers it and starts the keeper, in this order. Raises FtError."""
    runs.write_run(run.run_dir, run.recipe, run.plan, run.launch)
    register.write_record(run.record)
    runs.record_event(run.run_dir, "intended", f"launch of `{run.launch.name}` intended", is_durable=True)
    return replace(run, keeper=life.start_keeper(run.run_dir))


def await_ready(run: Run, progress: Progress) -> KeeperState:
    """Waits until the keeper says that the engine answers. Raises StartFailure; the keeper holds the time limits."""
    started, shown_s, what = time.monotonic(), 0.0, "starting"
    keeper: ProcessId | None = None
    while True:
        state = read_state(run.run_dir, fallback_dir=register.states_dir())
        if state is not None and keeper is None and state.keeper is not None:
            keeper = state.keeper
            register.update_record(run.run_id, keeper=keeper)
        if state is not None and state.is_final:
            raise make_failure(run, state)
        if state is not None and state.state == "ready":
            register.update_record(run.run_id, engine_process=state.engine)
            return state
        if not _has_keeper(run, keeper):
            _check_keeper(run)
        elapsed_s = time.monotonic() - started
        if elapsed_s - shown_s >= _PROGRESS_S:
            shown_s = elapsed_s
            look = probe_health(run.launch.host, run.launch.port, run.launch.ready_path, timeout_s=1.0)
            # An engine that imports or loads holds its interpreter for seconds: silence is no new phase.
            what = _describe_phase(look) or what
            progress(Step("load", f"{what} ({elapsed_s:.0f} s)", look.done_bytes, look.total_bytes, is_update=True))
        time.sleep(_POLL_S if elapsed_s > 2 else _POLL_S / 4)


def _has_keeper(run: Run, keeper: ProcessId | None) -> bool:
    if run.keeper is not None:
        return run.keeper.poll() is None
    return is_alive(keeper)


def _check_keeper(run: Run) -> None:
    """The keeper has ended: its last word counts; without one a living engine is adopted, else the start failed."""
    state = read_state(run.run_dir, fallback_dir=register.states_dir())
    if state is not None and state.is_final:
        raise make_failure(run, state)
    found = life.examine(run.record)
    if found.condition == "unkept":
        found = life.adopt(found)
    if not found.is_living:
        said = logs.read_tail(run.run_dir / "keeper.log", 3)
        raise StartFailure("crash", f"the keeper ended: {' '.join(said) or found.words}", run_dir=str(run.run_dir))


def make_failure(run: Run, state: KeeperState) -> StartFailure:
    """The failed start with the end of its log. A stop by hand is told apart: it must not be tried again."""
    log = logs.read_text(run.launch.log_path(run.run_dir))
    kind = "stopped" if state.state == "stopped" else state.kind or "crash"
    return StartFailure(kind, state.cause, exit_code=state.exit_code, log=log, run_dir=str(run.run_dir))


def _describe_phase(look: HealthLook) -> str:
    """The phase in words; empty where the engine says none."""
    return _PHASE_WORDS.get(look.phase, look.phase) if look.status == "loading" else ""
