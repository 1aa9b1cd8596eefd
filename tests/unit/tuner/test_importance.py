import random

from freetoken.tuner.importance import LEAST_POINTS, rank_knobs
from freetoken.tuner.objectives import OBJECTIVES
from freetoken.tuner.space import Parameter
from tests.fakes.tuning import make_measurement

KNOBS = (
    Parameter(name="chunk", cost="restart", kind="choice", choices=(512, 1024, 2048)),
    Parameter(name="share", cost="restart", kind="share", low=0, high=1),
    Parameter(name="slots", cost="live", kind="integer", low=1, high=1000, is_log=True),
)
TURN_TIME = OBJECTIVES["turn_time"]


def make_points(count, cost, slots=(1, 1000)):
    rng = random.Random(7)
    points = []
    for _ in range(count):
        point = {"chunk": rng.choice((512, 1024, 2048)), "share": rng.random(), "slots": rng.randint(*slots)}
        points.append((point, make_measurement(cost(point))))
    return points


def test_the_knob_that_decides_has_the_largest_share():
    found = rank_knobs(make_points(60, lambda p: 10 - 5 * p["share"]), KNOBS, TURN_TIME)
    assert next(iter(found.shares)) == "share"
    assert found.shares["share"] > 0.5
    assert abs(sum(found.shares.values()) - 1) < 1e-9
    assert found.note == "PED-ANOVA: what sets the best 10% of 60 measured trials apart from all of them"


def test_more_is_better_is_turned_round():
    points = make_points(60, lambda p: 1)
    points = [(point, make_measurement(decode_tps=10 + 90 * point["share"])) for point, _ in points]
    found = rank_knobs(points, KNOBS, OBJECTIVES["decode_tps"])
    assert next(iter(found.shares)) == "share"


def test_too_few_points_or_knobs_are_told_instead_of_ranked():
    few = rank_knobs(make_points(LEAST_POINTS - 1, lambda p: 1 + p["share"]), KNOBS, TURN_TIME)
    assert (few.shares, few.note) == ({}, "5 measured trials are too few to tell; 6 are needed")
    same = [({"chunk": 512, "share": 0.5, "slots": n}, make_measurement(n)) for n in range(1, 12)]
    assert rank_knobs(same, KNOBS, TURN_TIME).note == "1 of the knobs was turned: nothing to rank"
    assert rank_knobs([], KNOBS, OBJECTIVES["efficiency"]).shares == {}


def test_values_beyond_this_machines_bounds_are_ranked_too():
    points = make_points(30, lambda p: 1 / p["slots"], slots=(500, 4000))
    points += [({"chunk": 4096, "share": 0.5, "slots": 9000}, make_measurement(0.001))]
    found = rank_knobs(points, KNOBS, TURN_TIME)
    assert set(found.shares) == {"chunk", "share", "slots"}
