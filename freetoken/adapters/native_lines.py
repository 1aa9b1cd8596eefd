"""VRAM and RAM lines of the embedded engine, in the order in which it allocates.

Dense parameters live in the compute type: fp32 on the CPU, the checkpoint's 16-bit type on CUDA, where FP8 and NVFP4
linears stay packed. Routed experts stay as stored, one record each, in slots, banks and staging alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.adapters.model_costs import activation_bytes_per_token, context_bytes, shape_source
from freetoken.checkpoint.shape import ModelShape, TensorGroup
from freetoken.hardware.model import Gpu
from freetoken.planner.memory import Line, Phase, ResolvedSettings
from freetoken.planner.plan import PlanRequest
from freetoken.units import GIB, KIB, MIB, format_bytes, format_count

RECORD_ALIGN = 256
#: Resident set of a process with torch, transformers and the server, before any weight.
RUNTIME_BYTES = {"cpu": 700 * MIB, "cuda": 2 * GIB}
#: cuBLAS workspaces, kernel modules and what the allocator rounds up.
ALLOCATOR_BYTES = 192 * MIB
#: What a run with graphs of decode steps takes more than the same run without (benchmarks/gpu/README.md): 44 MiB that
#: torch reserves, of which the graphs' own pool is 2, and 16 beside torch, for 130 graphs. `allocator` has none of
#: that: it is a guess that was held against runs without graphs.
CUDA_GRAPHS_BYTES = 60 * MIB
#: Families whose layers `engine/decode_layers.py` cuts into graphs; the others decode by launches from Python.
GRAPH_FAMILIES = ("qwen3_moe", "qwen3_5_moe", "mixtral", "olmoe")
#: Eager modules keep more alive than a fused engine: intermediate copies of every projection.
EAGER_FACTOR = 2.0
#: What one staging buffer, and what weights unpacked at once on a GPU, may take (`engine/staging.py`, `compute.py`).
STAGING_BYTES = UNPACK_BYTES = 64 * MIB
#: Formats of dense linears that stay packed on a GPU; on the CPU everything is unpacked.
PACKED_FORMATS = ("fp8", "nvfp4")
#: Page-locked records through which misses of an unlocked bank or of the disk travel.
RING_RECORDS = 8
RUNNING: tuple[Phase, ...] = ("prefill", "decode")


def record_bytes(shape: ModelShape) -> int:
    """Bytes of one expert's record: as stored, parts and record aligned."""
    return -(-shape.experts.expert_bytes // RECORD_ALIGN) * RECORD_ALIGN


def element_bytes(shape: ModelShape, device: str) -> int:
    """Bytes of one dense element in the compute type."""
    return 4 if device == "cpu" or shape.dtype == "f32" else 2


def loaded_bytes(group: TensorGroup, shape: ModelShape, device: str) -> int:
    """Bytes of a dense group once loaded: in the compute type, packed linears as stored on a GPU.

    A group whose elements are not known counts as stored.
    """
    if not group.elements:
        return group.bytes
    if device == "cpu":
        return group.elements * 4
    by_format = group.by_format or {group.format: group.bytes}
    packed = sum(amount for name, amount in by_format.items() if name in PACKED_FORMATS)
    wide = sum(amount for name, amount in by_format.items() if name in ("fp8_block", "mxfp4"))
    plain = sum(by_format.values()) - packed - wide
    # Block formats are unpacked to 16 bit: twice the bytes of FP8.
    return packed + 2 * wide + plain


def staging_buffers(settings: ResolvedSettings) -> int:
    """Buffers that prefill streams experts through: two on a GPU; one on the CPU where the bank is on disk."""
    if settings.strategy == "fused":
        return 0
    if settings.device == "cuda":
        return 2
    return 1 if settings.experts_from == "disk" else 0


def staging_experts(shape: ModelShape) -> int:
    """Experts of one staging buffer: a whole layer where it is small, else what 64 MiB hold, at least one."""
    return max(1, min(shape.experts.per_layer, STAGING_BYTES // max(1, record_bytes(shape))))


def unpacked_expert_bytes(shape: ModelShape, element: int) -> int:
    """Bytes of one expert's matrices in the compute type: they are unpacked one after the other."""
    experts = shape.experts
    return experts.projections * experts.hidden_size * experts.intermediate_size * element


def has_graphs(shape: ModelShape, device: str) -> bool:
    """Whether decode steps are replayed as CUDA graphs, as far as a plan can tell: a capture may still fail."""
    return device == "cuda" and shape.experts.count > 0 and shape.family.startswith(GRAPH_FAMILIES)


def vram_lines(request: PlanRequest, settings: ResolvedSettings, gpu: Gpu) -> Iterator[Line]:
    """On CUDA: context, dense parts, caches and work space."""
    shape = request.shape
    yield Line(
        key="cuda_context",
        label="CUDA context",
        bytes=context_bytes(gpu),
        source="guess",
        formula="250 MiB + 1.5 MiB an SM",
    )
    yield from _dense_lines(shape, settings)
    yield Line(key="allocator", label="allocator and kernels", bytes=ALLOCATOR_BYTES, source="guess")
    if has_graphs(shape, settings.device):
        yield Line(
            key="cuda_graphs",
            label="CUDA graphs",
            bytes=CUDA_GRAPHS_BYTES,
            source="guess",
            formula="measured on an H200: graphs, work space of their stream, the driver's share",
            phases=("capture", *RUNNING),
        )
    yield from _cache_lines(shape, settings)
    yield from _work_lines(shape, settings)


def cpu_lines(request: PlanRequest, settings: ResolvedSettings) -> Iterator[Line]:
    """On the CPU: everything in host memory."""
    shape = request.shape
    yield Line(
        key="runtime",
        label="runtime",
        bytes=RUNTIME_BYTES["cpu"],
        source="guess",
        formula="Python, torch, transformers, server",
    )
    yield from _dense_lines(shape, settings)
    if settings.strategy == "cpu" and settings.experts_from == "ram":
        yield _bank_line(shape)
    yield from _cache_lines(shape, settings)
    yield from _work_lines(shape, settings)


def host_lines(request: PlanRequest, settings: ResolvedSettings) -> Iterator[Line]:
    """Beside CUDA: runtime, bank, what lives on the host."""
    shape = request.shape
    yield Line(
        key="runtime",
        label="runtime",
        bytes=RUNTIME_BYTES["cuda"],
        source="guess",
        formula="Python, torch, CUDA's host side, server",
    )
    if settings.strategy in ("offload", "cpu") and settings.experts_from == "ram":
        yield _bank_line(shape)
    if settings.strategy != "fused" and settings.experts_from == "disk":
        ring = RING_RECORDS * record_bytes(shape)
        yield Line(key="expert_banks", label="read buffers", bytes=ring, formula=f"{RING_RECORDS} page-locked records")
    if settings.embed_on_host:
        yield _embedding_line("host_embedding", "embedding on the host", shape, settings.device)
    yield Line(
        key="loader_peak",
        label="loader",
        bytes=512 * MIB,
        phases=("load",),
        source="guess",
        formula="tensors on their way",
    )


def _dense_lines(shape: ModelShape, settings: ResolvedSettings) -> Iterator[Line]:
    source, device = shape_source(shape), settings.device
    groups = (
        ("dense_weights", "dense weights", shape.dense),
        ("shared_experts", "shared experts", shape.shared_experts),
        ("head", "output head", shape.head),
    )
    for key, label, group in groups:
        amount = loaded_bytes(group, shape, device)
        if amount:
            yield Line(key=key, label=label, bytes=amount, source=source, formula=_group_formula(group, device))
    if not settings.embed_on_host:
        yield _embedding_line("embedding", "embedding", shape, device)


def _group_formula(group: TensorGroup, device: str) -> str:
    if device == "cpu":
        return f"{format_count(group.elements)} x 4 B"
    return "packed linears as stored, the rest in 16 bit"


def _embedding_line(key: str, label: str, shape: ModelShape, device: str) -> Line:
    amount = loaded_bytes(shape.embedding, shape, device)
    formula = f"{format_count(shape.embedding.elements)} x {element_bytes(shape, device)} B"
    return Line(
        key=key, label=label, bytes=amount, formula=formula, source=shape_source(shape), knob="settings.embed_on_host"
    )


def _cache_lines(shape: ModelShape, settings: ResolvedSettings) -> Iterator[Line]:
    each = element_bytes(shape, settings.device)
    record = record_bytes(shape)
    if settings.strategy == "fused" and shape.experts.count:
        yield Line(
            key="expert_slots",
            label="all experts",
            bytes=record * shape.experts.count,
            formula=f"{format_count(shape.experts.count)} experts x {format_count(record)} B",
            knob="settings.strategy",
        )
    elif settings.strategy == "offload":
        yield Line(
            key="expert_slots",
            label=f"{format_count(settings.expert_slots)} expert slots",
            bytes=record * settings.expert_slots,
            knob="settings.expert_slots",
            formula=f"{format_count(settings.expert_slots)} slots x {format_count(record)} B",
        )
    token = shape.kv_bytes_per_token(each)
    yield Line(
        key="kv_cache",
        label="KV cache",
        bytes=token * settings.kv_tokens,
        knob="settings.kv_tokens",
        formula=f"{format_count(settings.kv_tokens)} tokens x {format_count(token)} B",
    )
    state = shape.state_bytes_per_sequence(4, each, has_whole_window=True)
    if state:
        yield Line(
            key="linear_state",
            label="linear-attention state",
            bytes=state * settings.max_running_requests,
            formula=f"{settings.max_running_requests} requests x {format_count(state)} B",
            knob="settings.max_running_requests",
            phases=RUNNING,
        )


def _work_lines(shape: ModelShape, settings: ResolvedSettings) -> Iterator[Line]:
    each = element_bytes(shape, settings.device)
    buffers = staging_buffers(settings)
    if buffers:
        group = staging_experts(shape)
        yield Line(
            key="prefill_staging",
            label="prefill staging",
            bytes=buffers * group * record_bytes(shape),
            phases=RUNNING,
            formula=f"{buffers} x {group} experts x {format_count(record_bytes(shape))} B",
        )
    tokens = min(settings.prefill_chunk_tokens, settings.kv_tokens)
    per_token = int(activation_bytes_per_token(shape) * each / 2 * EAGER_FACTOR)
    unpacked = unpacked_expert_bytes(shape, each)
    if settings.device == "cuda":
        unpacked = max(unpacked, UNPACK_BYTES)
    yield Line(
        key="prefill_transient",
        label="prefill activations",
        bytes=tokens * per_token + unpacked,
        phases=("prefill",),
        formula=f"{format_count(tokens)} tokens x {per_token / KIB:.1f} KiB + {format_bytes(unpacked)} unpacked",
        knob="settings.prefill_chunk_tokens",
        source="guess",
    )
    yield Line(
        key="logits",
        label="logits",
        bytes=shape.vocab_size * 4 * settings.max_running_requests,
        phases=RUNNING,
        formula=f"{settings.max_running_requests} x {format_count(shape.vocab_size)} x 4 B",
    )


def _bank_line(shape: ModelShape) -> Line:
    count, record = shape.experts.count, record_bytes(shape)
    return Line(
        key="expert_banks",
        label="expert banks",
        bytes=count * record,
        source=shape_source(shape),
        formula=f"{format_count(count)} experts x {format_count(record)} B",
        knob="settings.strategy",
    )
