import json
import re
from html.parser import HTMLParser

import pytest

from freetoken.errors import UsageError
from freetoken.report.figures import draw_all
from freetoken.report.page import render, write_report
from freetoken.tuner.record import FrontPoint, StudyFacts, StudyRecord, TrialRecord
from freetoken.tuner.values import Measurement

#: Tags and attributes by which a browser would ask somebody else for something.
ASKING = {"src", "srcset", "href", "action", "poster", "data", "background", "ping", "manifest"}


class Reader(HTMLParser):
    """Text, tags and attributes of a page; scripts apart."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.asked, self.said, self.scripts, self.rows = [], [], "", [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.rows += tag == "tr"
        self.asked += [(tag, name, value) for name, value in attributes if name in ASKING]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("script", "style"):
            self.scripts.append(data)
        else:
            self.said += data


def make_study(trials=(), **facts):
    fields = {"recipe": "r", "target": "r", "engine": "native", "model": "m", "workload": "w",
              "objectives": ("turn_time",)}  # fmt: skip
    return StudyRecord(name="s", facts=StudyFacts(**(fields | facts)), trials=tuple(trials))


@pytest.fixture(scope="module")
def page(study):
    return render(study, draw_all(study))


def test_the_page_holds_plotly_itself_and_refers_to_nothing_outside(page):
    found = Reader(page)
    assert found.asked == [("link", "href", "data:,")]
    assert "default-src 'none'" in page
    assert max(len(one) for one in found.scripts) > 1_000_000
    assert not re.search(r"@import|url\(", page[: page.index("</style>")])


def test_the_data_of_every_plot_are_in_the_page(page, study):
    plots = json.loads(re.search(r'<script type="application/json" id="plots">(.*?)</script>', page)[1])
    drawn = {one.key: one for one in draw_all(study) if one.data}
    assert list(plots) == sorted(drawn)
    assert plots["history"]["data"] == list(drawn["history"].data)
    for key in drawn:
        assert f'<div class="plot" id="plot-{key}"' in page


def test_everything_that_comes_from_elsewhere_is_escaped():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{ 7*7 }}"
    measurement = Measurement(decode_tps=10, ttft_s=1, turn_time_s=3)
    trials = [
        TrialRecord(number=0, state="crash", stage=evil, words=evil, reason=evil, point={evil: evil}),
        TrialRecord(number=1, state="measured", stage=evil, point={evil: evil}, measurement=measurement,
                    figures={"turn_time": 3.0}),
    ]  # fmt: skip
    study = make_study(trials, recipe=evil, model=evil, workload=evil, machine=evil, description=evil)
    study = study.model_copy(update={"name": evil, "best": 1, "baseline_words": evil})
    page = render(study, draw_all(study))
    assert "<img" not in page.replace(read_own_script(page), "")
    assert "<script>alert" not in page
    assert "49" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    found = Reader(page)
    assert evil in found.said
    assert "img" not in found.tags


def read_own_script(page):
    """plotly.js, which makes tags of its own."""
    return max(re.findall(r"<script>(.*?)</script>", page, flags=re.S), key=len)


def test_a_study_without_a_trial_is_a_small_page_without_a_script(empty):
    page = render(empty, draw_all(empty))
    assert "<script" not in page
    assert len(page) < 20_000
    assert "There is no trial yet." in page
    assert page.count("Nothing to draw") == 7


def test_one_measured_trial_is_a_page_with_plots():
    measurement = Measurement(decode_tps=10, ttft_s=1, turn_time_s=3)
    one = TrialRecord(number=0, state="measured", measurement=measurement, figures={"turn_time": 3.0})
    study = make_study([one]).model_copy(
        update={"best": 0, "baseline": 0, "front": (FrontPoint(number=0, figures=(1.0, 10.0)),)}
    )
    drawn = [one.key for one in draw_all(study) if one.data]
    assert drawn == ["front", "history"]
    assert "The best is trial 0; the baseline is trial 0" in render(study, draw_all(study))


def test_a_page_of_thousands_of_trials_stays_small_and_whole():
    measurement = Measurement(decode_tps=10, ttft_s=1, turn_time_s=3, hit_ratio=0.5, peak_bytes=1 << 30)
    trials = [
        TrialRecord(number=n, state="measured", point={"expert_slots": n, "strategy": "offload"},
                    measurement=measurement, figures={"turn_time": 3.0})
        for n in range(5000)
    ]  # fmt: skip
    study = make_study(trials)
    page = render(study, draw_all(study))
    without_plotly = len(page) - len(read_own_script(page))
    assert without_plotly < 6_000_000
    assert Reader(page.replace(read_own_script(page), "")).rows > 5000


def test_writing_says_what_was_drawn_and_what_was_not(study, tmp_path):
    (tmp_path / "deep").mkdir()
    report = write_report(study, tmp_path / "deep" / "r.html")
    assert report.path == str(tmp_path / "deep" / "r.html")
    assert report.bytes == (tmp_path / "deep" / "r.html").stat().st_size
    assert set(report.drawn) == {"front", "history", "slots", "memory", "importance", "predictions"}
    assert list(report.missing) == ["lines"]
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["r.html"]


def test_a_place_that_cannot_be_written_is_told(study, tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        write_report(study, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is no folder"):
        write_report(study, tmp_path / "file" / "r.html")
    with pytest.raises(UsageError, match="there is no folder"):
        write_report(study, tmp_path / "none" / "r.html")
