"""The tuner against random, TPE and GPSampler at equal starts, on seeded simulated machines. See ../tuner.md."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import optuna

from benchmarks.tuner.machines import Machine, SimulatedLauncher, SimulatedSite, find_best, make_machine
from freetoken.tuner.objectives import pick_objectives
from freetoken.tuner.study import Budget, Search
from freetoken.tuner.values import Measurement, Point

METHODS = ("tuner", "random", "tpe", "gp")
#: Trials in one start of a baseline: its live knob, the slots, is turned twice more while the engine runs.
TRIALS_A_START = 3
#: Slots that a baseline tries, as a share of those that the planner grants.
SLOT_SHARES = (0.75, 1.08)
#: Questions that a baseline may ask its sampler for each start: what the planner refuses is free, but not for ever.
ASKS_A_START = 20


class Trace(NamedTuple):
    """Share of the best reached after each start, best-measured point first; crashes."""

    shares: tuple[float, ...]
    crashes: int
    starts: int


def run(method: str, machine: Machine, best_s: float, seed: int, starts: int) -> Trace:
    """One method on one machine with one seed."""
    site, launcher = SimulatedSite(machine), SimulatedLauncher(machine, seed)
    if method == "tuner":
        shares = _run_tuner(site, launcher, best_s, seed, starts)
    else:
        # A sequence of its own for each machine: with one for all, fifty machines would be one draw.
        shares = Baseline(method, site, launcher, 1000 * seed + machine.seed).run(best_s, starts)
    return Trace(tuple(round(one, 5) for one in shares), launcher.crashes, launcher.starts)


def _run_tuner(site: SimulatedSite, launcher: SimulatedLauncher, best_s: float, seed: int, starts: int) -> list[float]:
    search = Search(
        site, launcher, pick_objectives(["turn_time"]), budget=Budget(starts=starts, trials=6 * starts), seed=seed,
        stop_rule=None,
    )  # fmt: skip
    history = search.run().observations
    shares = []
    for start in range(1, starts + 1):
        best = search.method.best([one for one in history if one.start <= start])
        shares.append(min(1.0, best_s / site.machine.turn_s(best.point)) if best is not None else 0.0)
    return shares


class Baseline:
    """One of Optuna's samplers, helped as far as one can.

    It gets the engine's default first, and where that does not work the default with slots that leave room; slots as
    a share of those that the planner grants; no choice that can never fit; the planner's refusals for nothing, and
    what a measured peak has shown to fit is not refused; and its own live trials inside each start.
    """

    def __init__(self, method: str, site: SimulatedSite, launcher: SimulatedLauncher, seed: int) -> None:
        self.site, self.launcher = site, launcher
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = optuna.create_study(sampler=_make_sampler(method, seed))
        self.space = site.space.distributions()
        del self.space["expert_slots"]
        fitting = [one for one in site.space["strategy"].choices if self._can_fit(str(one))]
        self.space["strategy"] = optuna.distributions.CategoricalDistribution(fitting)
        self.space["slot_share"] = optuna.distributions.FloatDistribution(*SLOT_SHARES)
        #: Turn times of every point that was measured, and the worst of all.
        self.measured: dict[tuple[tuple[str, Any], ...], list[float]] = {}
        self.worst_s: float | None = None
        #: The most by which a plan was too careful, as measured.
        self.spare_bytes = 0

    def run(self, best_s: float, starts: int) -> list[float]:
        """Share of the best that the best-measured point reaches after each start."""
        default = self.site.default_point()
        self._enqueue(default, self._share_of(default))
        shares: list[float] = []
        for _ in range(ASKS_A_START * starts):
            if len(shares) == starts:
                break
            before = self.launcher.starts
            point = self._try(is_live=False)
            if point is not None:
                for _ in range(TRIALS_A_START - 1):
                    self._enqueue(point, None)
                    if self._try(is_live=True) is None:
                        break
            if not self.measured and len(self.study.trials) == 1:
                self._enqueue(default, 0.9)
            if self.launcher.starts > before:
                shares.append(self._reached(best_s))
        return shares + [self._reached(best_s)] * (starts - len(shares))

    def _can_fit(self, strategy: str) -> bool:
        """Whether the planner grants `strategy` with the settings that take the least memory."""
        least = {"strategy": strategy, "prefill_chunk_tokens": 512, "embed_on_host": True}
        forecast = self.site.forecast({**self.site.default_point(), **least})
        return forecast is not None and not forecast.missing_bytes

    def _share_of(self, point: Point) -> float:
        forecast = self.site.forecast(point)
        assert forecast is not None
        share = point["expert_slots"] / max(1, forecast.settings.expert_slots) if forecast.high else 1.0
        return min(SLOT_SHARES[1], max(SLOT_SHARES[0], share))

    def _enqueue(self, point: Point, share: float | None) -> None:
        """`point` next; without a share of slots the sampler chooses it."""
        fixed = {name: value for name, value in point.items() if name in self.space}
        self.study.enqueue_trial(fixed if share is None else {**fixed, "slot_share": share})

    def _try(self, *, is_live: bool) -> Point | None:
        """One trial; the point where it was measured, None where it was refused or crashed."""
        trial = self.study.ask(self.space)
        point = {name: trial.params[name] for name in self.space if name != "slot_share"}
        forecast = self.site.forecast(point)
        assert forecast is not None
        slots = int(forecast.settings.expert_slots * trial.params["slot_share"])
        point["expert_slots"] = max(forecast.low, min(forecast.high, slots)) if forecast.high else 32
        planned = forecast.peak_at(slots if forecast.high else 0)
        missing = max(forecast.missing_bytes, planned - self.spare_bytes - forecast.limit_bytes)
        if missing > 0:
            self._tell_failed(trial, missing)
            return None
        outcome = self.launcher.resize(point) if is_live else self.launcher.start(point)
        if outcome.kind != "ok":
            self._tell_failed(trial, outcome.violation_bytes)
            return None
        measurement = self.launcher.measure().measurement
        assert measurement is not None
        trial.set_constraint("memory", 0.0)
        self.study.tell(trial, self._learn(point, planned, measurement))
        return point

    def _learn(self, point: Point, planned: int, measurement: Measurement) -> float:
        seconds = measurement.turn_time_s
        self.measured.setdefault(tuple(sorted(point.items())), []).append(math.log(seconds))
        self.worst_s = max(self.worst_s or seconds, seconds)
        self.spare_bytes = max(self.spare_bytes, planned - (measurement.peak_bytes or planned))
        return seconds

    def _tell_failed(self, trial: optuna.Trial, missing_bytes: int) -> None:
        """As the worst so far, infeasible: what is pruned the GP sampler does not look at."""
        trial.set_constraint("memory", float(missing_bytes))
        if self.worst_s is None:
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial, self.worst_s)

    def _reached(self, best_s: float) -> float:
        if not self.measured:
            return 0.0
        incumbent = min(self.measured, key=lambda one: sum(self.measured[one]) / len(self.measured[one]))
        return min(1.0, best_s / self.site.machine.turn_s(dict(incumbent)))


def _make_sampler(method: str, seed: int) -> optuna.samplers.BaseSampler:
    if method == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if method == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=4)
    sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=4)
    # Its defaults are made for hundreds of trials; for three dozen this finds the same point in a fraction of the time.
    sampler._n_preliminary_samples, sampler._n_local_search = 512, 3
    return sampler


class Case(NamedTuple):
    """One machine with its true best, and one seed."""

    machine: int
    seed: int
    starts: int
    methods: tuple[str, ...]
    hardship: float = 1.0


_BEST: dict[tuple[int, float], float] = {}


def run_case(case: Case) -> dict[str, Trace]:
    """All methods on one case."""
    warnings.simplefilter("ignore")
    machine = make_machine(case.machine, case.hardship)
    key = case.machine, case.hardship
    if key not in _BEST:
        _BEST[key] = find_best(SimulatedSite(machine))[1]
    return {method: run(method, machine, _BEST[key], case.seed, case.starts) for method in case.methods}
