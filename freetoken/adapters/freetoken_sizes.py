"""Sizes of the upstream engine that depend on a shape and a few settings; constants with where they were measured."""

from __future__ import annotations

import itertools

from freetoken.adapters import freetoken_arithmetic as arithmetic
from freetoken.checkpoint.shape import ModelShape, TensorGroup
from freetoken.hardware.model import Gpu
from freetoken.planner.memory import ResolvedSettings
from freetoken.planner.plan import PlanRequest
from freetoken.units import GIB, MIB

#: W beyond the tensors: allocator rounding and kernel modules. Measured on an H200 over eight starts with 12 and 40
#: layers, the embedding on either side: 164 to 179 MiB, whatever the depth.
ALLOCATOR_BYTES = 170 * MIB
#: Triton's tuner clears caches with a buffer of this size before each probe; the allocator then keeps it for reuse.
AUTOTUNE_BYTES = 256 * MIB
#: CUDA graphs: measured 82 to 113 MiB for batch size 1 and 123 for [1, 2, 4] together on an H200.
FIRST_GRAPH_BYTES, NEXT_GRAPH_BYTES = 104 * MIB, 20 * MIB
#: Python, torch, the host side of CUDA and the tokenizer processes (estimated 2 to 4 GiB).
RUNTIME_BYTES = 3 * GIB
JIT_CACHE_BYTES = GIB


def slot_bytes(shape: ModelShape) -> int:
    """Bytes of one expert slot with the kernel that 0.2 chooses by itself."""
    return arithmetic.compute_slot_bytes(shape.experts)


def packed_bytes(group: TensorGroup) -> int:
    """A dense group as the engine keeps it: as stored, with one fp32 scale a row of each quantised matrix."""
    return group.bytes + 4 * group.quantized_rows


def state_element_bytes(settings: ResolvedSettings) -> int:
    """Bytes of one element of the recurrent state; the engine keeps fp32 unless told otherwise."""
    return 2 if settings.state_dtype in ("bfloat16", "float16") else 4


def vision_resident_bytes(shape: ModelShape) -> int:
    """What stays on the GPU of a vision tower whose blocks are streamed from the host."""
    return 128 * MIB if shape.vision.bytes else 0


def attention_workspace(shape: ModelShape, attention: str | None, gpu: Gpu) -> tuple[int, str]:
    """Fixed bytes of the attention backend, and their formula; triton has none."""
    names = set((attention or "triton").split(","))
    a = shape.attention
    if names & {"fi"}:
        tile = 64 if a.head_dim >= 256 else 128
        split = a.heads * -(-2 * (gpu.sm_count or 30) // max(1, a.kv_heads)) * tile * a.head_dim * 4 + 32 * MIB
        return max(256 * MIB, split) + 8 * MIB, "FlashInfer: max(256 MiB, split scratch) + 8 MiB"
    if names & {"trtllm", "fa"}:
        return 128 * MIB, "128 MiB"
    return 0, ""


def parallel_loader_bytes(shape: ModelShape) -> int:
    """What the parallel reader holds beyond the full banks at its worst moment.

    While shard k of n is read, the banks are (k + 1) / n filled and up to four shards are in flight.
    """
    banks, shard = slot_bytes(shape) * shape.experts.count, largest_shard(shape)
    count = len(shape.shards) or max(1, -(-shape.disk_bytes // max(1, shard)))
    peak = max(banks * (k + 1) // count + min(4, count - k) * shard for k in range(count))
    return max(0, peak - banks)


def largest_shard(shape: ModelShape) -> int:
    """Bytes of the checkpoint's largest file; 4 GiB or the whole where its files are not known."""
    return max((shard.bytes for shard in shape.shards), default=min(4 * GIB, shape.disk_bytes))


def pins_side_tables(request: PlanRequest) -> bool:
    """The recipe asks for the per-layer embedding table in RAM; the engine reads it from disk otherwise."""
    arguments = request.recipe.engine.extra_args
    pairs = itertools.pairwise(arguments)
    return "--ple-backend=pinned" in arguments or ("--ple-backend", "pinned") in pairs


def pin_limit(request: PlanRequest) -> int | None:
    """Host bytes that may be page-locked; None = no known limit. WSL kernels are capped at 40 % of RAM."""
    ram = request.hardware.ram
    if ram.pinnable_bytes is not None:
        return ram.pinnable_bytes
    return int(0.4 * ram.total_bytes) if request.hardware.os.is_wsl else None
