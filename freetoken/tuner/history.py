"""A study's trials as observations and back: what is written beside a trial, and how it is told to Optuna.

Infeasible points keep their violation as a constraint, which a trial told as FAIL would lose: the planner's no is told
as PRUNED, a crash as COMPLETE with the worst figure so far (as PRUNED while there is none), so that the GP sampler,
which does not look at pruned trials, still learns where the machine ends.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from freetoken.tuner.objectives import Limit, Objective
from freetoken.tuner.values import INFEASIBLE, Measurement, Observation, Outcome, Point, Stage

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

MEMORY = "memory_bytes"
OUTCOME, STAGE, START, REASON = "outcome", "stage", "start", "reason"
PREDICTED, HOST = "predicted_cost", "host"
#: Who has the trial in hand: the machine (a digest of boot and register, told apart and no more) and its process.
MACHINE, PROCESS = "machine", "process"
PLANNED = "planned"
#: Relative noise of one measurement beyond which something came between its repeats.
DISTURBED = 0.10


class Planned(NamedTuple):
    """What the plan said of a trial's point. Bytes are those of the memory that decides."""

    peak_bytes: int
    #: What may be used, headroom left out.
    limit_bytes: int
    #: Expert slots that the point really has; 0 where its strategy has none.
    slots: int = 0
    strategy: str | None = None


def read_history(study: Study, unasked: Mapping[str, Any] | None = None) -> list[Observation]:
    """Every finished trial that left an outcome, in order; `unasked` fills in knobs that its process did not have."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.is_finished() and (one := read_trial(trial)) is not None:
            found.append(one.model_copy(update={"point": {**(unasked or {}), **one.point}}) if unasked else one)
    return found


def read_trial(trial: FrozenTrial) -> Observation | None:
    """The trial as an observation; None where it left no outcome (its process died)."""
    attributes = trial.user_attrs
    if OUTCOME not in attributes:
        return None
    return Observation(
        number=trial.number,
        point=dict(trial.params),
        stage=attributes.get(STAGE, ""),
        start=attributes.get(START, 0),
        outcome=Outcome.model_validate(json.loads(attributes[OUTCOME])),
        predicted_cost=attributes.get(PREDICTED),
    )


def is_disturbed(one: Observation) -> bool:
    """Whether its repeats differ too much for a figure."""
    return one.measurement is not None and one.measurement.noise_ratio > DISTURBED


def calm(observations: Iterable[Observation], canonical: Callable[[Point], Point]) -> list[Observation]:
    """`observations` without disturbed measurements of points that were measured in peace as well."""

    def key(one: Observation) -> str:
        return json.dumps(canonical(one.point), sort_keys=True)

    known = list(observations)
    in_peace = {key(one) for one in known if one.measurement is not None and not is_disturbed(one)}
    return [one for one in known if not is_disturbed(one) or key(one) not in in_peace]


def merge_repeats(observations: Iterable[Observation], canonical: Callable[[Point], Point]) -> list[Observation]:
    """Each measured point once, as its last observation with the mean of all its figures (of peaks the highest)."""
    groups: dict[str, list[Observation]] = {}
    for one in calm(observations, canonical):
        if one.measurement is not None:
            groups.setdefault(json.dumps(canonical(one.point), sort_keys=True), []).append(one)
    return [_merge(group) for group in groups.values()]


def _merge(group: Sequence[Observation]) -> Observation:
    if len(group) == 1:
        return group[0]
    merged = average([one.measurement for one in group if one.measurement is not None])
    outcome = group[-1].outcome.model_copy(update={"measurement": merged})
    return group[-1].model_copy(update={"outcome": outcome})


def average(measurements: Sequence[Measurement]) -> Measurement:
    """The mean of every figure over one or more measurements, of peaks the highest; None where none told it."""
    dumped = [one.model_dump() for one in measurements]
    merged: dict[str, Any] = {}
    for name in dumped[0]:
        values = [one[name] for one in dumped if one[name] is not None]
        pick = max if name == "peak_bytes" else fmean
        merged[name] = pick(values) if values else None
    return Measurement(**merged)


def read_planned(trial: FrozenTrial) -> Planned | None:
    """What the plan said; None where nobody wrote it down."""
    try:
        return Planned(**trial.user_attrs[PLANNED])
    except (KeyError, TypeError):
        return None


def mark(
    trial: Trial, *, stage: Stage, reason: str, start: int, predicted_cost: float | None,
    planned: Planned | None = None, owner: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes beside a trial why it is tried, what the plan says of it and who has it, before anything starts."""
    values: dict[str, Any] = {**(owner or {})}
    values |= {STAGE: stage, REASON: reason, START: start, PREDICTED: predicted_cost, HOST: platform.node()}
    if planned is not None:
        values[PLANNED] = planned._asdict()
    for key, value in values.items():
        trial.set_user_attr(key, value)


def tell(
    study: Study, trial: Trial, outcome: Outcome, objectives: Sequence[Objective], limits: Sequence[Limit] = ()
) -> None:
    """Finishes a trial with what came of it."""
    from optuna.trial import TrialState

    trial.set_user_attr(OUTCOME, outcome.model_dump_json())
    if outcome.kind in ("invalid", "stopped"):
        study.tell(trial, state=TrialState.FAIL)
        return
    is_infeasible = outcome.kind in INFEASIBLE
    trial.set_constraint(MEMORY, float(max(1, outcome.violation_bytes)) if is_infeasible else 0.0)
    measurement = outcome.measurement
    for limit in limits:
        excess = limit.excess(measurement) if measurement is not None else None
        trial.set_constraint(limit.name, excess or 0.0)
    figures = [one.read(measurement) for one in objectives] if measurement is not None else []
    if is_infeasible:
        figures = [] if outcome.kind == "refused" else _worst_figures(study, objectives)
    values = [one for one in figures if one is not None]
    if len(values) == len(objectives):
        study.tell(trial, values)
    else:
        study.tell(trial, state=TrialState.PRUNED)


def _worst_figures(study: Study, objectives: Sequence[Objective]) -> list[float | None]:
    worst: list[float | None] = [None] * len(objectives)
    for one in study.get_trials(deepcopy=False):
        if one.values is None:
            continue
        for index, objective in enumerate(objectives):
            value, pick = one.values[index], max if objective.direction == "minimize" else min
            worst[index] = value if worst[index] is None else pick(value, worst[index] or value)
    return worst
