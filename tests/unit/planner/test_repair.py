"""Repairs: each one plans, the cheapest in predicted speed first, none where nothing helps."""

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.adapters.native import NativeAdapter
from freetoken.planner.plan import Plan, Refusal
from freetoken.planner.repair import UnknownFieldError, apply_sets, try_sets
from freetoken.planner.solve import make_plan
from freetoken.units import GIB, MIB
from tests.fakes.planner_cases import make_gpu, make_machine, make_recipe, make_request, make_tiny_shape

KV = "settings.kv_tokens"


def refuse(total=6, free=5.6, *, ram_gib=32, machine=None, **recipe):
    machine = machine or make_machine(make_gpu(total, free), ram_gib=ram_gib)
    request = make_request(make_recipe(**recipe), machine)
    answer = make_plan(request, FreetokenAdapter())
    assert isinstance(answer, Refusal)
    return request, answer


CASES = [
    {"settings": {"expert_slots": 3000}},
    {"settings": {"prefill_chunk_tokens": 8192, "attention": "fi", "memory_ratio": 0.95, "max_running_requests": 4}},
    {"settings": {"memory_ratio": 0.5}},
    {"settings": {"embed_on_host": False, "max_running_requests": 4}},
    {"workload": {"prompt_tokens": 60_000, "output_tokens": 1000, "concurrency": 4, "context_tokens": 65_536}},
]


@pytest.mark.parametrize("case", CASES)
def test_every_repair_that_is_offered_plans_when_applied(case):
    request, answer = refuse(**case)
    assert answer.repairs
    for repair in answer.repairs:
        sets = {path: _typed(value) for path, value in repair.sets.items()}
        assert isinstance(make_plan(_with(request, sets), FreetokenAdapter()), Plan), repair


def _typed(text):
    if text.startswith("["):
        return [one.strip() for one in text.strip("[]").split(",")]
    return {"true": True, "false": False}.get(text, text)


def _with(request, sets):
    return request.model_copy(update={"recipe": apply_sets(request.recipe, sets)})


def test_repairs_are_ranked_by_predicted_decode_speed():
    _, answer = refuse(settings=CASES[1]["settings"])
    speeds = [repair.predicted_decode_tps for repair in answer.repairs]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) > 1


def test_a_repair_can_be_pasted_and_says_what_it_costs():
    _, answer = refuse(settings={"expert_slots": 3000})
    repair = answer.repairs[0]
    slots = repair.sets["settings.expert_slots"]
    assert slots.isdigit()
    assert repair.description == (
        f"expert_slots {slots}: {int(slots):,} slots, {repair.predicted_decode_tps:.3g} tok/s predicted"
    )


def test_two_changes_are_tried_where_none_alone_is_enough():
    _, answer = refuse(settings={"expert_slots": 3000, "kv_tokens": 200_000})
    assert answer.repairs
    assert all(len(repair.sets) == 2 for repair in answer.repairs)


def test_a_half_precision_state_is_offered_with_the_permission_it_needs():
    machine = make_machine(make_gpu(4, 3.55))
    _, answer = refuse(machine=machine)
    repair = next(one for one in answer.repairs if "settings.state_dtype" in one.sets)
    assert repair.sets == {"allow_quality_changes": "[state_dtype]", "settings.state_dtype": "bfloat16"}


def test_nothing_is_offered_where_ram_is_what_is_short():
    _, answer = refuse(ram_gib=16)
    assert answer.repairs == ()
    assert answer.alternatives == (
        "8.31 GiB more RAM for the 16.9 GiB of experts, or a smaller quantisation; engine `native` reads experts from "
        "disk where RAM is short: `ft plan owner/model --engine native`",
    )


def test_nothing_is_offered_where_the_hardware_is_not_supported():
    machine = make_machine(make_gpu(6, 5.6, compute_capability="7.5"))
    _, answer = refuse(machine=machine)
    assert answer.repairs == ()
    assert answer.alternatives[0].startswith("`ft plan owner/model --engine native`")


def test_sets_are_validated_like_any_recipe():
    request, _ = refuse(settings={"expert_slots": 3000})
    assert apply_sets(request.recipe, {"settings.expert_slots": "2GiB"}).settings.expert_slots.bytes == 2 << 30
    with pytest.raises(UnknownFieldError, match=r"settings\.nothing\.more"):
        apply_sets(request.recipe, {"settings.nothing.more": 1})
    assert try_sets(request, FreetokenAdapter(), {"settings.nothing": 1}) is None


def test_the_largest_kv_cache_that_fits_is_offered_beside_the_one_that_is_needed():
    request, answer = refuse(settings={"kv_tokens": 400_000}, workload={"prompt_tokens": 6000, "output_tokens": 1000})
    found = sorted(int(one.sets["settings.kv_tokens"]) for one in answer.repairs if one.sets.keys() == {KV})
    assert len(found) == 2
    assert found[0] < found[1] < 400_000
    assert isinstance(make_plan(_with(request, {KV: found[1]}), FreetokenAdapter()), Plan)
    assert isinstance(make_plan(_with(request, {KV: found[1] + 1024}), FreetokenAdapter()), Refusal)


def test_headroom_that_alone_is_too_much_is_what_is_blamed_and_given_up():
    _, answer = refuse(headroom=20 * GIB)
    assert (answer.blamed_line, answer.alternatives) == (None, ())
    assert "0 B may be used of 5.60 GiB free (20.0 GiB are headroom)" in answer.message
    assert [one.sets for one in answer.repairs] == [{"headroom": "server"}]


def test_ram_that_is_missing_for_other_things_than_experts_is_not_put_on_them():
    machine = make_machine(None, ram_gib=16)
    request = make_request(make_recipe("native", settings={"kv_tokens": 16_000_000}), machine, shape=make_tiny_shape())
    answer = make_plan(request, NativeAdapter())
    assert (answer.kind, answer.blamed_line) == ("refusal", "kv_cache")
    assert [one for one in answer.alternatives if "experts" in one] == []


def test_on_the_cpu_a_headroom_in_bytes_is_kept_of_the_ram():
    machine = make_machine(None, ram_gib=64)
    shape = make_tiny_shape()
    for headroom, expected in (("server", 512 * MIB), (20 * GIB, 20 * GIB)):
        request = make_request(make_recipe("native", headroom=headroom), machine, shape=shape)
        plan = make_plan(request, NativeAdapter())
        assert (plan.kind, plan.ram.headroom_bytes) == ("plan", expected)
