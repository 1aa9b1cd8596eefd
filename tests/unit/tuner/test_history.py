from freetoken.tuner.history import merge_repeats
from freetoken.tuner.values import Observation, Outcome
from tests.fakes.tuning import make_measurement


def observe(number, point, turn_time_s, **changes):
    outcome = Outcome(kind="ok", measurement=make_measurement(turn_time_s, **changes))
    return Observation(number=number, point=point, outcome=outcome)


def test_repeats_of_a_setting_are_one_observation_with_their_mean_and_highest_peak():
    seen = [
        observe(0, {"a": 1}, 10.0, peak_bytes=7), observe(1, {"a": 2}, 11.0, peak_bytes=3),
        observe(2, {"a": 1}, 14.0, peak_bytes=5, hit_ratio=0.5),
    ]  # fmt: skip
    merged = merge_repeats(seen, lambda point: point)
    assert [(one.number, one.measurement.turn_time_s) for one in merged] == [(2, 12.0), (1, 11.0)]
    assert (merged[0].measurement.peak_bytes, merged[0].measurement.hit_ratio) == (7, 0.5)
    assert merged[1] is seen[1]


def test_what_was_not_measured_and_knobs_without_effect_are_left_out():
    crash = Observation(number=0, point={"a": 1}, outcome=Outcome(kind="crash"))
    seen = [crash, observe(1, {"a": 1, "b": 1}, 10.0), observe(2, {"a": 1, "b": 2}, 12.0)]
    (merged,) = merge_repeats(seen, lambda point: {"a": point["a"]})
    assert (merged.number, merged.measurement.turn_time_s) == (2, 11.0)
