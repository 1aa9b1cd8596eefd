"""Model, verify, probe: which point to try next, given all that was tried. Pure; nothing is launched or stored here.

A cold search needs tens of starts and crashes on the way. Here the engine's own default comes first, then a start
that pins the model's unknowns, the best predicted setting, the other strategy where the prediction is within 30 % of
it, and then one knob at a time where the model is blind and could be wrong by enough to pay. Live knobs are turned
inside a start, since a resize costs a second and a start a minute. Where a prediction was more than 10 % off, the
word goes to a constrained sampler that knows every trial.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from freetoken.tuner.history import is_disturbed
from freetoken.tuner.knowledge import Candidate, Knowledge
from freetoken.tuner.model import RISKY
from freetoken.tuner.objectives import Objective
from freetoken.tuner.site import Forecast
from freetoken.tuner.values import Observation, Point, Stage

#: The other strategy is tried when it is predicted to be at most this much slower.
WITHIN = 0.30
#: A strategy of which bandwidths alone say little is not the first to be started, unless it promises more than this.
CAUTION = 0.20
#: A prediction that is off by more than this hands over to the constrained sampler.
OFF_MODEL = 0.10
#: The sampler's turn comes once no probe of the corrected model promises more than this.
SEARCH_BELOW = 0.015
#: Deviations kept free inside a start whose peak is known.
LIVE_MARGIN = 1.3
#: More slots are worth a resize from this share on.
GROW_FROM = 0.02
#: What launches counts free memory anew: after a no to a resize, or a start, so often again for fewer slots.
GROW_REFUSALS, START_REFUSALS = 2, 1
#: Slots of the calibration, as shares of those that fit.
CALIBRATION = 0.5


class Proposal(NamedTuple):
    """The next point. `point` is None where a sampler should choose it."""

    point: Point | None
    stage: Stage
    reason: str
    #: Predicted cost in the objective that was looked at, and the expected relative gain over the best so far.
    predicted_cost: float | None = None
    gain: float = 1.0
    is_live: bool = False


class Method(Knowledge):
    """The state machine over a site."""

    # -- what to do -------------------------------------------------------------------------------------------

    def propose(self, history: Sequence[Observation], running: int = 0) -> Proposal:
        """The next point; `running` is the start that still runs, 0 where none does."""
        self.learn(history)
        if not any(one.stage == "default" for one in history):
            return self._propose_default()
        objective = self._turn_of(history)
        if running and (live := self._propose_live(history, running, objective)) is not None:
            return live
        ranked = [one for one in self._ranked(history, objective) if not self._is_refused(one.point, history)]
        if not ranked:
            return Proposal(None, "search", "the planner knows no point that fits", gain=0.0)
        return self._propose_start(history, objective, ranked)

    def _turn_of(self, history: Sequence[Observation]) -> Objective:
        """With two objectives, starts take turns between them."""
        starts = len({one.start for one in history if one.start})
        return self.objectives[starts % len(self.objectives)]

    def _propose_default(self) -> Proposal:
        point = self.site.default_point()
        forecast = self.site.forecast(point)
        if forecast is None:
            return Proposal(point, "default", "the engine's own default")
        cost = self._costs([Candidate(point, forecast, self.slots_of(point, forecast))], self.objectives[0])
        return Proposal(point, "default", "the engine's own default", float(cost[0]))

    def _propose_live(self, history: Sequence[Observation], start: int, objective: Objective) -> Proposal | None:
        """More of the running start: all the slots that turn out to fit, another count for the hit curve, a repeat."""
        running = [one for one in history if one.start == start]
        if not running or not all(one.outcome.is_ok for one in running):
            return None
        last = running[-1]
        key = self._start_key(last.point)
        if sum(is_live and self._start_key(point) == key for point, is_live in self._refused) > GROW_REFUSALS:
            return None
        forecast = self.site.forecast(last.point)
        if forecast is None:
            return None
        if (disturbed := self._disturbed(history, last)) is not None:
            return disturbed
        if (
            self.can_resize
            and forecast.high
            and "expert_slots" in self.space
            and self.space["expert_slots"].cost == "live"
        ):
            tried = [self.slots_of(one.point, forecast) for one in running]
            if (grown := self._grow(last.point, forecast, tried, objective, history)) is not None:
                return grown
            if not self._has_curve(history):
                shares = int(max(tried) * CALIBRATION)
                slots = max(forecast.low, shares)
                fewer = self._key({**last.point, "expert_slots": slots})
                if slots < 0.8 * max(tried) and all(self._key(point) != fewer for point, _ in self._refused):
                    return self._at(
                        last.point, forecast, slots, "calibrate", "a second slot count pins the hit curve", objective
                    )
        return self._repeat(history, running, objective)

    def _disturbed(self, history: Sequence[Observation], last: Observation) -> Proposal | None:
        """What the model is pinned by, once more where something came between: kernels were compiled, or a neighbour.

        On a machine's first start a prompt of a new length can take three times as long as the next.
        """
        if last.stage not in ("default", "calibrate") or not is_disturbed(last):
            return None
        key = self._key(last.point)
        count = sum(self._key(one.point) == key for one in history if one.measurement is not None)
        if count > 1:
            return None
        return Proposal(last.point, "repeat", "something came between its repeats", is_live=True)

    def _grow(
        self, point: Point, forecast: Forecast, tried: list[int], objective: Objective, history: Sequence[Observation]
    ) -> Proposal | None:
        fits = self._safe_slots(forecast, LIVE_MARGIN, is_live=True)
        if fits is None or fits < max(tried) * (1 + GROW_FROM):
            return None
        if any(one.outcome.kind == "crash" and one.stage == "grow" for one in history):
            return None
        reason = f"the peak shows room for {fits - max(tried):,} more slots"
        return self._at(point, forecast, fits, "grow", reason, objective)

    def _has_curve(self, history: Sequence[Observation]) -> bool:
        """Hit ratio at two distinct shares of residency, or two slot counts where nobody counts hits."""
        seen = set()
        for one in history:
            forecast = self.site.forecast(one.point) if one.measurement is not None else None
            if forecast is not None and forecast.high:
                seen.add(round(math.log(max(1, self.slots_of(one.point, forecast))) / 0.2))
        return len(seen) >= 2

    def _repeat(
        self, history: Sequence[Observation], running: list[Observation], objective: Objective
    ) -> Proposal | None:
        """Measures the point at hand once more where noise decides whether it is the best."""
        scores = self._scores(history, objective)
        if len(scores) < 2:
            return None
        key = self._key(running[-1].point)
        if key not in scores or sum(self._key(one.point) == key for one in history if one.measurement) > 1:
            return None
        others = min(cost for other, cost in scores.items() if other != key)
        # A best is measured twice while that costs no start: luck would keep it the best for good.
        if math.log(scores[key] / others) > 2.0 * self.noise(history, objective):
            return None
        return Proposal(running[-1].point, "repeat", "the best so far, within the noise", scores[key], is_live=True)

    def _at(
        self, point: Point, forecast: Forecast, slots: int, stage: Stage, reason: str, objective: Objective
    ) -> Proposal:
        fresh = {**point, "expert_slots": slots}
        cost = self._costs([Candidate(fresh, forecast, slots)], objective)
        return Proposal(fresh, stage, reason, float(cost[0]), is_live=True)

    def _propose_start(self, history: Sequence[Observation], objective: Objective, ranked: list[Candidate]) -> Proposal:
        costs = self._costs(ranked, objective)
        order = np.argsort(costs)
        ranked, costs = [ranked[i] for i in order], costs[order]
        tried = [one for one in history if one.start]
        worked = [one for one in tried if one.measurement is not None]
        keys = self._given_up(history)
        if not worked:
            safe = next(
                (i for i, one in enumerate(ranked) if one.point.get("strategy") in (None, "offload", "fused")), 0
            )
            one = ranked[safe]
            if self._start_key(one.point) in keys:
                one = self._lower(one, tried)
            return Proposal(one.point, "calibrate", "a safe start that pins the model", float(costs[safe]))
        best = self.best_cost(history, objective)
        if best is None:
            return Proposal(ranked[0].point, "predicted", "the best predicted setting", float(costs[0]))
        gains = self._gains(ranked, history, objective)
        if sum(one.stage == "predicted" for one in tried) < len(self.objectives):
            first = self._first_predicted(ranked, costs, tried)
            if self._start_key(ranked[first].point) not in keys:
                gain = max(float(gains[first]), 0.01)
                return Proposal(
                    ranked[first].point, "predicted", "the best predicted setting", float(costs[first]), gain
                )
        for index, one in enumerate(ranked):
            strategy = one.point.get("strategy")
            is_untried = strategy is not None and not any(o.point.get("strategy") == strategy for o in tried)
            if is_untried and costs[index] <= best * (1 + WITHIN):
                reason = f"`{strategy}` is predicted within {WITHIN:.0%} of the best"
                gain = max(float(gains[index]), 0.01)
                return Proposal(self._carry(one.point, tried), "other strategy", reason, float(costs[index]), gain)
        return self._probe(history, objective, keys, ranked)

    def _given_up(self, history: Sequence[Observation]) -> set[tuple[object, ...]]:
        """Start keys that are not proposed again: started, the default, or refused more than once with fewer slots."""
        known = {self._start_key(one.point) for one in history if one.start or one.stage == "default"}
        refused = Counter(self._start_key(point) for point, is_live in self._refused if not is_live)
        return known | {key for key, count in refused.items() if count > START_REFUSALS}

    def _is_refused(self, point: Point, history: Sequence[Observation]) -> bool:
        """Whether no start of the strategy of `point` was admitted, as often as one may be asked for."""
        strategy = point.get("strategy")
        if strategy is None or any(one.start and one.point.get("strategy") == strategy for one in history):
            return False
        refused = [other for other, is_live in self._refused if not is_live and other.get("strategy") == strategy]
        return len(refused) > START_REFUSALS

    def _first_predicted(self, ranked: list[Candidate], costs: np.ndarray, tried: Sequence[Observation]) -> int:
        """The best predicted one; where link and CPU were not measured together, a strategy that uses both waits.

        It is put behind others that promise nearly as much, until it was tried.
        """
        seen = {one.point.get("strategy") for one in tried}
        is_known = self.site.rates.cpu_overlap is not None
        names = [one.point.get("strategy") for one in ranked]
        doubt = [not is_known and name in RISKY and name not in seen for name in names]
        return int(np.argmin(costs * np.where(doubt, 1 + CAUTION, 1.0)))

    def _lower(self, candidate: Candidate, tried: Sequence[Observation]) -> Candidate:
        """The same with a third fewer slots than the last that failed."""
        least = min((int(one.point.get("expert_slots", 0)) for one in tried), default=candidate.slots)
        slots = max(candidate.forecast.low, min(candidate.slots, least * 2 // 3))
        return candidate._replace(point={**candidate.point, "expert_slots": slots}, slots=slots)

    def _carry(self, point: Point, tried: Sequence[Observation]) -> Point:
        """`point` with an attention backend that no start has had yet, where there is one.

        Attention shows in prefill, where strategies that stream the bank do not differ: the start says both.
        """
        if "attention" not in self.space:
            return point
        seen = {one.point["attention"] for one in tried if one.measurement is not None}
        fresh = [value for value in self.space["attention"].values() if value not in seen]
        found = self.candidate({**point, "attention": fresh[0]}) if fresh else None
        return found.point if found is not None else point

    def _probe(
        self,
        history: Sequence[Observation],
        objective: Objective,
        keys: set[tuple[object, ...]],
        ranked: list[Candidate],
    ) -> Proposal:
        """The neighbour of the best, or best of its strategy, with the greatest expected gain."""
        incumbent = self.best(history, objective)
        assert incumbent is not None
        best = self.best_cost(history, objective) or math.inf
        near = self._costs(ranked, objective) <= best * (1 + WITHIN)
        around = [
            *self._neighbours(self.space.searchable(incumbent.point)),
            *(one for one, is_near in zip(ranked, near, strict=True) if is_near),
        ]
        fresh = [
            one for one in around if self._start_key(one.point) not in keys and not self._is_refused(one.point, history)
        ]
        if not fresh:
            return Proposal(None, "search", "every neighbour of the best was tried", gain=0.0)
        gains = self._gains(fresh, history, objective)
        index = int(np.argmax(gains))
        one, cost = fresh[index], float(self._costs([fresh[index]], objective)[0])
        changed = [name for name, value in self.space.canonical(one.point).items()
                   if self.space.canonical(incumbent.point)[name] != value and name != "expert_slots"]  # fmt: skip
        is_spent = gains[index] < SEARCH_BELOW
        if is_spent and self.is_off(history) and self._searches(history) < self._probes(history):
            return Proposal(None, "search", "the model was more than 10 % off", gain=max(gains[index], 0.02))
        stage = "probe" if len(changed) <= 1 else "predicted"
        named = ", ".join(f"`{name}` {one.point[name]}" for name in changed)
        return Proposal(one.point, stage, f"{named}: could gain {gains[index]:.1%}", cost, float(gains[index]))

    def is_off(self, history: Sequence[Observation]) -> bool:
        """Whether what was predicted last, calibrated, missed its measurement by more than 10 %."""
        told = [one for one in history if one.stage in ("predicted", "other strategy", "probe") and one.predicted_cost]
        for one in told[-2:]:
            if one.measurement is None or one.predicted_cost is None:
                continue
            costs = [objective.cost(one.measurement) for objective in self.objectives]
            misses = [abs(math.log(cost / one.predicted_cost)) for cost in costs if cost is not None]
            if misses and min(misses) > OFF_MODEL:
                return True
        return False

    def _searches(self, history: Sequence[Observation]) -> int:
        return sum(one.stage == "search" for one in history)

    def _probes(self, history: Sequence[Observation]) -> int:
        return sum(one.stage in ("probe", "predicted") for one in history)

    # -- candidates -------------------------------------------------------------------------------------------

    def _ranked(self, history: Sequence[Observation], objective: Objective) -> list[Candidate]:
        """The best point of every strategy, by coordinate descent over its knobs on predicted cost."""
        strategies = self.space["strategy"].values() if "strategy" in self.space else (None,)
        best = self.best(history, objective)
        base = [self.space.searchable(best.point if best is not None else self.site.default_point())]
        found = []
        for strategy in strategies:
            starts = [one if strategy is None else {**one, "strategy": strategy} for one in base]
            reached = [one for start in starts if (one := self._descend(start, objective)) is not None]
            if reached:
                costs = self._wishes(reached, objective)
                found.append(reached[int(np.argmin(costs))])
        return found

    def _descend(self, start: Point, objective: Objective) -> Candidate | None:
        """The best predicted point that one-knob steps from `start` reach; `start` itself need not fit."""
        here = self.candidate(start)
        cost = float(self._wishes([here], objective)[0]) if here is not None else math.inf
        point = start
        for _ in range(6):
            around = list(self._neighbours(point, keep="strategy"))
            if here is None and not around:
                around = list(self._pairs(point))
            if not around:
                return here
            costs = self._wishes(around, objective)
            index = int(np.argmin(costs))
            if costs[index] >= cost * 0.9995:
                break
            here, cost = around[index], float(costs[index])
            point = here.point
        return here

    def _neighbours(self, point: Point, keep: str | None = None) -> Iterator[Candidate]:
        """All points that differ in one restart-bound knob and fit."""
        strategy = point.get("strategy")
        for parameter in self.space:
            if parameter.name == keep or parameter.cost == "live" or not parameter.is_relevant(strategy):
                continue
            for value in parameter.values():
                if value != point[parameter.name]:
                    found = self.candidate({**point, parameter.name: value})
                    if found is not None:
                        yield found

    def _pairs(self, point: Point) -> Iterator[Candidate]:
        """Points two steps away, where no single step fits: a smaller chunk and the embedding on the host."""
        if "prefill_chunk_tokens" not in self.space:
            return
        for chunk in self.space["prefill_chunk_tokens"].values():
            yield from self._neighbours({**point, "prefill_chunk_tokens": chunk}, keep="strategy")


def distinct_starts(history: Iterable[Observation]) -> int:
    """How many starts an engine had."""
    return len({one.start for one in history if one.start})
