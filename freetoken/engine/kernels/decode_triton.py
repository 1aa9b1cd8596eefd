"""Triton kernels for the small steps between the matrix products of a decode step. Imported by `decode` alone.

Each does in one launch what `transformers` does in five to forty, and rounds to the model's type in the same places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(inputs, weight, out, row_stride, width, eps, ROUND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row `program 0`; with ROUND the normed value is rounded before it is weighted, as Llama does."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < width
    values = tl.load(inputs + row * row_stride + col, mask=inside, other=0.0).to(tl.float32)
    values = values / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    if ROUND:
        values = values.to(out.dtype.element_ty).to(tl.float32)
    values = values * tl.load(weight + col, mask=inside, other=0.0)
    tl.store(out + row * width + col, values.to(out.dtype.element_ty), mask=inside)


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float, is_rounded: bool) -> torch.Tensor:
    """[..., width] in the type of `inputs`; `weight` is float32."""
    width = inputs.shape[-1]
    rows = inputs.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows.shape[0],)](
        rows, weight, out, rows.stride(0), width, eps,
        ROUND=is_rounded, BLOCK=block, num_warps=8 if block >= 2048 else 4 if block >= 512 else 1,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _conv_step_kernel(  # type: ignore[no-untyped-def]
    mixed, state, table, weight, out, channels,
    HAS_TABLE: tl.constexpr, TAPS: tl.constexpr, TAPS_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Channels `program 0` of sequence `program 1`: shift the window by one, convolve, SiLU."""
    sequence = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    tap = tl.arange(0, TAPS_UP)
    if HAS_TABLE:
        window = tl.multiple_of(tl.load(table), 16).to(tl.pointer_type(mixed.dtype.element_ty))
    else:
        window = state + sequence * channels * TAPS
    fresh = tl.load(mixed + sequence * channels + channel, mask=live, other=0.0)
    places = window + channel[:, None] * TAPS + tap[None, :]
    old = tl.load(places + 1, mask=live[:, None] & (tap < TAPS - 1)[None, :], other=0.0)
    values = tl.where((tap == TAPS - 1)[None, :], fresh[:, None], old)
    known = live[:, None] & (tap < TAPS)[None, :]
    factors = tl.load(weight + channel[:, None] * TAPS + tap[None, :], mask=known, other=0.0)
    total = tl.sum(values.to(tl.float32) * factors.to(tl.float32), axis=1)
    tl.debug_barrier()  # a place is read by another thread than the one that writes it
    tl.store(places, values, mask=known)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + sequence * channels + channel, total.to(out.dtype.element_ty), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _delta_step_kernel(  # type: ignore[no-untyped-def]
    mixed, gate, beta_raw, decay_raw, state, table, a_log, dt_bias, norm_weight, out,
    channels, key_dim, eps, scale,
    HAS_TABLE: tl.constexpr, ROUND: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Value head `program 0` of sequence `program 1`: gated delta rule of one token, then the gated norm."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    rows = tl.arange(0, K)
    cols = tl.arange(0, V)
    source = mixed + sequence * channels
    query = tl.load(source + (head // GROUP) * K + rows).to(tl.float32)
    key = tl.load(source + key_dim + (head // GROUP) * K + rows).to(tl.float32)
    value = tl.load(source + 2 * key_dim + head * V + cols).to(tl.float32)
    query = query / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6) * scale
    key = key / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6)
    place = sequence * heads + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(beta_raw + place).to(tl.float32)))
    beta = beta.to(out.dtype.element_ty).to(tl.float32)
    raw = tl.load(decay_raw + place).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    soft = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * soft)
    if HAS_TABLE:
        memory = tl.multiple_of(tl.load(table + 1), 16).to(tl.pointer_type(tl.float32)) + head * K * V
    else:
        memory = state + place * K * V
    places = memory + rows[:, None] * V + cols[None, :]
    held = tl.load(places) * decay
    delta = (value - tl.sum(held * key[:, None], axis=0)) * beta
    held += key[:, None] * delta[None, :]
    tl.store(places, held)
    answer = tl.sum(held * query[:, None], axis=0).to(out.dtype.element_ty).to(tl.float32)
    answer = answer / tl.sqrt(tl.sum(answer * answer, axis=0) / V + eps)
    answer = answer.to(out.dtype.element_ty).to(tl.float32) * tl.load(norm_weight + cols).to(tl.float32)
    if ROUND:
        answer = answer.to(out.dtype.element_ty).to(tl.float32)
    opened = tl.load(gate + place * V + cols).to(tl.float32)
    answer = answer * (opened / (1.0 + tl.exp(-opened)))
    tl.store(out + place * V + cols, answer.to(out.dtype.element_ty))


def delta_step(
    mixed: torch.Tensor,
    gate: torch.Tensor,
    beta_raw: torch.Tensor,
    decay_raw: torch.Tensor,
    states: tuple[torch.Tensor, torch.Tensor] | torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    head_k_dim: int,
) -> torch.Tensor:
    """As `decode.delta_step`; `states` may be an int64 [2] of the addresses of one sequence's states."""
    sequences, channels = mixed.shape
    heads = beta_raw.shape[-1]
    head_v_dim = gate.shape[-1] // heads
    key_dim = (channels - heads * head_v_dim) // 2
    has_table = isinstance(states, torch.Tensor)
    table = states if isinstance(states, torch.Tensor) else mixed
    conv_state, memory = (mixed, mixed) if isinstance(states, torch.Tensor) else states
    taps = conv_weight.shape[-1]
    convolved = torch.empty_like(mixed)
    block = 128
    _conv_step_kernel[(triton.cdiv(channels, block), sequences)](
        mixed, conv_state, table, conv_weight, convolved, channels,
        HAS_TABLE=has_table, TAPS=taps, TAPS_UP=triton.next_power_of_2(taps), BLOCK=block, num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(gate)
    tile = head_k_dim * head_v_dim
    _delta_step_kernel[(heads, sequences)](
        convolved, gate, beta_raw, decay_raw, memory, table, a_log, dt_bias, norm_weight, out,
        channels, key_dim, eps, head_k_dim**-0.5,
        HAS_TABLE=has_table, ROUND=norm_weight.dtype == gate.dtype, GROUP=heads * head_k_dim // key_dim,
        K=head_k_dim, V=head_v_dim, num_warps=8 if tile >= 8192 else 4,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _route_kernel(  # type: ignore[no-untyped-def]
    logits, scores, choice, experts, TOP: tl.constexpr, TOP_UP: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Token `program 0`: softmax over its logits, the TOP largest, best first; with NORM they add up to one."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    rank = tl.arange(0, TOP_UP)
    values = tl.load(logits + token * experts + col, mask=col < experts, other=float("-inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, axis=0))
    values = values / tl.sum(values, axis=0)
    values = tl.where(col < experts, values, -1.0)
    best = tl.zeros((TOP_UP,), dtype=tl.float32)
    which = tl.zeros((TOP_UP,), dtype=tl.int32)
    for place in range(TOP):
        top = tl.max(values, axis=0)
        # NaN equals nothing: an expert that does not exist would be read from where no record is.
        at = tl.minimum(tl.min(tl.where(values == top, col, BLOCK), axis=0), experts - 1)
        best = tl.where(rank == place, top, best)
        which = tl.where(rank == place, at, which)
        values = tl.where(col == at, -1.0, values)
    if NORM:
        best = best / tl.sum(best, axis=0)
    inside = rank < TOP
    tl.store(scores + token * TOP + rank, best.to(scores.dtype.element_ty), mask=inside)
    tl.store(choice + token * TOP + rank, which.to(tl.int64), mask=inside)


def route(logits: torch.Tensor, top_k: int, is_normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores in the logits' type, expert numbers), both [tokens, top_k]."""
    tokens, experts = logits.shape
    logits = logits.contiguous()
    scores = torch.empty(tokens, top_k, dtype=logits.dtype, device=logits.device)
    choice = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    _route_kernel[(tokens,)](
        logits, scores, choice, experts,
        TOP=top_k, TOP_UP=triton.next_power_of_2(top_k), NORM=is_normed, BLOCK=triton.next_power_of_2(experts),
        num_warps=1,
    )  # fmt: skip
    return scores, choice


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(gate, up, out, width, gate_stride, up_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of columns of row `program 1`."""
    row = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    opened = tl.load(gate + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    opened = (opened / (1.0 + tl.exp(-opened))).to(out.dtype.element_ty).to(tl.float32)
    values = opened * tl.load(up + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, values.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [rows, width] each; rows may be apart."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    _silu_mul_kernel[(triton.cdiv(width, _BLOCK), rows)](
        gate, up, out, width, gate.stride(0), up.stride(0), BLOCK=_BLOCK, num_warps=4
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    pairs, weights, slots, out, width, TOP: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of columns of token `program 1`."""
    token = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(TOP):
        pair = token * TOP + rank
        values = tl.load(pairs + pair * width + col, mask=inside, other=0.0).to(tl.float32)
        values = values * tl.load(weights + pair).to(tl.float32)
        if HAS_SLOTS:
            values = tl.where(tl.load(slots + pair) < 0, 0.0, values)
        total += values
    tl.store(out + token * width + col, total.to(out.dtype.element_ty), mask=inside)


def weighted_sum(pairs: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """[tokens * k, width] by [tokens, k] -> float32 [tokens, width]; a pair whose slot is negative is left out."""
    tokens, top_k = weights.shape
    pairs, weights = pairs.contiguous(), weights.contiguous()
    out = torch.empty(tokens, pairs.shape[1], dtype=torch.float32, device=pairs.device)
    _weighted_sum_kernel[(triton.cdiv(out.shape[1], 512), tokens)](
        pairs, weights, weights if slots is None else slots.contiguous(), out, out.shape[1],
        TOP=top_k, HAS_SLOTS=slots is not None, BLOCK=512, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _add_gated_kernel(routed, shared, gate, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of columns of token `program 1`."""
    token = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    place = token * width + col
    opened = 1.0 / (1.0 + tl.exp(-tl.load(gate + token).to(tl.float32)))
    opened = opened.to(out.dtype.element_ty).to(tl.float32)
    added = opened * tl.load(shared + place, mask=inside, other=0.0).to(tl.float32)
    added = added.to(out.dtype.element_ty).to(tl.float32)
    values = tl.load(routed + place, mask=inside, other=0.0).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + place, (values + added).to(out.dtype.element_ty), mask=inside)


def add_gated(routed: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """routed + sigmoid(gate) * shared, [tokens, width]."""
    tokens, width = shared.shape
    out = torch.empty_like(shared)
    _add_gated_kernel[(triton.cdiv(width, 512), tokens)](
        routed.contiguous(), shared, gate, out, width, BLOCK=512, num_warps=4
    )
    return out
