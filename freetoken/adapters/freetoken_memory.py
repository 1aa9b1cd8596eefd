"""What the upstream engine allocates: VRAM, RAM and disk lines by phase, and the settings worth a look.

Start-up arithmetic (`freetoken_arithmetic.py`) is the engine's own and exact. The rest, which the engine never
checks, was measured on one GPU or derived from the shapes; every line says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from freetoken.adapters import freetoken_arithmetic as arithmetic
from freetoken.adapters.base import DefaultSlots
from freetoken.adapters.freetoken_flags import has_flag
from freetoken.adapters.freetoken_lines import late_lines, make_ram_lines, weight_lines
from freetoken.adapters.freetoken_sizes import (
    ALLOCATOR_BYTES,
    JIT_CACHE_BYTES,
    RUNTIME_BYTES,
    largest_shard,
    packed_bytes,
    parallel_loader_bytes,
    pin_limit,
    slot_bytes,
    state_element_bytes,
    vision_resident_bytes,
)
from freetoken.adapters.freetoken_speed import make_speed_traits
from freetoken.adapters.model_costs import context_bytes, shape_source
from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Gpu
from freetoken.planner.budget import RAM_HEADROOM_BYTES, available_ram, find_gpu
from freetoken.planner.memory import Admission, Line, ResolvedSettings, SpeedTraits
from freetoken.planner.plan import PlanRequest
from freetoken.units import MIB, format_bytes, format_count

CHUNKS = (8192, 4096, 2048, 1024, 512)
DEFAULT_RATIO = 0.9
#: A start leaves room for a live resize to so many more slots, as a share; with ratios up to 0.96 the engine was seen
#: to run.
GROWTH, MOST_ROOMY_RATIO = 0.25, 0.96
#: Two layers of experts are borrowed for prefill where the slots hold them.
OVERLAP_LAYERS = 2
#: Formats whose experts can be resident without slots.
FUSED_FORMATS = ("bf16", "f16", "fp8_block", "nvfp4", "mxfp4", "gguf")


class FreetokenMemory:
    """`MemoryModel` of the upstream engine."""

    def candidates(self, request: PlanRequest) -> Iterator[ResolvedSettings]:
        """Strategy x embedding place x prefix cache x chunk, fixed values kept; offload and large chunks first."""
        gpu = find_gpu(request, ResolvedSettings(kv_tokens=1))
        if gpu is None or request.shape.experts.count == 0:
            return
        base = _base(request, gpu)
        for strategy in _strategies(request, base):
            for has_cache in _prefix_choices(request):
                for on_host in _embedding_choices(request):
                    for chunk in _chunk_choices(request, base.kv_tokens):
                        update = {
                            "strategy": strategy,
                            "experts_from": None if strategy == "fused" else "ram",
                            "prefix_cache": has_cache,
                            "embed_on_host": on_host,
                            "prefill_chunk_tokens": chunk,
                        }
                        yield base.model_copy(update=update)

    def slot_range(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[int, int]:
        """One layer of experts (two with overlap asked for or the `cpu` strategy) up to all of them."""
        experts = request.shape.experts
        if settings.strategy == "fused":
            return 0, 0
        both = min(OVERLAP_LAYERS * experts.per_layer, experts.count)
        if settings.strategy == "cpu":
            return both, both
        wants_overlap = request.recipe.settings.prefill_overlap is True
        return (both if wants_overlap else experts.per_layer), arithmetic.compute_slot_cap(experts)

    def finish(self, request: PlanRequest, settings: ResolvedSettings) -> ResolvedSettings:
        """Overlap, memory ratio and loading mode that follow from the slots."""
        update: dict[str, object] = {"expert_load": choose_expert_load(request, settings)}
        if settings.strategy != "fused" and request.recipe.settings.prefill_overlap == "auto":
            both = OVERLAP_LAYERS * request.shape.experts.per_layer
            update["prefill_overlap"] = settings.expert_slots >= both and not settings.cpu_layers
        if request.recipe.settings.memory_ratio == "auto":
            update["memory_ratio"] = self._choose_ratio(request, settings)
        return settings.model_copy(update=update)

    def admission(self, request: PlanRequest, settings: ResolvedSettings) -> Admission:
        """The engine's rule for slots and pages: `N s + P c <= int(r B) - W - F`."""
        needed = self._cache_bytes(request, settings)
        budget = int((settings.memory_ratio or DEFAULT_RATIO) * self.free_before_load(request, settings))
        budget -= self.weight_bytes(request, settings) + self.fixed_bytes(request, settings)
        is_admitted = needed <= budget
        if not is_admitted:
            message = _refusal_words(settings, needed, budget)
            return Admission(is_admitted=False, needed_bytes=needed, budget_bytes=budget, message=message)
        return self._pin_admission(request, settings) or Admission(
            is_admitted=True, needed_bytes=needed, budget_bytes=budget
        )

    def default_slots(self, request: PlanRequest, settings: ResolvedSettings) -> DefaultSlots | None:
        """What the engine gives itself at its own ratio, the KV of `settings` kept; None without slots."""
        experts = request.shape.experts
        if settings.strategy not in ("offload", "hybrid") or not experts.layers or find_gpu(request, settings) is None:
            return None
        found = arithmetic.upstream_auto_plan(
            self.free_before_load(request, settings), DEFAULT_RATIO, self.weight_bytes(request, settings),
            self.fixed_bytes(request, settings), arithmetic.compute_kv_bytes(request.shape), slot_bytes(request.shape),
            experts.per_layer, experts.layers, overlap=settings.prefill_overlap is not False,
            reserve_tokens=settings.kv_tokens,
        )  # fmt: skip
        if isinstance(found, arithmetic.AutoRefusal):
            missing = found.needed_bytes - found.budget_bytes
            return DefaultSlots(missing_bytes=missing, words=found.message)
        return DefaultSlots(slots=found.slots)

    def _pin_admission(self, request: PlanRequest, settings: ResolvedSettings) -> Admission | None:
        """The engine's refusal before reading: banks of layers that decode on the GPU must be page-locked."""
        limit, experts = pin_limit(request), request.shape.experts
        if limit is None or settings.strategy not in ("offload", "hybrid") or not experts.layers:
            return None
        locked = slot_bytes(request.shape) * experts.per_layer * (experts.layers - (settings.cpu_layers or 0))
        if locked <= limit:
            return None
        message = f"expert banks need {format_bytes(locked)} of pinned host RAM, {format_bytes(limit)} may be pinned"
        return Admission(is_admitted=False, needed_bytes=locked, budget_bytes=limit, message=message)

    def free_before_load(self, request: PlanRequest, settings: ResolvedSettings) -> int:
        """B: what the engine reads as free, after its context and before any weight."""
        gpu = find_gpu(request, settings)
        assert gpu is not None
        available = min(gpu.vram_total_bytes, gpu.vram_free_bytes + request.reclaimable_vram_bytes)
        return max(0, available - context_bytes(gpu))

    def weight_bytes(self, request: PlanRequest, settings: ResolvedSettings) -> int:
        """W: dense tensors, the rope table and what the allocator rounds up."""
        shape = request.shape
        dense = packed_bytes(shape.dense) + packed_bytes(shape.shared_experts) + packed_bytes(shape.head)
        dense += 0 if settings.embed_on_host else shape.embedding.bytes
        dense += 0 if settings.text_only else vision_resident_bytes(shape)
        if settings.strategy == "fused":
            dense += slot_bytes(shape) * shape.experts.count
        return dense + arithmetic.compute_rope_bytes(shape) + ALLOCATOR_BYTES

    def fixed_bytes(self, request: PlanRequest, settings: ResolvedSettings) -> int:
        """F: the pool of recurrent states."""
        return arithmetic.compute_fixed_bytes(
            request.shape,
            settings.max_running_requests,
            has_prefix_cache=settings.prefix_cache is not False,
            state_bytes=state_element_bytes(settings),
        )

    def _cache_bytes(self, request: PlanRequest, settings: ResolvedSettings) -> int:
        kv = arithmetic.compute_kv_bytes(request.shape) * settings.kv_tokens
        return kv + (0 if settings.strategy == "fused" else slot_bytes(request.shape) * settings.expert_slots)

    def _choose_ratio(self, request: PlanRequest, settings: ResolvedSettings) -> float:
        """The ratio of a start whose sizes are all given: it allocates nothing, and bounds every later resize."""
        free = self.free_before_load(request, settings)
        if free <= 0:
            return 1.0
        taken = self._cache_bytes(request, settings) + self.weight_bytes(request, settings)
        taken += self.fixed_bytes(request, settings)
        more = int(GROWTH * settings.expert_slots) * slot_bytes(request.shape)
        # Rounded up to a whole percent, so that a reading of B that is a little off still admits the plan.
        needed, roomy = (-(-one * 100 // free) / 100 for one in (taken, taken + more))
        return min(1.0, max(DEFAULT_RATIO, needed, min(MOST_ROOMY_RATIO, roomy)))

    def vram_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """All VRAM lines in the order in which the engine allocates."""
        shape, gpu = request.shape, find_gpu(request, settings)
        if gpu is None:
            return ()
        return (
            *weight_lines(shape, settings, gpu),
            *self._cache_lines(request, settings),
            *late_lines(shape, settings, gpu),
        )

    def _cache_lines(self, request: PlanRequest, settings: ResolvedSettings) -> Iterator[Line]:
        shape = request.shape
        if settings.strategy != "fused":
            each, count = slot_bytes(shape), settings.expert_slots
            yield Line(
                key="expert_slots",
                label=f"{format_count(count)} expert slots",
                bytes=each * count,
                formula=f"{format_count(count)} slots x {format_count(each)} B",
                knob="settings.expert_slots",
            )
        token = arithmetic.compute_kv_bytes(shape)
        yield Line(
            key="kv_cache",
            label="KV cache",
            bytes=token * (settings.kv_tokens + 1),
            formula=f"({format_count(settings.kv_tokens)} + 1) tokens x {format_count(token)} B",
            knob="settings.kv_tokens",
        )
        fixed = self.fixed_bytes(request, settings)
        if fixed:
            slots = arithmetic.compute_state_slots(
                settings.max_running_requests, has_prefix_cache=settings.prefix_cache is not False
            )
            yield Line(
                key="linear_state",
                label="linear-attention state",
                bytes=fixed,
                formula=f"{slots} states x {format_count(fixed // slots)} B",
                knob="settings.max_running_requests",
            )

    def ram_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """Host memory: pinned banks, the loader's peak, the embedding, the runtime."""
        return tuple(make_ram_lines(request, settings))

    def disk_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """The download that is still to come, and the JIT caches of a first start."""
        lines = [Line(key="caches", label="JIT caches", bytes=JIT_CACHE_BYTES, formula="under 1 GiB", source="guess")]
        if request.download_bytes:
            lines.insert(
                0,
                Line(
                    key="download", label="download", bytes=request.download_bytes, source=shape_source(request.shape)
                ),
            )
        return tuple(lines)

    def speed_traits(self, request: PlanRequest, settings: ResolvedSettings) -> SpeedTraits:
        """Costs of a token and of a chunk on this engine."""
        return make_speed_traits(request, settings)


def _refusal_words(settings: ResolvedSettings, needed: int, budget: int) -> str:
    slots, tokens = format_count(settings.expert_slots), format_count(settings.kv_tokens)
    return (
        f"{slots} slots and {tokens} KV tokens need {format_bytes(needed)}, its budget at memory_ratio "
        f"{settings.memory_ratio or DEFAULT_RATIO:g} is {format_bytes(budget)}"
    )


def _base(request: PlanRequest, gpu: Gpu) -> ResolvedSettings:
    settings, workload = request.recipe.settings, request.recipe.workload
    page = arithmetic.choose_page_tokens(request.shape, None if settings.attention == "auto" else settings.attention)
    tokens = workload.kv_tokens if settings.kv_tokens == "auto" else settings.kv_tokens
    text_only = request.recipe.serve.text_only
    return ResolvedSettings(
        gpu=gpu.uuid or str(gpu.index),
        device="cuda",
        memory_ratio=None if settings.memory_ratio == "auto" else settings.memory_ratio,
        kv_tokens=-(-tokens // page) * page,
        max_running_requests=_or(settings.max_running_requests, workload.concurrency),
        fetch_ratio=None if settings.fetch_ratio == "auto" else settings.fetch_ratio,
        attention=choose_attention(request.shape) if settings.attention == "auto" else settings.attention,
        prefill_overlap=None if settings.prefill_overlap == "auto" else settings.prefill_overlap,
        cpu_layers=_cpu_layers(request),
        cpu_threads=None if settings.cpu_threads == "auto" else settings.cpu_threads,
        state_dtype=settings.state_dtype,
        text_only=True if text_only == "auto" else text_only,
        experts_from="ram",
    )


def _or(value: int | str, default: int) -> int:
    return default if value == "auto" else int(value)


def choose_attention(shape: ModelShape) -> str:
    """The backend that runs without extras: a family's own, else triton, which has no fixed workspace."""
    own = {
        "deepseek_v41": "dsv41_sparse",
        "deepseek_v4": "dsv4_sparse",
        "minimax_m3": "m3_sparse",
        "qwen4_exp": "qsa_sparse",
    }
    for family, backend in own.items():
        if shape.family.startswith(family):
            return backend
    return "dsa" if shape.attention.count("mla") else "triton"


def _cpu_layers(request: PlanRequest) -> int | None:
    """Layers that must be decoded on the CPU because their experts cannot be pinned; None where all can."""
    wanted = request.recipe.settings.cpu_layers
    if wanted != "auto":
        return wanted
    limit, bank = pin_limit(request), slot_bytes(request.shape) * request.shape.experts.count
    if limit is None or bank <= limit:
        return None
    layers = request.shape.experts.layers
    return min(layers, -(-layers * (bank - limit) // bank))


def _strategies(request: PlanRequest, base: ResolvedSettings) -> tuple[str, ...]:
    wanted = request.recipe.settings.strategy
    if wanted != "auto":
        return (wanted,)
    chosen = ["fused"] if request.shape.experts.format in FUSED_FORMATS and _may_be_resident(request, base) else []
    chosen.append("offload")
    if _is_hybrid_worth_a_look(request):
        chosen.append("hybrid")
    return tuple(chosen)


def _may_be_resident(request: PlanRequest, base: ResolvedSettings) -> bool:
    gpu = find_gpu(request, base)
    return gpu is not None and slot_bytes(request.shape) * request.shape.experts.count < gpu.vram_total_bytes


def _is_hybrid_worth_a_look(request: PlanRequest) -> bool:
    """Only with the pair measured together, and by the engine's own rule: CPU experts above twice the link.

    Bandwidth alone mispredicts hybrid by 14 % to 40 times, and without a measured row it fetches one miss a layer.
    """
    known = request.hardware.bandwidth
    cpu, link = known.cpu_experts_bytes_per_s, known.h2d_bytes_per_s
    measured = known.sources.get("cpu_experts_overlap_bytes_per_s") == "measured" or request.hardware.is_probed
    if cpu is None or link is None or known.cpu_experts_overlap_bytes_per_s is None or not measured:
        return False
    return cpu > 2.0 * link and not request.hardware.os.is_wsl


def _prefix_choices(request: PlanRequest) -> tuple[bool, ...]:
    wanted = request.recipe.settings.prefix_cache
    if wanted != "auto":
        return (wanted,)
    workload = request.recipe.workload
    if workload.turns == 1 and workload.shared_prefix_tokens == 0 and request.shape.state_bytes_per_sequence():
        return (True, False)
    return (True,)


def _embedding_choices(request: PlanRequest) -> tuple[bool, ...]:
    wanted = request.recipe.settings.embed_on_host
    if wanted != "auto":
        return (wanted,)
    can_move = not request.shape.tie_embeddings and has_flag("--embed-weights", request.engine_version)
    return (False, True) if can_move else (False,)


def _chunk_choices(request: PlanRequest, kv_tokens: int) -> tuple[int, ...]:
    wanted = request.recipe.settings.prefill_chunk_tokens
    if wanted != "auto":
        return (wanted,)
    # A chunk beyond the largest prompt costs memory for nothing.
    useful = max(CHUNKS[-1], request.recipe.workload.context_tokens)
    fitting = tuple(chunk for chunk in CHUNKS if chunk < 2 * useful)
    return fitting or CHUNKS[-1:]


def choose_expert_load(request: PlanRequest, settings: ResolvedSettings) -> Literal["serial", "parallel"] | None:
    """The engine's own rule (parallel when all shards and the largest fit in what is available), and our ledger's."""
    wanted = request.recipe.settings.expert_load
    if wanted != "auto":
        return wanted
    if settings.strategy == "fused":
        return None
    shape, available = request.shape, available_ram(request)
    tensor = shape.experts.bank_bytes if shape.experts.is_stacked else shape.experts.expert_bytes // 3
    if tensor >= 16 * MIB or available <= shape.disk_bytes + largest_shard(shape):
        return "serial"
    peak = RUNTIME_BYTES + slot_bytes(shape) * shape.experts.count + parallel_loader_bytes(shape) + RAM_HEADROOM_BYTES
    peak += shape.embedding.bytes if settings.embed_on_host else 0
    # What earlier starts lacked counts here as well: it is the loader that can give way.
    peak += sum(
        one.bytes for one in request.calibration.residuals if one.key in ("expert_banks", "runtime", "loader_peak")
    )
    return "parallel" if peak <= available else "serial"
