"""One study, several processes: who has which trial in hand, who is gone, and who gives way.

Equal machines may share a study through a storage that all of them reach. Each process marks its trials with its
machine and itself; what others have in hand counts as tried, so that nobody measures it twice. A process that is gone
is known at once on its own machine, and elsewhere by its heartbeat, where the storage keeps one.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.supervisor.process import ProcessId, identify_self, is_alive
from freetoken.tuner import history as trials
from freetoken.tuner.method import Method, Proposal
from freetoken.tuner.sampler import ModelSampler
from freetoken.tuner.values import Observation, Outcome

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial

#: Seconds between two heartbeats, and of silence after which a trial's process is taken for gone.
HEARTBEAT_S, GRACE_S = 60, 300
#: Seconds that a trial may stay without its first words before it is taken for one of a dead process.
SILENT_S = 600.0
#: Seconds that an earlier trial is given to say what it is about.
PATIENCE_S = 30.0
#: A point that another process has in hand is thought over this often.
MOST_YIELDS = 2


def name_machine() -> str:
    """Eight digits that tell this machine (and register of deployments) from others, and say nothing else of it."""
    return hashlib.sha256(f"{platform.node()} {paths.runtime_dir()}".encode()).hexdigest()[:8]


def make_owner() -> dict[str, Any]:
    """What a trial keeps of the process that has it in hand."""
    return {trials.MACHINE: name_machine(), trials.PROCESS: identify_self().to_dict()}


# --- who is gone


def find_stale(study: Study, *, is_shared: bool) -> list[int]:
    """Numbers of RUNNING trials whose process is gone.

    Without others every trial was this machine's, whatever it was called then (a container has a new name each time).
    In a shared study one that says nothing of its process may have just been asked for elsewhere: it is given
    `SILENT_S`.
    """
    from optuna.trial import TrialState

    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    silent = _find_silent_ids(study) if running else frozenset[int]()
    return [one.number for one in running if one._trial_id in silent or _is_lost(one, is_shared=is_shared)]


def _is_lost(trial: FrozenTrial, *, is_shared: bool) -> bool:
    attributes = trial.user_attrs
    is_known = trials.PROCESS in attributes
    is_ours = attributes.get(trials.MACHINE) == name_machine()
    lives = is_known and is_ours and is_alive(ProcessId.from_dict(attributes[trials.PROCESS]))
    if not is_shared:
        return not lives
    return is_ours and not lives if is_known else _age_s(trial) > SILENT_S


def _find_silent_ids(study: Study) -> frozenset[int]:
    """Trials whose heartbeat, by the storage's own clock, stopped; none where it keeps no heartbeats."""
    from optuna.storages._heartbeat import is_heartbeat_enabled

    storage = study._storage
    if not is_heartbeat_enabled(storage):
        return frozenset()
    return frozenset(storage._get_stale_trial_ids(study._study_id))  # type: ignore[attr-defined,unused-ignore]


def _age_s(trial: FrozenTrial) -> float:
    began = trial.datetime_start
    return (datetime.now() - began).total_seconds() if began is not None else 0.0


@contextlib.contextmanager
def beating(storage: BaseStorage, trial_id: int) -> Iterator[None]:
    """Tells the storage every minute that the trial's process lives; does nothing where it keeps no heartbeats."""
    from optuna.storages._heartbeat import is_heartbeat_enabled

    if not is_heartbeat_enabled(storage):
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while True:
            # A storage that is away for a minute costs beats, not the trial.
            with contextlib.suppress(Exception):
                storage.record_heartbeat(trial_id)  # type: ignore[attr-defined,unused-ignore]
            if ended.wait(HEARTBEAT_S):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# --- what others have in hand


class SharingSampler(ModelSampler):
    """Proposes as if what other processes are at were tried already, with nothing known of it yet."""

    def __init__(self, method: Method, seed: int | None = None) -> None:
        super().__init__(method, seed)
        self._kept: tuple[tuple[Any, ...], Proposal] | None = None

    def peek(self, study: Study) -> Proposal:
        """What the next trial would be, without asking for it."""
        history = self.read(study)
        pending = list_pending(study, self.method)
        key = len(history), self.running_start, *(one.number for one in pending)
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self.method.propose([*history, *pending], self.running_start)
        return self._kept[1]


def list_pending(study: Study, method: Method) -> list[Observation]:
    """Trials that other processes have in hand, as observations without an outcome."""
    from optuna.trial import TrialState

    own, found = identify_self().to_dict(), []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        attributes = trial.user_attrs
        stage = attributes.get(trials.STAGE)
        if stage is None or attributes.get(trials.PROCESS) == own:
            continue
        point = dict(trial.params)
        if not _has_spoken(trial, method):
            # Its values are being written this moment; those of the default are known.
            if stage != "default":
                continue
            point = method.site.default_point()
        start = attributes.get(trials.START, trial.number + 1)
        outcome = Outcome(kind="stopped", words="another process has it in hand")
        found.append(Observation(number=trial.number, point=point, stage=stage, start=start, outcome=outcome))
    return found


def _has_spoken(trial: FrozenTrial, method: Method) -> bool:
    return trials.STAGE in trial.user_attrs and all(one.name in trial.params for one in method.space)


def find_rival(
    study: Study, trial_number: int, method: Method, *, sleep: Callable[[float], None] = time.sleep
) -> int | None:
    """An earlier trial of the same setting that another process has in hand; None without one.

    Two processes may have asked in the same moment, neither seeing the other: the earlier trial stays. One that has
    not said yet what it is about is waited for.
    """
    from optuna.trial import TrialState

    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = study.get_trials(deepcopy=False)
        own = found[trial_number]
        earlier = {
            one.number: one for one in found[:trial_number]
            if one.state == TrialState.RUNNING and one.user_attrs.get(trials.PROCESS) != identify_self().to_dict()
        }  # fmt: skip
        wanted = method.space.canonical(own.params)
        for one in list_pending(study, method):
            if one.number in earlier and method.space.canonical(one.point) == wanted:
                return one.number
        silent = [one for one in earlier.values() if not _has_spoken(one, method) and _age_s(one) < PATIENCE_S]
        if not silent or time.monotonic() > deadline:
            return None
        sleep(0.1)
