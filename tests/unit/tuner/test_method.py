import numpy as np
import pytest

from freetoken.tuner.method import Method
from freetoken.tuner.objectives import OBJECTIVES, pick_objectives
from freetoken.tuner.values import Observation, Outcome
from tests.fakes.tuning import make_measurement, make_site

TURN_TIME = pick_objectives(("turn_time",))


def observe(number, point, turn_time_s, **changes):
    measurement = make_measurement(turn_time_s, **changes)
    outcome = Outcome(kind="ok", measurement=measurement)
    return Observation(number=number, point=point, stage="default", start=1, outcome=outcome)


@pytest.fixture
def method():
    return Method(make_site(), TURN_TIME)


def test_noise_is_what_the_bench_says_until_repeats_differ_by_more(method):
    point = method.site.default_point()
    assert method.noise([]) == 0.02
    once = [observe(0, point, 10.0, noise_ratio=0.03)]
    assert method.noise(once) == pytest.approx(0.03)
    alike = [*once, observe(1, point, 10.3, noise_ratio=0.03)]
    assert method.noise(alike) == pytest.approx(0.03, rel=0.1)
    apart = [*once, observe(1, point, 12.5, noise_ratio=0.03)]
    assert 0.06 < method.noise(apart) < 0.12
    # Two different points say nothing of noise.
    other = [*once, observe(1, {**point, "prefill_chunk_tokens": 512}, 12.5, noise_ratio=0.03)]
    assert method.noise(other) == pytest.approx(0.03)


def test_the_best_follows_what_was_learned_last(method):
    slow = {**method.site.default_point(), "prefill_chunk_tokens": 512}
    fast = {**slow, "prefill_chunk_tokens": 4096}
    history = [observe(0, slow, 20.0)]
    assert method.best(history).point == slow
    history.append(observe(1, fast, 10.0))
    assert method.best(history).point == fast
    assert method.best(history[:1]).point == slow


def propose_after_default(overlap):
    """What comes after the default where `hybrid` is predicted a little faster than `offload`."""
    site = make_site(3)
    site.rates = site.rates._replace(cpu_overlap=overlap)
    method = Method(site, TURN_TIME)
    offload, hybrid = (method.candidate({**site.default_point(), "strategy": name}) for name in ("offload", "hybrid"))
    history = [observe(0, {**offload.point, "prefill_chunk_tokens": 512}, 10.0, hit_ratio=0.5)]
    method.learn(history)
    method._ranked = lambda *_: [offload, hybrid]
    method._costs = lambda candidates, objective: np.array(
        [9.0 if one.point["strategy"] == "hybrid" else 9.5 for one in candidates]
    )
    return method.propose(history)


def test_a_strategy_known_by_bandwidths_alone_is_not_the_first_to_be_started():
    careful = propose_after_default(None)
    assert (careful.stage, careful.point["strategy"]) == ("predicted", "offload")
    measured = propose_after_default(30e9)
    assert (measured.stage, measured.point["strategy"]) == ("predicted", "hybrid")


def test_a_hair_of_decode_speed_is_not_bought_with_seconds_to_the_first_token(method):
    (decode,) = pick_objectives(("decode_tps",))
    method.learn([])
    offload = [one for one in method._ranked([], decode) if one.point["strategy"] == "offload"]
    assert len(offload) == 1
    chosen = method.model.predict(offload)
    for chunk in method.space["prefill_chunk_tokens"].values():
        other = method.candidate({**offload[0].point, "prefill_chunk_tokens": chunk})
        found = method.model.predict([other])
        faster = float(chosen.step_s[0] / found.step_s[0]) - 1
        longer = float(found.turn_time_s(500)[0] / chosen.turn_time_s(500)[0]) - 1
        assert faster <= 0.011 * longer + 1e-4, f"chunk {chunk} decodes {faster:.2%} faster for {longer:.0%} of a turn"


def test_decode_speed_worth_having_is_chosen_over_the_turn(method):
    objectives = pick_objectives(("decode_tps", "turn_time"))
    method.learn([])
    chunks = [
        one.point["prefill_chunk_tokens"]
        for objective in objectives
        for one in method._ranked([], objective)
        if one.point["strategy"] == "offload"
    ]
    assert chunks[0] < chunks[1]


def test_a_disturbed_measurement_that_pins_the_model_is_made_once_more(method):
    point = method.candidate({**method.site.default_point(), "strategy": "offload"}).point
    calm = [observe(0, point, 10.0, noise_ratio=0.02)]
    assert method.propose(calm, running=1).stage != "repeat"
    disturbed = [observe(0, point, 12.0, noise_ratio=0.13)]
    again = method.propose(disturbed, running=1)
    assert (again.stage, again.is_live, again.point) == ("repeat", True, point)
    disturbed.append(observe(1, point, 12.0, noise_ratio=0.2))
    assert method.propose(disturbed, running=1).stage != "repeat", "once is enough"


def test_after_a_disturbed_measurement_the_calm_one_counts(method):
    point = method.candidate({**method.site.default_point(), "strategy": "offload"}).point
    slots = int(point["expert_slots"])
    true_s = float(method.model.predict([(point, method.site.forecast(point), slots)]).prefill_s[0])
    disturbed = observe(0, point, 12.0, noise_ratio=0.13, ttft_s=3 * true_s)
    calm = observe(1, point, 10.0, noise_ratio=0.01, ttft_s=true_s)
    method.learn([disturbed])
    alone = float(method.model.predict([(point, method.site.forecast(point), slots)]).prefill_s[0])
    method.learn([disturbed, calm])
    both = float(method.model.predict([(point, method.site.forecast(point), slots)]).prefill_s[0])
    assert alone > 1.25 * true_s
    assert both == pytest.approx(true_s, rel=0.2)


def test_of_two_objectives_each_is_doubted_by_its_own_noise():
    method = Method(make_site(), pick_objectives(("decode_tps", "turn_time")))
    seen = [observe(0, method.site.default_point(), 10.0, noise_ratio=0.06, decode_noise_ratio=0.002)]
    turn, decode = (method.noise(seen, OBJECTIVES[name]) for name in ("turn_time", "decode_tps"))
    assert (turn, decode) == (pytest.approx(0.06), pytest.approx(0.002))
    assert method.noise(seen) == decode
