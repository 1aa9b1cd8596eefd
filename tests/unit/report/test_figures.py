import json

import plotly.graph_objects as go
import pytest

from freetoken.report.figures import draw_all
from freetoken.store.rows import MeasuredLine
from freetoken.units import GIB

LINES = (
    MeasuredLine(ledger="vram", key="expert_slots", planned_bytes=4 * GIB, measured_bytes=4 * GIB),
    MeasuredLine(ledger="vram", key="cuda_context", planned_bytes=GIB // 2, measured_bytes=GIB),
    MeasuredLine(ledger="ram", key="expert_banks", planned_bytes=9 * GIB, measured_bytes=9 * GIB),
)


def by_key(drawings):
    return {one.key: one for one in drawings}


def by_name(drawing):
    return {one["name"]: one for one in drawing.data}


def test_every_plot_of_a_finished_study_is_drawn_as_plotly_knows_it(study):
    drawn = draw_all(study, LINES)
    assert [one.key for one in drawn if one.missing] == []
    assert [one.key for one in drawn] == [
        "front", "history", "slots", "memory", "lines", "importance", "predictions",
    ]  # fmt: skip
    for one in drawn:
        go.Figure(data=list(one.data), layout=one.layout)  # raises for any property that it does not know
        json.dumps(one.data, allow_nan=False)


def test_the_front_shows_every_measured_trial_once_and_marks_baseline_and_best(study):
    traces = by_name(by_key(draw_all(study))["front"])
    measured = [one for one in study.trials if one.measurement]
    assert sorted(traces["measured"]["x"]) == sorted(one.measurement.ttft_s for one in measured)
    best = study.best_figures.measurement
    assert (traces["best"]["x"], traces["best"]["y"]) == ([best.ttft_s], [best.decode_tps])
    assert traces["front"]["y"] == [one.figures[1] for one in study.front]
    assert traces["front"]["x"] == sorted(traces["front"]["x"])


def test_the_history_has_the_running_best_and_each_kind_of_failure(study):
    traces = by_name(by_key(draw_all(study))["history"])
    best = traces["best so far"]["y"]
    assert best == sorted(best, reverse=True)
    assert best[-1] == min(traces["measured"]["y"])
    assert len(traces["crash"]["x"]) == sum(one.state == "crash" for one in study.trials) == 1
    assert len(traces["refused"]["x"]) == sum(one.state == "refused" for one in study.trials)


def test_slots_are_drawn_against_speed_and_hit_rate(study):
    traces = by_name(by_key(draw_all(study))["slots"])
    assert traces["hit rate (%)"]["yaxis"] == "y2"
    placed = dict(zip(traces["hit rate (%)"]["x"], traces["hit rate (%)"]["y"], strict=True))
    most, least = max(placed), min(placed)
    assert placed[most] > placed[least]
    assert len(traces["decode (tok/s)"]["x"]) == len(traces["hit rate (%)"]["x"])


def test_without_hit_ratios_speed_is_drawn_alone_and_the_caption_says_why(study):
    def without_hits(one):
        told = one.measurement and one.measurement.model_copy(update={"hit_ratio": None})
        return one.model_copy(update={"measurement": told})

    blind = study.model_copy(update={"trials": tuple(without_hits(one) for one in study.trials)})
    drawing = by_key(draw_all(blind))["slots"]
    assert list(by_name(drawing)) == ["decode (tok/s)"]
    assert "yaxis2" not in drawing.layout
    assert "told no hit rate" in drawing.caption


def test_memory_is_drawn_as_planned_and_measured_with_what_crashes_lacked(study):
    traces = by_name(by_key(draw_all(study))["memory"])
    told = [one for one in study.trials if one.measurement and one.planned]
    assert traces["measured"]["y"] == [one.measurement.peak_bytes / GIB for one in told]
    assert traces["measured"]["x"] == [one.planned.peak_bytes / GIB for one in told]
    assert "may be used" in traces
    crash = next(one for one in study.trials if one.state == "crash")
    assert traces["crashed, needed at least"]["y"] == [(crash.planned.limit_bytes + (300 << 20)) / GIB]


def test_ledger_lines_are_those_of_the_memory_that_decides(study):
    traces = by_name(by_key(draw_all(study, LINES))["lines"])
    assert traces["planned"]["y"] == ["cuda context", "expert slots"]
    assert traces["measured"]["x"] == [1.0, 4.0]
    assert by_key(draw_all(study))["lines"].missing == "this state folder keeps no ledger of the best trial's run"


def test_two_objectives_have_a_history_each_and_their_own_front(pair):
    drawn = by_key(draw_all(pair))
    assert {"history_ttft", "history_decode_tps"} <= set(drawn)
    assert drawn["front"].title == "Trade-off: TTFT against decode"
    assert drawn["front"].layout["xaxis"]["title"]["text"] == "TTFT (s)"
    assert len(by_name(drawn["front"])["misses a limit"]["x"]) == sum(bool(one.missed) for one in pair.trials)
    assert {one["name"] for one in drawn["importance"].data} == {"TTFT", "decode"}


@pytest.mark.parametrize("kind", ["empty", "failures"])
def test_where_nothing_was_measured_each_plot_says_why(kind, request):
    study = request.getfixturevalue(kind)
    drawn = by_key(draw_all(study))
    missing = {key for key, one in drawn.items() if one.missing}
    assert all(not one.data for one in drawn.values() if one.missing)
    if kind == "empty":
        assert missing == set(drawn)
        assert drawn["front"].missing == "there is no trial yet"
    else:
        assert missing == set(drawn) - {"history"}
        assert drawn["front"].missing == f"none of {len(study.trials)} trials was measured"


def test_what_an_engine_said_is_never_markup(failures):
    texts = by_name(by_key(draw_all(failures))["history"])["crash"]["text"]
    assert "&lt;b&gt;no&lt;/b&gt; such flag &amp; more" in texts[0]
    assert not any("<b>" in one for one in texts)


def test_a_limit_far_above_all_that_was_needed_is_said_and_not_drawn(study):
    def small(one):
        planned = one.planned and one.planned._replace(peak_bytes=200 << 20, limit_bytes=21 << 30)
        told = one.measurement and one.measurement.model_copy(update={"peak_bytes": 300 << 20})
        return one.model_copy(update={"planned": planned, "measurement": told, "violation_bytes": 0})

    roomy = study.model_copy(update={"trials": tuple(small(one) for one in study.trials)})
    drawing = by_key(draw_all(roomy))["memory"]
    assert list(by_name(drawing)) == ["as planned", "measured"]
    assert set(by_name(drawing)["measured"]["y"]) == {300}
    assert drawing.layout["yaxis"]["title"]["text"] == "measured (MiB)"
    assert drawing.caption.endswith("21.0 GiB may be used.")
