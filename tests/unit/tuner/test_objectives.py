import pytest

from freetoken.errors import UsageError
from freetoken.recipe.model import GoodEnough
from freetoken.tuner.objectives import (
    OBJECTIVES,
    make_limits,
    missed_limits,
    pareto_front,
    penalised_cost,
    pick_objectives,
)
from freetoken.tuner.stop import count_fruitless, expected_gain, should_stop
from freetoken.tuner.values import Observation, Outcome
from tests.fakes.tuning import make_measurement


def observe(number, start=1, stage="probe", **figures):
    outcome = Outcome(kind="ok", measurement=make_measurement(**figures))
    return Observation(number=number, point={"x": number}, stage=stage, start=start, outcome=outcome)


def test_every_objective_of_a_recipe_is_known():
    assert set(OBJECTIVES) == {"turn_time", "decode_tps", "ttft", "throughput", "efficiency"}


@pytest.mark.parametrize("names", [(), ("speed",), ("ttft", "ttft"), ("ttft", "turn_time", "decode_tps")])
def test_one_or_two_known_objectives_can_be_asked_for(names):
    with pytest.raises(UsageError):
        pick_objectives(names)


def test_more_tokens_a_second_cost_less():
    slow, fast = make_measurement(decode_tps=20.0), make_measurement(decode_tps=40.0)
    rate = OBJECTIVES["decode_tps"]
    assert rate.cost(fast) < rate.cost(slow)
    assert rate.to_cost(rate.cost(fast)) == 40.0


def test_a_missed_limit_outweighs_any_speed():
    limits = make_limits(GoodEnough(ttft_p95=3.0, decode_tps=20))
    good, bad = make_measurement(12.0), make_measurement(8.0, ttft_p95_s=6.0)
    assert missed_limits(good, limits) == ()
    assert missed_limits(bad, limits) == ("ttft_p95",)
    cost = OBJECTIVES["turn_time"]
    assert penalised_cost(cost, good, limits) < penalised_cost(cost, bad, limits)


def test_the_front_holds_what_nothing_else_beats_in_both_objectives():
    objectives = pick_objectives(("ttft", "decode_tps"))
    seen = [
        observe(0, ttft_s=1.0, decode_tps=20.0), observe(1, ttft_s=2.0, decode_tps=40.0),
        observe(2, ttft_s=2.5, decode_tps=30.0), observe(3, ttft_s=1.5, decode_tps=30.0),
    ]  # fmt: skip
    assert [one.number for one in pareto_front(seen, objectives)] == [0, 3, 1]


def test_what_misses_a_limit_is_not_on_the_front():
    objectives, limits = pick_objectives(("ttft", "decode_tps")), make_limits(GoodEnough(decode_tps=25))
    seen = [observe(0, ttft_s=1.0, decode_tps=20.0), observe(1, ttft_s=2.0, decode_tps=40.0)]
    assert [one.number for one in pareto_front(seen, objectives, limits)] == [1]


def test_expected_gain_grows_with_the_mean_and_with_the_doubt():
    assert expected_gain(0.0, 0.1) == pytest.approx(0.0399, abs=1e-4)
    assert expected_gain(0.1, 1e-9) == pytest.approx(0.1)
    assert expected_gain(-0.1, 1e-9) == 0
    assert expected_gain(-0.05, 0.1) > expected_gain(-0.05, 0.02)


def test_a_search_stops_when_the_next_gain_could_not_be_seen():
    objective = OBJECTIVES["turn_time"]
    assert "less than the" in should_stop(0.001, 0.02, [], objective)
    assert should_stop(0.05, 0.02, [], objective) is None


def test_a_search_stops_after_starts_that_were_promised_gains_and_brought_none():
    times = [10.0, 8.0, 7.99, 7.98, 8.2]
    seen = [observe(index, start=index + 1, turn_time_s=time) for index, time in enumerate(times)]
    assert count_fruitless(seen, OBJECTIVES["turn_time"]) == 3
    assert "3 starts" in should_stop(0.01, 0.02, seen, OBJECTIVES["turn_time"])
    assert should_stop(0.05, 0.02, seen, OBJECTIVES["turn_time"]) is None


def test_the_front_leaves_out_what_is_better_by_noise_alone():
    seen = [
        observe(0, turn_time_s=10.0, decode_tps=50.0), observe(1, turn_time_s=9.98, decode_tps=30.0),
        observe(2, turn_time_s=5.0, decode_tps=20.0),
    ]  # fmt: skip
    objectives = pick_objectives(("turn_time", "decode_tps"))
    assert [one.number for one in pareto_front(seen, objectives)] == [2, 1, 0]
    assert [one.number for one in pareto_front(seen, objectives, noise=0.01)] == [2, 0]


def test_each_rate_has_the_noise_of_its_own_figure():
    found = make_measurement(noise_ratio=0.05, decode_noise_ratio=0.002, total_decode_tps=100.0, total_noise_ratio=0.1)
    noises = {name: one.noise(found) for name, one in OBJECTIVES.items()}
    assert noises == {"turn_time": 0.05, "ttft": 0.05, "efficiency": 0.05, "decode_tps": 0.002, "throughput": 0.1}
    # Without a rate of all requests together the one of each stands for it; what nobody told is the turn's.
    alone = found.model_copy(update={"total_decode_tps": None, "total_noise_ratio": None})
    assert OBJECTIVES["throughput"].noise(alone) == 0.002
    older = found.model_copy(update={"decode_noise_ratio": None, "total_noise_ratio": None})
    assert (OBJECTIVES["decode_tps"].noise(older), OBJECTIVES["throughput"].noise(older)) == (0.05, 0.05)
