from freetoken.tuner.objectives import pick_objectives
from freetoken.tuner.study import Budget, Search
from tests.fakes.tuning import ScriptedLauncher, make_site


def make_search(launcher, seeds, trials=4):
    site = make_site(launcher.machine.seed)
    return Search(site, launcher, pick_objectives(("turn_time",)), budget=Budget(trials=trials), seed=0, seeds=seeds)


def test_a_new_study_starts_from_the_seeds_and_then_measures_the_default():
    search = make_search(ScriptedLauncher(seed=2), [])
    default = search.site.default_point()
    seed = {**default, "prefill_chunk_tokens": 512}
    end = make_search(ScriptedLauncher(seed=2), [seed]).run()
    assert [one.stage for one in end.observations[:2]] == ["seed", "default"]
    assert end.observations[0].point["prefill_chunk_tokens"] == 512


def test_slots_of_a_seed_are_cut_to_what_fits_here():
    search = make_search(ScriptedLauncher(seed=2), [])
    default = search.site.default_point()
    search = make_search(ScriptedLauncher(seed=2), [{**default, "expert_slots": 10**9}], trials=1)
    (one,) = search.run().observations
    forecast = search.site.forecast(one.point)
    assert one.stage == "seed"
    assert forecast.low <= one.point["expert_slots"] <= forecast.slots_within(0.0)
    assert one.outcome.kind == "ok"


def test_values_that_this_space_does_not_know_are_left_out():
    search = make_search(ScriptedLauncher(seed=2), [{"kv_dtype": "model", "odd": 1}], trials=1)
    (one,) = search.run().observations
    assert set(one.point) == {parameter.name for parameter in search.site.space}
