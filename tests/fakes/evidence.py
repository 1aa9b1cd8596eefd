"""Replays public reports: a report becomes recipe + profile, and the planner says whether it would have run.

Rules, the same for every row: what the report gives is taken; a flag that it does not give has the engine's default;
free VRAM is as reported, else what is usual for the card; a prompt that is not reported is a full chunk, since that
is what a plan has to promise. Where the engine sized its own slots, its own rule is run first. Headroom is 0: the
question is what fits, not what is wise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from freetoken.adapters import get_adapter
from freetoken.adapters.freetoken_arithmetic import (
    AutoPlan,
    AutoRefusal,
    choose_page_tokens,
    compute_kv_bytes,
    upstream_auto_plan,
)
from freetoken.adapters.freetoken_sizes import slot_bytes
from freetoken.checkpoint.cards import find_card
from freetoken.checkpoint.shape import ModelShape, TensorGroup
from freetoken.hardware.catalog import make_what_if
from freetoken.hardware.model import Hardware
from freetoken.planner.plan import PlanRequest
from freetoken.planner.solve import Attempt, search
from freetoken.recipe.model import Recipe
from freetoken.units import GIB, MIB

DOCUMENT = json.loads((Path(__file__).parents[1] / "fixtures" / "evidence" / "rows.json").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = DOCUMENT["rows"]
BITS = {"iq3_s": 3.4375, "q4_k": 4.5, "q5_k": 5.5}
#: RAM that decides nothing, where a report does not give it.
PLENTY_OF_RAM_GIB = 1024


class Verdict(NamedTuple):
    """What the planner says of a row: yes or no, what would be left of the card at the peak, and why."""

    fits: bool
    left_ratio: float | None
    reason: str
    auto: AutoPlan | AutoRefusal | None = None
    attempt: Attempt | None = None


def make_shape(row: dict[str, Any]) -> ModelShape:
    """The card of the row, with the quantisation that the report names."""
    shape = find_card(row["card"])
    assert shape is not None, row["card"]
    update: dict[str, Any] = {}
    if "dense_bits" in row:
        for name in ("dense", "shared_experts"):
            update[name] = _at_bits(getattr(shape, name), row["dense_bits"])
    if "bits" in row:
        experts = shape.experts
        each = int(3 * experts.hidden_size * experts.intermediate_size * BITS[row["bits"]] / 8)
        update["experts"] = experts.model_copy(update={"expert_bytes": each, "bytes_by_layer": ()})
    return shape.model_copy(update=update)


def _at_bits(group: TensorGroup, bits: float) -> TensorGroup:
    return group.model_copy(update={"bytes": int(group.elements * bits / 8)})


def make_machine(row: dict[str, Any], shift_bytes: int = 0) -> Hardware:
    """The profile of the row; `shift_bytes` moves what is free within its uncertainty."""
    machine = make_what_if(row["gpu"], f"{row.get('ram', PLENTY_OF_RAM_GIB)}GiB")
    gpu, ram = machine.gpus[0], machine.ram
    total = int(row["total"] * GIB) if "total" in row else gpu.vram_total_bytes
    free = gpu.vram_free_bytes - (gpu.vram_total_bytes - total)
    if row.get("headless"):
        free = total - 200 * MIB - int(0.0054 * total)
    if "held_gib" in row:
        free = total - int(row["held_gib"] * GIB)
    if "free" in row:
        free = int(row["free"] * GIB)
    update = {"vram_total_bytes": total, "vram_free_bytes": min(total, free + shift_bytes), "vram_free_spread_bytes": 0}
    if "pinnable" in row:
        ram = ram.model_copy(update={"pinnable_bytes": int(row["pinnable"] * GIB)})
    return machine.model_copy(update={"gpus": (gpu.model_copy(update=update),), "ram": ram})


def free_spread(row: dict[str, Any]) -> int:
    """Bytes by which the free VRAM of the row is uncertain; 0 where it was reported."""
    if "free" in row:
        return 0
    return 64 * MIB if row.get("headless") else make_what_if(row["gpu"]).gpus[0].vram_free_spread_bytes


def judge(row: dict[str, Any], shift_bytes: int = 0) -> Verdict:
    """Would this row have run, by the planner."""
    shape, machine = make_shape(row), make_machine(row, shift_bytes)
    settings = _defaults(row)
    adapter = get_adapter("freetoken")
    request = _request(row, settings, shape, machine)
    auto = None
    if "expert_slots" not in settings and settings["strategy"] != "cpu":
        auto = plan_like_the_engine(request, row)
        if isinstance(auto, AutoRefusal):
            return Verdict(False, None, auto.message, auto)
        page = choose_page_tokens(shape, settings.get("attention"))
        settings |= {"expert_slots": auto.slots, "kv_tokens": row.get("kv", auto.pages * page)}
    # What the engine's own rule admitted is held against the bytes alone; a ratio is no part of physics.
    settings |= {"memory_ratio": "auto", "kv_tokens": row.get("grown_kv", settings["kv_tokens"])}
    settings.setdefault("prefill_overlap", "auto")
    if settings["strategy"] == "cpu":
        settings.pop("expert_slots", None)
    attempt = search(_request(row, settings, shape, machine), adapter.memory_model)
    assert attempt is not None
    left = attempt.budget.vram.left_bytes / machine.gpus[0].vram_total_bytes
    return Verdict(attempt.is_feasible, left, _why(attempt), auto, attempt)


def plan_like_the_engine(request: PlanRequest, row: dict[str, Any]) -> AutoPlan | AutoRefusal:
    """Slots and pages that the engine gives itself with the row's ratio and reserve."""
    model = get_adapter("freetoken").memory_model
    settings = next(iter(model.candidates(request)))
    shape, page = request.shape, choose_page_tokens(request.shape, settings.attention)
    return upstream_auto_plan(
        model.free_before_load(request, settings), row["settings"].get("memory_ratio", 0.9),
        model.weight_bytes(request, settings), model.fixed_bytes(request, settings), compute_kv_bytes(shape) * page,
        slot_bytes(shape), shape.experts.per_layer, shape.experts.layers,
        overlap=row["settings"].get("prefill_overlap", True), reserve_tokens=row.get("reserve", 8192), page_tokens=page,
    )  # fmt: skip


def _defaults(row: dict[str, Any]) -> dict[str, Any]:
    """The row's settings on top of the engine's defaults; a chunk is never longer than the longest prompt."""
    settings: dict[str, Any] = {
        "max_running_requests": row.get("max_running", 4), "prefill_chunk_tokens": 8192, "strategy": "offload",
        "embed_on_host": False, "prefix_cache": True, "kv_tokens": row.get("kv", row.get("reserve", 8192)),
    }  # fmt: skip
    settings |= row["settings"]
    settings["prefill_chunk_tokens"] = min(settings["prefill_chunk_tokens"], row.get("prompt", 1 << 30))
    return settings


def _request(row: dict[str, Any], settings: dict[str, Any], shape: ModelShape, machine: Hardware) -> PlanRequest:
    context = settings["kv_tokens"]
    recipe = Recipe.model_validate({
        "name": row["id"], "model": {"repo": "reported/model"}, "headroom": 0, "settings": settings,
        "engine": {"name": "freetoken", "extra_args": row.get("extra_args", [])},
        "workload": {"prompt_tokens": context - 1, "output_tokens": 1},
        "serve": {"text_only": not row.get("vision", False)},
    })  # fmt: skip
    return PlanRequest(recipe=recipe, hardware=machine, shape=shape)


def _why(attempt: Attempt) -> str:
    budget = attempt.budget
    if attempt.is_feasible:
        return f"{budget.vram.left_bytes >> 20:,} MiB left at the peak ({budget.vram.peak_phase})"
    if attempt.finding is not None:
        return attempt.finding.message
    from freetoken.planner.explain import describe_shortfall

    return describe_shortfall(budget)
