"""Predicted speed: decode and prefill tok/s and TTFT with a range, and what limits them.

The practical form of decode is serial, since routing of a layer is known only after its attention:
`t = VRAM traffic / (efficiency x bandwidth) + miss traffic / link + step overhead`. Against eight published runs
its mean error is 8 % and the worst 26 %. The overlapped form (the larger of the two) was set aside: no engine
with exact routing reaches it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from freetoken.planner.budget import find_gpu
from freetoken.planner.memory import ResolvedSettings, SpeedTraits
from freetoken.planner.plan import Calibration, PlanRequest, Prediction
from freetoken.planner.rates import Rates, resolve_rates
from freetoken.recipe.workload import Workload

Limiter = Literal["vram", "pcie", "dram", "disk", "overhead", "compute"]
PrefillLimiter = Literal["pcie", "compute", "disk", "dram"]


class DecodeStep(NamedTuple):
    """Seconds of one decode step by cause, and the traffic behind it."""

    read_s: float
    miss_s: float
    overhead_s: float
    hit_ratio: float
    miss_bytes: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.read_s + self.miss_s + self.overhead_s


def predict_hit_ratio(resident_ratio: float, curve: float) -> float:
    """Share of expert look-ups found resident under LRU: `h = (1 + c) f / (1 + c f)`.

    One parameter, exact at f = 0 and f = 1; pooled over 21 published points of four models c = 10.7, rmse 3.2 points.
    """
    share = min(1.0, max(0.0, resident_ratio))
    return (1 + curve) * share / (1 + curve * share)


def fit_hit_curve(resident_ratio: float, hit_ratio: float) -> float | None:
    """The `c` that one counter reading pins; None where the reading says nothing (nothing or all resident)."""
    if not 0 < resident_ratio < 1 or not 0 < hit_ratio < 1:
        return None
    return max(0.0, ((1 - resident_ratio) / (1 - hit_ratio) - 1) / resident_ratio)


def compute_decode_step(
    traits: SpeedTraits,
    rates: Rates,
    *,
    slots: int,
    context_tokens: int,
    curve: float,
    fetch_ratio: float | None = None,
) -> DecodeStep:
    """One decode step of one request with `slots` experts resident and `context_tokens` in the KV cache."""
    hit = 1.0 if traits.miss_path == "none" else predict_hit_ratio(slots / max(1, traits.experts), curve)
    on_cpu = traits.miss_path == "dram" and traits.resident_in == "vram"
    misses = traits.experts_per_token * (1.0 if on_cpu else 1 - hit)
    miss_bytes = misses * traits.expert_bytes
    read = traits.dense_read_bytes + context_tokens * traits.kv_read_bytes_per_token + traits.state_read_bytes
    if not on_cpu:
        read += traits.experts_per_token * traits.expert_bytes
    bandwidth = rates.vram if traits.resident_in == "vram" else rates.dram
    return DecodeStep(
        read_s=read / (traits.efficiency * bandwidth),
        miss_s=_miss_seconds(traits, rates, miss_bytes, fetch_ratio),
        overhead_s=traits.step_overhead_s,
        hit_ratio=0.0 if on_cpu else hit,
        miss_bytes=miss_bytes,
    )


def _miss_seconds(traits: SpeedTraits, rates: Rates, miss_bytes: float, fetch_ratio: float | None) -> float:
    match traits.miss_path:
        case "pcie":
            return miss_bytes / rates.pcie
        case "dram":
            return miss_bytes / rates.cpu_experts
        case "disk":
            return miss_bytes / rates.disk
        case "hybrid":
            # Both sides share the DRAM: what PCIe takes is missing on the CPU side unless both were measured together.
            link = rates.pcie_overlap or rates.pcie
            cpu = rates.cpu_overlap or max(rates.cpu_experts - link, rates.cpu_experts / 4)
            share = link / (link + cpu) if fetch_ratio is None else fetch_ratio
            return max(share * miss_bytes / link, (1 - share) * miss_bytes / cpu)
        case _:
            return 0.0


class ChunkTime(NamedTuple):
    """Seconds of one prefill chunk by cause."""

    stream_s: float
    compute_s: float
    seconds: float


def compute_chunk(traits: SpeedTraits, rates: Rates, tokens: int, past_tokens: int = 0) -> ChunkTime:
    """One prefill chunk of `tokens` after `past_tokens`: the bank is streamed once, compute hides behind it or adds."""
    paths = {
        "pcie": rates.pcie,
        "pcie_pageable": rates.pcie_pageable,
        "dram": rates.dram,
        "disk": rates.disk,
    }
    stream = traits.prefill_stream_bytes / paths[traits.stream_path] if traits.stream_path != "none" else 0.0
    effective = traits.compute_efficiency * rates.flops * tokens / (tokens + traits.chunk_half_tokens)
    attention = 4.0 * traits.full_attention_layers * traits.attention_width * tokens * (past_tokens + tokens / 2)
    compute = (2.0 * traits.active_parameters * tokens + attention) / effective
    total = max(stream, compute) if traits.is_stream_overlapped else stream + compute
    return ChunkTime(stream, compute, total + traits.chunk_overhead_s)


def compute_prefill_s(traits: SpeedTraits, rates: Rates, tokens: int, chunk_tokens: int, past_tokens: int = 0) -> float:
    """Seconds to prefill `tokens` new prompt tokens after `past_tokens` already cached."""
    chunk_tokens = max(1, chunk_tokens)
    whole, rest = divmod(tokens, chunk_tokens)
    # The attention term is linear in the past, so the mean past stands for all whole chunks.
    seconds = 0.0
    if whole:
        mean_past = past_tokens + int((whole - 1) * chunk_tokens / 2)
        seconds += whole * compute_chunk(traits, rates, chunk_tokens, mean_past).seconds
    if rest:
        seconds += compute_chunk(traits, rates, rest, past_tokens + whole * chunk_tokens).seconds
    return seconds


def computed_prompt_tokens(workload: Workload, turn: int, has_prefix_cache: bool) -> tuple[int, int]:
    """(new, cached) prompt tokens of turn 1, 2, ...: with a prefix cache only what is new is computed."""
    history = workload.shared_prefix_tokens + (turn - 1) * (workload.prompt_tokens + workload.output_tokens)
    if not has_prefix_cache:
        return history + workload.prompt_tokens, 0
    if turn == 1:
        return workload.first_prompt_tokens, 0
    return workload.prompt_tokens, history


def predict_speed(
    request: PlanRequest, settings: ResolvedSettings, traits: SpeedTraits, *, rates: Rates | None = None
) -> Prediction:
    """Decode and prefill rates of the recipe's workload with `settings`, with a range and the limiting resource.

    TTFT is that of the turn with the longest prompt to compute. Decode is taken at the mean context of the workload.
    """
    rates = rates or resolve_rates(request.hardware, find_gpu(request, settings))
    traits = apply_calibration(traits, request.calibration)
    workload = request.recipe.workload
    step = _step_of(traits, rates, request, settings, traits.hit_curve_c)
    spread = _spread(request.calibration, rates)
    low = _step_of(traits, rates, request, settings, traits.hit_curve_range[0]).seconds
    high = _step_of(traits, rates, request, settings, traits.hit_curve_range[1]).seconds
    new, cached = _longest_turn(workload, settings.prefix_cache is not False)
    chunk = min(settings.prefill_chunk_tokens, max(1, new))
    ttft = compute_prefill_s(traits, rates, new, chunk, cached) + step.seconds
    has_misses = traits.miss_path != "none" and traits.experts > 0
    return Prediction(
        decode_tps=1 / step.seconds,
        decode_tps_low=(1 - spread) / max(low, step.seconds),
        decode_tps_high=(1 + spread) / min(high, step.seconds),
        prefill_tps=new / ttft,
        ttft_s=ttft,
        ttft_low_s=ttft * (1 - spread),
        ttft_high_s=ttft * (1 + 1.5 * spread),
        hit_ratio=step.hit_ratio if has_misses else None,
        miss_bytes_per_token=round(step.miss_bytes) if has_misses else None,
        limited_by=_decode_limiter(traits, step),
        prefill_limited_by=_prefill_limiter(traits, compute_chunk(traits, rates, chunk, cached)),
        mean_turn_time_s=predict_turn_time_s(workload, traits, rates, settings, step),
        notes=_notes(request, traits, rates, new),
    )


def _step_of(
    traits: SpeedTraits, rates: Rates, request: PlanRequest, settings: ResolvedSettings, curve: float
) -> DecodeStep:
    workload = request.recipe.workload
    # Half of the last turn's context is the mean over a conversation that grows from nothing.
    context = workload.largest_prompt_tokens // 2 if workload.turns > 1 else workload.largest_prompt_tokens
    return compute_decode_step(
        traits,
        rates,
        slots=settings.expert_slots,
        context_tokens=context,
        curve=curve,
        fetch_ratio=settings.fetch_ratio,
    )


def apply_calibration(traits: SpeedTraits, calibration: Calibration) -> SpeedTraits:
    """`traits` with what was measured on this machine in place of priors."""
    update: dict[str, object] = {}
    if calibration.hit_curve_c is not None:
        c = calibration.hit_curve_c
        update |= {"hit_curve_c": c, "hit_curve_range": (0.9 * c, 1.1 * c), "hit_curve_note": ""}
    if calibration.step_overhead_s is not None:
        update["step_overhead_s"] = calibration.step_overhead_s
    return traits.model_copy(update=update) if update else traits


def predict_turn_time_s(
    workload: Workload, traits: SpeedTraits, rates: Rates, settings: ResolvedSettings, step: DecodeStep
) -> float:
    """Mean seconds of a turn: prompt computed, then the output decoded."""
    has_cache = settings.prefix_cache is not False
    turns = (
        sorted({1, (workload.turns + 1) // 2, workload.turns}) if workload.turns > 3 else range(1, workload.turns + 1)
    )
    weights = _turn_weights(workload.turns)
    total = 0.0
    for turn in turns:
        new, cached = computed_prompt_tokens(workload, turn, has_cache)
        chunk = min(settings.prefill_chunk_tokens, max(1, new))
        total += weights[turn] * compute_prefill_s(traits, rates, new, chunk, cached)
    return total + workload.output_tokens * step.seconds


def _turn_weights(turns: int) -> dict[int, float]:
    """Weights that make the first, middle and last turn stand for all of them; the plain mean up to three."""
    if turns <= 3:
        return dict.fromkeys(range(1, turns + 1), 1 / turns)
    return {1: 1 / turns, (turns + 1) // 2: (turns - 2) / turns, turns: 1 / turns}


def _longest_turn(workload: Workload, has_prefix_cache: bool) -> tuple[int, int]:
    turns = {1, workload.turns}
    return max(computed_prompt_tokens(workload, turn, has_prefix_cache) for turn in turns)


def _spread(calibration: Calibration, rates: Rates) -> float:
    if calibration.hit_curve_c is not None and calibration.step_overhead_s is not None:
        return 0.05
    return 0.3 if rates.guessed else 0.15


def _decode_limiter(traits: SpeedTraits, step: DecodeStep) -> Limiter:
    largest = max(step.read_s, step.miss_s, step.overhead_s)
    if largest == step.overhead_s:
        return "overhead"
    if largest == step.read_s:
        return "vram" if traits.resident_in == "vram" else "dram"
    return {"pcie": "pcie", "hybrid": "pcie", "dram": "dram", "disk": "disk"}.get(traits.miss_path, "overhead")  # type: ignore[return-value]


def _prefill_limiter(traits: SpeedTraits, chunk: ChunkTime) -> PrefillLimiter:
    if traits.stream_path == "none" or chunk.compute_s >= chunk.stream_s:
        return "compute"
    return {"pcie": "pcie", "pcie_pageable": "pcie", "dram": "dram", "disk": "disk"}[traits.stream_path]  # type: ignore[return-value]


def _notes(request: PlanRequest, traits: SpeedTraits, rates: Rates, prompt_tokens: int) -> tuple[str, ...]:
    notes = [f"TTFT of {prompt_tokens:,} prompt tokens to compute"]
    if traits.miss_path in ("pcie", "hybrid", "disk") and traits.hit_curve_note:
        notes.append(traits.hit_curve_note)
    if rates.guessed:
        notes.append(f"guessed bandwidths: {', '.join(rates.guessed)}; `ft probe --bandwidth` measures them")
    return tuple(notes)
