"""Live resize of expert slots and KV: checked against memory, done between two steps, undone where it fails."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from freetoken.engine.budget import RESERVE_BYTES, free_bytes
from freetoken.engine.quicken import renew
from freetoken.errors import FtError
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.engine.kv_cache import KvPool
    from freetoken.engine.loader import LoadedModel


class RebuildResult(BaseModel):
    """How a rebuild ended, with the sizes that are in force now.

    `busy`: something that runs needs more, ask again; `rejected`: does not fit, the old cache is kept;
    `failed`: neither new nor old could be had, the engine needs a restart; `timeout`: still at it.
    """

    model_config = ConfigDict(frozen=True)

    request_id: str = Field(default_factory=lambda: str(uuid.uuid4()))
    status: Literal["ok", "busy", "rejected", "failed", "timeout"]
    expert_slots: int
    kv_tokens: int
    error: str | None = None
    #: Another rebuild or a stop is in progress (a `busy` of the engine, not of its requests).
    is_conflict: bool = False


class CacheLimits(BaseModel):
    """What a rebuild may ask for now."""

    model_config = ConfigDict(frozen=True)

    budget_bytes: int
    kv_min: int
    kv_max: int
    slots_min: int
    slots_max: int


def compute_limits(loaded: LoadedModel, pool: KvPool) -> CacheLimits:
    """The budget, and how far it reaches for KV with the slots as they are, and for slots with the KV as it is."""
    slot_bytes, token_bytes = loaded.experts.slot_bytes, pool.geometry.bytes_per_token
    slots_now = loaded.experts.expert_slots * slot_bytes
    budget = max(slots_now + pool.bytes, slots_now + pool.bytes + free_bytes(loaded.device) - RESERVE_BYTES)
    lowest, highest = slot_range(loaded)
    affordable = (budget - pool.bytes) // slot_bytes if slot_bytes else highest
    return CacheLimits(
        budget_bytes=budget,
        kv_min=max(1, pool.use.reserved),
        kv_max=(budget - slots_now) // token_bytes if token_bytes else pool.tokens,
        slots_min=lowest,
        slots_max=max(lowest, min(highest, affordable)),
    )


def slot_range(loaded: LoadedModel) -> tuple[int, int]:
    """Fewest and most slots that a resize may ask for: without `offload` there is nothing to resize."""
    experts = loaded.experts
    if loaded.engine_config.strategy != "offload":
        return experts.expert_slots, experts.expert_slots
    return experts.min_slots, experts.max_slots


def rebuild(
    loaded: LoadedModel, pool: KvPool, *, expert_slots: int | None, kv_tokens: int | None, waiting_tokens: int
) -> RebuildResult:
    """Resizes what is given; what shrinks goes first. `waiting_tokens` = the largest request that waits for KV.

    Graphs that read the slots are captured anew before the answer, whether new slots or the old ones are in force.
    """
    result = _resize(loaded, pool, expert_slots, kv_tokens, waiting_tokens)
    if result.status != "failed":
        renew(loaded.model, loaded.graphs)
    return result


def _resize(
    loaded: LoadedModel, pool: KvPool, expert_slots: int | None, kv_tokens: int | None, waiting_tokens: int
) -> RebuildResult:
    old_slots, old_kv = loaded.experts.expert_slots, pool.tokens
    slots, kv = old_slots if expert_slots is None else expert_slots, old_kv if kv_tokens is None else kv_tokens

    def make_result(status: Literal["ok", "busy", "rejected", "failed"], error: str | None = None) -> RebuildResult:
        return RebuildResult(
            status=status, error=error, expert_slots=loaded.experts.expert_slots, kv_tokens=pool.tokens
        )

    if no := _reason_against(loaded, pool, slots, kv, waiting_tokens):
        return make_result(*no)
    steps: list[Callable[[], object]] = []
    if slots != old_slots:
        steps.append(lambda: loaded.experts.resize(slots))
    if kv != old_kv:
        steps.insert(0 if kv < old_kv else len(steps), lambda: pool.resize(kv))
    try:
        for step in steps:
            step()
            _return_memory(loaded.device)
    except (MemoryError, RuntimeError, ValueError, FtError) as error:
        reason = f"slots {slots}, KV {kv} tokens: {error}"
        if problem := _restore(loaded, pool, old_slots, old_kv):
            return make_result("failed", f"{reason}; the old cache could not be restored either: {problem}")
        return make_result("rejected", f"{reason}; old cache kept, still serving")
    return make_result("ok")


def _reason_against(
    loaded: LoadedModel, pool: KvPool, slots: int, kv: int, waiting_tokens: int
) -> tuple[Literal["busy", "rejected"], str] | None:
    """Why `slots` and `kv` cannot be had, with the numbers; None where they can."""
    kept = "old cache kept, still serving"
    limits, experts = compute_limits(loaded, pool), loaded.experts
    if kv < 1:
        return "rejected", f"requested KV of {kv} tokens is below 1; {kept}"
    lowest, highest = slot_range(loaded)
    if not lowest <= slots <= highest:
        where = f"outside {lowest} to {highest} of the strategy `{loaded.engine_config.strategy}`"
        return "rejected", f"requested {slots} expert slots, {where}; {kept}"
    needed = slots * experts.slot_bytes + kv * pool.geometry.bytes_per_token
    grows = slots > experts.expert_slots or kv > pool.tokens
    if grows and needed > limits.budget_bytes:
        asked = f"requested cache (moe={slots} slots, kv={kv} tokens)"
        return "rejected", f"{asked} needs {format_bytes(needed)} > budget {format_bytes(limits.budget_bytes)}; {kept}"
    if kv < pool.reserved_tokens:
        return (
            "busy",
            f"running requests hold {pool.reserved_tokens} tokens of KV, more than the {kv} asked for; {kept}",
        )
    if kv < waiting_tokens:
        return "busy", f"a waiting request needs {waiting_tokens} tokens of KV, more than the {kv} asked for; {kept}"
    return None


def _restore(loaded: LoadedModel, pool: KvPool, slots: int, kv: int) -> str | None:
    """Puts the old sizes back; the answer is what went wrong, None when all is as it was."""
    try:
        _return_memory(loaded.device)
        if pool.tokens != kv:
            pool.resize(kv)
        if loaded.experts.expert_slots != slots:
            loaded.experts.resize(slots)
    except (MemoryError, RuntimeError, ValueError, FtError) as error:
        return str(error)
    return None


def _return_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
