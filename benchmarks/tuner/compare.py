"""The tuner against random, TPE and GPSampler at equal starts, on seeded simulated machines. See ../tuner.md."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import optuna

from benchmarks.tuner.machines import Machine, SimulatedLauncher, SimulatedSite, find_best, make_machine
from freetoken.tuner.objectives import pick_objectives
from freetoken.tuner.study import Budget, Search
from freetoken.tuner.values import Point

METHODS = ("tuner", "random", "tpe", "gp")


class Trace(NamedTuple):
    """Share of the best reached after each start, best-measured point first; crashes."""

    shares: tuple[float, ...]
    crashes: int
    starts: int


def run(method: str, machine: Machine, best_s: float, seed: int, starts: int) -> Trace:
    """One method on one machine with one seed."""
    site, launcher = SimulatedSite(machine), SimulatedLauncher(machine, seed)
    if method == "tuner":
        return Trace(tuple(_run_tuner(site, launcher, best_s, seed, starts)), launcher.crashes, launcher.starts)
    # A sequence of its own for each machine: with one for all, fifty machines would be one draw.
    tried = _run_baseline(method, site, launcher, 1000 * seed + machine.seed, starts)
    shares, best, incumbent = [], math.inf, None
    measured: dict[tuple[Any, ...], list[float]] = {}
    for start in range(1, starts + 1):
        for point, seconds in (one[1:] for one in tried if one[0] == start):
            key = tuple(sorted(point.items()))
            measured.setdefault(key, []).append(math.log(seconds))
            incumbent = min(measured, key=lambda one: sum(measured[one]) / len(measured[one]))
        best = machine.turn_s(dict(incumbent)) if incumbent is not None else math.inf
        shares.append(min(1.0, best_s / best) if incumbent is not None else 0.0)
    return Trace(tuple(shares), launcher.crashes, launcher.starts)


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


def _run_baseline(
    method: str, site: SimulatedSite, launcher: SimulatedLauncher, seed: int, starts: int
) -> list[tuple[int, Point, float]]:
    """Optuna's sampler, helped as far as one can: the default first, slots as a share of those that the planner grants.

    A point that the planner refuses costs it no start either.
    """
    sampler = {
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=4),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed, n_startup_trials=4),
    }[method]()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    space = site.space.distributions()
    space.pop("expert_slots")
    space["slot_share"] = optuna.distributions.FloatDistribution(0.5, 1.05)
    default = site.default_point()
    granted = site.forecast(default)
    assert granted is not None
    share = default["expert_slots"] / max(1, granted.settings.expert_slots) if granted.high else 1.0
    study.enqueue_trial({**{k: v for k, v in default.items() if k in space}, "slot_share": min(1.05, max(0.5, share))})
    tried, worst = [], None
    for index in range(40 * starts):
        if launcher.starts >= starts:
            break
        trial = study.ask(space)
        point = {name: trial.params[name] for name in space if name != "slot_share"}
        forecast = site.forecast(point)
        assert forecast is not None
        granted_slots = forecast.settings.expert_slots
        slots = default["expert_slots"] if index == 0 else int(granted_slots * trial.params["slot_share"])
        point["expert_slots"] = max(forecast.low, min(forecast.high, slots)) if forecast.high else 32
        if forecast.missing_bytes:
            trial.set_constraint("memory", forecast.missing_bytes)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        outcome = launcher.start(point)
        if outcome.kind == "ok":
            measurement = launcher.measure().measurement
            assert measurement is not None
            seconds = measurement.turn_time_s
            worst = max(worst or seconds, seconds)
            tried.append((launcher.starts, point, seconds))
            trial.set_constraint("memory", 0.0)
            study.tell(trial, seconds)
        else:
            trial.set_constraint("memory", float(outcome.violation_bytes))
            study.tell(trial, worst) if worst else study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return tried


class Case(NamedTuple):
    """One machine with its true best, and one seed."""

    machine: int
    seed: int
    starts: int
    methods: tuple[str, ...]


_BEST: dict[int, float] = {}


def run_case(case: Case) -> dict[str, Trace]:
    """All methods on one case."""
    warnings.simplefilter("ignore")
    machine = make_machine(case.machine)
    if case.machine not in _BEST:
        _BEST[case.machine] = find_best(SimulatedSite(machine))[1]
    return {method: run(method, machine, _BEST[case.machine], case.seed, case.starts) for method in case.methods}
