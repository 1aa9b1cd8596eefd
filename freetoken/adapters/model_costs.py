"""What every engine's model needs of a shape or a card: activations, FLOPs, the CUDA context, the hit-rate prior.

Activations: the largest layer's working set per token of a chunk, 16-bit. Measured for Qwen3.6's gated delta net:
121 KiB with chunks of 2048 and 123 with 8000 tokens on an H200, 124.5 published for Ornith of the same architecture.
"""

from __future__ import annotations

from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Gpu
from freetoken.planner.memory import LineSource
from freetoken.units import KIB, MIB

#: Bytes per channel of the delta net's convolution: projections, convolution, expanded heads, chunk states, output.
DELTA_NET_BYTES_PER_CHANNEL = 15.5
#: Mamba path of Nemotron after its fix, per token (KiB); before the fix it was 4,256.
MAMBA_BYTES_PER_TOKEN = int(224.6 * KIB)


def activation_bytes_per_token(shape: ModelShape) -> int:
    """Bytes that each token of a prefill chunk needs at once: the dearest layer kind, residual streams included."""
    a, experts = shape.attention, shape.experts
    kinds = [_moe_bytes(shape), _attention_bytes(shape)]
    if a.count("linear"):
        channels = 2 * a.linear_key_heads * a.linear_key_head_dim + a.linear_value_heads * a.linear_value_head_dim
        kinds.append(int(DELTA_NET_BYTES_PER_CHANNEL * channels))
    if a.count("mamba"):
        kinds.append(MAMBA_BYTES_PER_TOKEN)
    return max(kinds) if experts.count or a.kinds else 0


def _moe_bytes(shape: ModelShape) -> int:
    experts, hidden = shape.experts, shape.hidden_size
    widths = (experts.projections - 1) * experts.intermediate_size + experts.intermediate_size + hidden
    return experts.top_k * widths * 2 + 2 * hidden


def _attention_bytes(shape: ModelShape) -> int:
    a, hidden = shape.attention, shape.hidden_size
    # Query (with a gate in some families), keys, values, output, and three residual streams.
    return 2 * (4 * a.heads * a.head_dim + 2 * a.kv_heads * a.head_dim) + 2 * 3 * hidden


def active_parameters(shape: ModelShape) -> float:
    """Parameters that take part in one token's forward, the embedding look-up left out."""
    experts = shape.experts
    routed = experts.layers * experts.top_k * experts.projections * experts.hidden_size * experts.intermediate_size
    head = shape.head.elements or shape.vocab_size * shape.hidden_size
    return float(routed + shape.dense.elements + shape.shared_experts.elements + head)


def shape_source(shape: ModelShape) -> LineSource:
    """`card` for a bundled card, else `header`."""
    return "card" if shape.source == "card" else "header"


def context_bytes(gpu: Gpu) -> int:
    """VRAM of the CUDA context and the allocator before the engine reads what is free.

    0.58 GiB measured on an H200; consumer cards are estimated at 250 to 500 MiB, growing with the SM count.
    """
    major = int((gpu.compute_capability or "8.0").split(".")[0])
    minor = (gpu.compute_capability or "8.6").split(".")[-1]
    if major in (9, 10) or (major == 8 and minor == "0"):
        return 594 * MIB
    if gpu.sm_count is None:
        return 400 * MIB
    return min(500 * MIB, 250 * MIB + gpu.sm_count * 3 * MIB // 2)


def hit_curve_prior(shape: ModelShape) -> tuple[float, tuple[float, float], str]:
    """`c` of the hit-rate law by family, its published range, and a sentence that says it is a prior."""
    if shape.family.startswith(("qwen3_5", "qwen3_6")):
        curve, curve_range = 9.0, (8.0, 10.0)
    else:
        curve, curve_range = 11.0, (7.0, 14.0)
    note = (
        f"hit rate from a published prior (c = {curve:g}, {curve_range[0]:g} to {curve_range[1]:g}), not measured here"
    )
    return curve, curve_range, note
