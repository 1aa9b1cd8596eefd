"""Stopping deployments by name or all of them: who is meant, what would be hit, and the end of it."""

from __future__ import annotations

from pathlib import Path

from freetoken import paths
from freetoken.deploy import record, runs
from freetoken.deploy.ending import end_life
from freetoken.deploy.values import DeployModel, StopOutcome
from freetoken.errors import FtError, UsageError
from freetoken.supervisor import life
from freetoken.supervisor.process import find_members, read_stat


class StopTarget(DeployModel):
    """A deployment that would be ended, with its processes (pid and name) and ports."""

    name: str
    run_id: str
    condition: str
    processes: tuple[str, ...]
    ports: tuple[int, ...]


def find_targets(name: str | None, *, is_all: bool = False) -> tuple[life.Life, ...]:
    """The living runs that are meant; () where there is nothing to stop.

    Without a name it is the only one of this state folder. UsageError where several could be meant, or where the
    name was never heard of.
    """
    lives = [one for one in life.examine_all() if one.is_living or one.condition == "dead"]
    if is_all:
        return tuple(lives)
    here = [one for one in lives if _is_here(one)]
    if name is not None:
        found = [one for one in here if one.record.name == name] or [one for one in lives if one.record.name == name]
        if not found and runs.read_declaration(name) is None:
            known = ", ".join(sorted({f"`{one.record.name}`" for one in lives})) or "none"
            raise UsageError(f"no deployment `{name}`; running: {known}")
        _refuse_several(found)
        return tuple(found)
    names = {one.record.name for one in here}
    if len(names) > 1:
        listed = ", ".join(f"`{one}`" for one in sorted(names))
        raise UsageError(f"several deployments run here: {listed}", hint="`ft stop NAME`, or `ft stop --all`")
    return tuple(here)


def _refuse_several(found: list[life.Life]) -> None:
    folders = sorted({one.record.state_dir for one in found})
    if len(folders) > 1:
        raise UsageError(
            f"`{found[0].record.name}` runs from several state folders: {', '.join(folders)}",
            hint=f"`ft --state {folders[0]} stop {found[0].record.name}`",
        )


def describe_target(found: life.Life) -> StopTarget:
    """What `stop` would end; touches nothing."""
    members = [*([found.keeper] if found.keeper else []), *find_members(found.record.run_id, found.engine)]
    stats = [stat for stat in (read_stat(one.pid) for one in members) if stat]
    return StopTarget(
        name=found.record.name,
        run_id=found.record.run_id,
        condition=found.condition,
        processes=tuple(f"{stat.pid} {stat.name}" for stat in stats),
        ports=(found.record.port, *found.record.extra_ports),
    )


def stop_run(found: life.Life) -> StopOutcome:
    """Ends one run and takes its declaration back. FtError where something of it cannot be ended."""
    outcome = end_life(found)
    withdraw(found.record.name, found.record.state_dir)
    if outcome.left:
        pids = ", ".join(str(pid) for pid in outcome.left)
        raise FtError(f"`{outcome.name}`: the kernel holds process {pids}, even SIGKILL did not end it")
    warning = record.record_stop(outcome.run_id, outcome.exit_code) if _is_here(found) else None
    return outcome.model_copy(update={"warning": warning})


def withdraw(name: str, state_dir: str | None = None) -> None:
    """Marks `name` as stopped on purpose, in the state folder it belongs to."""
    if state_dir is not None and Path(state_dir).resolve() != paths.state_dir().resolve():
        return
    declared = runs.read_declaration(name)
    if declared is not None and declared.is_wanted:
        runs.write_declaration(name, declared.run_id, is_wanted=False)


def _is_here(found: life.Life) -> bool:
    return Path(found.record.state_dir).resolve() == paths.state_dir().resolve()
