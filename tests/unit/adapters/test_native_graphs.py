"""What CUDA graphs of decode steps change in the embedded engine's plan, held against one run on an H200.

The run: `benchmarks/gpu/README.md`, 8 GiB of an H200, offload with 2,000 slots, 2,000 tokens in, 128 out.
"""

from __future__ import annotations

from typing import Any

import pytest

from freetoken.adapters.native import NativeAdapter
from freetoken.adapters.native_lines import CUDA_GRAPHS_BYTES
from freetoken.adapters.native_memory import GRAPH_LAYER_OVERHEAD_S, LAYER_OVERHEAD_S, SERVER_STEP_S
from freetoken.hardware.model import Bandwidth, Hardware, PcieLink
from freetoken.planner.plan import Calibration, Plan
from freetoken.planner.roofline import fit_hit_curve
from freetoken.planner.solve import make_plan
from freetoken.units import MIB
from tests.fakes.planner_cases import make_gpu, make_machine, make_qwen_shape, make_recipe, make_request

SLOTS, EXPERTS = 2000, 40 * 256
MEASURED_TPS, MEASURED_HITS = 87.2, 0.858
#: The demo model, four layers all but free of misses, in its proof.
DEMO_TPS = 370
#: In use at the peak, with graphs and without.
TAKEN_BYTES, TAKEN_EAGER_BYTES = 7380 * MIB, 7320 * MIB


def make_h200() -> Hardware:
    gpu = make_gpu(
        140.4, 8.001, name="NVIDIA H200", compute_capability="9.0", sm_count=132,
        pcie=PcieLink(max_generation=5, max_width=16),
    )  # fmt: skip
    rates = Bandwidth(h2d_bytes_per_s=50e9, vram_bytes_per_s=4.8e12, dram_bytes_per_s=92e9, disk_bytes_per_s=2.5e9)
    return make_machine(gpu, ram_gib=128, bandwidth=rates)


def plan_run(machine: Hardware | None = None, *, calibration: Calibration | None = None, **shape: Any) -> Plan:
    recipe = make_recipe(
        "native", headroom="150MiB",
        workload={"name": "run", "prompt_tokens": 2000, "output_tokens": 128, "context_tokens": 2128},
        settings={
            "strategy": "offload", "expert_slots": SLOTS, "prefill_chunk_tokens": 1024, "embed_on_host": False,
        },
    )  # fmt: skip
    request = make_request(
        recipe, machine or make_h200(), make_qwen_shape(**shape), calibration=calibration or Calibration()
    )
    plan = make_plan(request, NativeAdapter())
    assert isinstance(plan, Plan), plan.message
    return plan


@pytest.mark.parametrize("hit_ratio", [None, MEASURED_HITS], ids=["planned hit rate", "measured hit rate"])
def test_the_measured_run_is_predicted_within_a_tenth(hit_ratio: float | None) -> None:
    curve = None if hit_ratio is None else fit_hit_curve(SLOTS / EXPERTS, hit_ratio)
    step_s = 1 / plan_run(calibration=Calibration(hit_curve_c=curve)).prediction.decode_tps
    # That run had no server around it.
    assert 1 / (step_s - SERVER_STEP_S) == pytest.approx(MEASURED_TPS, rel=0.1)


def test_a_small_model_is_bound_by_its_server() -> None:
    request = make_request(make_recipe("native"), make_h200(), make_qwen_shape(layers=4))
    model = NativeAdapter().memory_model
    settings = next(one for one in model.candidates(request) if one.device == "cuda")
    assert 1 / model.speed_traits(request, settings).step_overhead_s == pytest.approx(DEMO_TPS, rel=0.05)


def test_the_peak_of_the_measured_run_is_planned_within_a_hundredth() -> None:
    ledger = plan_run().vram
    assert ledger.peak_bytes == pytest.approx(TAKEN_BYTES, rel=0.01)
    # Graphs are in their own line alone: without it the plan is as near to the run without graphs.
    assert ledger.peak_bytes - CUDA_GRAPHS_BYTES == pytest.approx(TAKEN_EAGER_BYTES, rel=0.01)
    assert CUDA_GRAPHS_BYTES == TAKEN_BYTES - TAKEN_EAGER_BYTES


def test_graphs_are_there_from_their_capture_on() -> None:
    line = plan_run().vram.line("cuda_graphs")
    assert line is not None
    assert (line.bytes, line.phases) == (60 * MIB, ("capture", "prefill", "decode"))


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "glm4_moe"])
def test_a_family_whose_layers_are_not_cut_decodes_by_launches(family: str) -> None:
    plan, graphs = plan_run(family=family), plan_run()
    assert plan.vram.line("cuda_graphs") is None
    assert plan.vram.peak_bytes == graphs.vram.peak_bytes - CUDA_GRAPHS_BYTES
    slower_s = 1 / plan.prediction.decode_tps - 1 / graphs.prediction.decode_tps
    # Another family has another hit rate as well.
    assert slower_s == pytest.approx(40 * (LAYER_OVERHEAD_S["cuda"] - GRAPH_LAYER_OVERHEAD_S), rel=0.02)
    assert (plan.prediction.limited_by, plan.prediction.prefill_tps) == (
        "overhead", pytest.approx(graphs.prediction.prefill_tps, rel=0.1),
    )  # fmt: skip


def test_a_cpu_has_neither_the_line_nor_the_speed() -> None:
    machine = make_machine(ram_gib=64)
    request = make_request(make_recipe("native"), machine, make_qwen_shape())
    model = NativeAdapter().memory_model
    settings = next(iter(model.candidates(request)))
    assert settings.device == "cpu"
    assert [line.key for line in model.ram_lines(request, settings) if line.key == "cuda_graphs"] == []
    assert model.speed_traits(request, settings).step_overhead_s == pytest.approx(40 * LAYER_OVERHEAD_S["cpu"])
