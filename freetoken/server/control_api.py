"""`/health`, `/v1/stats`, `/v1/cache/*`, `/v1/requests`, `/v1/admin/prepare-stop`: the engine's typed values under
the names that the upstream engine gives them, so that one client serves both. What we add stands beside them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from freetoken.server.errors import ApiError
from freetoken.server.listen import is_loopback
from freetoken.server.schemas import MOST_WAIT_S, PrepareStopBody, RebuildBody
from freetoken.server.state import ServerState

if TYPE_CHECKING:
    from freetoken.engine.rebuild import RebuildResult
    from freetoken.engine.scheduler import Engine

#: HTTP codes of a rebuild's statuses (a `busy` that is a conflict with another rebuild is 409).
_REBUILD_CODES = {"ok": 200, "busy": 503, "rejected": 503, "failed": 503, "timeout": 504}


def make_router(state: ServerState) -> APIRouter:
    """The endpoints, bound to `state`."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, Any]:
        return state.health()

    @router.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        return _describe_stats(state, state.engine)

    @router.get("/v1/requests")
    async def requests(since: int = Query(0, ge=0), limit: int = Query(100, ge=1, le=512)) -> dict[str, Any]:
        entries, cursor = state.ring.read(since, limit)
        return {"entries": entries, "next_cursor": cursor}

    @router.get("/v1/cache/status")
    async def cache_status() -> dict[str, Any]:
        return _describe_cache(state.engine)

    @router.post("/v1/cache/rebuild")
    async def rebuild(body: RebuildBody) -> JSONResponse:
        if not state.is_ready:
            return JSONResponse({"status": "loading", "error": "model is still loading"}, status_code=503)
        engine = state.engine
        if (refused := _refuse_pools(engine, body)) is not None:
            return refused
        result = await asyncio.to_thread(engine.rebuild, body.moe_cache_size, body.num_pages, timeout_s=body.timeout)
        code = 409 if result.is_conflict else _REBUILD_CODES[result.status]
        return JSONResponse(_describe_rebuild(engine, result), status_code=code)

    @router.api_route("/v1/cache/flush", methods=["GET", "POST"])
    async def flush(timeout: float = Query(0.0, ge=0, le=MOST_WAIT_S)) -> JSONResponse:
        try:
            dropped = await asyncio.to_thread(state.serving_engine.flush, max(timeout, 1.0))
        except TimeoutError:
            error = "the engine was in the middle of a step for too long"
            return JSONResponse({"status": "timeout", "error": error}, status_code=504)
        return JSONResponse({"status": "ok", "dropped_tokens": dropped})

    @router.post("/v1/admin/prepare-stop")
    async def prepare_stop(request: Request, body: PrepareStopBody | None = None) -> JSONResponse:
        if not is_loopback(request.client.host if request.client else ""):
            raise ApiError(403, "prepare-stop is taken from this machine only")
        return await _drain(state, body or PrepareStopBody())

    return router


async def _drain(state: ServerState, body: PrepareStopBody) -> JSONResponse:
    engine = state.engine
    is_drained = await asyncio.to_thread(engine.drain, body.drain_timeout_s)
    if not is_drained:
        engine.abort_all()
        is_drained = await asyncio.to_thread(engine.drain, body.abort_timeout_s)
    if not is_drained:
        engine.resume()
        error = f"{engine.active_count} requests are still running"
        return JSONResponse({"error": error, "drain_complete": False, "engine_preserved": True}, status_code=503)
    stats = engine.stats()
    return JSONResponse({
        "instance_id": state.instance_id, "model_id": state.options.served_model_name,
        "prompt_tokens_total": stats.prompt_tokens_total, "completion_tokens_total": stats.completion_tokens_total,
        "uptime_s": state.uptime_s, "drain_complete": True,
    })  # fmt: skip


def _describe_stats(state: ServerState, engine: Engine) -> dict[str, Any]:
    stats = engine.stats()
    hits = stats.hits
    return {
        "instance_id": state.instance_id,
        "model": {
            "id": state.options.served_model_name, "ctx": engine.model_tokens, "attn": _attention(engine), "moe": True,
            "input_modalities": ["text"], "sampling": engine.defaults.sampling or None,
        },
        "uptime_s": state.uptime_s,
        "kv": {
            "used_pages": stats.kv_used_tokens, "total_pages": stats.kv_total_tokens, "page_size": 1,
            "cached_pages": stats.kv_cached_tokens,
        },
        "mamba": {"used_slots": stats.state_sequences, "total_slots": engine.config.max_running_requests}
        if stats.has_state
        else None,
        "swa": None,
        "vram_bytes": stats.vram_bytes,
        "gpus": describe_gpus(engine),
        "throughput": {"decode_tps": round(stats.decode_tps, 1), "prefill_tps": round(stats.prefill_tps, 1)},
        "requests": {
            "active": stats.running + stats.waiting, "waiting": stats.waiting, "completed": stats.completed,
            "cancelled": stats.cancelled, "failed": stats.failed, **state.ring.summarise(),
            "prompt_tokens_total": stats.prompt_tokens_total, "cached_tokens_total": stats.cached_tokens_total,
            "completion_tokens_total": stats.completion_tokens_total,
        },
        "moe_hits": hits.model_dump() | {"hit_ratio": hits.hit_ratio},
        "memory": stats.memory,
        "decode_graphs": stats.graphs.model_dump() if stats.graphs is not None else None,
    }  # fmt: skip


def _describe_cache(engine: Engine) -> dict[str, Any]:
    status = engine.cache_status()
    limits, slots = status.limits, _state_slots(engine)
    return {
        "state": status.state,
        "last_rebuild": _describe_rebuild(engine, engine.last_rebuild) if engine.last_rebuild else None,
        "geometry": {
            "num_pages": status.kv_tokens, "page_size": 1, "moe_cache_size": status.expert_slots,
            "num_mamba_slots": slots, "num_experts": status.experts_per_layer, "num_moe_layers": status.moe_layers,
            "moe_cache_policy": "lru",
            "unit_bytes": {
                "kv_per_token": status.kv_bytes_per_token, "moe_per_expert": status.slot_bytes,
                "mamba_per_slot": status.state_bytes_per_sequence if slots else 0, "swa_per_token": 0,
            },
            "swa_full_tokens_ratio": 0.0, "swa_page_size": 0, "num_swa_pages": 0,
            "cache_budget_bytes": limits.budget_bytes, "reasoning": None,
            "limits": {
                "kv_tokens": {"min": limits.kv_min, "max": limits.kv_max},
                "moe_experts": {"min": limits.slots_min, "max": limits.slots_max},
                "mamba_slots": {"min": slots, "max": slots}, "swa_tokens": {"min": 0, "max": 0},
            },
            "strategy": engine.config.strategy, "prefix_cache": status.prefix_cache,
            "cached_tokens": status.cached_tokens, "max_running_requests": status.max_running_requests,
            "prefill_chunk_tokens": engine.config.prefill_chunk_tokens,
        },
    }  # fmt: skip


def _describe_rebuild(engine: Engine, result: RebuildResult) -> dict[str, Any]:
    return {
        "request_id": result.request_id, "status": result.status, "moe_cache_size": result.expert_slots,
        "num_pages": result.kv_tokens, "mamba_slots": _state_slots(engine), "num_swa_pages": 0, "error": result.error,
    }  # fmt: skip


def _refuse_pools(engine: Engine, body: RebuildBody) -> JSONResponse | None:
    """The answer to a rebuild of pools that this engine does not have; None where none is asked for."""
    if body.num_swa_pages is not None or body.swa_full_tokens_ratio is not None:
        both = body.num_swa_pages is not None and body.swa_full_tokens_ratio is not None
        error = (
            "num_swa_pages and swa_full_tokens_ratio exclude each other" if both else "this engine has no window pool"
        )
        return JSONResponse({"status": "failed", "error": error}, status_code=422)
    if body.num_mamba_slots not in (None, _state_slots(engine)):
        error = f"state slots follow max_running_requests ({engine.config.max_running_requests}), which needs a restart"
        return JSONResponse({"status": "unsupported", "error": error}, status_code=503)
    return None


def _state_slots(engine: Engine) -> int:
    return engine.config.max_running_requests if engine.pool.geometry.has_state else 0


def _attention(engine: Engine) -> str:
    geometry = engine.pool.geometry
    if geometry.has_state:
        return "hybrid_linear"
    return "hybrid_swa" if any(window is not None for window in geometry.windows.values()) else "mha"


def describe_gpus(engine: Engine) -> list[dict[str, Any]]:
    """The GPU that the engine uses; empty on the CPU."""
    from freetoken.engine.gpu import describe_gpu

    found = describe_gpu(engine.loaded.device)
    return [found] if found is not None else []
