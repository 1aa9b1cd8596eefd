"""What a search and its confirmation come to, from observations and blocks alone."""

from freetoken.recipe.model import GoodEnough
from freetoken.tuner.confirm import judge
from freetoken.tuner.objectives import OBJECTIVES, make_limits
from freetoken.tuner.values import Observation, Outcome
from freetoken.tuner.verdict import choose, find_imported, has_default_failed
from tests.fakes.tuning import make_measurement

TURN_TIME = OBJECTIVES["turn_time"]


def observe(number, stage, turn_time_s=None, kind="ok", **figures):
    measurement = make_measurement(turn_time_s, **figures) if turn_time_s else None
    return Observation(
        number=number, point={"x": number}, stage=stage, start=1, outcome=Outcome(kind=kind, measurement=measurement)
    )


def test_the_best_imported_setting_is_the_one_that_measured_best_here_and_keeps_the_limits():
    seen = [
        observe(0, "seed", 9.0), observe(1, "seed", 7.0), observe(2, "seed", kind="crash"), observe(3, "default", 5.0),
        observe(4, "seed", 6.0, ttft_p95_s=9.0),
    ]  # fmt: skip
    assert find_imported(seen, TURN_TIME, ()).number == 4
    assert find_imported(seen, TURN_TIME, make_limits(GoodEnough(ttft_p95=3.0))).number == 1
    assert find_imported(seen[2:4], TURN_TIME, ()) is None


def test_a_default_has_failed_only_where_it_was_tried_and_said_something_of_itself():
    assert not has_default_failed([observe(0, "seed", 9.0)])
    assert not has_default_failed([observe(0, "default", kind="invalid"), observe(1, "predicted", 9.0)])
    assert has_default_failed([observe(0, "default", kind="refused"), observe(1, "predicted", 9.0)])
    assert not has_default_failed([observe(0, "default", kind="crash"), observe(1, "default", 9.0)])


def held(baseline, winner, imported=None, **figures):
    """A confirmation with these turn times, each of two blocks."""
    blocks = {
        name: [make_measurement(time * (1 + 0.001 * k), **figures.get(name, {})) for k in range(2)]
        for name, time in (("a", baseline), ("b", winner), ("c", imported))
        if time is not None
    }
    found = judge(blocks["a"], blocks["b"], TURN_TIME)
    if imported is None:
        return found
    return found.model_copy(update={"imported": judge(blocks["c"], blocks["b"], TURN_TIME)})


B, C = {"x": 1}, {"x": 2}


def test_of_winner_and_imported_setting_the_faster_one_is_taken():
    assert choose(B, C, held(10.0, 6.0, 8.0), ()).candidate == B
    found = choose(B, C, held(10.0, 8.0, 6.0), ())
    assert (found.candidate, found.is_gain) == (C, True)
    assert found.confirmation.imported is None
    # Alike: what the search found here stays.
    assert choose(B, C, held(10.0, 6.0, 6.0), ()).candidate == B


def test_an_imported_setting_is_no_gain_where_it_does_not_beat_the_baseline():
    found = choose(B, C, held(10.0, 13.0, 11.0), ())
    assert (found.candidate, found.is_gain, found.warning) == (B, False, None)


def test_a_limit_that_only_one_of_both_keeps_decides():
    limits = make_limits(GoodEnough(ttft_p95=3.0))
    late = {"ttft_p95_s": 5.0}
    found = choose(B, C, held(10.0, 6.0, 8.0, b=late), limits)
    assert (found.candidate, found.is_gain) == (C, True)
    found = choose(B, C, held(10.0, 8.0, 6.0, c=late), limits)
    assert (found.candidate, found.is_gain) == (B, True)
    found = choose(B, C, held(10.0, 8.0, 6.0, b=late, c=late), limits)
    assert not found.is_gain
    assert "it misses the hard limit on `ttft_p95`" in found.warning


def test_an_imported_setting_that_was_not_measured_changes_nothing():
    proof = held(10.0, 6.0)
    versus = proof.model_copy(update={"verdict": "unfinished", "baseline_blocks": (), "winner_blocks": ()})
    found = choose(B, C, proof.model_copy(update={"imported": versus}), ())
    assert (found.candidate, found.is_gain) == (B, True)
