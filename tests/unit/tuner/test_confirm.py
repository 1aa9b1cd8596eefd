import pytest

from freetoken.tuner.confirm import confirm, judge
from freetoken.tuner.objectives import OBJECTIVES
from freetoken.tuner.values import Outcome
from tests.fakes.tuning import ScriptedLauncher, make_measurement, make_site

TURN_TIME = OBJECTIVES["turn_time"]


def blocks(*times, noise=0.01):
    return [make_measurement(time, noise_ratio=noise) for time in times]


def test_a_gain_beyond_the_noise_is_confirmed_with_its_interval():
    found = judge(blocks(12.0, 12.1), blocks(10.0, 10.1), TURN_TIME)
    assert found.verdict == "gain"
    assert found.gain == pytest.approx(0.2, abs=0.005)
    assert 0 < found.gain_low < found.gain < found.gain_high


def test_no_gain_is_an_answer():
    assert judge(blocks(10.0, 10.2), blocks(10.1, 10.0), TURN_TIME).verdict == "no gain"
    assert judge(blocks(10.0, 12.0), blocks(9.5, 9.6), TURN_TIME).verdict == "no gain"  # it drifts too much to say


def test_a_winner_that_lost_is_called_worse():
    assert judge(blocks(10.0, 10.1), blocks(12.0, 12.1), TURN_TIME).verdict == "worse"


def test_a_rate_counts_the_other_way_round():
    slow = [make_measurement(decode_tps=20.0), make_measurement(decode_tps=20.1)]
    fast = [make_measurement(decode_tps=30.0), make_measurement(decode_tps=30.1)]
    found = judge(slow, fast, OBJECTIVES["decode_tps"])
    assert (found.verdict, round(found.gain, 2)) == ("gain", 0.5)
    assert found.baseline == (20.0, 20.1)


def test_the_order_is_a_b_b_a_on_unseen_prompts_and_the_middle_needs_no_start():
    site, launcher = make_site(2), ScriptedLauncher(seed=2)
    a = site.space.clip(
        {**site.default_point(), "strategy": "offload", "prefill_chunk_tokens": 2048, "expert_slots": 600}
    )
    b = {**a, "attention": "fi"}
    found = confirm(launcher, site.space, a, b, TURN_TIME)
    kinds = [(one[0], one[1] if one[0] == "measure" else one[1]["attention"]) for one in launcher.log]
    unseen = ("measure", True)
    assert kinds == [("start", "triton"), unseen, ("start", "fi"), unseen, unseen, ("start", "triton"), unseen]
    assert found.verdict in ("gain", "no gain", "worse")


def test_settings_that_share_a_start_are_resized_between_the_blocks():
    site, launcher = make_site(2), ScriptedLauncher(seed=2)
    a = site.space.clip(
        {**site.default_point(), "strategy": "offload", "prefill_chunk_tokens": 2048, "expert_slots": 150}
    )
    found = confirm(launcher, site.space, a, {**a, "expert_slots": 1100}, TURN_TIME)
    assert [one[0] for one in launcher.log if one[0] != "measure"] == ["start", "resize", "resize"]
    assert found.verdict == "gain"


def test_a_resize_that_is_refused_between_the_blocks_is_a_start_instead():
    class Full(ScriptedLauncher):
        def resize(self, point):
            self.log.append(("refused", dict(point)))
            return Outcome(kind="refused", violation_bytes=1, words="no room while this one runs")

    site, launcher = make_site(2), Full(seed=2)
    a = site.space.clip(
        {**site.default_point(), "strategy": "offload", "prefill_chunk_tokens": 2048, "expert_slots": 150}
    )
    found = confirm(launcher, site.space, a, {**a, "expert_slots": 1100}, TURN_TIME)
    kinds = [one[0] for one in launcher.log if one[0] != "measure"]
    assert kinds == ["start", "refused", "start", "refused", "start"]
    assert found.verdict == "gain"


def test_a_block_that_fails_leaves_the_answer_open():
    site = make_site(2)
    launcher = ScriptedLauncher(seed=2, fate=lambda number, point: Outcome(kind="crash", words="gone"))
    found = confirm(launcher, site.space, site.default_point(), site.default_point(), TURN_TIME)
    assert (found.verdict, found.describe()) == ("unfinished", "not confirmed: the baseline did not measure: gone")


def settings_of_three_starts():
    site = make_site(2)
    a = site.space.clip(
        {**site.default_point(), "strategy": "offload", "prefill_chunk_tokens": 2048, "expert_slots": 600}
    )
    return site, a, {**a, "attention": "fi"}, {**a, "prefill_chunk_tokens": 1024}


def test_an_imported_setting_is_measured_in_the_same_run_around_the_same_moment():
    site, a, b, c = settings_of_three_starts()
    launcher = ScriptedLauncher(seed=2)
    found = confirm(launcher, site.space, a, b, TURN_TIME, imported=c)
    measured, current = [], None
    for kind, told in launcher.log:
        current = told if kind != "measure" else current
        if kind == "measure":
            measured.append(next(name for name, point in (("A", a), ("B", b), ("C", c)) if point == current))
    assert "".join(measured) == "ACBBCA"
    assert sum(kind == "start" for kind, _ in launcher.log) == 5
    assert found.verdict in ("gain", "no gain", "worse")
    # Both comparisons rest on the same blocks of the winner.
    assert found.imported.winner == found.winner
    assert found.imported.baseline != found.baseline
    assert found.imported.imported is None


def test_an_imported_setting_that_dies_is_left_out_and_the_rest_goes_on():
    site, a, b, c = settings_of_three_starts()

    def fate(number, point):
        return Outcome(kind="crash", words="out of memory") if point == c else None

    launcher = ScriptedLauncher(seed=2, fate=fate)
    found = confirm(launcher, site.space, a, b, TURN_TIME, imported=c)
    assert found.verdict in ("gain", "no gain", "worse")
    assert (len(found.baseline), len(found.winner)) == (2, 2)
    assert found.imported.verdict == "unfinished"
    assert found.imported.describe_interval() == "not compared: the imported setting did not measure: out of memory"
    # It is tried once, and nothing is taken for running after it.
    assert [one[0] for one in launcher.log].count("start") == 4


def test_a_study_of_three_takes_its_time_into_account():
    site, a, b, c = settings_of_three_starts()
    ends = iter([False] * 5 + [True])
    found = confirm(ScriptedLauncher(seed=2), site.space, a, b, TURN_TIME, imported=c, is_over=lambda: next(ends))
    assert found.describe() == "not confirmed: the budget ended after 5 of 6 measurements"
