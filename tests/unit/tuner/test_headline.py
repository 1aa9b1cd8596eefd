import pytest

from freetoken.tuner.headline import make_headline
from freetoken.tuner.objectives import OBJECTIVES
from tests.fakes.tuning import make_measurement


def test_a_setting_is_told_by_the_mean_of_its_measurements_and_not_by_the_last_or_the_luckiest():
    found = make_headline([make_measurement(8.564), make_measurement(5.799)], OBJECTIVES["turn_time"])
    assert found.figure == found.measurement.turn_time_s == pytest.approx(7.1815)
    assert found.low < 5.799 < 8.564 < found.high
    assert found.describe() == (f"turn_time 7.18 s (95 %: {found.low:.2f} to {found.high:.2f}), mean of 2 measurements")


def test_more_measurements_that_agree_narrow_the_interval():
    turn_time = OBJECTIVES["turn_time"]
    one, four = (make_headline([make_measurement(7.0)] * count, turn_time) for count in (1, 4))
    assert one.describe() == "turn_time 7.00 s (95 %: 6.78 to 7.23), 1 measurement"
    assert four.high - four.low < (one.high - one.low) / 2


def test_turns_that_differ_by_design_do_not_blur_the_decode_rate():
    found = [make_measurement(2.3, decode_tps=214.0, noise_ratio=0.057, decode_noise_ratio=0.002)] * 2
    turn, decode = (make_headline(found, OBJECTIVES[name]) for name in ("turn_time", "decode_tps"))
    assert turn.high / turn.low > 1.15
    assert decode.high / decode.low < 1.01
    only_turns = [one.model_copy(update={"decode_noise_ratio": None}) for one in found]
    assert make_headline(only_turns, OBJECTIVES["decode_tps"]).high > 1.05 * decode.high


def test_what_has_no_figure_of_the_objective_has_no_headline():
    assert make_headline([make_measurement()], OBJECTIVES["efficiency"]) is None
