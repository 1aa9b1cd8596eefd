"""The planner's model of the upstream engine, held against what the engine itself printed on a GPU."""

import json
from pathlib import Path

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.adapters.freetoken_arithmetic import (
    AutoPlan,
    AutoRefusal,
    compute_fixed_bytes,
    upstream_auto_plan,
)
from freetoken.planner.budget import make_budget
from freetoken.planner.memory import ResolvedSettings
from freetoken.units import GIB, MIB
from tests.fakes.planner_cases import make_gpu, make_machine, make_qwen_shape, make_recipe, make_request

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "freetoken" / "recordings.json").read_text())
RUNS = {run["name"]: run for run in RECORDED["runs"]}
SERVED = [name for name, run in RUNS.items() if "slots" in run]
#: The CUDA context and allocator took 0.58 GiB, so the engine read 7.42 and 5.42 GiB free. W follows exactly from the
#: refusal of `default6` and from `cache_budget_bytes` of the others.
FREE = {8: int(7.42 * GIB), 6: int(5.42 * GIB)}


def settings_of(run):
    return ResolvedSettings(
        gpu="0", memory_ratio=run["ratio"], expert_slots=run.get("slots", 512), kv_tokens=run.get("pages", 8192),
        max_running_requests=run["mr"], strategy="cpu" if run["name"] == "cpu_8" else "offload", attention="triton",
        prefill_chunk_tokens=run["chunk"], prefix_cache=True, embed_on_host=run["embed_on_host"],
        expert_load="parallel", prefill_overlap=True,
    )  # fmt: skip


def request_of(run):
    gpu = make_gpu(139.8, run["free_gib"], compute_capability="9.0", sm_count=132)
    return make_request(make_recipe(), make_machine(gpu, ram_gib=128))


def weight_bytes(run):
    """W of the run, by subtraction from what the engine printed."""
    budget = run.get("cache_budget_bytes")
    if budget is None:
        refused = RUNS["default6"]
        fixed = compute_fixed_bytes(make_qwen_shape(), refused["mr"])
        return int(0.9 * FREE[6]) - fixed - refused["refusal"]["budget"]
    return int(run["ratio"] * FREE[run["free_gib"]]) - budget


@pytest.mark.parametrize("name", [name for name in SERVED if not RUNS[name].get("explicit")])
def test_slots_and_pages_equal_what_the_engine_gave_itself(name):
    run = RUNS[name]
    plan = upstream_auto_plan(
        FREE[run["free_gib"]], run["ratio"], weight_bytes(run), compute_fixed_bytes(make_qwen_shape(), run["mr"]),
        20_480, 1_781_760, 256, 40,
    )  # fmt: skip
    assert plan == AutoPlan(run["slots"], run["pages"], has_overlap=True)


def test_refusal_carries_the_engines_own_bytes():
    run = RUNS["default6"]
    plan = upstream_auto_plan(
        FREE[6], 0.9, weight_bytes(run), compute_fixed_bytes(make_qwen_shape(), 4), 20_480, 1_781_760, 256, 40
    )
    assert plan == AutoRefusal(1_080_033_280, 670_302_208, slots=512, pages=8192)
    assert plan.message == (
        "cache budget too small: minimum plan (moe=512 slots, kv=8192 pages) needs 1080033280 B > budget 670302208 B"
    )


@pytest.mark.parametrize("name", list(RUNS))
def test_predicted_weights_are_within_16_mib_of_what_loading_took(name):
    run = RUNS[name]
    model = FreetokenAdapter().memory_model
    assert model.weight_bytes(request_of(run), settings_of(run)) == pytest.approx(weight_bytes(run), abs=16 * MIB)


def budget_of(name, prompt_tokens=2000):
    """The budget of a run whose longest prompt had 2,000 tokens, whatever its chunk."""
    run = RUNS[name]
    settings = settings_of(run)
    chunk = min(settings.prefill_chunk_tokens, prompt_tokens)
    settings = settings.model_copy(update={"prefill_chunk_tokens": chunk})
    return make_budget(request_of(run), FreetokenAdapter().memory_model, settings)


@pytest.mark.parametrize("name", SERVED)
def test_plans_that_ran_are_admitted_and_fit_without_headroom(name):
    budget = budget_of(name)
    # The engine's plan fills its budget to the byte; ours knows W to 16 MiB.
    assert budget.admission.needed_bytes <= budget.admission.budget_bytes + 16 * MIB
    assert budget.vram.left_bytes >= 0


def test_the_engines_default_plan_on_8_gib_dies_at_its_first_full_chunk():
    budget = budget_of("default8", prompt_tokens=8192)
    assert budget.admission.is_admitted
    assert budget.vram.left_bytes < -350 * MIB
    assert budget.vram.peak_phase == "prefill"


def test_the_plan_that_was_refused_is_refused_by_the_same_rule():
    run = RUNS["default6"]
    admission = FreetokenAdapter().memory_model.admission(request_of(run), settings_of(run))
    assert admission.is_admitted is False
    assert admission.needed_bytes == 1_080_033_280
    assert admission.budget_bytes == pytest.approx(670_302_208, abs=16 * MIB)


@pytest.mark.parametrize("name", [name for name in SERVED if "free_after_graphs_gib" in RUNS[name]])
def test_free_memory_after_graph_capture_is_predicted_within_60_mib(name):
    run, budget = RUNS[name], budget_of(name)
    later = {"autotune_scratch", "prefill_transient"}
    used = sum(line.bytes for line in budget.vram.lines if line.key not in later)
    left = run["free_gib"] * GIB - used
    assert left == pytest.approx(run["free_after_graphs_gib"] * GIB, abs=60 * MIB)


@pytest.mark.parametrize("name", [name for name in SERVED if "reserved_bytes" in RUNS[name]])
def test_memory_reserved_after_prompts_is_predicted_within_two_percent(name):
    run, budget = RUNS[name], budget_of(name)
    outside = {"cuda_context", "allocator"}
    inside = [line for line in budget.vram.lines if line.key not in outside]
    steady = sum(line.bytes for line in inside if line.key not in ("autotune_scratch", "prefill_transient"))
    reserved = steady + max(line.bytes for line in inside if line.key in ("autotune_scratch", "prefill_transient"))
    assert reserved == pytest.approx(run["reserved_bytes"], rel=0.02)
