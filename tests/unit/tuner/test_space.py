import pytest

from freetoken.adapters import get_adapter
from freetoken.tuner.site import PlannedSite
from freetoken.tuner.space import Parameter, make_space
from tests.fakes.planner_cases import make_gpu, make_machine, make_recipe, make_request


def names_of(recipe, hardware=None):
    hardware = hardware or make_machine(make_gpu(8, 7.6))
    space = make_space(make_request(recipe, hardware), get_adapter(recipe.engine.name))
    return {one.name for one in space} if space else set()


def test_what_the_recipe_fixes_is_no_knob():
    free = names_of(make_recipe())
    fixed = names_of(make_recipe(settings={"strategy": "offload", "expert_slots": 600}))
    assert free - fixed == {"strategy", "expert_slots"}


def test_knobs_that_change_answers_are_turned_only_where_they_are_listed():
    assert "state_dtype" not in names_of(make_recipe())
    assert "state_dtype" in names_of(make_recipe(allow_quality_changes=["state_dtype"]))


def test_what_the_planner_decides_is_never_a_knob():
    left = {"memory_ratio", "expert_load", "cpu_layers", "max_running_requests"}
    assert names_of(make_recipe()) & left == set()


def test_kv_is_never_below_the_workloads_need():
    recipe = make_recipe()
    space = make_space(make_request(recipe, make_machine(make_gpu(8, 7.6))), get_adapter("freetoken"))
    assert space["kv_tokens"].low == recipe.workload.kv_tokens


def test_chunks_stop_at_the_first_that_holds_the_context():
    space = make_space(make_request(make_recipe(), make_machine(make_gpu(8, 7.6))), get_adapter("freetoken"))
    assert space["prefill_chunk_tokens"].choices == (512, 1024, 2048, 4096, 8192)
    small = make_recipe(workload={"name": "s", "prompt_tokens": 500, "output_tokens": 100})
    space = make_space(make_request(small, make_machine(make_gpu(8, 7.6))), get_adapter("freetoken"))
    assert space["prefill_chunk_tokens"].choices == (512, 1024)


def test_a_recipe_that_fixes_everything_leaves_no_space():
    settings = {
        "expert_slots": 64, "kv_tokens": 8192, "strategy": "offload", "prefill_chunk_tokens": 512,
        "prefix_cache": True, "embed_on_host": False, "cpu_threads": 2,
    }  # fmt: skip
    assert names_of(make_recipe("native", settings=settings)) == set()


@pytest.mark.parametrize("value", [0, 1, 7, 10**9, 3.7])
def test_a_value_is_clipped_into_the_bounds(value):
    knob = Parameter(name="expert_slots", cost="live", kind="integer", low=4, high=128)
    assert 4 <= knob.clip(value) <= 128
    choice = Parameter(name="chunk", cost="restart", kind="choice", choices=(256, 512))
    assert choice.clip(value) in (256, 512)


def test_points_that_differ_only_in_what_does_nothing_are_one_point():
    space = make_space(make_request(make_recipe(), make_machine(make_gpu(8, 7.6))), get_adapter("freetoken"))
    point = space.clip({"strategy": "offload", "cpu_threads": 2})
    assert space.canonical(point) == space.canonical({**point, "cpu_threads": 8})
    hybrid = {**point, "strategy": "hybrid"}
    assert space.canonical(hybrid) != space.canonical({**hybrid, "cpu_threads": 8})


def test_the_planner_refuses_without_a_launch_and_says_how_much_is_missing():
    request = make_request(make_recipe(), make_machine(make_gpu(6, 5.6)))
    space = make_space(request, get_adapter("freetoken"))
    site = PlannedSite(request, get_adapter("freetoken"), space)
    assert site.forecast({**site.planned_point(), "strategy": "fused"}).missing_bytes > 10e9
    planned = site.forecast(site.planned_point())
    assert planned.missing_bytes == 0
    assert planned.slots_within(0) == planned.settings.expert_slots
    assert planned.slots_within(100 * planned.slot_bytes) <= planned.settings.expert_slots - 100
