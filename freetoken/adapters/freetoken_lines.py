"""VRAM and RAM lines of the upstream engine, in the order in which it allocates."""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.adapters import freetoken_arithmetic as arithmetic
from freetoken.adapters.freetoken_sizes import (
    ALLOCATOR_BYTES,
    AUTOTUNE_BYTES,
    FIRST_GRAPH_BYTES,
    NEXT_GRAPH_BYTES,
    RUNTIME_BYTES,
    attention_workspace,
    largest_shard,
    packed_bytes,
    parallel_loader_bytes,
    pins_side_tables,
    slot_bytes,
    vision_resident_bytes,
)
from freetoken.adapters.model_costs import activation_bytes_per_token, context_bytes, shape_source
from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Gpu
from freetoken.planner.memory import Line, Phase, ResolvedSettings
from freetoken.planner.plan import PlanRequest
from freetoken.units import GIB, KIB, format_bytes, format_count

DECODE: tuple[Phase, ...] = ("capture", "prefill", "decode")


def weight_lines(shape: ModelShape, settings: ResolvedSettings, gpu: Gpu) -> Iterator[Line]:
    """Context and weights: everything before the engine plans its caches."""
    source = shape_source(shape)
    is_measured = (gpu.compute_capability or "").startswith("9")
    yield Line(
        key="cuda_context",
        label="CUDA context",
        bytes=context_bytes(gpu),
        source="measured" if is_measured else "guess",
        formula="measured on an H200" if is_measured else "250 MiB + 1.5 MiB an SM",
    )
    rope = arithmetic.compute_rope_bytes(shape)
    if rope:
        yield Line(
            key="rope",
            label="rope table",
            bytes=rope,
            formula=f"{format_count(shape.max_position_tokens)} positions x {shape.rotary_dim} x 4 B",
        )
    yield Line(key="dense_weights", label="dense weights", bytes=packed_bytes(shape.dense), source=source)
    if shape.shared_experts.bytes:
        yield Line(
            key="shared_experts", label="shared experts", bytes=packed_bytes(shape.shared_experts), source=source
        )
    if shape.head.bytes:
        yield Line(key="head", label="output head", bytes=packed_bytes(shape.head), source=source)
    if not settings.embed_on_host:
        yield Line(
            key="embedding",
            label="embedding",
            bytes=shape.embedding.bytes,
            source=source,
            knob="settings.embed_on_host",
        )
    if not settings.text_only and shape.vision.bytes:
        yield Line(
            key="vision",
            label="vision tower",
            bytes=vision_resident_bytes(shape),
            source="guess",
            formula="blocks streamed from the host",
            knob="serve.text_only",
        )
    yield Line(
        key="allocator",
        label="allocator and kernels",
        bytes=ALLOCATOR_BYTES,
        formula="measured on an H200",
        source="guess",
    )
    if settings.strategy == "fused":
        count = shape.experts.count
        yield Line(
            key="expert_slots",
            label="all experts",
            bytes=slot_bytes(shape) * count,
            formula=f"{format_count(count)} experts x {format_count(slot_bytes(shape))} B",
            knob="settings.strategy",
        )


def late_lines(shape: ModelShape, settings: ResolvedSettings, gpu: Gpu) -> Iterator[Line]:
    """What the engine never charges to its budget: everything after the pools."""
    running, positions = settings.max_running_requests, shape.max_position_tokens
    tables = 2 * 4 * (running + 1) * positions + 4 * running * positions
    yield Line(
        key="page_tables",
        label="page tables",
        bytes=tables,
        phases=DECODE,
        formula=f"(2 x {running + 1} + {running}) x {format_count(positions)} x 4 B",
    )
    workspace, formula = attention_workspace(shape, settings.attention, gpu)
    if workspace:
        yield Line(
            key="attention_workspace",
            label="attention workspace",
            bytes=workspace,
            formula=formula,
            phases=DECODE,
            knob="settings.attention",
        )
    batches = arithmetic.graph_batch_sizes(running)
    graphs = FIRST_GRAPH_BYTES + NEXT_GRAPH_BYTES * (len(batches) - 1)
    yield Line(
        key="cuda_graphs",
        label="CUDA graphs",
        bytes=graphs,
        source="guess",
        phases=DECODE,
        formula=f"{format_bytes(FIRST_GRAPH_BYTES)} + {len(batches) - 1} x {format_bytes(NEXT_GRAPH_BYTES)}",
        knob="settings.max_running_requests",
    )
    yield Line(
        key="logits",
        label="logits",
        bytes=running * shape.vocab_size * 4,
        phases=DECODE,
        formula=f"{running} x {format_count(shape.vocab_size)} x 4 B",
    )
    yield Line(
        key="autotune_scratch",
        label="autotune scratch",
        bytes=AUTOTUNE_BYTES,
        phases=("capture",),
        source="guess",
        formula="one Triton probe; the allocator reuses it later",
    )
    tokens = min(settings.prefill_chunk_tokens, settings.kv_tokens)
    each = activation_bytes_per_token(shape)
    yield Line(
        key="prefill_transient",
        label="prefill activations",
        bytes=tokens * each,
        phases=("prefill",),
        formula=f"{format_count(tokens)} tokens x {each / KIB:.1f} KiB",
        knob="settings.prefill_chunk_tokens",
    )


def make_ram_lines(request: PlanRequest, settings: ResolvedSettings) -> Iterator[Line]:
    """Runtime, page-locked banks, the embedding on the host and the loader's peak."""
    shape, experts = request.shape, request.shape.experts
    yield Line(
        key="runtime",
        label="runtime",
        bytes=RUNTIME_BYTES,
        source="guess",
        formula="Python, torch, CUDA's host side, tokenizers: 2 to 4 GiB",
    )
    if settings.strategy != "fused":
        yield Line(
            key="expert_banks",
            label="expert banks",
            bytes=slot_bytes(shape) * experts.count,
            formula=f"{format_count(experts.count)} experts x {format_count(slot_bytes(shape))} B, page-locked",
            knob="settings.strategy",
        )
    if settings.embed_on_host:
        yield Line(
            key="host_embedding",
            label="embedding on the host",
            bytes=shape.embedding.bytes,
            source=shape_source(shape),
            knob="settings.embed_on_host",
        )
    if shape.side_tables.bytes and pins_side_tables(request):
        yield Line(
            key="side_tables",
            label="per-layer embedding table",
            bytes=shape.side_tables.bytes,
            source=shape_source(shape),
            formula="page-locked: `--ple-backend pinned`",
            knob="engine.extra_args",
        )
    if not settings.text_only and shape.vision.bytes:
        yield Line(key="vision", label="vision tower", bytes=shape.vision.bytes, source=shape_source(shape))
    if settings.expert_load == "parallel":
        yield Line(
            key="loader_peak",
            label="parallel loader",
            bytes=parallel_loader_bytes(shape),
            phases=("load",),
            formula=f"shards read ahead of the banks they fill, largest {format_bytes(largest_shard(shape))}",
            knob="settings.expert_load",
        )
    else:
        yield Line(
            key="loader_peak",
            label="serial loader",
            bytes=GIB,
            phases=("load",),
            source="guess",
            formula="one layer and its tensors",
            knob="settings.expert_load",
        )
