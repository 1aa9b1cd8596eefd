"""What a token and a prefill chunk cost on the upstream engine."""

from __future__ import annotations

from freetoken.adapters.freetoken_sizes import slot_bytes, state_element_bytes
from freetoken.adapters.model_costs import active_parameters, hit_curve_prior
from freetoken.planner.memory import ResolvedSettings, SpeedTraits
from freetoken.planner.plan import PlanRequest

#: Decode steps cost more with work on both sides: submit and merge for each layer.
STEP_OVERHEAD_S = {"fused": 0.0025, "offload": 0.003, "hybrid": 0.005, "cpu": 0.005}


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
        step_overhead_s=STEP_OVERHEAD_S[settings.strategy],
        prefill_stream_bytes=slot_bytes(shape) * experts.count if streams else 0,
        is_stream_overlapped=settings.prefill_overlap is not False,
        stream_path="pcie" if streams else "none",
        hit_curve_c=curve,
        hit_curve_range=curve_range,
        hit_curve_note=note,
    )
