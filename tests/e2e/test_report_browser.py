"""The report in a real browser: every plot is drawn, to the last point, and nothing is asked of anybody."""

import re

import optuna
import pytest

from freetoken.report.figures import draw_all
from freetoken.report.page import write_report
from freetoken.store.rows import MeasuredLine
from freetoken.tuner.reading import read_study
from freetoken.tuner.values import Outcome
from freetoken.units import GIB
from tests.fakes.browser import Drawn, read_dom
from tests.fakes.studies import finish, make_search
from tests.fakes.tuning import ScriptedLauncher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LINES = (
    MeasuredLine(ledger="vram", key="expert_slots", planned_bytes=4 * GIB, measured_bytes=4 * GIB),
    MeasuredLine(ledger="vram", key="cuda_context", planned_bytes=GIB // 2, measured_bytes=GIB),
)
HOSTILE = "</script><script>document.title='owned'</script><img src='http://tracker.invalid/x.png'>&<b>"


def make_study(objectives):
    def fate(number, point):
        return Outcome(kind="crash", violation_bytes=300 << 20, words=HOSTILE) if number == 2 else None

    storage = optuna.storages.InMemoryStorage()
    search = make_search(
        storage, "s", objectives=objectives, launcher=ScriptedLauncher(2, fate), starts=6, trials=14, model=HOSTILE
    )
    finish(search)
    return read_study(storage, "s")


def count_points(drawing):
    """Points and bars that a drawing must show."""
    return sum(len(one["x"]) for one in drawing.data if one["type"] == "bar" or "markers" in one["mode"])


@pytest.mark.parametrize("objectives", [("turn_time",), ("ttft", "decode_tps")], ids=["one", "two"])
def test_every_plot_is_drawn_and_no_request_is_made(tmp_path, objectives):
    study = make_study(objectives)
    page = tmp_path / "r.html"
    report = write_report(study, page, LINES)
    assert report.missing == {}
    dom, asked = read_dom(page, tmp_path)
    assert asked == []
    drawn = Drawn(dom)
    drawings = {f"plot-{one.key}": one for one in draw_all(study, LINES)}
    assert set(drawn.counts) == set(drawings)
    assert len(drawings) == 6 + len(objectives)
    for key, drawing in drawings.items():
        counts = drawn.counts[key]
        assert "could not be drawn" not in drawn.texts[key]
        assert (key, counts["trace"]) == (key, len(drawing.data))
        # In a legend that names several traces each has one point more, as its sign.
        assert (key, counts["point"] >= count_points(drawing) > 0) == (key, True)
        assert drawing.layout["xaxis"]["title"]["text"] in drawn.texts[key]
    assert "<title>s</title>" in dom
    # No button that would carry the figures elsewhere.
    buttons = re.findall(r'data-title="([^"]*)"', dom)
    assert "Zoom" in buttons
    assert [one for one in buttons if re.search("share|cloud|edit|send", one, re.IGNORECASE)] == []


def test_a_request_would_be_seen_and_the_page_forbids_it(tmp_path):
    page = tmp_path / "r.html"
    write_report(make_study(("turn_time",)), page)
    text = page.read_text(encoding="utf-8").replace("<body>", "<body><img src='http://tracker.invalid/x.png'>")
    page.write_text(text, encoding="utf-8")
    _, asked = read_dom(page, tmp_path)
    assert asked == []
    policy = text[text.index("<meta http-equiv") : text.index(">", text.index("<meta http-equiv")) + 1]
    page.write_text(text.replace(policy, ""), encoding="utf-8")
    _, asked = read_dom(page, tmp_path)
    assert asked == ["http://tracker.invalid/x.png"]
