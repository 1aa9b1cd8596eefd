"""What the embedded engine allocates, on the CPU and on CUDA, and the settings worth a look.

Prefill streams a layer's experts through staging buffers; decode uses the slots. There is no rule of admission
beside the ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from freetoken.adapters.model_costs import active_parameters, hit_curve_prior, shape_source
from freetoken.adapters.native_lines import (
    cpu_lines,
    element_bytes,
    has_graphs,
    host_lines,
    loaded_bytes,
    record_bytes,
    vram_lines,
)
from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Gpu, Hardware
from freetoken.planner.budget import RAM_HEADROOM_BYTES, available_ram, find_gpu
from freetoken.planner.memory import Admission, Line, ResolvedSettings, SpeedTraits
from freetoken.planner.plan import PlanRequest

CHUNKS = (4096, 2048, 1024, 512, 256)
#: Seconds that one layer costs in launches and Python, by device, in a prefill chunk and a decode step without graphs.
#: On a GPU measured (benchmarks/gpu/README.md: 65 ms a token over 40 layers, of which bandwidths explain 3).
LAYER_OVERHEAD_S = {"cpu": 0.0009, "cuda": 0.0016}
#: The same for a decode step replayed as graphs, from the same page: 11.5 ms a token over 40 layers at 2,000 slots.
#: Reads and misses explain 2.5 of them at the hit rate measured (0.858), which leaves 0.00023 s a layer, and 4.1 at
#: the one planned (0.708), which leaves 0.00018: with what lies between, the run is predicted within 10 % by either.
GRAPH_LAYER_OVERHEAD_S = 0.00021
#: Of each token beside the model on a GPU: scheduling, sampling, detokenising, the reply. The demo's four layers gave
#: 370 tok/s through the server, 2.7 ms, of which their overhead explains 0.84 (same page).
SERVER_STEP_S = 0.0018


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
        return () if gpu is None else tuple(vram_lines(request, settings, gpu))

    def ram_lines(self, request: PlanRequest, settings: ResolvedSettings) -> tuple[Line, ...]:
        """All host lines: on the CPU everything, on CUDA the bank and the runtime."""
        if settings.device == "cpu":
            return tuple(cpu_lines(request, settings))
        return tuple(host_lines(request, settings))

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
    return "cuda" if can_use_gpu(request.hardware, request.recipe.settings.gpu) else "cpu"


def can_use_gpu(hardware: Hardware, name: int | str) -> bool:
    """Whether the GPU called `name` is there and our torch can use it."""
    try:
        gpu = hardware.pick_gpu(name)
    except KeyError:
        return False
    # A CPU build of torch does not see the GPU; a profile does not say, so that planning assumes a CUDA build.
    can_cuda = not hardware.is_probed or hardware.software.torch_cuda is not None
    return gpu is not None and gpu.vendor == "nvidia" and can_cuda


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
        prefix_cache=has_prefix_reuse(request.shape) and settings.prefix_cache is not False,
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


def _speed_traits(request: PlanRequest, settings: ResolvedSettings) -> SpeedTraits:
    shape, experts, device = request.shape, request.shape.experts, settings.device
    curve, curve_range, note = hit_curve_prior(shape)
    element = element_bytes(shape, device)
    head = loaded_bytes(shape.head, shape, device) or loaded_bytes(shape.embedding, shape, device)
    dense = loaded_bytes(shape.dense, shape, device) + loaded_bytes(shape.shared_experts, shape, device) + head
    return SpeedTraits(
        experts=experts.count,
        experts_per_token=experts.layers * experts.top_k,
        expert_bytes=record_bytes(shape),
        dense_read_bytes=dense,
        kv_read_bytes_per_token=shape.kv_bytes_per_token(element),
        state_read_bytes=2 * shape.state_bytes_per_sequence(4, element, has_whole_window=True),
        active_parameters=active_parameters(shape),
        full_attention_layers=shape.attention.count("full") + shape.attention.count("sliding"),
        attention_width=shape.attention.heads * shape.attention.head_dim,
        resident_in="vram" if device == "cuda" else "ram",
        miss_path=_miss_path(request, settings),
        efficiency=0.6 if device == "cuda" else 0.4,
        step_overhead_s=(SERVER_STEP_S if device == "cuda" else 0.0)
        + shape.layers * (GRAPH_LAYER_OVERHEAD_S if has_graphs(shape, device) else LAYER_OVERHEAD_S[device]),
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
