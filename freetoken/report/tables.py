"""The words and tables of a report: what was tuned, the winner against the baseline, how to have it again, all trials.

Plain text in, plain text out; the page escapes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from freetoken.units import format_bytes, format_seconds, format_significant

if TYPE_CHECKING:
    from freetoken.tuner.headline import Headline
    from freetoken.tuner.record import StudyRecord, TrialRecord
    from freetoken.tuner.space import Parameter
    from freetoken.tuner.values import Measurement

#: Label with unit, how it is read, and whether less of it is better (None: neither).
_FIGURES: tuple[tuple[str, Callable[[Measurement], float | None], bool | None], ...] = (
    ("turn time (s)", lambda m: m.turn_time_s, True),
    ("decode (tok/s)", lambda m: m.decode_tps, False),
    ("decode of all requests (tok/s)", lambda m: m.total_decode_tps, False),
    ("TTFT (s)", lambda m: m.ttft_s, True),
    ("TTFT p95 (s)", lambda m: m.ttft_p95_s, True),
    ("ITL p95 (ms)", lambda m: None if m.itl_p95_s is None else 1000 * m.itl_p95_s, True),
    ("prefill (tok/s)", lambda m: m.prefill_tps, False),
    ("expert hit rate (%)", lambda m: None if m.hit_ratio is None else 100 * m.hit_ratio, None),
    ("energy (J/token)", lambda m: m.joules_per_token, True),
    ("peak memory (GiB)", lambda m: None if m.peak_bytes is None else m.peak_bytes / (1 << 30), None),
)
#: With one request at a time and one turn these are the same figure under another name, told once.
_SAME = {"decode of all requests (tok/s)": "decode (tok/s)", "TTFT p95 (s)": "TTFT (s)"}


class FigureRow(NamedTuple):
    """One figure of baseline and best."""

    label: str
    baseline: str
    best: str
    change: str
    is_better: bool | None


class SettingRow(NamedTuple):
    """One knob."""

    name: str
    baseline: str
    best: str
    cost: str
    is_changed: bool


class TrialRow(NamedTuple):
    """One line of the table of trials."""

    number: str
    machine: str
    stage: str
    start: str
    settings: str
    figures: tuple[str, ...]
    hit: str
    planned: str
    measured: str
    duration: str
    outcome: str
    kind: str


def summarise(study: StudyRecord) -> str:
    """How the study stands, in a sentence or two."""
    measured = sum(one.measurement is not None for one in study.trials)
    counts = f"{_count(len(study.trials), 'trial')} ({measured} measured) in {_count(study.starts, 'start')}, " + (
        f"{_count(study.crashes, 'crash', 'crashes')}"
    )
    if study.machines > 1:
        counts += f", on {study.machines} equal machines"
    result = study.result
    if result is not None:
        return f"{counts}, {format_seconds(result.duration_s)}. It ended because {_lower_first(result.reason)}."
    if any(one.state == "running" for one in study.trials):
        return f"{counts}. A trial is running, or its process was killed: nothing is confirmed yet."
    return f"{counts}. The study was interrupted: nothing is confirmed yet."


def list_facts(study: StudyRecord) -> list[tuple[str, str]]:
    """What the study is about."""
    facts = study.facts
    engine = f"{facts.engine} {facts.engine_version}" if facts.engine_version else facts.engine
    found = [
        ("recipe", f"{facts.recipe}: {facts.description}" if facts.description else facts.recipe),
        ("model", facts.model),
        ("engine", engine),
        ("machine class", facts.machine),
        ("workload", f"{facts.workload}: {facts.workload_words}" if facts.workload_words else facts.workload),
        ("objective", " and ".join(_describe_objective(study, name) for name in facts.objectives)),
    ]
    if facts.limits:
        bounds = (f"{one.name} {'at most' if one.is_upper else 'at least'} {one.bound:g}" for one in facts.limits)
        found.append(("hard limits", ", ".join(bounds)))
    if facts.fixed:
        found.append(("fixed by the recipe", ", ".join(f"{name} = {value}" for name, value in facts.fixed.items())))
    if facts.budget_s:
        found.append(("budget", format_seconds(facts.budget_s)))
    if facts.began_at:
        found.append(("began", facts.began_at))
    if study.result is not None:
        found.append(("ended", study.result.finished_at))
    return [(name, value) for name, value in found if value]


def describe_winner(study: StudyRecord) -> list[str]:
    """What is proven of the winner, one sentence each."""
    best, result, tried = study.trial(study.best), study.result, study.trial(study.candidate)
    if best is None:
        return ["No setting could be measured, so there is no winner."]
    if tried is not None:
        found = [f"The baseline stays: {_describe_baseline(study)}. Trial {tried.number} was found and not taken."]
    else:
        found = [f"The best is trial {best.number}; the baseline is {_describe_baseline(study)}."]
    if result is None:
        found.append("It was not held against the baseline on unseen prompts.")
    elif result.confirmation is not None:
        found.append(f"Held against the baseline: {result.confirmation.describe()}.")
        if (versus := result.confirmation.imported) is not None:
            found.append(f"Held against the best imported setting in the same run: {versus.describe_interval()}.")
    else:
        found.append("Nothing beat the baseline, so there was nothing to confirm.")
    found += [
        f"{name}: {head.describe()}."
        for name, head in (("Baseline", study.baseline_figures), (name_rival(study).capitalize(), _rival(study)))
        if head is not None
    ]
    missed = result.missed if result is not None else best.missed
    if missed:
        found.append(f"It misses the hard limit on {', '.join(missed)}.")
    if result is not None and result.soak:
        found.append(f"Soak: {result.soak}.")
    for other in study.results[1:]:
        if other.confirmation is not None:
            found.append(f"Another process of this study: {other.confirmation.describe()}.")
    return found


def name_rival(study: StudyRecord) -> str:
    """What stands beside the baseline: the best, or what was found and not taken."""
    return "best" if study.candidate is None else "found, not taken"


def _rival(study: StudyRecord) -> Headline | None:
    return study.best_figures if study.candidate is None else study.candidate_figures


def compare_figures(study: StudyRecord) -> list[FigureRow]:
    """Figures of the baseline and of the best (or of what was not taken) side by side, over all that was measured."""
    base, best = study.baseline_figures, _rival(study)
    if best is None:
        return []
    rows: list[FigureRow] = []
    for label, read, is_less_better in _FIGURES:
        new = read(best.measurement)
        old = read(base.measurement) if base is not None else None
        if new is None and old is None:
            continue
        if any(
            row.label == _SAME.get(label) and (row.baseline, row.best) == (_figure(old), _figure(new)) for row in rows
        ):
            continue
        change = new / old - 1 if new is not None and old else None
        is_better = None if change is None or is_less_better is None or not change else (change < 0) == is_less_better
        rows.append(FigureRow(label, _figure(old), _figure(new), "" if change is None else f"{change:+.1%}", is_better))
    return rows


def list_settings(study: StudyRecord) -> list[SettingRow]:
    """Every knob with its value in the baseline and in the best."""
    base, best = study.trial(study.baseline), study.trial(study.best)
    if best is None:
        return []
    new, old = study.canonical(best.point), study.canonical(base.point) if base is not None else {}
    rows = []
    for knob in _knobs(study, best):
        ours = _value(new.get(knob.name)) if _is_relevant(knob, best) else ""
        theirs = _value(old.get(knob.name)) if base is not None and _is_relevant(knob, base) else ""
        rows.append(SettingRow(knob.name, theirs, ours, knob.cost, ours != theirs and base is not None))
    return rows


def make_commands(study: StudyRecord) -> list[tuple[str, str]]:
    """What can be typed: the best setting again, and the search again."""
    facts, best = study.facts, study.trial(study.best)
    given = [f"--set {shlex.quote(one)}" for one in facts.sets]
    at = [f"workload={value}"] if (value := facts.workload if facts.is_named_workload else facts.workload_set) else []
    is_named = facts.is_named_workload
    workload = [f"--workload {shlex.quote(value)}"] if is_named else [f"--set {shlex.quote(one)}" for one in at]
    objectives = [f"--objective {name}" for name in facts.objectives]
    target = shlex.quote(facts.target)
    search = " ".join(["ft tune", target, *given, *workload, *objectives])
    if best is None:
        return [("search again", search)]
    at += [
        f"settings.{knob.name}={_value(best.point[knob.name])}"
        for knob in _knobs(study, best)
        if _is_relevant(knob, best) and best.point.get(knob.name) is not None
    ]
    run = " ".join(["ft apply", target, *given, *(f"--set {shlex.quote(one)}" for one in at)])
    return [("run the best setting", run), ("search again", search)]


def list_front(study: StudyRecord) -> list[TrialRow]:
    """The settings of the front of two objectives, by the first one; () for a study of one."""
    if len(study.objectives) < 2:
        return []
    rows = {row.number: row for row in list_trials(study)[1]}
    return [
        row._replace(figures=tuple(format_significant(figure) for figure in one.figures))
        for one in study.front
        if (row := rows.get(str(one.number)))
    ]


def list_trials(study: StudyRecord) -> tuple[list[str], list[TrialRow], str]:
    """Headings of the objectives, one row a trial, and what all trials had in common."""
    points = [study.canonical(one.point) for one in study.trials]
    names = list(dict.fromkeys(name for point in points for name in point))
    varied = [name for name in names if len({repr(point.get(name)) for point in points}) > 1]
    same = ", ".join(f"{name} = {_value(points[0].get(name))}" for name in names if name not in varied)
    shown = [objective.name for objective in study.objectives]
    headings = [f"{objective.name} ({objective.unit})" for objective in study.objectives]
    if "decode_tps" not in shown:
        shown, headings = [*shown, "decode_tps"], [*headings, "decode_tps (tok/s)"]
    rows = [_trial_row(study, one, varied, shown) for one in study.trials]
    return headings, rows, same


def _trial_row(study: StudyRecord, one: TrialRecord, varied: list[str], shown: list[str]) -> TrialRow:
    found, point = one.measurement, study.canonical(one.point)
    relevant = {knob.name: _is_relevant(knob, one) for knob in study.facts.knobs}
    settings = " ".join(
        f"{name}={_value(point[name])}" for name in varied if name in point and relevant.get(name, True)
    )
    figures = {**one.figures, **({"decode_tps": found.decode_tps} if found is not None else {})}
    words = one.state if one.state != "measured" else "misses " + ", ".join(one.missed) if one.missed else "measured"
    told = one.words or (one.reason if one.state in ("lost", "running", "waiting") else "")
    marks = [word for word, number in (("best", study.best), ("baseline", study.baseline)) if number == one.number]
    if len(study.objectives) > 1 and any(point.number == one.number for point in study.front):
        marks.append("front")
    return TrialRow(
        number=str(one.number), machine=str(one.machine), stage=one.stage, start=str(one.start or ""),
        settings=settings,
        figures=tuple(format_significant(figures[name]) if name in figures else "" for name in shown),
        hit=f"{100 * found.hit_ratio:.1f}" if found is not None and found.hit_ratio is not None else "",
        planned=format_bytes(one.planned.peak_bytes) if one.planned is not None else "",
        measured=format_bytes(found.peak_bytes) if found is not None and found.peak_bytes is not None else "",
        duration=format_seconds(one.duration_s) if one.duration_s is not None else "",
        outcome=(f"{words}: {told}" if told else words) + (f" ({', '.join(marks)})" if marks else ""), kind=one.state,
    )  # fmt: skip


def _describe_objective(study: StudyRecord, name: str) -> str:
    objective = next(one for one in study.objectives if one.name == name)
    return f"{name} ({objective.unit}, {'less' if objective.direction == 'minimize' else 'more'} is better)"


def _describe_baseline(study: StudyRecord) -> str:
    base = study.trial(study.baseline)
    return f"trial {base.number}, {study.baseline_words}" if base is not None else f"missing: {study.baseline_words}"


def _knobs(study: StudyRecord, best: TrialRecord) -> list[Parameter]:
    return [one for one in study.facts.knobs if one.name in best.point]


def _is_relevant(knob: Parameter, trial: TrialRecord) -> bool:
    strategy = trial.point.get("strategy") or (trial.planned.strategy if trial.planned is not None else None)
    return knob.is_relevant(strategy)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _figure(value: float | None) -> str:
    return "" if value is None else format_significant(value)


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
