"""Model, verify, probe: which point to try next, given all that was tried. Pure; nothing is launched or stored here.

A cold search needs tens of starts and crashes on the way. Here the engine's own default comes first, then a start
that pins the model's unknowns, the best predicted setting, the other strategy where the prediction is within 30 % of
it, and then one knob at a time where the model is blind and could be wrong by enough to pay. Live knobs are turned
inside a start, since a resize costs a second and a start a minute. Where a prediction was more than 10 % off, the
word goes to a constrained sampler that knows every trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from freetoken.tuner.memory import MemoryCorrection, Peak
from freetoken.tuner.model import RISKY, CostModel, Predicted
from freetoken.tuner.objectives import Limit, Objective, penalised_cost
from freetoken.tuner.site import Forecast, Site
from freetoken.tuner.stop import expected_gain
from freetoken.tuner.values import Measurement, Observation, Point, Stage

#: The other strategy is tried when it is predicted to be at most this much slower.
WITHIN = 0.30
#: A strategy of which bandwidths alone say little is not the first to be started, unless it promises more than this.
CAUTION = 0.20
#: A prediction that is off by more than this hands over to the constrained sampler.
OFF_MODEL = 0.10
#: The sampler's turn comes once no probe of the corrected model promises more than this.
SEARCH_BELOW = 0.015
#: Deviations kept free before a start, and inside one whose peak is known.
START_MARGIN, LIVE_MARGIN = 1.7, 1.3
#: More slots are worth a resize from this share on.
GROW_FROM = 0.02
#: What launches counts free memory anew; it is asked so often again for fewer slots after a no.
GROW_REFUSALS = 2
#: Relative noise of one measurement beyond which a start that pins the model is measured again.
DISTURBED = 0.10
#: What the logarithm of a turn's time weighs beside an objective that leaves part of the turn out: a hair's breadth of
#: decode speed is not worth a second more to the first token.
TURN_WEIGHT = 0.01
#: Stages that turn a knob of the start at hand.
LIVE_STAGES = ("grow", "calibrate")
#: Slots of the calibration, as shares of those that fit.
CALIBRATION = 0.5
#: Degrees of freedom that the bench's own word on its noise counts for.
SAID_FREEDOM = 4
#: Sets of parameters that an expected gain is the mean of.
DRAWS = 128


class Proposal(NamedTuple):
    """The next point. `point` is None where a sampler should choose it."""

    point: Point | None
    stage: Stage
    reason: str
    #: Predicted cost in the objective that was looked at, and the expected relative gain over the best so far.
    predicted_cost: float | None = None
    gain: float = 1.0
    is_live: bool = False


class Candidate(NamedTuple):
    """A point with its forecast and slots."""

    point: Point
    forecast: Forecast
    slots: int


class Method:
    """The state machine over a site. Stateless between calls: everything follows from the observations."""

    def __init__(
        self, site: Site, objectives: Sequence[Objective], limits: Sequence[Limit] = (), *, can_resize: bool = True
    ) -> None:
        self.site, self.objectives, self.limits = site, tuple(objectives), tuple(limits)
        self.space = site.space
        self.can_resize = can_resize and any(one.cost == "live" for one in self.space)
        self.model = CostModel(site.rates, site.workload, site.cores, site.workload.concurrency)
        self.memory = MemoryCorrection()
        #: Bytes below the limit to which whoever launches kept a point, in a start (False) and while one runs (True).
        self._kept_free: dict[bool, float] = {False: 0.0, True: 0.0}
        self._fitted: int | None = None
        #: What is believed of each point, by objective; it holds until something is learned.
        self._beliefs: dict[str, dict[tuple[object, ...], float]] = {}

    # -- what is known ----------------------------------------------------------------------------------------

    def learn(self, history: Sequence[Observation]) -> None:
        """Fits cost model and memory to `history`."""
        key = hash(tuple((one.number, one.outcome.kind) for one in history))
        if key == self._fitted:
            return
        self._fitted = key
        self._beliefs = {}
        self._kept_free = {False: 0.0, True: 0.0}
        rows, peaks, scale, noise = [], [], None, self.noise(history)
        calm = {one.number for one in self._calm(history)}
        for one in history:
            forecast = self.site.forecast(one.point)
            if forecast is None:
                continue
            slots = self.slots_of(one.point, forecast)
            scale = max(scale or 0, forecast.limit_bytes)
            chunk = forecast.settings.prefill_chunk_tokens
            planned, limit = forecast.peak_at(slots), forecast.limit_bytes
            # The engine's default is started as it is and never asked for the full chunk that its plan holds.
            is_own = self.site.own_verdict(one.point) is not None
            if one.measurement is not None:
                if one.number in calm:
                    rows.append((one.point, forecast, slots, _with_noise(one.measurement, noise)))
                if one.measurement.peak_bytes is not None and not is_own:
                    peaks.append(Peak(chunk, planned, one.measurement.peak_bytes, limit))
            elif one.outcome.kind == "crash" and one.outcome.violation_bytes and not is_own:
                missing = one.outcome.violation_bytes if one.outcome.violation_bytes > 1 else 0
                peaks.append(Peak(chunk, planned, None, limit, missing))
            elif one.outcome.kind == "refused" and not is_own:
                is_live = one.stage in LIVE_STAGES
                kept = limit - planned + one.outcome.violation_bytes
                self._kept_free[is_live] = max(self._kept_free[is_live], kept)
        self.model.fit(rows)
        self.memory = MemoryCorrection(peaks, scale)

    def slots_of(self, point: Point, forecast: Forecast) -> int:
        """The slots that `point` has: its own where they are a knob, else as planned; 0 where there are none."""
        if not forecast.high:
            return 0
        if "expert_slots" not in self.space:
            return forecast.settings.expert_slots
        return max(forecast.low, min(forecast.high, int(point["expert_slots"])))

    def best(self, history: Sequence[Observation], objective: Objective | None = None) -> Observation | None:
        """The observation with the least believed cost (see `_believed`); None before there is one."""
        objective = objective or self.objectives[0]
        self.learn(history)
        scored = self._beliefs.get(objective.name)
        if scored is None:
            scored = self._beliefs[objective.name] = self._believed(history, objective)
        if not scored:
            return None
        key = min(scored, key=lambda one: scored[one])
        return next(one for one in reversed(history) if one.measurement is not None and self._key(one.point) == key)

    def best_cost(self, history: Sequence[Observation], objective: Objective | None = None) -> float | None:
        """The cost of the best point, its repeated measurements averaged."""
        objective = objective or self.objectives[0]
        found = self.best(history, objective)
        return self._scores(history, objective)[self._key(found.point)] if found is not None else None

    def _believed(self, history: Sequence[Observation], objective: Objective) -> dict[tuple[object, ...], float]:
        """Costs between what was measured and what the fitted model says of the same points.

        The least of several noisy figures is too good to be true; the model, which has seen them all, is not. The
        more often a point was measured and the less the model fits, the more the measurement counts.
        """
        scores = self._scores(history, objective)
        anchors = self._anchors(history, scores)
        if len(anchors) < 2 or objective.name == "efficiency":
            return scores
        known = [Candidate(one.point, forecast, self.slots_of(one.point, forecast)) for one, forecast, _ in anchors]
        fitted = self._log_costs(self.model.predict(known), objective)
        form, noise = max(0.015, self.model.residual_sd), self.noise(history)
        believed = dict(scores)
        for (one, _, cost), guess in zip(anchors, fitted, strict=True):
            key = self._key(one.point)
            count = sum(self._key(other.point) == key for other in history if other.measurement is not None)
            weight = form**2 / (form**2 + noise**2 / count)
            believed[key] = math.exp(weight * math.log(cost) + (1 - weight) * float(guess))
        return believed

    def _scores(self, history: Sequence[Observation], objective: Objective) -> dict[tuple[object, ...], float]:
        found: dict[tuple[object, ...], list[float]] = {}
        for one in self._calm(history):
            if one.measurement is None:
                continue
            cost = penalised_cost(objective, one.measurement, self.limits)
            if cost is not None:
                found.setdefault(self._key(one.point), []).append(math.log(cost))
        return {key: math.exp(sum(costs) / len(costs)) for key, costs in found.items()}

    def _calm(self, history: Sequence[Observation]) -> list[Observation]:
        """`history` without disturbed measurements of points that were measured in peace as well."""
        in_peace = {self._key(one.point) for one in history if one.measurement and not _is_disturbed(one)}
        return [one for one in history if not _is_disturbed(one) or self._key(one.point) not in in_peace]

    def _key(self, point: Point) -> tuple[object, ...]:
        return tuple(self.space.canonical(point).items())

    def noise(self, history: Sequence[Observation]) -> float:
        """Relative noise of one measurement: what the bench says of its own, and how much repeats differ.

        A bench that saw one request can only guess, and nobody sees a busy neighbour from inside one measurement.
        """
        said = self.said_noise(history)
        logs: dict[tuple[object, ...], list[float]] = {}
        for one in self._calm(history):
            cost = self.objectives[0].cost(one.measurement) if one.measurement is not None else None
            if cost is not None:
                logs.setdefault(self._key(one.point), []).append(math.log(cost))
        squares = sum(float(np.var(one)) * len(one) for one in logs.values())
        freedom = sum(len(one) - 1 for one in logs.values())
        return math.sqrt((SAID_FREEDOM * said**2 + squares) / (SAID_FREEDOM + freedom))

    def said_noise(self, history: Sequence[Observation]) -> float:
        """Relative noise of one measurement by the bench's own word: the median."""
        said = [one.measurement.noise_ratio for one in self._calm(history) if one.measurement is not None]
        return float(np.median(said)) if said else 0.02

    # -- what to do -------------------------------------------------------------------------------------------

    def propose(self, history: Sequence[Observation], running: int = 0) -> Proposal:
        """The next point; `running` is the start that still runs, 0 where none does."""
        self.learn(history)
        if not any(one.stage == "default" for one in history):
            return self._propose_default()
        objective = self._turn_of(history)
        if running and (live := self._propose_live(history, running, objective)) is not None:
            return live
        ranked = self._ranked(history, objective)
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
                if slots < 0.8 * max(tried):
                    return self._at(
                        last.point, forecast, slots, "calibrate", "a second slot count pins the hit curve", objective
                    )
        return self._repeat(history, running, objective)

    def _disturbed(self, history: Sequence[Observation], last: Observation) -> Proposal | None:
        """What the model is pinned by, once more where something came between: kernels were compiled, or a neighbour.

        On a machine's first start a prompt of a new length can take three times as long as the next.
        """
        if last.stage not in ("default", "calibrate") or not _is_disturbed(last):
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
        failed = [one.outcome.kind for one in history if one.stage == "grow"]
        if "crash" in failed or failed.count("refused") > GROW_REFUSALS:
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
        if math.log(scores[key] / others) > 2.0 * self.noise(history):
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
        keys = {self._start_key(one.point) for one in history}
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
        if not any(one.stage == "predicted" for one in tried):
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

    def _has_live_slots(self) -> bool:
        return "expert_slots" in self.space and self.space["expert_slots"].cost == "live"

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
            *self._neighbours(incumbent.point),
            *(one for one, is_near in zip(ranked, near, strict=True) if is_near),
        ]
        fresh = [one for one in around if self._start_key(one.point) not in keys]
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

    def _start_key(self, point: Point) -> tuple[object, ...]:
        return self.space.start_key(self.space.canonical(point))

    def _safe_slots(self, forecast: Forecast, deviations: float, *, is_live: bool = False) -> int | None:
        """The most slots that measured peaks and the plan both allow.

        The plan binds whoever launches, and later whoever applies the tuned recipe, whatever room a peak has shown.
        """
        chunk = forecast.settings.prefill_chunk_tokens
        excess = max(self.memory.excess_bytes(chunk, deviations), self._kept_free[is_live])
        return forecast.slots_within(excess)

    def candidate(self, point: Point, deviations: float = START_MARGIN) -> Candidate | None:
        """`point` with as many slots as surely fit; None where the planner says no."""
        forecast = self.site.forecast(point)
        if forecast is None or forecast.missing_bytes:
            return None
        slots = self._safe_slots(forecast, deviations)
        if slots is None:
            return None
        if not forecast.high:
            slots = 0
        elif "expert_slots" in self.space:
            point = {**point, "expert_slots": slots}
        else:
            slots = forecast.settings.expert_slots
        return Candidate(point, forecast, slots)

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

    # -- arithmetic -------------------------------------------------------------------------------------------

    def _costs(self, candidates: Sequence[Candidate], objective: Objective) -> np.ndarray:
        return np.asarray(np.exp(self._log_costs(self.model.predict(candidates), objective)))

    def _wishes(self, candidates: Sequence[Candidate], objective: Objective) -> np.ndarray:
        """Costs by which predicted settings are ranked: of two that are alike in the objective the shorter turn."""
        predicted = self.model.predict(candidates)
        turn = np.log(predicted.turn_time_s(self.site.workload.output_tokens))
        return np.asarray(np.exp(self._log_costs(predicted, objective) + TURN_WEIGHT * turn))

    def _log_costs(self, predicted: Predicted, objective: Objective) -> np.ndarray:
        """Log cost with the penalty of predicted misses. Efficiency has no model: time stands for it."""
        output = self.site.workload.output_tokens
        step, prefill = predicted.step_s, predicted.prefill_s
        match objective.name:
            case "decode_tps":
                cost = np.log(step)
            case "throughput":
                cost = np.log(step / self.site.workload.concurrency)
            case "ttft":
                cost = np.log(prefill + step)
            case _:
                cost = np.log(prefill + output * step)
        figures = {
            "ttft_p50": prefill + step,
            "ttft_p95": predicted.longest_prefill_s + step,
            "itl_p95": 1.1 * step,
            "turn_time": prefill + output * step,
            "decode_tps": 1 / step,
        }
        for limit in self.limits:
            if limit.name in figures:
                figure = figures[limit.name]
                excess = figure / limit.bound - 1 if limit.is_upper else limit.bound / figure - 1
                cost = cost + np.log1p(10 * np.maximum(0.0, excess))
        return np.asarray(cost)

    def _gains(
        self, candidates: Sequence[Candidate], history: Sequence[Observation], objective: Objective
    ) -> np.ndarray:
        """Expected relative gain of each candidate over the best measured point.

        A candidate stands where its nearest measured point stands, moved by what the model says of their difference:
        what both have in common cancels, and with it most of what the model has wrong.
        """
        best, scores = self.best_cost(history, objective), self._scores(history, objective)
        anchors = self._anchors(history, scores)
        if best is None or not anchors:
            return np.ones(len(candidates))
        nearest = [min(range(len(anchors)), key=lambda i: self._distance(one.point, anchors[i])) for one in candidates]
        known = [Candidate(one.point, forecast, self.slots_of(one.point, forecast)) for one, forecast, _ in anchors]
        logs = self._log_costs(self.model.draw([*candidates, *known], DRAWS), objective)
        count = len(candidates)
        measured = np.log([anchors[i][2] for i in nearest])
        moved = logs[:, :count] - logs[:, [count + i for i in nearest]]
        gains = math.log(best) - (measured + moved)
        form = 0.008 + 0.5 * min(self.noise(history), 0.03)
        return np.asarray(expected_gain(gains, form).mean(axis=0))

    def _anchors(
        self, history: Sequence[Observation], scores: dict[tuple[object, ...], float]
    ) -> list[tuple[Observation, Forecast, float]]:
        """Measured points, each once, with their mean cost."""
        found: dict[tuple[object, ...], tuple[Observation, Forecast, float]] = {}
        for one in history:
            key = self._key(one.point)
            forecast = self.site.forecast(one.point) if one.measurement is not None else None
            if forecast is not None and key in scores:
                found[key] = one, forecast, scores[key]
        return list(found.values())

    def _distance(self, point: Point, anchor: tuple[Observation, Forecast, float]) -> tuple[float, float]:
        """Knobs that differ, a strategy as much as all others together; then the cost: the better one counts."""
        here, there = self.space.canonical(point), self.space.canonical(anchor[0].point)
        far = 0.0
        for one in self.space:
            a, b = here[one.name], there[one.name]
            if one.cost == "live" or a == b:
                continue
            # A step along a range is nearer than a jump.
            along = abs(a - b) / max(1e-9, one.high - one.low) if one.kind != "choice" else 1.0
            far += 10.0 if one.name == "strategy" else min(1.0, 0.2 + along)
        return far, anchor[2]


def _is_disturbed(one: Observation) -> bool:
    return one.measurement is not None and one.measurement.noise_ratio > DISTURBED


def _with_noise(measurement: Measurement, noise_ratio: float) -> Measurement:
    """`measurement` with at least this noise: repeats may have shown more than the bench knew of."""
    return measurement.model_copy(update={"noise_ratio": max(measurement.noise_ratio, noise_ratio)})


def distinct_starts(history: Iterable[Observation]) -> int:
    """How many starts an engine had."""
    return len({one.start for one in history if one.start})
