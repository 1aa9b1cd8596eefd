"""What the embedded engine allocates, on the CPU and on CUDA, and the settings worth a look.

Dense parameters live in the compute type (fp32 on the CPU, the checkpoint's 16-bit type on CUDA; quantised ones are
unpacked). Routed experts stay as stored, one record each, in slots, banks and staging alike. Prefill streams a layer's
experts through two staging buffers; decode uses the slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from freetoken.adapters.freetoken_activations import activation_bytes_per_token, active_parameters
from freetoken.adapters.freetoken_memory import context_bytes, hit_curve_prior, shape_source
from freetoken.checkpoint.shape import ModelShape, TensorGroup
from freetoken.hardware.model import Gpu
from freetoken.planner.budget import RAM_HEADROOM_BYTES, available_ram, find_gpu
from freetoken.planner.memory import Admission, Line, Phase, ResolvedSettings, SpeedTraits
from freetoken.planner.plan import PlanRequest
from freetoken.units import GIB, KIB, MIB, format_bytes, format_count

RECORD_ALIGN = 256
#: Resident set of a process with torch, transformers and the server, before any weight.
RUNTIME_BYTES = {"cpu": 700 * MIB, "cuda": 2 * GIB}
#: cuBLAS workspaces, kernel modules and what the allocator rounds up.
ALLOCATOR_BYTES = 192 * MIB
CHUNKS = (4096, 2048, 1024, 512, 256)
#: Eager modules keep more alive than a fused engine: intermediate copies of every projection.
EAGER_FACTOR = 2.0
#: Experts of one staging buffer, at most, and the bytes that it may take.
STAGING_BYTES = 256 * MIB
RUNNING: tuple[Phase, ...] = ("prefill", "decode")
#: Seconds that one layer of `transformers`' modules costs in launches and Python, by device.
LAYER_OVERHEAD_S = {"cpu": 0.0009, "cuda": 0.003}


class NativeMemory:
    """`MemoryModel` of the embedded engine."""

    def candidates(self, request: PlanRequest) -> Iterator[ResolvedSettings]:
        """Everything resident first, then slots; large chunks first. Fixed values are kept."""
        device = choose_device(request)
        gpu = request.hardware.pick_gpu(request.recipe.settings.gpu) if device == "cuda" else None
        base = _base(request, device, gpu)
        for strategy in _strategies(request):
            for source in _sources(request, strategy, device):
                for on_host in _embedding_choices(request, device):
                    for chunk in _chunk_choices(request):
                        update = {
                            "strategy": strategy,
                            "experts_from": source,
                            "embed_on_host": on_host,
                            "prefill_chunk_tokens": chunk,
                        }
                        yield base.model_copy(update=update)

    def slot_range(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[int, int]:
        """`top_k` (a decode step needs a layer's experts at once) up to all; none where there are no slots."""
        if settings.strategy != "offload":
            return 0, 0
        return request.shape.experts.top_k, request.shape.experts.count

    def finish(self, request: PlanRequest, settings: ResolvedSettings) -> ResolvedSettings:
        """Nothing follows from the slots here."""
        return settings

    def admission(self, request: PlanRequest, settings: ResolvedSettings) -> Admission:
        """The embedded engine has no rule beside the ledgers."""
        return Admission(is_admitted=True)

    def vram_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """All VRAM lines in the order of allocation; empty on the CPU."""
        gpu = find_gpu(request, settings)
        return () if gpu is None else tuple(_vram_lines(request, settings, gpu))

    def ram_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """All host lines: on the CPU everything, on CUDA the bank and the runtime."""
        if settings.device == "cpu":
            return tuple(_cpu_lines(request, settings))
        return tuple(_host_lines(request, settings))

    def disk_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """The download that is still to come."""
        if not request.download_bytes:
            return ()
        return (
            Line(key="download", label="download", bytes=request.download_bytes, source=shape_source(request.shape)),
        )

    def speed_traits(self, request: PlanRequest, settings: ResolvedSettings) -> SpeedTraits:
        """Costs of a token and of a chunk on this engine."""
        return _speed_traits(request, settings)


def choose_device(request: PlanRequest) -> Literal["cpu", "cuda"]:
    """`cuda` where there is an NVIDIA GPU that our torch can use; the CPU otherwise."""
    hardware = request.hardware
    try:
        gpu = hardware.pick_gpu(request.recipe.settings.gpu)
    except KeyError:
        gpu = None
    if gpu is None or gpu.vendor != "nvidia":
        return "cpu"
    # A CPU build of torch does not see the GPU; a profile does not say, so that planning assumes a CUDA build.
    return "cpu" if hardware.is_probed and hardware.software.torch_cuda is None else "cuda"


def record_bytes(shape: ModelShape) -> int:
    """Bytes of one expert's record: as stored, parts and record aligned."""
    return -(-shape.experts.expert_bytes // RECORD_ALIGN) * RECORD_ALIGN


def element_bytes(shape: ModelShape, device: str) -> int:
    """Bytes of one dense element in the compute type."""
    return 4 if device == "cpu" or shape.dtype == "f32" else 2


def unpacked_bytes(group: TensorGroup, shape: ModelShape, device: str) -> int:
    """Bytes of a dense group in the compute type; as stored where its elements are not known."""
    return group.elements * element_bytes(shape, device) if group.elements else group.bytes


def has_prefix_reuse(shape: ModelShape) -> bool:
    """Prefixes are reused where every layer keeps keys and values: a recurrent state cannot be cut back."""
    return not (shape.attention.count("linear") or shape.attention.count("mamba"))


def _base(request: PlanRequest, device: Literal["cpu", "cuda"], gpu: Gpu | None) -> ResolvedSettings:
    settings, workload = request.recipe.settings, request.recipe.workload
    running = settings.max_running_requests
    threads = settings.cpu_threads
    return ResolvedSettings(
        gpu=(gpu.uuid or str(gpu.index)) if gpu is not None else None,
        device=device,
        kv_tokens=workload.kv_tokens if settings.kv_tokens == "auto" else settings.kv_tokens,
        max_running_requests=workload.concurrency if running == "auto" else running,
        prefix_cache=has_prefix_reuse(request.shape),
        cpu_threads=request.hardware.cpu.usable_cores if threads == "auto" else threads,
        text_only=True,
    )


def _strategies(request: PlanRequest) -> tuple[str, ...]:
    wanted = request.recipe.settings.strategy
    if request.shape.experts.count == 0:
        return ("fused",)
    if wanted != "auto":
        return (wanted,) if wanted != "hybrid" else ()
    slots = request.recipe.settings.expert_slots
    return ("fused", "offload") if slots == "auto" else ("offload",)


def _sources(request: PlanRequest, strategy: str, device: str) -> tuple[Literal["ram", "disk"], ...]:
    """Where experts without a slot are read from: RAM first; on the CPU, slots spare reads of the checkpoint."""
    if strategy == "fused":
        return ("ram",)
    if strategy == "offload" and device == "cpu":
        return ("disk",)
    return ("ram", "disk")


def _embedding_choices(request: PlanRequest, device: str) -> tuple[bool, ...]:
    wanted = request.recipe.settings.embed_on_host
    if device == "cpu" or request.shape.tie_embeddings:
        return (False,)
    return (False, True) if wanted == "auto" else (wanted,)


def _chunk_choices(request: PlanRequest) -> tuple[int, ...]:
    wanted = request.recipe.settings.prefill_chunk_tokens
    if wanted != "auto":
        return (wanted,)
    useful = max(CHUNKS[-1], request.recipe.workload.context_tokens)
    return tuple(chunk for chunk in CHUNKS if chunk < 2 * useful) or CHUNKS[-1:]


def _dense_lines(shape: ModelShape, settings: ResolvedSettings) -> Iterator[Line]:
    source, device = shape_source(shape), settings.device
    each = element_bytes(shape, device)
    groups = (
        ("dense_weights", "dense weights", shape.dense),
        ("shared_experts", "shared experts", shape.shared_experts),
        ("head", "output head", shape.head),
    )
    for key, label, group in groups:
        amount = unpacked_bytes(group, shape, device)
        if amount:
            yield Line(
                key=key, label=label, bytes=amount, source=source, formula=f"{format_count(group.elements)} x {each} B"
            )
    if not settings.embed_on_host:
        yield _embedding_line("embedding", "embedding", shape, device)


def _embedding_line(key: str, label: str, shape: ModelShape, device: str) -> Line:
    amount = unpacked_bytes(shape.embedding, shape, device)
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
    state = shape.state_bytes_per_sequence(4, each)
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
    if settings.strategy != "fused":
        group = staging_experts(shape)
        yield Line(
            key="prefill_staging",
            label="prefill staging",
            bytes=2 * group * record_bytes(shape),
            phases=RUNNING,
            formula=f"2 buffers x {group} experts x {format_count(record_bytes(shape))} B",
        )
    tokens = min(settings.prefill_chunk_tokens, settings.kv_tokens)
    per_token = int(activation_bytes_per_token(shape) * each / 2 * EAGER_FACTOR)
    unpacked = unpacked_expert_bytes(shape, each)
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


def staging_experts(shape: ModelShape) -> int:
    """Experts of one staging buffer: a whole layer where it is small, else what 256 MiB hold."""
    return max(1, min(shape.experts.per_layer, STAGING_BYTES // max(1, record_bytes(shape))))


def unpacked_expert_bytes(shape: ModelShape, element: int) -> int:
    """Bytes of one expert's matrices in the compute type: they are unpacked one after the other."""
    experts = shape.experts
    return experts.projections * experts.hidden_size * experts.intermediate_size * element


def _vram_lines(request: PlanRequest, settings: ResolvedSettings, gpu: Gpu) -> Iterator[Line]:
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
    yield from _cache_lines(shape, settings)
    yield from _work_lines(shape, settings)


def _cpu_lines(request: PlanRequest, settings: ResolvedSettings) -> Iterator[Line]:
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


def _host_lines(request: PlanRequest, settings: ResolvedSettings) -> Iterator[Line]:
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


def _speed_traits(request: PlanRequest, settings: ResolvedSettings) -> SpeedTraits:
    shape, experts, device = request.shape, request.shape.experts, settings.device
    curve, curve_range, note = hit_curve_prior(shape)
    element = element_bytes(shape, device)
    head = unpacked_bytes(shape.head, shape, device) or unpacked_bytes(shape.embedding, shape, device)
    dense = unpacked_bytes(shape.dense, shape, device) + unpacked_bytes(shape.shared_experts, shape, device) + head
    return SpeedTraits(
        experts=experts.count,
        experts_per_token=experts.layers * experts.top_k,
        expert_bytes=record_bytes(shape),
        dense_read_bytes=dense,
        kv_read_bytes_per_token=shape.kv_bytes_per_token(element),
        state_read_bytes=2 * shape.state_bytes_per_sequence(4, element),
        active_parameters=active_parameters(shape),
        full_attention_layers=shape.attention.count("full") + shape.attention.count("sliding"),
        attention_width=shape.attention.heads * shape.attention.head_dim,
        resident_in="vram" if device == "cuda" else "ram",
        miss_path=_miss_path(request, settings),
        efficiency=0.6 if device == "cuda" else 0.4,
        step_overhead_s=LAYER_OVERHEAD_S[device] * shape.layers,
        chunk_overhead_s=LAYER_OVERHEAD_S[device] * shape.layers,
        prefill_stream_bytes=experts.bank_bytes if settings.strategy != "fused" else 0,
        stream_path=_stream_path(request, settings),
        compute_efficiency=0.35,
        chunk_half_tokens=256,
        hit_curve_c=curve,
        hit_curve_range=curve_range,
        hit_curve_note=note,
    )


def is_bank_cached(request: PlanRequest) -> bool:
    """The page cache holds the checkpoint after a first pass: RAM available exceeds it."""
    return available_ram(request) - RAM_HEADROOM_BYTES > request.shape.disk_bytes


def _miss_path(request: PlanRequest, settings: ResolvedSettings) -> Literal["none", "pcie", "dram", "disk"]:
    if settings.strategy == "fused":
        return "none"
    if settings.strategy == "cpu" or settings.device == "cpu":
        return "disk" if settings.experts_from == "disk" and not is_bank_cached(request) else "dram"
    return "disk" if settings.experts_from == "disk" and not is_bank_cached(request) else "pcie"


def _stream_path(request: PlanRequest, settings: ResolvedSettings) -> Literal["none", "pcie", "dram", "disk"]:
    path = _miss_path(request, settings)
    return "pcie" if path == "dram" and settings.device == "cuda" else path
