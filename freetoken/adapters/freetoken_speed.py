"""What a token and a prefill chunk cost on the upstream engine."""

from __future__ import annotations

from freetoken.adapters.freetoken_sizes import slot_bytes, state_element_bytes
from freetoken.adapters.model_costs import active_parameters, hit_curve_prior
from freetoken.planner.memory import ResolvedSettings, SpeedTraits
from freetoken.planner.plan import PlanRequest

#: Of each decode step beside reads and misses: sampling, detokenising and scheduling once, launches and expert look-up
#: for each layer. Two depths separate the two: 1.2 ms with 12 layers and 3.3 to 3.7 with 40 (offload, H200).
STEP_BASE_S = 0.0003
#: Layers cost more with work on both sides: submit and merge. Published for 40 layers: 2.5 ms fused, 5 hybrid or CPU.
STEP_LAYER_S = {"fused": 55e-6, "offload": 75e-6, "hybrid": 118e-6, "cpu": 118e-6}


def make_speed_traits(request: PlanRequest, settings: ResolvedSettings) -> SpeedTraits:
    """The costs that the roofline needs."""
    shape, experts = request.shape, request.shape.experts
    curve, curve_range, note = hit_curve_prior(shape)
    path = {"fused": "none", "offload": "pcie", "hybrid": "hybrid", "cpu": "dram"}[settings.strategy]
    streams = settings.strategy != "fused"
    return SpeedTraits(
        experts=experts.count,
        experts_per_token=experts.layers * experts.top_k,
        expert_bytes=slot_bytes(shape),
        dense_read_bytes=shape.dense.bytes + shape.shared_experts.bytes + (shape.head.bytes or shape.embedding.bytes),
        kv_read_bytes_per_token=shape.kv_bytes_per_token(),
        state_read_bytes=2 * shape.state_bytes_per_sequence(state_element_bytes(settings)),
        active_parameters=active_parameters(shape),
        full_attention_layers=shape.attention.count("full") + shape.attention.count("mla"),
        attention_width=shape.attention.heads * shape.attention.head_dim,
        miss_path=path,
        step_overhead_s=STEP_BASE_S + STEP_LAYER_S[settings.strategy] * shape.layers,
        prefill_stream_bytes=slot_bytes(shape) * experts.count if streams else 0,
        is_stream_overlapped=settings.prefill_overlap is not False,
        stream_path="pcie" if streams else "none",
        hit_curve_c=curve,
        hit_curve_range=curve_range,
        hit_curve_note=note,
    )
