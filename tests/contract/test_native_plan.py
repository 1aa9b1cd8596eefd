"""Ledger lines of the embedded engine against the bytes that it really allocates, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.adapters.native import NativeAdapter
from freetoken.checkpoint.header import read_shape
from freetoken.engine.config import EngineConfig
from freetoken.engine.loader import load_model
from freetoken.engine.request import GenerationRequest
from freetoken.engine.scheduler import Engine
from freetoken.planner.plan import Plan
from freetoken.planner.solve import make_plan
from tests.fakes.planner_cases import make_machine, make_recipe, make_request
from tests.fakes.tiny_models import FAMILIES, TOP_K, make_tiny_checkpoint

#: Lines that one running model can be asked for; runtime, activations and KV belong to the process and the scheduler.
MEASURED = ("dense_weights", "shared_experts", "head", "embedding", "expert_slots", "expert_banks", "prefill_staging")
WORK = {"name": "tiny", "prompt_tokens": 64, "output_tokens": 16}
SETTINGS: list[dict[str, Any]] = [
    {"strategy": "fused"},
    {"strategy": "cpu"},
    {"strategy": "offload", "expert_slots": TOP_K},
    {"strategy": "offload", "expert_slots": 12},
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("plan") / request.param, request.param)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "-".join(map(str, one.values())))
def test_planned_lines_are_what_the_engine_allocates(checkpoint: Path, settings: dict[str, Any]) -> None:
    shape = read_shape(checkpoint)
    recipe = make_recipe("native", workload=WORK, settings=settings)
    plan = make_plan(make_request(recipe, make_machine(ram_gib=16), shape, model_path=str(checkpoint)), NativeAdapter())
    assert isinstance(plan, Plan), plan.message
    resolved = plan.settings
    config = EngineConfig(
        model_path=checkpoint, strategy=resolved.strategy, expert_slots=resolved.expert_slots,
        kv_tokens=resolved.kv_tokens, experts_from=resolved.experts_from or "auto",
    )  # fmt: skip
    loaded = load_model(config)
    try:
        measured = loaded.memory()
    finally:
        loaded.close()
    planned = {key: line.bytes for key in MEASURED if (line := plan.ram.line(key)) is not None}
    found = {key: measured[key] for key in MEASURED if measured.get(key)}
    # Norms and routers keep their own types; a record's parts are aligned: a few KiB on these tiny models.
    assert planned == {key: pytest.approx(value, rel=0.02, abs=8192) for key, value in found.items()}


def test_the_planned_state_of_linear_attention_is_what_a_sequence_keeps(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "qwen3_5_moe")
    shape = read_shape(folder)
    recipe = make_recipe("native", workload=WORK, settings={"strategy": "fused"})
    plan = make_plan(make_request(recipe, make_machine(ram_gib=16), shape, model_path=str(folder)), NativeAdapter())
    assert isinstance(plan, Plan), plan.message
    config = EngineConfig(model_path=folder, strategy="fused", kv_tokens=64)
    engine = Engine(load_model(config), config)
    try:
        told = engine.state_bytes_per_sequence
        list(engine.submit(GenerationRequest(prompt_ids=(5, 6, 7, 8, 9, 10), max_tokens=3)))
        measured = engine.state_bytes_per_sequence
    finally:
        engine.close()
    assert (plan.ram.line("linear_state").bytes, told) == (measured, measured)
