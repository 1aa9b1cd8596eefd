"""Stopping deployments by name or all of them: who is meant, what would be hit, and the end of it.

A stop wins over whoever is changing the deployment at the moment. It says so first (`register.request_stop`), ends
what runs, then waits for the deployment's lock and ends what was started in between. An apply looks for the word
after it has registered a launch: one of the two always sees the other. A stop holds no lock while it waits for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from freetoken import paths
from freetoken.deploy import record, runs
from freetoken.deploy.ending import end_life
from freetoken.deploy.values import DeployModel, StopOutcome
from freetoken.errors import FtError, UsageError
from freetoken.recipe.model import NAME_PATTERN
from freetoken.supervisor import life, register
from freetoken.supervisor.locks import LockHolder, find_holder, read_holder
from freetoken.supervisor.process import find_members, identify_self, read_stat

#: Seconds that an `ft` which is changing the deployment is given to see that it was stopped.
PATIENCE_S = 60.0
OnWait = Callable[[str, LockHolder | None], None]


class StopTarget(DeployModel):
    """A deployment that would be ended, with its processes (pid and name) and ports."""

    name: str
    run_id: str
    condition: str
    processes: tuple[str, ...]
    ports: tuple[int, ...]


def ignore_wait(name: str, holder: LockHolder | None) -> None:
    """For callers that show nothing."""


def stop(
    name: str | None = None,
    *,
    is_all: bool = False,
    on_stop: Callable[[life.Life], None] = lambda found: None,
    on_wait: OnWait = ignore_wait,
) -> tuple[StopOutcome, ...]:
    """Ends one deployment (the only one, or `name`), or all of this user's, and takes their declarations back.

    Those that are declared without running are among the outcomes. `on_wait` is told whose end is waited for. Raises
    what `find_targets` raises, and FtError where something cannot be ended.
    """
    found = find_targets(name, is_all=is_all)
    absent = find_absent(name, is_all=is_all) if is_all or not found else ()
    outcomes = []
    for one in found:
        on_stop(one)
        outcomes.append(stop_run(one, on_wait=on_wait))
    ended = (stop_absent(one, on_wait=on_wait) for one in absent)
    return (*outcomes, *(one for one in ended if one is not None))


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
        if not found and runs.read_declaration(name) is None and not _is_being_changed(name):
            known = ", ".join(sorted({f"`{one.record.name}`" for one in lives})) or "none"
            raise UsageError(f"no deployment `{name}`; running: {known}")
        _refuse_several(found)
        return tuple(found)
    names = {one.record.name for one in here}
    if len(names) > 1:
        listed = ", ".join(f"`{one}`" for one in sorted(names))
        raise UsageError(f"several deployments run here: {listed}", hint="`ft stop NAME`, or `ft stop --all`")
    return tuple(here)


def preview(name: str | None = None, *, is_all: bool = False) -> tuple[StopTarget, ...]:
    """What `stop` would end or take back; touches nothing."""
    found = find_targets(name, is_all=is_all)
    absent = find_absent(name, is_all=is_all) if is_all or not found else ()
    return (*(describe_target(one) for one in found), *(_describe_absent(one) for one in absent))


def _describe_absent(name: str) -> StopTarget:
    declared = runs.read_declaration(name)
    run_id = declared.run_id if declared else "none"
    return StopTarget(name=name, run_id=run_id, condition="not running", processes=(), ports=())


def find_absent(name: str | None, *, is_all: bool = False) -> tuple[str, ...]:
    """Names of this state folder that are meant, are wanted or just being brought up, and do not run.

    UsageError where several could be meant.
    """
    running = {one.record.name for one in life.examine_all() if _is_here(one) and one.is_living}
    wanted = {one.name for one in runs.read_declarations() if one.is_wanted}
    wanted |= {one for one in register.list_locked_names(paths.state_dir()) if _is_being_changed(one)}
    names = tuple(sorted(wanted - running))
    if name is not None:
        return (name,) if name in names else ()
    if len(names) > 1 and not is_all:
        listed = ", ".join(f"`{one}`" for one in names)
        raise UsageError(f"nothing runs here; declared are {listed}", hint="`ft stop NAME`, or `ft stop --all`")
    return names


def _is_being_changed(name: str) -> bool:
    """Whether another `ft` holds the lock of `name`."""
    if not re.fullmatch(NAME_PATTERN, name):
        return False
    holder = find_holder(register.deployment_lock(paths.state_dir(), name).path)
    return holder is not None and holder.process != identify_self()


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


def stop_run(found: life.Life, *, on_wait: OnWait = ignore_wait) -> StopOutcome:
    """Ends one run and takes its declaration back. FtError where something of it cannot be ended."""
    name, state_dir = found.record.name, found.record.state_dir
    register.request_stop(Path(state_dir), name)
    withdraw(name, state_dir)
    outcome = end_life(found)
    at_work = _outlast(name, Path(state_dir), on_wait)
    withdraw(name, state_dir)
    if outcome.left:
        pids = ", ".join(str(pid) for pid in outcome.left)
        raise FtError(f"`{outcome.name}`: the kernel holds process {pids}, even SIGKILL did not end it")
    warning = record.record_stop(outcome.run_id, outcome.exit_code) if _is_here(found) else None
    return outcome.model_copy(update={"warning": "; ".join(one for one in (at_work, warning) if one) or None})


def stop_absent(name: str, *, on_wait: OnWait = ignore_wait) -> StopOutcome | None:
    """Takes back what is declared or being brought up without running yet; None where there was nothing to do."""
    declared, is_changing = runs.read_declaration(name), _is_being_changed(name)
    if not is_changing and (declared is None or not declared.is_wanted):
        return None
    register.request_stop(paths.state_dir(), name)
    withdraw(name)
    at_work = _outlast(name, paths.state_dir(), on_wait)
    withdraw(name)
    how = "it was being brought up, and is not any more" if is_changing else "did not run; no longer declared"
    run_id = declared.run_id if declared is not None else ""
    return StopOutcome(run_id=run_id, name=name, was_running=False, how=how, warning=at_work or None)


def _outlast(name: str, state_dir: Path, on_wait: OnWait) -> str:
    """Waits for whoever is changing the deployment, then ends what that left; words where it is at work still."""
    lock = register.deployment_lock(state_dir, name)
    holder = read_holder(lock.path)
    # Called from within an apply of this process: it will see by itself that it was stopped.
    is_own = holder is not None and holder.process == identify_self()
    is_ours = lock.acquire(timeout_s=0.0 if is_own else PATIENCE_S, on_wait=lambda one: on_wait(name, one))
    here = state_dir.resolve()
    try:
        for one in life.examine_all():
            if one.is_living and one.record.name == name and Path(one.record.state_dir).resolve() == here:
                end_life(one)
    finally:
        lock.release()
    if is_ours or is_own:
        return ""
    return f"{holder.describe() if holder else 'another `ft`'} is at work still; it ends before it starts anything"


def withdraw(name: str, state_dir: str | None = None) -> None:
    """Marks `name` as stopped on purpose, in the state folder it belongs to."""
    if state_dir is not None and Path(state_dir).resolve() != paths.state_dir().resolve():
        return
    declared = runs.read_declaration(name)
    if declared is not None and declared.is_wanted:
        runs.write_declaration(name, declared.run_id, is_wanted=False)


def _is_here(found: life.Life) -> bool:
    return Path(found.record.state_dir).resolve() == paths.state_dir().resolve()
