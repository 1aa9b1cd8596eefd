"""Lines of a start read off the upstream engine's log, against what NVML sampled beside it."""

import json

import pytest

from benchmarks.planner_gpu.compare import FIXTURE, plan_run
from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.checkpoint.shape import ModelShape
from freetoken.planner.memory import Ledger, ResolvedSettings
from freetoken.planner.plan import Plan
from freetoken.units import MIB

DOCUMENT = json.loads(FIXTURE.read_text(encoding="utf-8"))
RUNS = {run["name"]: run for run in DOCUMENT["runs"]}


def measure(name, log=None, reserved=None):
    run = RUNS[name]
    budget = plan_run(run, ModelShape.model_validate(DOCUMENT["shapes"][run["depth"]]))
    plan = Plan(
        recipe_name="x", engine="freetoken", model_name="x", vram=budget.vram, ram=budget.ram, disk=budget.disk,
        settings=ResolvedSettings.model_validate(run["settings"]),
    )  # fmt: skip
    return FreetokenAdapter().measure_lines(plan, make_log(run) if log is None else log, reserved or 0)


def make_log(run):
    return (
        f"[INFO] Free memory before loading model: {run['free_before_gib']:.2f} GiB\n"
        f"[INFO] \x1b[32mFree memory after initialization: {run['free_after_init_gib']:.2f} GiB\x1b[0m\n"
        f"Free GPU memory before capturing CUDA graphs: {run['graphs_gib'][0]:.2f} GiB\n"
        f"Free GPU memory after capturing CUDA graphs: {run['graphs_gib'][1]:.2f} GiB\n"
        "Free GPU memory before capturing CUDA graphs: 3.00 GiB\n"
    )


@pytest.mark.parametrize("name", ["a03", "a04"])
def test_context_allocator_and_graphs_follow_from_four_statements_of_the_log(name):
    found = measure(name)
    assert found["cuda_context"] == pytest.approx(595 * MIB, abs=6 * MIB)
    assert found["allocator"] == pytest.approx(150 * MIB, abs=30 * MIB)
    assert found["cuda_graphs"] == pytest.approx((113 if name == "a03" else 133) * MIB, abs=MIB)
    assert found.keys() == {"cuda_context", "allocator", "cuda_graphs"}


def test_prefill_follows_from_what_torch_has_reserved():
    run = RUNS["a03"]
    found = measure("a03", reserved=run["reserved_bytes"])
    assert found["prefill_transient"] == pytest.approx(run["peaks"]["prefill"] - run["idle_bytes"], abs=40 * MIB)


def test_a_silent_log_tells_nothing_and_a_plan_without_vram_neither():
    assert measure("a03", log="nothing of the kind") == {}
    ram = Ledger(kind="ram", total_bytes=1, available_bytes=1)
    plan = Plan(
        recipe_name="x", engine="freetoken", model_name="x", ram=ram, disk=ram, settings=ResolvedSettings(kv_tokens=1)
    )
    assert FreetokenAdapter().measure_lines(plan, make_log(RUNS["a03"]), 1 << 40) == {}
