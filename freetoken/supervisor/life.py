"""What is true of a run now: its record, its keeper's last words and /proc held against each other; and adoption.

Every `ft` command that looks at deployments goes through here, so each of them repairs what it finds: a living
engine without a keeper gets a new one, an intent that nobody carried out is closed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import freetoken
from freetoken import paths
from freetoken.errors import FtError
from freetoken.supervisor import register
from freetoken.supervisor.files import EventLog, describe_os_error, format_now, read_json
from freetoken.supervisor.launch import (
    EVENTS_FILE,
    KEEPER_LOCK_FILE,
    KEEPER_LOG_FILE,
    REPORT_FILE,
    KeeperState,
    Launch,
    make_base_environment,
    read_launch,
    read_state,
    write_state,
)
from freetoken.supervisor.locks import FileLock, read_holder
from freetoken.supervisor.process import ProcessId, find_marked, is_alive, read_boot_id
from freetoken.supervisor.register import Deployment

#: `ready` = proven; `unproven` = up, but nobody has proven it; `unkept` = the engine lives without a keeper.
Condition = Literal["launching", "starting", "unproven", "ready", "unkept", "stopping", "stopped", "failed", "dead"]
#: In these a process of ours lives.
LIVING: frozenset[Condition] = frozenset(("launching", "starting", "unproven", "ready", "unkept", "stopping"))


@dataclass(frozen=True)
class Life:
    """One run, examined. `words` say what is the matter, for people."""

    record: Deployment
    launch: Launch | None
    state: KeeperState | None
    condition: Condition
    words: str
    keeper: ProcessId | None = None
    engine: ProcessId | None = None
    #: The `ft` that is bringing it up; None when it is gone, which leaves the run to whoever comes next.
    owner: ProcessId | None = None

    @property
    def is_living(self) -> bool:
        """True while a process of the run exists, or is about to."""
        return self.condition in LIVING


def examine(record: Deployment) -> Life:
    """What is true of `record` now; changes nothing."""
    run_dir = record.folder
    launch, state = read_launch(run_dir), read_state(run_dir, fallback_dir=register.states_dir())
    holder = read_holder(run_dir / KEEPER_LOCK_FILE)
    candidates = (holder.process if holder else None, state.keeper if state else None, record.keeper)
    keeper = next((one for one in candidates if is_alive(one)), None)
    engine = _find_engine(record, state, keeper)
    owner = launch.owner if launch and is_alive(launch.owner) else None
    life = Life(record, launch, state, "dead", "", keeper, engine, owner)
    condition, words = _judge(life)
    return replace(life, condition=condition, words=words)


def _find_engine(record: Deployment, state: KeeperState | None, keeper: ProcessId | None) -> ProcessId | None:
    for candidate in (state.engine if state else None, record.engine_process):
        if is_alive(candidate):
            return candidate
    # While a keeper lives it knows better; without one the marker finds what was started just before it died.
    return None if keeper else next(iter(find_marked(record.run_id)), None)


def _judge(life: Life) -> tuple[Condition, str]:
    state = life.state
    if state is not None and state.is_final and not life.engine:
        return ("stopped", state.cause) if state.state == "stopped" else ("failed", state.cause)
    if life.keeper is None:
        return _judge_unkept(life)
    if state is not None and state.state == "starting" and life.record.proven_at:
        return (
            "starting",
            f"its keeper is restarting it: {state.cause}" if state.cause else "its keeper starts it again",
        )
    if state is None or state.state == "starting":
        phase = (state.health.get("phase") if state else "") or "starting"
        return "starting", f"{_owner_words(life)}; phase {phase}" + (
            f"; {state.cause}" if state and state.cause else ""
        )
    if state.state == "stopping":
        return "stopping", "being stopped"
    if state.state == "ready" and life.record.proven_at:
        return "ready", "; ".join(state.problems)
    if state.state == "ready":
        return "unproven", f"answers, but is unproven: {_owner_words(life)}"
    return "stopping", state.cause


def _judge_unkept(life: Life) -> tuple[Condition, str]:
    if life.engine is not None:
        return "unkept", f"the keeper is gone; the engine goes on as process {life.engine.pid}"
    if life.state is None:
        if life.owner is not None:
            return "launching", _owner_words(life)
        return "dead", "the `ft` that wanted to launch it is gone; nothing was started"
    process = life.state.engine or life.state.keeper
    if process is not None and process.boot_id != read_boot_id():
        return "dead", "the machine was restarted since; nothing of it runs"
    return "dead", "keeper and engine are both gone, killed from outside"


def _owner_words(life: Life) -> str:
    return (
        f"`ft apply` (process {life.owner.pid}) is bringing it up"
        if life.owner
        else "the `ft` that launched it is gone"
    )


def examine_all() -> tuple[Life, ...]:
    """Every registered run, examined."""
    return tuple(examine(record) for record in register.read_records())


def reconcile() -> tuple[Life, ...]:
    """Every registered run after repair: engines without a keeper adopted, ended runs closed and taken out.

    What was repaired comes back with words that say so; the records of ended runs are gone afterwards.
    """
    return tuple(_repair(life) for life in examine_all())


def _repair(life: Life) -> Life:
    if life.condition == "unkept":
        return adopt(life)
    if life.condition == "dead":
        return close(life)
    if life.condition in ("stopped", "failed"):
        register.remove_record(life.record.run_id)
    return life


def close(life: Life) -> Life:
    """Writes the end of a run whose processes are gone, and takes it out of the register.

    Takes the keeper's lock meanwhile: a keeper that was just spawned then finds the end written and leaves.
    """
    lock = FileLock(life.record.folder / KEEPER_LOCK_FILE, is_named=False)
    if life.record.folder.is_dir():
        if not lock.try_acquire():
            return examine(life.record)
        try:
            before = life.state or KeeperState(life.record.run_id)
            ended = replace(
                before, state="failed", kind="abandoned", cause=life.words, ended_at=format_now(), engine=None
            )
            write_state(life.record.folder, ended, fallback_dir=register.states_dir())
            EventLog(life.record.folder / EVENTS_FILE).append("abandoned", life.words, is_durable=True)
        except OSError:
            pass  # a full disk must not keep the register from being cleaned
        finally:
            lock.release()
    register.remove_record(life.record.run_id)
    return replace(life, state=life.state)


def adopt(life: Life, *, timeout_s: float = 10.0) -> Life:
    """Gives a living engine a new keeper; back comes the run as it is then."""
    process = start_keeper(life.record.folder, is_adopting=True)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        found = examine(life.record)
        if found.state and found.keeper and found.state.keeper == found.keeper:
            register.update_record(life.record.run_id, keeper=found.keeper, engine_process=found.engine)
            words = f"its keeper was gone; adopted by a new one (process {found.keeper.pid})"
            return replace(found, words="; ".join(one for one in (words, found.words) if one))
        time.sleep(0.02)
    return examine(life.record)


def start_keeper(run_dir: Path, *, is_adopting: bool = False) -> subprocess.Popen[bytes]:
    """Starts the keeper of a run, in a session of its own so that it outlives the terminal. Raises FtError."""
    # From the folder that holds the package: no PYTHONPATH is needed, so none reaches the engine.
    package_parent = Path(freetoken.__file__).resolve().parent.parent
    argv = [sys.executable, "-m", "freetoken.supervisor.keeper", str(run_dir), *(["--adopt"] if is_adopting else [])]
    try:
        with open(run_dir / KEEPER_LOG_FILE, "ab") as log:
            return subprocess.Popen(
                argv,
                cwd=package_parent,
                env=make_base_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise FtError(f"the keeper cannot be started: {describe_os_error(error, run_dir / KEEPER_LOG_FILE)}") from error


def find_deployments(name: str | None, lives: tuple[Life, ...]) -> tuple[Life, ...]:
    """The living runs called `name`, or all of them; those of this state folder come before those of others."""
    found = [one for one in lives if one.is_living and name in (None, one.record.name)]
    if name is not None:
        here = [one for one in found if Path(one.record.state_dir) == paths.state_dir()]
        found = here or found
    return tuple(found)


def read_report(run_dir: Path) -> dict[str, object] | None:
    """What the proof of a run found; None while it is not proven."""
    return read_json(run_dir / REPORT_FILE)
