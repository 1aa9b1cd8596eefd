"""`ft service`: a systemd unit for a deployment, installed, looked at and removed.

What the unit does stands in `supervisor/service.py`, its text in `supervisor/unit.py`. Secrets of the deployment go
into an environment file beside the state, which its user alone may read; the unit itself holds none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from freetoken import paths
from freetoken.deploy import runs
from freetoken.deploy.values import DeployModel
from freetoken.errors import FtError, UsageError
from freetoken.supervisor.files import describe_os_error
from freetoken.supervisor.launch import Launch, read_launch
from freetoken.supervisor.systemd import Systemd, UnitState, find_user, is_ours
from freetoken.supervisor.unit import Scope, UnitSpec, make_environment_file, make_unit

#: Variables of this shell that change how engines are found, built and run; a service's environment is nearly empty.
KEPT_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HF_HOME",
    "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "OMP_NUM_THREADS", "LANG", "FREETOKEN_BENCHBW_PATH",
)  # fmt: skip
#: Beside the engine's own grace: SIGINT and SIGTERM one after the other, then the kernel's time for SIGKILL.
_STOP_SPARE_S = 30.0
Condition = Literal["running", "starting", "failed", "stopped", "not enabled", "unknown"]


class ServiceChange(DeployModel):
    """What `install` or `remove` did or, with `is_dry_run`, would do."""

    deployment: str
    scope: Scope
    unit: str
    unit_path: str
    is_dry_run: bool = False
    #: The unit's text; the values of the environment file are never shown, only their names.
    text: str = ""
    environment_file: str = ""
    environment_names: tuple[str, ...] = ()
    #: Command lines, in order.
    commands: tuple[str, ...] = ()
    #: What a person should know or still do.
    notes: tuple[str, ...] = ()


class ServiceView(DeployModel):
    """One installed service and how it stands."""

    deployment: str
    scope: Scope
    unit: str
    unit_path: str
    condition: Condition
    words: str
    active: str = ""
    enabled: str = ""
    restarts: int = 0
    main_pid: int | None = None
    #: Of a user's service: whether it runs without a session of theirs.
    is_lingering: bool | None = None
    #: What is wrong, with what to do; empty where nothing is.
    problems: tuple[str, ...] = ()

    @property
    def is_well(self) -> bool:
        """Running, enabled, and so after the next boot too."""
        return self.condition == "running" and not self.problems


# -- install ------------------------------------------------------------------------------------------------------


def install(
    name: str | None, systemd: Systemd, *, environ: Mapping[str, str], is_dry_run: bool = False, is_forced: bool = False
) -> ServiceChange:
    """Writes unit and environment file, enables the unit and starts it, which adopts what runs already.

    Raises UsageError where nothing was applied under `name`, a secret is not set, or a unit of somebody else has the
    name (`is_forced` replaces it); FtError where there is no systemd or it refuses.
    """
    launch = _find_launch(name)
    spec = make_spec(launch, systemd.scope)
    path = systemd.unit_path(launch.name)
    variables = collect_variables(launch, environ)
    change = ServiceChange(
        deployment=launch.name,
        scope=systemd.scope,
        unit=spec.name,
        unit_path=str(path),
        is_dry_run=is_dry_run,
        text=make_unit(spec),
        environment_file=spec.environment_file,
        environment_names=tuple(sorted(variables)),
        commands=tuple(
            " ".join(systemd.command(*words)) for words in (("daemon-reload",), ("enable", "--now", spec.name))
        ),
        notes=tuple(_make_notes(systemd, spec)),
    )
    if is_dry_run:
        return change
    if problem := systemd.find_problem():
        raise problem
    if path.exists() and not is_ours(path) and not is_forced:
        raise UsageError(f"{path} was not written by `ft`", hint="`--yes` replaces it")
    _write(Path(spec.environment_file), make_environment_file(variables), mode=0o600, owner=spec.uid)
    _write(path, change.text, mode=0o644)
    systemd.do("daemon-reload")
    systemd.do("enable", "--now", spec.name)
    return change


def make_spec(launch: Launch, scope: Scope) -> UnitSpec:
    """The unit for a deployment of this state folder; it runs as whoever owns that folder."""
    state_dir = paths.state_dir()
    uid = state_dir.stat().st_uid if state_dir.exists() else os.geteuid()
    return UnitSpec(
        deployment=launch.name,
        scope=scope,
        python=sys.executable,
        state_dir=str(state_dir),
        # Of the launch, not of this process: under `sudo` the register would be root's.
        runtime_dir=launch.runtime_dir or str(paths.runtime_dir()),
        environment_file=str(_environment_path(launch.name)),
        user=find_user(uid),
        uid=uid,
        stop_timeout_s=3 * launch.grace_s + _STOP_SPARE_S,
    )


def collect_variables(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """What the service needs of `environ`: the engine's secrets, and what changes how it is found and run.

    Raises UsageError where a secret is not set: the service could never start the engine.
    """
    missing = [name for name in launch.secret_env if not environ.get(name)]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise UsageError(f"the engine needs {names}, which is not set", hint=f"`export {missing[0]}=...` first")
    wanted = (*KEPT_VARIABLES, *launch.secret_env)
    return {name: environ[name] for name in wanted if environ.get(name)}


def _find_launch(name: str | None) -> Launch:
    """The launch that was proven last under `name`, or under the only name that is wanted."""
    declared = [one for one in runs.read_declarations() if one.name == name or (name is None and one.is_wanted)]
    if not declared:
        what = f"nothing was ever applied as `{name}` here" if name else "nothing is declared here"
        raise UsageError(what, hint="`ft apply RECIPE` first: a service keeps what was proven")
    if len(declared) > 1:
        listed = ", ".join(f"`{one.name}`" for one in declared)
        raise UsageError(f"several deployments are declared: {listed}", hint="`ft service install NAME`")
    found = declared[0]
    if found.last_good_run is None:
        raise UsageError(f"`{found.name}` was never proven", hint="`ft apply` it first: a service keeps what works")
    launch = read_launch(paths.runs_dir() / found.last_good_run)
    if launch is None:
        raise UsageError(f"the run folder of `{found.name}` is gone", hint="`ft apply` it again")
    return launch


def _make_notes(systemd: Systemd, spec: UnitSpec) -> Iterator[str]:
    if problem := systemd.find_problem():
        yield f"{problem.message}; {problem.hint}"
    if spec.scope == "user" and not systemd.is_lingering(spec.user):
        yield (
            f"it ends with the last session of `{spec.user}` and does not start at boot: "
            f"`loginctl enable-linger {spec.user}` lets it"
        )
    if systemd.is_wsl:
        yield (
            "Windows ends the whole WSL machine some seconds after its last terminal is closed, services included: "
            "`vmIdleTimeout=-1` under `[wsl2]` in %UserProfile%\\.wslconfig keeps it, and a task at log-on with "
            "`wsl.exe --exec true` starts it"
        )


# -- look ---------------------------------------------------------------------------------------------------------


def read_services(scopes: tuple[Systemd, ...], name: str | None = None) -> tuple[ServiceView, ...]:
    """Every service of ours in `scopes`, or those of one deployment. Raises UsageError where `name` has none."""
    found = tuple(
        _view(systemd, one) for systemd in scopes for one in systemd.list_deployments() if name in (None, one)
    )
    if name is not None and not found:
        raise UsageError(f"no service is installed for `{name}`", hint=f"`ft service install {name}`")
    return found


def _view(systemd: Systemd, deployment: str) -> ServiceView:
    path, problem = systemd.unit_path(deployment), systemd.find_problem()
    state = UnitState() if problem else systemd.show(deployment)
    is_lingering = systemd.is_lingering(find_user()) if systemd.scope == "user" else None
    condition, words = _judge(state)
    problems = tuple(_find_problems(systemd, deployment, state, is_lingering, problem))
    return ServiceView(
        deployment=deployment, scope=systemd.scope, unit=path.name, unit_path=str(path), condition=condition,
        words=words, active=state.active, enabled=state.enabled, restarts=state.restarts, main_pid=state.main_pid,
        is_lingering=is_lingering, problems=problems,
    )  # fmt: skip


def _judge(state: UnitState) -> tuple[Condition, str]:
    detail = f"{state.active} ({state.sub})" if state.sub else state.active
    if state.active == "active":
        return "running", f"process {state.main_pid}" if state.main_pid else detail
    if state.active == "failed":
        return "failed", f"result `{state.result}` after {state.restarts} restarts"
    if state.active in ("activating", "reloading", "deactivating"):
        return "starting", detail
    if state.active == "unknown":
        return "unknown", "systemd does not say"
    return ("stopped", detail) if state.enabled == "enabled" else ("not enabled", detail)


def _find_problems(
    systemd: Systemd, deployment: str, state: UnitState, is_lingering: bool | None, problem: FtError | None
) -> Iterator[str]:
    if problem is not None:
        yield f"{problem.message}; {problem.hint}"
        return
    path = systemd.unit_path(deployment)
    user = " --user" if systemd.scope == "user" else ""
    if state.active == "unknown":
        yield f"systemd does not answer for {path.name}: log in as its user, not by `su`"
        return
    if state.active == "failed":
        again = f"`ft service install {deployment}` tries again"
        yield f"it has failed: `journalctl{user} -u {path.name}` says why, {again}"
    if state.enabled != "enabled":
        yield f"it does not start at boot: `systemctl{user} enable {path.name}`"
    if is_lingering is False:
        yield f"it ends with your last session: `loginctl enable-linger {find_user()}`"


# -- remove -------------------------------------------------------------------------------------------------------


def remove(name: str, systemd: Systemd, *, is_dry_run: bool = False) -> ServiceChange:
    """Stops and disables the unit and deletes its files. Raises UsageError where it is not ours or not there."""
    path = systemd.unit_path(name)
    if not path.exists():
        raise UsageError(f"no service is installed for `{name}`: {path} is not there")
    if not is_ours(path):
        raise UsageError(f"{path} was not written by `ft`", hint=f"`systemctl disable --now {path.name}`, by hand")
    problem = systemd.find_problem()
    verbs = (("disable", "--now", path.name), ("daemon-reload",))
    change = ServiceChange(
        deployment=name,
        scope=systemd.scope,
        unit=path.name,
        unit_path=str(path),
        is_dry_run=is_dry_run,
        environment_file=str(_environment_path(name)),
        commands=() if problem else tuple(" ".join(systemd.command(*words)) for words in verbs),
    )
    if is_dry_run:
        return change
    if problem is None:
        systemd.do(*verbs[0])
    try:
        path.unlink()
        _environment_path(name).unlink(missing_ok=True)
    except OSError as error:
        raise FtError(describe_os_error(error, path)) from error
    if problem is None:
        systemd.do(*verbs[1])
    return change


def _environment_path(name: str) -> Path:
    return paths.state_dir() / "services" / f"{name}.env"


def _write(path: Path, text: str, *, mode: int, owner: int | None = None) -> None:
    """Writes `path` by a temporary file that has `mode` from its first byte on. Raises FtError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)
            if owner is not None and owner != os.geteuid():
                os.fchown(descriptor, owner, -1)
                os.chown(path.parent, owner, -1)
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        hint = "system units need root: `sudo`, or `--user`" if isinstance(error, PermissionError) else None
        raise FtError(describe_os_error(error, path), hint=hint) from error
