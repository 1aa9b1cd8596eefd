"""How much each knob mattered, by Optuna's PED-ANOVA over the points that were measured.

It compares the best points with all of them, knob by knob, and needs neither scikit-learn nor a fitted model. What a
handful of trials says of that is a hint, and of fewer than `LEAST_POINTS` nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from freetoken.tuner.objectives import Objective
from freetoken.tuner.space import Parameter, Space
from freetoken.tuner.values import Measurement, Point, TunerModel

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

#: Measured points without which no share is told.
LEAST_POINTS = 6
#: The best are a tenth of all, and never fewer than this many.
LEAST_BEST = 3
TENTH = 0.1


class Importance(TunerModel):
    """Shares of the knobs in one objective, the largest first; they add up to 1. `note` says what they rest on."""

    objective: str
    shares: dict[str, float] = {}
    note: str


def rank_knobs(
    points: Sequence[tuple[Point, Measurement]], knobs: Sequence[Parameter], objective: Objective
) -> Importance:
    """The shares over canonical `points`; no shares, and why, where they say too little."""
    costed = [(point, cost) for point, found in points if (cost := objective.cost(found)) is not None]
    turned = [one for one in knobs if len({repr(point.get(one.name)) for point, _ in costed}) > 1]
    costed = [(point, cost) for point, cost in costed if all(one.name in point for one in turned)]
    if len(costed) < LEAST_POINTS:
        return Importance(
            objective=objective.name,
            note=f"{len(costed)} measured trials are too few to tell; {LEAST_POINTS} are needed",
        )
    if len(turned) < 2:
        return Importance(objective=objective.name, note=f"{len(turned)} of the knobs was turned: nothing to rank")
    best = max(TENTH, LEAST_BEST / len(costed))
    try:
        shares = _evaluate(costed, turned, min(0.5, best))
    except Exception as error:  # Optuna's evaluator on a corner case: the rest of a report still stands
        return Importance(objective=objective.name, note=f"could not be computed: {type(error).__name__}: {error}")
    note = f"PED-ANOVA: what sets the best {min(0.5, best):.0%} of {len(costed)} measured trials apart from all of them"
    return Importance(objective=objective.name, shares=shares, note=note)


def _evaluate(costed: Sequence[tuple[Point, float]], knobs: Sequence[Parameter], best: float) -> dict[str, float]:
    """As a study of its own in memory: figures of crashes and knobs without effect stay out of it."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    distributions = {one.name: _wide_enough(one, costed) for one in knobs}
    level = optuna.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            study = optuna.create_study(direction="minimize")
            study.add_trials(
                optuna.trial.create_trial(
                    params={name: point[name] for name in distributions}, distributions=distributions, value=cost
                )
                for point, cost in costed
            )
            found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=best))
        finally:
            optuna.logging.set_verbosity(level)
    return {name: float(share) for name, share in sorted(found.items(), key=lambda pair: -pair[1])}


def _wide_enough(knob: Parameter, costed: Sequence[tuple[Point, float]]) -> BaseDistribution:
    """The knob's distribution, as wide as the values: machines that share a study may differ in what fits."""
    values = [point[knob.name] for point, _ in costed]
    if knob.kind == "choice":
        others = [one for one in dict.fromkeys(values) if one not in knob.choices]
        knob = knob.model_copy(update={"choices": (*knob.choices, *others)})
    else:
        knob = knob.model_copy(update={"low": min(knob.low, *values), "high": max(knob.high, *values)})
    return Space(parameters=(knob,)).distributions()[knob.name]
