import pytest

from freetoken.tuner.method import Method
from freetoken.tuner.objectives import pick_objectives
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
