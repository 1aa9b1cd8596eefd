"""What `llama.cpp` allocates, for planning: weights by layer, `--n-cpu-moe`, KV types, the compute buffer.

All layers are on the GPU (`-ngl 99`) except the experts of the first `cpu_layers` MoE layers (`--n-cpu-moe`), which
are read and computed on the CPU; the token embedding stays on the CPU, as `llama.cpp` keeps it. `fused` means that no
layer's experts are on the CPU, `cpu` that some or all are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from freetoken.adapters.model_costs import (
    activation_bytes_per_token,
    active_parameters,
    context_bytes,
    shape_source,
)
from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Gpu
from freetoken.planner.budget import find_gpu
from freetoken.planner.memory import Admission, Line, Phase, ResolvedSettings, SpeedTraits
from freetoken.planner.plan import PlanRequest
from freetoken.units import GIB, MIB, format_bytes, format_count

#: `-ub`: tokens of one physical batch; the compute buffer grows with it.
DEFAULT_UBATCH = 512
UBATCHES = (2048, 1024, 512)
#: Bytes of one KV element by cache type: f16, and q8_0 with its scale.
KV_ELEMENT_BYTES = {"model": 2.0, "bf16": 2.0, "fp8": 34 / 32}
RUNTIME_BYTES = GIB // 2
#: cuBLAS, dequantisation scratch and CUDA graphs beyond the buffers that the log names.
ALLOCATOR_BYTES = 160 * MIB
RUNNING: tuple[Phase, ...] = ("capture", "prefill", "decode")
STEP_OVERHEAD_S = 0.0015
#: Crossing to the CPU and back costs a synchronisation for each layer.
CPU_LAYER_OVERHEAD_S = 0.00008


class LlamaCppMemory:
    """`MemoryModel` of llama.cpp."""

    def candidates(self, request: PlanRequest) -> Iterator[ResolvedSettings]:
        """Fewest layers on the CPU first, for each physical batch; fixed values kept."""
        gpu = find_gpu(request, ResolvedSettings(kv_tokens=1))
        if gpu is None or request.shape.experts.count == 0:
            return
        base = _base(request, gpu)
        for layers in _layer_choices(request):
            for chunk in _ubatch_choices(request):
                strategy = "fused" if layers == 0 else "cpu"
                update = {"strategy": strategy, "cpu_layers": layers, "prefill_chunk_tokens": chunk}
                yield base.model_copy(update=update)

    def slot_range(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[int, int]:
        """There are no slots: experts are placed by layer."""
        return 0, 0

    def finish(self, request: PlanRequest, settings: ResolvedSettings) -> ResolvedSettings:
        """Nothing follows from slots."""
        return settings

    def admission(self, request: PlanRequest, settings: ResolvedSettings) -> Admission:
        """llama.cpp allocates what it is told and fails where it does not fit."""
        return Admission(is_admitted=True)

    def vram_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """All VRAM lines in the order of allocation."""
        gpu = find_gpu(request, settings)
        return () if gpu is None else tuple(_vram_lines(request.shape, settings, gpu))

    def ram_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """Host memory: what is read on the CPU for every token must stay there, mapped or not."""
        return tuple(_ram_lines(request.shape, settings))

    def disk_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """The download that is still to come."""
        if not request.download_bytes:
            return ()
        return (
            Line(key="download", label="download", bytes=request.download_bytes, source=shape_source(request.shape)),
        )

    def speed_traits(self, request: PlanRequest, settings: ResolvedSettings) -> SpeedTraits:
        """Costs of a token and of a chunk on this engine."""
        return _speed_traits(request.shape, settings)


def _base(request: PlanRequest, gpu: Gpu) -> ResolvedSettings:
    settings, workload = request.recipe.settings, request.recipe.workload
    running = settings.max_running_requests
    tokens = workload.kv_tokens if settings.kv_tokens == "auto" else settings.kv_tokens
    return ResolvedSettings(
        gpu=gpu.uuid or str(gpu.index),
        device="cuda",
        kv_tokens=-(-tokens // 256) * 256 if settings.kv_tokens == "auto" else tokens,
        max_running_requests=workload.concurrency if running == "auto" else running,
        prefix_cache=settings.prefix_cache is not False,
        embed_on_host=True,
        cpu_threads=request.hardware.cpu.usable_cores if settings.cpu_threads == "auto" else settings.cpu_threads,
        kv_dtype=settings.kv_dtype,
        experts_from="ram",
    )


def _layer_choices(request: PlanRequest) -> range | tuple[int, ...]:
    """Numbers of MoE layers whose experts are on the CPU, fewest first."""
    settings, layers = request.recipe.settings, request.shape.experts.layers
    if settings.cpu_layers != "auto":
        return (min(settings.cpu_layers, layers),)
    if settings.strategy == "fused":
        return (0,)
    return range(1 if settings.strategy == "cpu" else 0, layers + 1)


def _ubatch_choices(request: PlanRequest) -> tuple[int, ...]:
    wanted = request.recipe.settings.prefill_chunk_tokens
    if wanted != "auto":
        return (wanted,)
    return tuple(size for size in UBATCHES if size <= max(DEFAULT_UBATCH, request.recipe.workload.context_tokens))


def layer_bytes(shape: ModelShape) -> tuple[int, ...]:
    """Stored bytes of the experts of each MoE layer, first layer first."""
    experts = shape.experts
    return experts.bytes_by_layer or (experts.per_layer * experts.expert_bytes,) * experts.layers


def _split(shape: ModelShape, settings: ResolvedSettings) -> tuple[int, int]:
    """Bytes of routed experts (on the CPU, on the GPU): `--n-cpu-moe` keeps the first layers on the CPU."""
    sizes, on_cpu = layer_bytes(shape), settings.cpu_layers or 0
    return sum(sizes[:on_cpu]), sum(sizes[on_cpu:])


def compute_kv(shape: ModelShape, settings: ResolvedSettings) -> tuple[int, str]:
    """Bytes of the KV cache with the cache type of `settings`, and their formula.

    Sliding layers have a cache of their own that keeps the window and one batch for each sequence.
    """
    a, element = shape.attention, KV_ELEMENT_BYTES.get(settings.kv_dtype, 2.0)
    sliding = 2 * (a.sliding_head_dim or a.head_dim) * (a.sliding_kv_heads or a.kv_heads) * a.count("sliding")
    full = shape.kv_bytes_per_token(1) - sliding
    kept = min(settings.kv_tokens, (a.sliding_window or 0) + settings.prefill_chunk_tokens)
    kept *= settings.max_running_requests
    formula = f"{format_count(settings.kv_tokens)} tokens x {format_count(int(full * element))} B"
    if sliding:
        formula += f" + {format_count(kept)} in the window x {format_count(int(sliding * element))} B"
    return int((full * settings.kv_tokens + sliding * kept) * element), formula


def compute_buffer_bytes(shape: ModelShape, settings: ResolvedSettings) -> tuple[int, str]:
    """The graph's buffer: logits of a whole physical batch in fp32 or the layer's activations, whichever is larger.

    With experts on the CPU a large batch copies a layer's tensor to the GPU: a third of the layer, double-buffered.
    """
    batch = min(settings.prefill_chunk_tokens, settings.kv_tokens)
    logits, act = batch * shape.vocab_size * 4, batch * 2 * activation_bytes_per_token(shape)
    copied = 2 * max(layer_bytes(shape), default=0) // 3 if settings.cpu_layers else 0
    formula = f"max({format_count(batch)} x {format_count(shape.vocab_size)} x 4 B, activations)"
    return max(logits, act) + copied, formula + (f" + {format_bytes(copied)} of copied experts" if copied else "")


def _vram_lines(shape: ModelShape, settings: ResolvedSettings, gpu: Gpu) -> Iterator[Line]:
    source = shape_source(shape)
    yield Line(
        key="cuda_context",
        label="CUDA context",
        bytes=context_bytes(gpu),
        source="guess",
        formula="250 MiB + 1.5 MiB an SM",
    )
    yield Line(key="dense_weights", label="dense weights", bytes=shape.dense.bytes, source=source)
    if shape.shared_experts.bytes:
        yield Line(key="shared_experts", label="shared experts", bytes=shape.shared_experts.bytes, source=source)
    # A tied head is a second copy on the GPU of the embedding that stays on the CPU.
    head = shape.head.bytes or shape.embedding.bytes
    yield Line(key="head", label="output head", bytes=head, source=source)
    _, on_gpu = _split(shape, settings)
    if on_gpu:
        resident = shape.experts.layers - (settings.cpu_layers or 0)
        yield Line(
            key="expert_slots",
            label="experts on the GPU",
            bytes=on_gpu,
            source=source,
            formula=f"{resident} of {shape.experts.layers} layers",
            knob="settings.cpu_layers",
        )
    kv, formula = compute_kv(shape, settings)
    yield Line(key="kv_cache", label="KV cache", bytes=kv, formula=formula, knob="settings.kv_tokens")
    state = shape.state_bytes_per_sequence(4, 4)
    if state:
        yield Line(
            key="linear_state",
            label="recurrent state",
            bytes=state * settings.max_running_requests,
            formula=f"{settings.max_running_requests} sequences x {format_count(state)} B",
        )
    buffer, formula = compute_buffer_bytes(shape, settings)
    yield Line(
        key="prefill_transient",
        label="compute buffer",
        bytes=buffer,
        formula=formula,
        phases=RUNNING,
        knob="settings.prefill_chunk_tokens",
    )
    yield Line(key="allocator", label="CUDA pools and graphs", bytes=ALLOCATOR_BYTES, source="guess", phases=RUNNING)


def _ram_lines(shape: ModelShape, settings: ResolvedSettings) -> Iterator[Line]:
    source = shape_source(shape)
    yield Line(key="runtime", label="runtime", bytes=RUNTIME_BYTES, source="guess")
    yield Line(key="host_embedding", label="token embedding", bytes=shape.embedding.bytes, source=source)
    on_cpu, _ = _split(shape, settings)
    if on_cpu:
        yield Line(
            key="expert_banks",
            label="experts on the CPU",
            bytes=on_cpu,
            source=source,
            formula=f"{settings.cpu_layers} of {shape.experts.layers} layers, mapped from the file",
            knob="settings.cpu_layers",
        )


def _speed_traits(shape: ModelShape, settings: ResolvedSettings) -> SpeedTraits:
    experts, on_cpu = shape.experts, settings.cpu_layers or 0
    each = experts.bank_bytes // max(1, experts.count)
    resident = experts.top_k * (experts.layers - on_cpu)
    path: Literal["none", "dram"] = "dram" if on_cpu else "none"
    return SpeedTraits(
        experts=experts.count,
        experts_per_token=experts.top_k * on_cpu if on_cpu else experts.top_k * experts.layers,
        expert_bytes=each,
        dense_read_bytes=shape.dense.bytes
        + shape.shared_experts.bytes
        + (shape.head.bytes or shape.embedding.bytes)
        + (resident * each if on_cpu else 0),
        kv_read_bytes_per_token=int(shape.kv_bytes_per_token(1) * KV_ELEMENT_BYTES.get(settings.kv_dtype, 2.0)),
        state_read_bytes=2 * shape.state_bytes_per_sequence(4, 4),
        active_parameters=active_parameters(shape),
        full_attention_layers=shape.attention.count("full") + shape.attention.count("mla"),
        attention_width=shape.attention.heads * shape.attention.head_dim,
        miss_path=path,
        efficiency=0.7,
        step_overhead_s=STEP_OVERHEAD_S + CPU_LAYER_OVERHEAD_S * on_cpu,
        chunk_overhead_s=0.005,
        prefill_stream_bytes=on_cpu * experts.per_layer * each,
        is_stream_overlapped=False,
        # Weights of a mapped file are not page-locked.
        stream_path="pcie_pageable" if on_cpu else "none",
        chunk_half_tokens=400,
    )
