"""What a search knows: the cost model and memory fitted to every trial, their noise, and what each point is worth.

`method.py` decides with it what to try next. Pure; nothing is launched or stored here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from freetoken.tuner.history import calm
from freetoken.tuner.memory import MemoryCorrection, Peak
from freetoken.tuner.model import CostModel, Predicted
from freetoken.tuner.objectives import OBJECTIVES, Limit, Objective, penalised_cost
from freetoken.tuner.site import Forecast, Site
from freetoken.tuner.stop import expected_gain
from freetoken.tuner.values import Measurement, Observation, Outcome, Point

#: Deviations kept free before a start.
START_MARGIN = 1.7
#: Where nobody told what was missing, so much less is asked for, as a share of the slots.
STEP_DOWN = 0.02
#: What the logarithm of a turn's time weighs beside an objective that leaves part of the turn out: a hair's breadth of
#: decode speed is not worth a second more to the first token.
TURN_WEIGHT = 0.01
#: Degrees of freedom that the bench's own word on its noise counts for.
SAID_FREEDOM = 4
#: Sets of parameters that an expected gain is the mean of.
DRAWS = 128


class Candidate(NamedTuple):
    """A point with its forecast and slots."""

    point: Point
    forecast: Forecast
    slots: int


class Knowledge:
    """What is known of a site: all of it follows from the observations, but for what this process was refused."""

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
        #: What it refused: the point, and whether as a resize.
        self._refused: list[tuple[Point, bool]] = []
        self._fitted: int | None = None
        #: What is believed of each point, by objective; it holds until something is learned.
        self._beliefs: dict[str, dict[tuple[object, ...], float]] = {}

    def learn(self, history: Sequence[Observation]) -> None:
        """Fits cost model and memory to `history`."""
        key = hash(tuple((one.number, one.outcome.kind) for one in history))
        if key == self._fitted:
            return
        self._fitted = key
        self._beliefs = {}
        rows, peaks, scale = [], [], None
        noises = [self.noise(history, OBJECTIVES[name]) for name in ("turn_time", "decode_tps")]
        counted = {one.number for one in self._calm(history)}
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
                if one.number in counted:
                    rows.append((one.point, forecast, slots, _with_noise(one.measurement, *noises)))
                if one.measurement.peak_bytes is not None and not is_own:
                    peaks.append(Peak(chunk, planned, one.measurement.peak_bytes, limit))
            elif one.outcome.kind == "crash" and one.outcome.violation_bytes and not is_own:
                missing = one.outcome.violation_bytes if one.outcome.violation_bytes > 1 else 0
                peaks.append(Peak(chunk, planned, None, limit, missing))
        self.model.fit(rows)
        self.memory = MemoryCorrection(peaks, scale)

    def note_refusal(self, point: Point, outcome: Outcome, *, is_live: bool) -> None:
        """What whoever launches had no room for, though the plan known here has some.

        It holds for this process alone: of another day, or another machine, it says nothing.
        """
        forecast = self.site.forecast(point)
        if forecast is None or self.site.own_verdict(point) is not None:
            return
        self._refused.append((point, is_live))
        slots = self.slots_of(point, forecast)
        missing = outcome.ledger_bytes
        if missing is None:
            missing = int(STEP_DOWN * slots * forecast.slot_bytes)
        if slots and missing:
            self._kept_free[is_live] = forecast.limit_bytes - forecast.peak_at(slots) + missing

    @cached_property
    def unasked(self) -> Point:
        """Values of knobs that a trial of the same study may not have had: the engine's own."""
        return self.site.default_point()

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
        known = reversed(self._calm(history))
        return next(one for one in known if one.measurement is not None and self._key(one.point) == key)

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
        form, noise = max(0.015, self.model.residual_sd), self.noise(history, objective)
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
        return calm(history, self.space.canonical)

    def _key(self, point: Point) -> tuple[object, ...]:
        return tuple(self.space.canonical(point).items())

    def noise(self, history: Sequence[Observation], objective: Objective | None = None) -> float:
        """Relative noise of one measurement of `objective` (the first): by the bench's word and by how repeats differ.

        A bench that saw one request can only guess, and nobody sees a busy neighbour from inside one measurement.
        """
        objective = objective or self.objectives[0]
        said = self.said_noise(history, objective)
        logs: dict[tuple[object, ...], list[float]] = {}
        for one in self._calm(history):
            cost = objective.cost(one.measurement) if one.measurement is not None else None
            if cost is not None:
                logs.setdefault(self._key(one.point), []).append(math.log(cost))
        squares = sum(float(np.var(one)) * len(one) for one in logs.values())
        freedom = sum(len(one) - 1 for one in logs.values())
        return math.sqrt((SAID_FREEDOM * said**2 + squares) / (SAID_FREEDOM + freedom))

    def said_noise(self, history: Sequence[Observation], objective: Objective | None = None) -> float:
        """Relative noise of one measurement of `objective` (the first) by the bench's own word: the median."""
        told = (objective or self.objectives[0]).noise
        said = [told(one.measurement) for one in self._calm(history) if one.measurement is not None]
        return float(np.median(said)) if said else 0.02

    # -- points -----------------------------------------------------------------------------------------------

    def _start_key(self, point: Point) -> tuple[object, ...]:
        return self.space.start_key(self.space.canonical(point))

    def _safe_slots(self, forecast: Forecast, deviations: float, *, is_live: bool = False) -> int | None:
        """The most slots that measured peaks and the plan both allow.

        The plan binds whoever launches, and later whoever applies the tuned recipe, whatever room a peak has shown; by
        then a little less may be free.
        """
        chunk = forecast.settings.prefill_chunk_tokens
        excess = max(self.memory.excess_bytes(chunk, deviations), self.memory.run_sd)
        kept = forecast.slots_within(max(excess, self._kept_free[is_live]))
        # What was missing for a moment must not end a search: then it is asked for all the same.
        return kept if kept is not None else forecast.slots_within(excess)

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
        form = 0.008 + 0.5 * min(self.noise(history, objective), 0.03)
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


def _with_noise(measurement: Measurement, turn: float, decode: float) -> Measurement:
    """`measurement` with at least this noise: repeats may have shown more than the bench knew of."""
    own = measurement.decode_noise_ratio
    return measurement.model_copy(update={
        "noise_ratio": max(measurement.noise_ratio, turn),
        "decode_noise_ratio": None if own is None else max(own, decode),
    })  # fmt: skip
