"""Our Optuna sampler: the method's proposals first, a constrained GP or TPE seeded with every trial after them.

Optuna's samplers want many trials before they say anything; here they are asked only once the model has been found
wrong, and then start from all that is known. The sampler keeps no state: another process, or a later one, that opens
the same study goes on where the trials are.
"""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from freetoken.tuner.history import PREDICTED, REASON, STAGE, read_history
from freetoken.tuner.method import Method, Proposal
from freetoken.tuner.values import Observation, Point

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial

#: A GP on fewer measurements than this is noise; TPE takes over where scipy or torch cannot be had.
LEAST_TRIALS = 3
#: Slots stay within this share of what the planner says fits.
AROUND_PLAN = 0.25


class ModelSampler(BaseSampler):
    """Proposes by `method`; hands over to a constrained GP where the method asks for it."""

    def __init__(self, method: Method, seed: int | None = None) -> None:
        self.method = method
        #: The start that runs now; whoever drives the study says so.
        self.running_start = 0
        self._random = RandomSampler(seed=seed)
        self._rng = random.Random(seed)
        self._search = _make_search(seed)
        self._peeked: tuple[tuple[int, int], Proposal] | None = None

    def read(self, study: Study) -> list[Observation]:
        """The study's history, every point with all knobs of today."""
        return read_history(study, self.method.unasked)

    def peek(self, study: Study) -> Proposal:
        """What the next trial would be, without asking for it."""
        history = self.read(study)
        key = len(history), self.running_start
        if self._peeked is None or self._peeked[0] != key:
            self._peeked = key, self.method.propose(history, self.running_start)
        return self._peeked[1]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole space, always the same."""
        return self.method.space.distributions()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Values for every knob; () for a trial whose values were enqueued."""
        if "fixed_params" in trial.system_attrs:
            return {}
        proposal = self.peek(study)
        point = proposal.point
        if point is None:
            point = self._ask_search(study, trial, search_space)
        for key, value in ((STAGE, proposal.stage), (REASON, proposal.reason), (PREDICTED, proposal.predicted_cost)):
            study._storage.set_trial_user_attr(trial._trial_id, key, value)
        clipped = self.method.space.clip(point)
        return {name: clipped[name] for name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Only for a knob that an enqueued point lacks."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _ask_search(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> Point:
        """A point of the constrained sampler, its slots kept near the plan; a new one where it was tried already."""
        history = self.read(study)
        worked = sum(one.measurement is not None for one in history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self._search.sample_relative(study, trial, search_space) if worked >= LEAST_TRIALS else {}
            for name, distribution in search_space.items():
                if name not in found:
                    found[name] = self._random.sample_independent(study, trial, name, distribution)
        return self._refresh(self._bound(self.method.space.searchable(found), history), history)

    def _refresh(self, point: Point, history: list[Observation]) -> Point:
        """`point`, or a random neighbour where it would only repeat a start."""
        space = self.method.space
        tried = {space.start_key(space.canonical(one.point)) for one in history}
        for _ in range(20):
            point = space.canonical(point)
            if space.start_key(point) not in tried:
                break
            free = [one for one in space if one.cost == "restart" and one.is_relevant(point.get("strategy"))]
            if not free:
                break
            knob = free[self._rng.randrange(len(free))]
            fresh = {**point, knob.name: knob.values()[self._rng.randrange(len(knob.values()))]}
            candidate = self.method.candidate(fresh)
            point = candidate.point if candidate is not None else point
        return point

    def _bound(self, point: Point, history: list[Observation]) -> Point:
        if "expert_slots" not in point or (candidate := self.method.candidate(point)) is None:
            return point
        if not candidate.slots:
            return point
        least = int(candidate.slots * (1 - AROUND_PLAN))
        return {**point, "expert_slots": min(candidate.slots, max(least, int(point["expert_slots"])))}


def _make_search(seed: int | None) -> BaseSampler:
    try:
        import scipy  # type: ignore[import-untyped,unused-ignore]  # noqa: F401

        sampler = GPSampler(seed=seed, n_startup_trials=LEAST_TRIALS, warn_independent_sampling=False)
        # Its defaults are made for hundreds of trials; for a dozen this finds the same point in a fraction of the time.
        sampler._n_preliminary_samples, sampler._n_local_search = 512, 3
        return sampler
    except ImportError:
        return TPESampler(seed=seed, n_startup_trials=LEAST_TRIALS, multivariate=True, warn_independent_sampling=False)
