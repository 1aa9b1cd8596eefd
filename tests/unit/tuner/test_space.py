import pytest

from freetoken.adapters import get_adapter
from freetoken.tuner.record import make_canonical
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
    # With the strategy goes what does nothing under it: the threads of the experts on the CPU.
    assert free - fixed == {"strategy", "expert_slots", "cpu_threads"}
    assert "cpu_threads" in names_of(make_recipe(settings={"strategy": "hybrid"}))
    on_cpu = make_recipe("native", settings={"strategy": "offload"})
    assert names_of(on_cpu, make_machine()) >= {"expert_slots", "cpu_threads"}


def test_an_embedding_on_the_host_is_no_choice_where_everything_is():
    assert "embed_on_host" in names_of(make_recipe("native"))
    assert "embed_on_host" not in names_of(make_recipe("native"), make_machine())


def test_knobs_that_change_answers_are_turned_only_where_they_are_listed():
    assert "state_dtype" not in names_of(make_recipe())
    assert "state_dtype" in names_of(make_recipe(allow_quality_changes=["state_dtype"]))


def test_what_the_planner_decides_is_never_a_knob():
    left = {"memory_ratio", "expert_load", "cpu_layers"}
    assert names_of(make_recipe()) & left == set()


def test_requests_beyond_the_workloads_are_the_engines_default_and_nothing_that_a_search_tries():
    space = make_space(make_request(make_recipe(), make_machine(make_gpu(8, 7.6))), get_adapter("freetoken"))
    knob = space["max_running_requests"]
    assert (knob.choices, knob.values(), knob.clip(4)) == ((1, 4), (1,), 4)
    load = {"name": "s", "prompt_tokens": 500, "output_tokens": 100, "concurrency": 6}
    assert "max_running_requests" not in names_of(make_recipe(workload=load))
    assert "max_running_requests" not in names_of(make_recipe(settings={"max_running_requests": 2}))
    assert "max_running_requests" not in names_of(make_recipe("native"))


def make_h200_site(free_gib, **recipe):
    gpu = make_gpu(139.8, free_gib, compute_capability="9.0", sm_count=132)
    request = make_request(make_recipe(**recipe), make_machine(gpu, ram_gib=128))
    adapter = get_adapter("freetoken")
    return PlannedSite(request, adapter, make_space(request, adapter))


LOADS = ({}, {"workload": {"name": "one", "prompt_tokens": 2000, "output_tokens": 192, "context_tokens": 8192}})


@pytest.mark.parametrize("load", LOADS)
def test_the_engines_default_is_what_it_gives_itself_without_flags(load):
    """On a GPU held to 8 GiB it took 1,366 slots (tests/fixtures/freetoken/recordings.json, `default8`).

    Its prefix cache takes of them, whether a workload can use it or not.
    """
    site = make_h200_site(8.0, **load)
    point = site.default_point()
    told = {"strategy": "offload", "prefill_chunk_tokens": 8192, "max_running_requests": 4, "embed_on_host": False}
    assert told.items() <= point.items()
    assert point["expert_slots"] == pytest.approx(1366, abs=5)
    own = site.own_verdict(point)
    assert own is not None
    assert (own.slots, own.missing_bytes) == (point["expert_slots"], 0)
    assert point["prefix_cache"] is True
    # By plan it does not hold a full chunk, which is for the workload to find out.
    assert site.forecast(point).missing_bytes > 0
    # Of another hour, with a little more memory free, it is still the default; with one knob turned it is not.
    assert site.own_verdict({**point, "expert_slots": point["expert_slots"] + 20}) == own
    assert site.own_verdict({**point, "expert_slots": point["expert_slots"] + 200}) is None
    assert site.own_verdict({**point, "max_running_requests": 1}) is None


def test_a_default_that_its_own_rule_refuses_is_refused_in_its_words():
    """Held to 6 GiB it said: needs 1080033280 B > budget 670302208 B."""
    site = make_h200_site(6.0)
    own = site.own_verdict(site.default_point())
    assert own is not None
    assert own.words.startswith("cache budget too small: minimum plan (moe=512 slots, kv=8192 pages) needs 1080033280")
    assert own.missing_bytes == pytest.approx(1_080_033_280 - 670_302_208, abs=16 << 20)


def test_a_default_that_surely_runs_out_of_memory_is_not_started():
    """Held to 8 GiB it died in its first chunk of 8,000 tokens, and answered prompts of 2,000."""
    site = make_h200_site(8.0, workload={"name": "long", "prompt_tokens": 7900, "output_tokens": 200})
    own = site.own_verdict(site.default_point())
    assert own is not None
    assert own.missing_bytes > 200 << 20
    assert own.words == (
        f"its own rule grants {own.slots:,} expert slots, {own.missing_bytes:,} bytes more than there are by plan"
    )


def test_an_engine_without_a_rule_of_its_own_has_the_planners_slots():
    load = {"name": "s", "prompt_tokens": 500, "output_tokens": 100}
    request = make_request(make_recipe("native", workload=load), make_machine(make_gpu(8, 7.6), ram_gib=64))
    adapter = get_adapter("native")
    site = PlannedSite(request, adapter, make_space(request, adapter))
    assert site.own_verdict(site.default_point()) is None


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
    # What is shown, written and kept of them leaves out what does nothing, and is still the same point.
    assert "cpu_threads" not in space.relevant(point)
    assert space.relevant(hybrid)["cpu_threads"] == 2
    assert space.canonical(space.relevant(point)) == space.canonical(point)
    assert make_canonical(space.parameters, space.relevant(point)) == space.canonical(point)


def test_a_choice_that_needs_a_package_is_left_out_where_the_package_is_not_there():
    request, adapter = make_request(make_recipe(), make_machine(make_gpu(8, 7.6))), get_adapter("freetoken")
    assert make_space(request, adapter)["attention"].choices == ("triton", "fi")
    assert "attention" not in make_space(request, adapter, {"flashinfer"})
    assert make_space(request, adapter, {"something_else"})["attention"].choices == ("triton", "fi")


def test_the_planner_refuses_without_a_launch_and_says_how_much_is_missing():
    request = make_request(make_recipe(), make_machine(make_gpu(6, 5.6)))
    space = make_space(request, get_adapter("freetoken"))
    site = PlannedSite(request, get_adapter("freetoken"), space)
    assert site.forecast({**site.planned_point(), "strategy": "fused"}).missing_bytes > 10e9
    planned = site.forecast(site.planned_point())
    assert planned.missing_bytes == 0
    assert planned.slots_within(0) == planned.settings.expert_slots
    assert planned.slots_within(100 * planned.slot_bytes) <= planned.settings.expert_slots - 100
