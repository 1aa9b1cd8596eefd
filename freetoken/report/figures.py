"""The plots of a study as Plotly's own JSON: traces and layout, or why there is nothing to draw.

Plain values, so that no plotting library is imported and a page of thousands of trials is made at once. Texts come
from engines' logs and shared storages: whatever Plotly would read as markup is escaped here.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from freetoken.units import GIB, MIB, format_bytes, format_significant

if TYPE_CHECKING:
    from freetoken.store.rows import MeasuredLine
    from freetoken.tuner.objectives import Objective
    from freetoken.tuner.record import StudyRecord, TrialRecord

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6fb0", "#d9822b", "#2e8b57", "#c0392b", "#7d5ba6", "#9aa4ae"
#: Up to so many trials every point tells its settings; beyond, its number and figures alone.
MAX_TOLD = 2000
#: States in which a trial is drawn as one that failed.
FAILED = ("refused", "crash", "hang", "garbage", "invalid", "stopped", "lost")
_LABELS = {
    "turn_time": "turn time", "decode_tps": "decode", "ttft": "TTFT", "throughput": "throughput",
    "efficiency": "energy",
}  # fmt: skip


class Drawing(NamedTuple):
    """One plot. Without traces, `missing` says why."""

    key: str
    title: str
    caption: str
    data: tuple[dict[str, Any], ...] = ()
    layout: dict[str, Any] = {}
    missing: str = ""


def draw_all(study: StudyRecord, lines: Sequence[MeasuredLine] = ()) -> tuple[Drawing, ...]:
    """Every plot of `study`, in the order of the page; `lines` are the ledger lines of the best trial's run."""
    tell = _make_teller(study)
    return (
        draw_front(study, tell),
        *(draw_history(study, one, tell) for one in study.objectives),
        draw_slots(study, tell),
        draw_memory(study, tell),
        draw_lines(study, lines),
        draw_importance(study),
        draw_predictions(study, tell),
    )


def axis_title(objective: Objective) -> str:
    """`decode (tok/s)`."""
    return f"{_LABELS.get(objective.name, objective.name)} ({objective.unit})"


# --- the plots


def draw_front(study: StudyRecord, tell: Callable[[TrialRecord], str]) -> Drawing:
    """What one figure costs in the other."""
    across, up = study.axes
    title = f"Trade-off: {_LABELS[across.name]} against {_LABELS[up.name]}"
    caption = "Settings on the line are beaten by no other one in both figures, limits kept; repeats are averaged."
    placed = [
        (one, x, y)
        for one in study.trials
        if one.measurement is not None
        and (x := across.read(one.measurement)) is not None
        and (y := up.read(one.measurement)) is not None
    ]
    if not placed:
        return Drawing("front", title, caption, missing=_none_measured(study))
    at = {one.number: (one, x, y) for one, x, y in placed}
    front = [(at[one.number][0], *one.figures) for one in study.front if one.number in at]
    data = [
        _points(name, [one for one in placed if bool(one[0].missed) == is_missed], tell, symbol=symbol, colour=colour)
        for name, is_missed, symbol, colour in (
            ("measured", False, "circle", GREY), ("misses a limit", True, "circle-open", RED),
        )
    ]  # fmt: skip
    data.append(_points("front", front, tell, mode="lines+markers", colour=BLUE, size=10))
    for name, number, head, symbol, colour in (
        ("baseline", study.baseline, study.baseline_figures, "diamond", ORANGE),
        ("best", study.best, study.best_figures, "star", GREEN),
    ):
        marked = []
        if number is not None and number in at and head is not None:
            x, y = across.read(head.measurement), up.read(head.measurement)
            marked = [(at[number][0], x, y)] if x is not None and y is not None else []
        data.append(_points(name, marked, tell, symbol=symbol, colour=colour, size=15))
    return Drawing("front", title, caption, _drawn(data), _layout(axis_title(across), axis_title(up)))


def draw_history(study: StudyRecord, objective: Objective, tell: Callable[[TrialRecord], str]) -> Drawing:
    """Figures over trials with the best so far, and where trials failed."""
    key = "history" if len(study.objectives) == 1 else f"history_{objective.name}"
    title = f"History: {_LABELS[objective.name]} of every trial, and the best so far"
    caption = f"{'Less' if objective.direction == 'minimize' else 'More'} is better; crosses are trials that failed."
    placed = [(one, one.number, one.figures[objective.name]) for one in study.trials if objective.name in one.figures]
    failed = [one for one in study.trials if one.state in FAILED]
    if not placed and not failed:
        return Drawing(key, title, caption, missing="no trial has ended yet")
    figures = [figure for _, _, figure in placed]
    # Failures have no figure: they stand at the worse end of those that have one.
    floor = (max(figures) if objective.direction == "minimize" else min(figures)) if figures else 0.0
    data = [_points("measured", placed, tell, colour=BLUE)]
    best = _running_best(placed, objective)
    data.append(
        {
            "type": "scatter", "mode": "lines", "name": "best so far", "x": [x for x, _ in best],
            "y": [y for _, y in best], "line": {"color": GREEN, "shape": "hv", "width": 2}, "hoverinfo": "skip",
        }
    )  # fmt: skip
    base = study.trial(study.baseline)
    if base is not None and objective.name in base.figures and len(study.trials) > 1:
        ends = [0, max(one.number for one in study.trials)]
        data.append(_line("baseline", ends, [base.figures[objective.name]] * 2, ORANGE, dash="dash"))
    for state in FAILED:
        ended = [(one, one.number, floor) for one in failed if one.state == state]
        colour = {"refused": PURPLE, "invalid": GREY, "lost": GREY, "stopped": GREY}.get(state, RED)
        data.append(_points(state, ended, tell, symbol="x", colour=colour))
    layout = _layout("trial", axis_title(objective))
    layout["xaxis"] |= {"tickformat": "d"}
    return Drawing(key, title, caption, _drawn(data), layout)


def draw_slots(study: StudyRecord, tell: Callable[[TrialRecord], str]) -> Drawing:
    """Expert slots against decode speed and hit rate."""
    title = "Expert slots against hit rate and decode speed"
    caption = "Trials of strategies that have slots."
    placed = [
        (one, one.planned.slots, one.measurement)
        for one in study.trials
        if one.measurement is not None and one.planned is not None and one.planned.slots
    ]
    if not placed:
        why = "no measured trial had expert slots" if _measured(study) else _none_measured(study)
        return Drawing("slots", title, caption, missing=why)
    speeds = [(one, slots, found.decode_tps) for one, slots, found in placed]
    hits = [(one, slots, 100 * found.hit_ratio) for one, slots, found in placed if found.hit_ratio is not None]
    data = [
        _points("decode (tok/s)", speeds, tell, colour=BLUE),
        {**_points("hit rate (%)", hits, tell, symbol="square", colour=ORANGE), "yaxis": "y2"},
    ]
    layout = _layout("expert slots", "decode (tok/s)")
    if hits:
        layout["yaxis2"] = _axis("hit rate (%)") | {
            "overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto",
        }  # fmt: skip
    else:
        caption += " The engine told no hit rate."
    return Drawing("slots", title, caption, _drawn(data), layout)


def draw_memory(study: StudyRecord, tell: Callable[[TrialRecord], str]) -> Drawing:
    """Planned against measured peak, and by how much crashes missed."""
    what = "VRAM" if study.facts.ledger == "vram" else "RAM"
    title = f"Planned against measured memory ({what} peak)"
    caption = "On the dashed line a plan was exact; above it the engine took more than was planned."
    told = [
        (one, one.planned, one.measurement.peak_bytes)
        for one in study.trials
        if one.planned is not None and one.measurement is not None and one.measurement.peak_bytes is not None
    ]
    lacked = [
        (one, one.planned, one.planned.limit_bytes + one.violation_bytes)
        for one in study.trials
        if one.planned is not None and one.state == "crash" and one.violation_bytes > 1
    ]
    unit, scale = _pick_unit(found for _, _, found in (*told, *lacked))
    placed = [(one, planned.peak_bytes / scale, found / scale) for one, planned, found in told]
    short = [(one, planned.peak_bytes / scale, found / scale) for one, planned, found in lacked]
    if not placed and not short:
        why = "no trial told its peak" if _measured(study) else _none_measured(study)
        return Drawing("memory", title, caption, missing=why)
    limit = median(planned.limit_bytes for _, planned, _ in (*told, *lacked))
    caption += f" {format_bytes(limit)} may be used."
    everything = [value for _, x, y in (*placed, *short) for value in (x, y)]
    # A limit far above all that was needed would press the points into a corner.
    is_near = limit / scale < 1.5 * max(everything)
    everything += [limit / scale] if is_near else []
    low, high = min(everything), max(everything)
    margin = 0.03 * (high - low) or 0.1 * high or 0.1
    ends = [low - margin, high + margin]
    data = [
        _line("as planned", ends, ends, GREY, dash="dash"),
        *([_line("may be used", ends, [limit / scale] * 2, ORANGE, dash="dot")] if is_near else []),
        _points("measured", placed, tell, colour=BLUE),
        _points("crashed, needed at least", short, tell, symbol="x", colour=RED),
    ]
    layout = _layout(f"planned ({unit})", f"measured ({unit})")
    return Drawing("memory", title, caption, _drawn(data), layout)


def draw_lines(study: StudyRecord, lines: Sequence[MeasuredLine]) -> Drawing:
    """The ledger of the best trial's run, line by line."""
    title = "Planned against measured memory, line by line"
    best = study.trial(study.best)
    caption = f"The ledger of trial {best.number}, the best." if best is not None else "The ledger of the best trial."
    told = [one for one in lines if one.ledger == study.facts.ledger and (one.planned_bytes or one.measured_bytes)]
    if not told:
        return Drawing("lines", title, caption, missing="this state folder keeps no ledger of the best trial's run")
    told.sort(key=lambda one: max(one.planned_bytes, one.measured_bytes))
    names = [_escape(one.key.replace("_", " ")) for one in told]
    unit, scale = _pick_unit(one.measured_bytes for one in told)
    data = [
        _bars("planned", names, [one.planned_bytes / scale for one in told], GREY),
        _bars("measured", names, [one.measured_bytes / scale for one in told], BLUE),
    ]
    return Drawing("lines", title, caption, tuple(data), _bar_layout(unit, len(names) * 2))


def draw_importance(study: StudyRecord) -> Drawing:
    """Which knobs mattered."""
    title = "Parameter importance"
    told = [one for one in study.importances if one.shares]
    caption = "; ".join(f"{_LABELS[one.objective]}: {one.note}" for one in study.importances) + "."
    if not told:
        return Drawing("importance", title, "", missing=caption.removesuffix(".") or "nothing was ranked")
    names = sorted({name for one in told for name in one.shares}, key=lambda name: told[0].shares.get(name, 0.0))
    data = [
        _bars(_LABELS[one.objective], [_escape(name) for name in names],
              [100 * one.shares.get(name, 0.0) for name in names], colour)
        for one, colour in zip(told, (BLUE, ORANGE), strict=False)
    ]  # fmt: skip
    if len(study.trials) < 30:
        caption += " So few trials give a hint, no more."
    return Drawing("importance", title, caption, tuple(data), _bar_layout("share (%)", len(names) * len(told)))


def draw_predictions(study: StudyRecord, tell: Callable[[TrialRecord], str]) -> Drawing:
    """What the cost model said before each trial, and what was measured then."""
    objective = study.objectives[0]
    title = f"Predicted against measured {_LABELS[objective.name]}"
    caption = "On the dashed line the cost model was right."
    placed = [
        (one, one.predicted_figure, one.figures[objective.name])
        for one in study.trials
        if one.predicted_figure is not None and objective.name in one.figures
    ]
    if not placed:
        why = "nothing was predicted before it was measured" if _measured(study) else _none_measured(study)
        return Drawing("predictions", title, caption, missing=why)
    values = [value for _, x, y in placed for value in (x, y)]
    ends = [0.97 * min(values), 1.03 * max(values)]
    data = [_line("as predicted", ends, ends, GREY, dash="dash"), _points("measured", placed, tell, colour=BLUE)]
    unit = objective.unit
    return Drawing("predictions", title, caption, _drawn(data), _layout(f"predicted ({unit})", f"measured ({unit})"))


# --- parts


def _make_teller(study: StudyRecord) -> Callable[[TrialRecord], str]:
    """What a point says under the mouse."""
    is_full = len(study.trials) <= MAX_TOLD

    def tell(one: TrialRecord) -> str:
        figures = [
            f"{_LABELS[objective.name]} {format_significant(one.figures[objective.name])} {objective.unit}"
            for objective in study.objectives
            if objective.name in one.figures
        ]
        head = f"trial {one.number}" + (f", {one.stage}" if one.stage else "")
        if one.state != "measured":
            figures = [f"{one.state}: {one.words[:120]}" if one.words else one.state]
        knobs = [f"{name} = {value}" for name, value in study.canonical(one.point).items()] if is_full else []
        return "<br>".join(_escape(text) for text in (head, *figures, *knobs))

    return tell


def _points(
    name: str, placed: Iterable[tuple[TrialRecord, float, float]], tell: Callable[[TrialRecord], str], *,
    colour: str, mode: str = "markers", symbol: str = "circle", size: int = 8,
) -> dict[str, Any]:  # fmt: skip
    found = list(placed)
    return {
        "type": "scatter", "mode": mode, "name": name, "x": [x for _, x, _ in found], "y": [y for _, _, y in found],
        "text": [tell(one) for one, _, _ in found], "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, "symbol": symbol, "size": size}, "line": {"color": colour, "width": 1.5},
    }  # fmt: skip


def _line(name: str, x: Sequence[float], y: Sequence[float], colour: str, *, dash: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "hoverinfo": "name",
        "line": {"color": colour, "dash": dash, "width": 1.5},
    }  # fmt: skip


def _bars(name: str, names: Sequence[str], values: Sequence[float], colour: str) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "name": name, "y": list(names), "x": list(values),
        "marker": {"color": colour}, "hovertemplate": "%{y}: %{x:.3~g}<extra></extra>",
    }  # fmt: skip


def _drawn(traces: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The traces that have points."""
    return tuple(one for one in traces if one["x"])


def _running_best(placed: Sequence[tuple[TrialRecord, int, float]], objective: Objective) -> list[tuple[int, float]]:
    """The best so far at each trial that was measured; trials that miss a limit count while no other one did."""
    pick = min if objective.direction == "minimize" else max
    found: list[tuple[int, float]] = []
    best, best_is_missed = None, True
    for one, number, figure in placed:
        is_missed = bool(one.missed)
        if best is None or (best_is_missed and not is_missed):
            best, best_is_missed = figure, is_missed
        elif is_missed == best_is_missed:
            best = pick(best, figure)
        found.append((number, best))
    return found


def _pick_unit(sizes: Iterable[int]) -> tuple[str, int]:
    """GiB, or MiB where nothing reaches one."""
    return ("GiB", GIB) if max(sizes, default=GIB) >= GIB else ("MiB", MIB)


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "gridcolor": "#e6eaee", "zeroline": False, "automargin": True}


def _layout(across: str, up: str) -> dict[str, Any]:
    return {
        "xaxis": _axis(across), "yaxis": _axis(up), "height": 420, "hovermode": "closest",
        "margin": {"l": 64, "r": 24, "t": 12, "b": 52}, "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#24292f"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, "showlegend": True,
    }  # fmt: skip


def _bar_layout(across: str, bars: int) -> dict[str, Any]:
    return _layout(across, "") | {"height": max(240, 110 + 24 * bars), "barmode": "group"}


def _measured(study: StudyRecord) -> bool:
    return any(one.measurement is not None for one in study.trials)


def _none_measured(study: StudyRecord) -> str:
    return f"none of {len(study.trials)} trials was measured" if study.trials else "there is no trial yet"


def _escape(text: str) -> str:
    return html.escape(text, quote=False)
