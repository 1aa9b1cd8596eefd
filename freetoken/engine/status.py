"""What an engine tells about itself, as typed values; HTTP gives them their outward names."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict

from freetoken.engine.rebuild import CacheLimits
from freetoken.errors import FtError
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.engine.decode_graphs import DecodeGraphs
    from freetoken.engine.request import RequestHandle
    from freetoken.engine.scheduler import Engine
    from freetoken.engine.sequence import Sequence


class StatusModel(BaseModel):
    """Base: frozen."""

    model_config = ConfigDict(frozen=True)


class Hits(StatusModel):
    """Expert lookups of decode steps since the start: found in a slot, or fetched."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    miss_bytes: int = 0

    @property
    def hit_ratio(self) -> float | None:
        """Hits / lookups; None before the first lookup."""
        return self.hits / self.lookups if self.lookups else None


class GraphStats(StatusModel):
    """Decode steps replayed as CUDA graphs."""

    captured: int
    replayed: int
    held_bytes: int
    #: Why none are replayed any more; None while all is well.
    problem: str | None


class EngineStats(StatusModel):
    """Counts and rates. Tokens, bytes, tok/s."""

    taken_at: float
    kv_used_tokens: int
    kv_cached_tokens: int
    kv_total_tokens: int
    running: int
    waiting: int
    completed: int
    cancelled: int
    failed: int
    prompt_tokens_total: int
    cached_tokens_total: int
    completion_tokens_total: int
    decode_tps: float
    prefill_tps: float
    vram_bytes: int
    hits: Hits
    memory: dict[str, int]
    state_sequences: int
    has_state: bool
    #: None where decode steps are not made of graphs.
    graphs: GraphStats | None


class CacheStatus(StatusModel):
    """Geometry and limits of the two caches."""

    state: str
    expert_slots: int
    experts_per_layer: int
    moe_layers: int
    kv_tokens: int
    kv_bytes_per_token: int
    slot_bytes: int
    state_bytes_per_sequence: int
    max_running_requests: int
    prefix_cache: bool
    cached_tokens: int
    limits: CacheLimits


def describe_stats(engine: Engine) -> EngineStats:
    """The engine's counters, read without stopping it."""
    meter, pool, counters = engine.meter, engine.pool, engine.loaded.experts.counters()
    device, use = engine.loaded.device, pool.use
    running = engine.active_count - engine.waiting_count
    return EngineStats(
        taken_at=time.time(),
        kv_used_tokens=use.reserved,
        kv_cached_tokens=use.cached,
        kv_total_tokens=use.total,
        running=running,
        waiting=engine.waiting_count,
        completed=meter.completed,
        cancelled=meter.cancelled,
        failed=meter.failed,
        prompt_tokens_total=meter.prompt_tokens_total,
        cached_tokens_total=meter.cached_tokens_total,
        completion_tokens_total=meter.completion_tokens_total,
        decode_tps=meter.decode.read(),
        prefill_tps=meter.prefill.read(),
        vram_bytes=int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0,
        hits=Hits(lookups=counters.lookups, hits=counters.hits, misses=counters.misses, miss_bytes=counters.miss_bytes),
        memory=engine.memory(),
        state_sequences=running if pool.geometry.has_state else 0,
        has_state=pool.geometry.has_state,
        graphs=_describe_graphs(engine.loaded.graphs),
    )


def _describe_graphs(graphs: DecodeGraphs | None) -> GraphStats | None:
    if graphs is None:
        return None
    return GraphStats(
        captured=graphs.captured_count,
        replayed=graphs.replayed_count,
        held_bytes=graphs.held_bytes,
        problem=graphs.problem,
    )


def describe_cache(engine: Engine, limits: CacheLimits) -> CacheStatus:
    """Sizes in force now."""
    experts = engine.loaded.experts
    return CacheStatus(
        state=engine.state,
        expert_slots=experts.expert_slots,
        experts_per_layer=experts.experts_per_layer,
        moe_layers=len(experts.layouts),
        kv_tokens=engine.pool.tokens,
        kv_bytes_per_token=engine.pool.geometry.bytes_per_token,
        slot_bytes=experts.slot_bytes,
        state_bytes_per_sequence=engine.state_bytes_per_sequence,
        max_running_requests=engine.config.max_running_requests,
        prefix_cache=engine.pool.can_reuse_prefixes,
        cached_tokens=engine.pool.use.cached,
        limits=limits,
    )


def describe_request(handle: RequestHandle) -> str:
    """The line of a finished request in the log: tokens in, cached and out, time to the first one, rate, end."""
    first, last = handle.first_token_at, handle.finished_at
    parts = [
        f"{handle.prompt_tokens} prompt tokens ({handle.cached_tokens} cached)",
        f"{handle.completion_tokens} generated",
    ]
    if first is not None and last is not None:
        parts.append(f"first after {first - handle.submitted_at:.2f} s")
        if handle.completion_tokens > 1 and last > first:
            parts.append(f"{(handle.completion_tokens - 1) / (last - first):.3g} tok/s")
    parts.append(f"{handle.finish_reason}: {handle.error}" if handle.error else str(handle.finish_reason))
    return f"request {handle.number}: {', '.join(parts)}"


def describe_oom(error: torch.OutOfMemoryError, sequence: Sequence) -> FtError:
    """What a CUDA out-of-memory error in a step of `sequence` is told as."""
    # The first two sentences say what was asked for; the rest is advice for who writes the program.
    sentence, free = ". ".join(str(error).split(". ")[:2]), ""
    if torch.cuda.is_available():
        free = f" ({format_bytes(torch.cuda.mem_get_info()[0])} are free)"
    return FtError(
        f"{sentence}, in {sequence.phase} of a request of {sequence.handle.prompt_tokens} prompt tokens{free};"
        " the engine goes on serving",
        hint="a smaller `settings.prefill_chunk_tokens` or fewer `settings.expert_slots` leave more room",
    )
