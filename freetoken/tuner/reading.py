"""Studies of `ft tune` in any storage: which there are, the one that is meant, and it read back as a value."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from freetoken.errors import UsageError, did_you_mean
from freetoken.tuner import history
from freetoken.tuner.headline import Headline, make_headline
from freetoken.tuner.importance import rank_knobs
from freetoken.tuner.objectives import OBJECTIVES, Limit, Objective, missed_limits, pareto_front, penalised_cost
from freetoken.tuner.record import (
    FACTS,
    RESULT,
    TRADE_OFF,
    FrontPoint,
    State,
    StudyFacts,
    StudyRecord,
    StudyResult,
    TrialRecord,
    make_canonical,
)
from freetoken.tuner.values import Observation, Outcome, Point

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial


class StudyLine(NamedTuple):
    """A study of `ft tune` in a storage."""

    name: str
    recipe: str
    number: int


def list_studies(storage: BaseStorage) -> tuple[StudyLine, ...]:
    """The studies of `ft tune` in `storage`, the newest first; others' studies in it are passed over."""
    found = []
    for one in storage.get_all_studies():
        facts = one.user_attrs.get(FACTS)
        if isinstance(facts, dict):
            found.append(StudyLine(one.study_name, str(facts.get("recipe", "")), one._study_id))
    return tuple(sorted(found, key=lambda one: one.number, reverse=True))


class Picked(NamedTuple):
    """The study that was meant, and what should be said of the choice."""

    name: str
    note: str = ""


def pick_study(storage: BaseStorage, wanted: str | None) -> Picked:
    """The study with this name, else the newest of the recipe with it, else the newest that begins with it.

    None means the only one there is. Raises UsageError, with the nearest name.
    """
    found = list_studies(storage)
    if not found:
        raise UsageError("there is no study of `ft tune` in this storage", hint="`ft tune RECIPE`")
    names = [one.name for one in found]
    if wanted is None:
        if len(found) > 1:
            raise UsageError(f"which study? there are {_list_names(names)}", hint=f"`ft report {names[0]}`")
        return Picked(names[0])
    if wanted in names:
        return Picked(wanted)
    of_recipe = [one.name for one in found if one.recipe == wanted] or [one for one in names if one.startswith(wanted)]
    if of_recipe:
        others = f", the newest of {len(of_recipe)}" if len(of_recipe) > 1 else ""
        return Picked(of_recipe[0], f"study `{of_recipe[0]}`{others}")
    guess = did_you_mean(wanted, [*names, *dict.fromkeys(one.recipe for one in found)])
    raise UsageError(f"no study `{wanted}`{guess}", hint=f"there are {_list_names(names)}")


def _list_names(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(f"`{one}`" for one in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def read_study(storage: BaseStorage, name: str) -> StudyRecord:
    """The study `name`. Raises UsageError where there is none, or it is none of `ft tune`."""
    try:
        number = storage.get_study_id_from_name(name)
    except KeyError:
        raise UsageError(f"no study `{name}` in this storage") from None
    attributes = storage.get_study_user_attrs(number)
    try:
        facts = StudyFacts.model_validate(attributes.get(FACTS))
        objectives = [OBJECTIVES[one] for one in facts.objectives]
    except (ValidationError, KeyError) as error:
        raise UsageError(f"the study `{name}` was not made by this version of `ft tune`") from error
    limits = _find_limits(facts)
    trials = tuple(_read_trials(storage.get_all_trials(number, deepcopy=False), objectives, limits))
    results = _read_results(attributes)
    baseline, words = _find_baseline(facts, trials, results)
    axes = (facts.objectives[0], facts.objectives[1]) if len(facts.objectives) > 1 else TRADE_OFF
    measured = [(one, one.measurement) for one in trials if one.measurement is not None]
    best = _find_best(facts, trials, results, objectives[0], limits)
    candidate = _find_point(facts, trials, results[0].candidate) if results and results[0].candidate else None
    heads = [_find_figures(facts, trials, results, one, objectives[0]) for one in (best, baseline, candidate)]
    return StudyRecord(
        name=name, facts=facts, trials=trials, results=results, baseline=baseline, baseline_words=words,
        best=best, candidate=candidate, best_figures=heads[0], baseline_figures=heads[1], candidate_figures=heads[2],
        front_axes=axes,
        front=_find_front(facts, trials, [OBJECTIVES[one] for one in axes], limits),
        importances=tuple(
            rank_knobs([(make_canonical(facts.knobs, tried.point), told) for tried, told in measured], facts.knobs, one)
            for one in objectives
        ),
    )  # fmt: skip


def _read_trials(
    found: Iterable[FrozenTrial], objectives: Sequence[Objective], limits: Sequence[Limit]
) -> Iterable[TrialRecord]:
    hosts: dict[str, int] = {}
    for trial in found:
        attributes = trial.user_attrs
        one = history.read_trial(trial)
        host = str(attributes.get(history.MACHINE) or attributes.get(history.HOST) or "")
        measurement = one.measurement if one is not None else None
        predicted = attributes.get(history.PREDICTED)
        figures = [(each.name, each.read(measurement)) for each in objectives] if measurement is not None else []
        yield TrialRecord(
            number=trial.number,
            state=_state_of(trial, one),
            stage=str(attributes.get(history.STAGE, "")),
            reason=str(attributes.get(history.REASON, "")),
            words=one.outcome.words if one is not None else "",
            start=int(attributes.get(history.START, 0)),
            point=dict(trial.params),
            measurement=measurement,
            figures={name: figure for name, figure in figures if figure is not None},
            missed=missed_limits(measurement, limits) if measurement is not None else (),
            predicted_figure=objectives[0].to_cost(predicted) if predicted else None,
            violation_bytes=one.outcome.violation_bytes if one is not None else 0,
            planned=history.read_planned(trial),
            run_id=one.outcome.run_id if one is not None else None,
            machine=hosts.setdefault(host, len(hosts) + 1) if host else 1,
            began_at=trial.datetime_start.isoformat(timespec="seconds") if trial.datetime_start else "",
            duration_s=one.outcome.duration_s if one is not None else None,
        )


def _state_of(trial: FrozenTrial, one: Observation | None) -> State:
    if not trial.state.is_finished():
        return "running" if trial.state.name == "RUNNING" else "waiting"
    if one is None:
        return "lost"
    return "measured" if one.outcome.is_ok else "garbage" if one.outcome.kind == "ok" else one.outcome.kind


def _read_results(attributes: Mapping[str, Any]) -> tuple[StudyResult, ...]:
    found = []
    for key, value in attributes.items():
        if key.startswith(RESULT):
            try:
                found.append(StudyResult.model_validate(value))
            except ValidationError:
                continue  # of another version; the trials still stand
    return tuple(sorted(found, key=lambda one: one.finished_at, reverse=True))


def _find_limits(facts: StudyFacts) -> tuple[Limit, ...]:
    from freetoken.recipe.model import GoodEnough
    from freetoken.tuner.objectives import make_limits

    bounds: dict[str, Any] = {one.name: one.bound for one in facts.limits if one.name in GoodEnough.model_fields}
    return make_limits(GoodEnough.model_construct(None, **bounds))


def _find_best(
    facts: StudyFacts, trials: Sequence[TrialRecord], results: Sequence[StudyResult], objective: Objective,
    limits: Sequence[Limit],
) -> int | None:  # fmt: skip
    """What the result names; before there is one, the setting that measured best over all its repeats."""
    if results and (found := _find_point(facts, trials, results[0].best)) is not None:
        return found
    costs = [
        (cost, one.number)
        for one in _merge_trials(facts, trials)
        if one.measurement is not None and (cost := penalised_cost(objective, one.measurement, limits)) is not None
    ]
    return min(costs)[1] if costs else None


def _find_figures(
    facts: StudyFacts, trials: Sequence[TrialRecord], results: Sequence[StudyResult], number: int | None,
    objective: Objective,
) -> Headline | None:  # fmt: skip
    """What the setting of a trial comes to."""
    point = next((one.point for one in trials if one.number == number), None)
    if point is None:
        return None
    wanted = make_canonical(facts.knobs, point)
    if results and results[0].confirmation is not None:
        result, proof = results[0], results[0].confirmation
        for other, blocks in (
            (result.baseline, proof.baseline_blocks), (result.candidate or result.best, proof.winner_blocks),
        ):  # fmt: skip
            if blocks and make_canonical(facts.knobs, other) == wanted:
                return make_headline(blocks, objective, is_unseen=True)
    same = [
        one.measurement
        for one in trials
        if one.measurement is not None and make_canonical(facts.knobs, one.point) == wanted
    ]
    return make_headline(same, objective)


def _find_baseline(
    facts: StudyFacts, trials: Sequence[TrialRecord], results: Sequence[StudyResult]
) -> tuple[int | None, str]:
    """As the result says; before there is one, the engine's default, or the first setting that worked."""
    if results and results[0].baseline:
        return _find_point(facts, trials, results[0].baseline), results[0].baseline_words
    default = next((one for one in trials if one.stage == "default" and one.state not in ("running", "lost")), None)
    if default is not None and default.measurement is not None:
        return default.number, "the engine's own default"
    why = f"the engine's default did not work ({default.state})" if default is not None else "no default was tried"
    worked = next((one.number for one in trials if one.measurement is not None), None)
    return worked, f"{why}; " + ("the first setting that worked stands for it" if worked is not None else "none worked")


def _find_point(facts: StudyFacts, trials: Sequence[TrialRecord], point: Point) -> int | None:
    """The last measurement of `point`."""
    wanted = make_canonical(facts.knobs, point)
    same = [
        one.number for one in trials if one.measurement is not None and make_canonical(facts.knobs, one.point) == wanted
    ]
    return same[-1] if same else None


def _find_front(
    facts: StudyFacts, trials: Sequence[TrialRecord], axes: Sequence[Objective], limits: Sequence[Limit]
) -> tuple[FrontPoint, ...]:
    observations = _observe(trials)
    merged = _merge_trials(facts, trials)
    counts = Counter(json.dumps(make_canonical(facts.knobs, one.point), sort_keys=True) for one in observations)
    measured = [one.measurement for one in observations if one.measurement is not None]
    noise = max(median(axis.noise(one) for one in measured) for axis in axes) if measured else 0.0
    found = []
    for one in pareto_front(merged, axes, limits, noise=noise):
        figures = [axis.read(one.measurement) for axis in axes] if one.measurement is not None else []
        repeats = counts[json.dumps(make_canonical(facts.knobs, one.point), sort_keys=True)]
        across, up = (figure for figure in figures if figure is not None)
        found.append(FrontPoint(number=one.number, figures=(across, up), repeats=repeats))
    return tuple(found)


def _observe(trials: Sequence[TrialRecord]) -> list[Observation]:
    return [
        Observation(number=one.number, point=one.point, outcome=Outcome(kind="ok", measurement=one.measurement))
        for one in trials
        if one.measurement is not None
    ]


def _merge_trials(facts: StudyFacts, trials: Sequence[TrialRecord]) -> list[Observation]:
    """Each measured setting once, under its last trial's number."""
    return history.merge_repeats(_observe(trials), lambda point: make_canonical(facts.knobs, point))
