"""What the control API answers, typed. One set of shapes for the upstream engine and for ours.

Fields that an engine adds are kept (`extra="allow"`), fields that it leaves out have a neutral default: what is
read here decides whether a deployment is ready, so a missing extra must not look like a dead engine.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    """Base of replies: frozen, further fields kept."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


class Progress(Reply):
    """Bytes of the phase that is being loaded; a total of 0 = not known."""

    done_bytes: int = 0
    total_bytes: int = 0


class Health(Reply):
    """`GET /health`. Its HTTP code is always 200, so the status is here."""

    status: str  # loading | ok | error
    message: str | None = None
    model: str | None = None
    instance_id: str | None = None
    uptime_s: float | None = None
    maintenance: str | None = None  # serving | rebuilding | failed | stopping
    version: str | None = None
    phase: str | None = None
    progress: Progress | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it serves: status `ok` and maintenance `serving`, both."""
        return self.status == "ok" and self.maintenance == "serving"


class ModelInfo(Reply):
    """The model as `/v1/stats` names it; `ctx` is the model's limit, not the KV capacity."""

    id: str = ""
    ctx: int | None = None
    attn: str | None = None
    moe: bool | None = None
    input_modalities: tuple[str, ...] = ()
    sampling: dict[str, Any] | None = None


class PageUse(Reply):
    """Pages of a pool; tokens = pages x page size."""

    used_pages: int = 0
    total_pages: int = 0
    page_size: int = 1


class SlotUse(Reply):
    """State slots of linear attention."""

    used_slots: int = 0
    total_slots: int = 0


class Throughput(Reply):
    """tok/s of the last seconds; too coarse for tuning."""

    decode_tps: float = 0.0
    prefill_tps: float = 0.0


class RequestCounts(Reply):
    """Requests and tokens since the start."""

    active: int = 0
    completed: int = 0
    p95_ms: float | None = None
    ttft_mean_ms: float | None = None
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0


class MoeHits(Reply):
    """Expert lookups of decode steps since the start."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    miss_bytes: int = 0
    hit_ratio: float | None = None


class Stats(Reply):
    """`GET /v1/stats`. `moe_hits` is None where the engine does not count hits there."""

    instance_id: str | None = None
    model: ModelInfo = ModelInfo()
    uptime_s: float = 0.0
    kv: PageUse | None = None
    mamba: SlotUse | None = None
    swa: PageUse | None = None
    vram_bytes: int = 0
    gpus: tuple[dict[str, Any], ...] = ()
    throughput: Throughput = Throughput()
    requests: RequestCounts = RequestCounts()
    moe_hits: MoeHits | None = None


class UnitBytes(Reply):
    """Measured cost of one unit of each cache."""

    kv_per_token: int = 0
    moe_per_expert: int = 0
    mamba_per_slot: int = 0
    swa_per_token: int = 0


class Range(Reply):
    """Fewest and most that a rebuild may ask for."""

    min: int = 0
    max: int = 0


class CacheLimits(Reply):
    """What the caches may be resized to, each with the others as they are."""

    kv_tokens: Range = Range()
    moe_experts: Range = Range()
    mamba_slots: Range = Range()
    swa_tokens: Range = Range()


class Geometry(Reply):
    """Sizes in force."""

    num_pages: int = 0
    page_size: int = 1
    moe_cache_size: int = 0
    num_mamba_slots: int = 0
    num_experts: int = 0
    num_moe_layers: int = 0
    moe_cache_policy: str | None = None
    unit_bytes: UnitBytes = UnitBytes()
    swa_full_tokens_ratio: float = 0.0
    swa_page_size: int = 0
    num_swa_pages: int = 0
    cache_budget_bytes: int = 0
    limits: CacheLimits = CacheLimits()


class CacheStatus(Reply):
    """`GET /v1/cache/status`."""

    state: str = ""
    last_rebuild: dict[str, Any] | None = None
    geometry: Geometry = Geometry()

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.geometry.num_pages * self.geometry.page_size

    @property
    def expert_slots(self) -> int:
        """Expert slots in force."""
        return self.geometry.moe_cache_size


RebuildStatus = Literal["ok", "busy", "rejected", "unsupported", "failed", "loading", "timeout"]


class RebuildResult(Reply):
    """`POST /v1/cache/rebuild`: the sizes are those in force after it, whatever it answered."""

    status: RebuildStatus
    request_id: str | None = None
    moe_cache_size: int | None = None
    num_pages: int | None = None
    mamba_slots: int | None = None
    num_swa_pages: int | None = None
    error: str | None = None
    #: Seconds from the first call to the answer, retries included.
    duration_s: float = Field(default=0.0, ge=0)

    @property
    def is_ok(self) -> bool:
        """Whether what was asked for is in force."""
        return self.status == "ok"

    @property
    def is_declined(self) -> bool:
        """Whether nothing was done: the engine goes on with the sizes that it had."""
        return self.status in ("busy", "rejected", "unsupported", "loading")


class RequestEntry(Reply):
    """One row of the request ring."""

    ts: float | None = None
    method: str = ""
    path: str = ""
    status: int | None = None
    model: str | None = None
    duration_ms: float | None = None
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    stream: bool | None = None
    error: str | None = None


class RequestPage(Reply):
    """`GET /v1/requests`; `next_cursor` is the `since` of the next call."""

    entries: tuple[RequestEntry, ...] = ()
    next_cursor: int = 0


class Completion(Reply):
    """One timed completion, counted by the engine's own `usage`. Seconds, tok/s."""

    text: str
    ttft_s: float
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None = None
    #: (completion tokens - 1) / (last - first token); None with fewer than two tokens.
    decode_tps: float | None = None
