"""The small steps between the matrix products of a decode step: one Triton kernel each, or plain torch operations.

Every function works everywhere. A kernel is taken on a GPU where it passed its self-test, once a device; what stands
here in torch operations is both the other way and what a kernel is tested against. Kernels round to the model's type
in the same places, so the two differ by the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from freetoken.engine.kernels.packed import find_error

States = tuple[torch.Tensor, torch.Tensor]
#: How far a kernel may be off in a self-test, as a share of the largest value. bfloat16 is there for its rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
KERNELS = ("rms_norm", "delta_step", "route", "silu_mul", "weighted_sum", "add_gated")


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float, is_rounded: bool) -> torch.Tensor:
    """[..., width] normed and weighted by the float32 `weight`; `is_rounded` rounds in between, as Llama does."""
    if (kernel := _kernel("rms_norm", inputs)) is not None:
        return _as_tensor(kernel(inputs, weight, eps, is_rounded))
    values = inputs.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    values = values.to(inputs.dtype).float() if is_rounded else values
    return (values * weight).to(inputs.dtype)


def delta_step(
    mixed: torch.Tensor,
    gate: torch.Tensor,
    beta_raw: torch.Tensor,
    decay_raw: torch.Tensor,
    states: States | torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    head_k_dim: int,
) -> torch.Tensor:
    """One token of a gated delta net, from its projections to what its output projection takes; states go along.

    `mixed` [sequences, channels] is query, key and value before the convolution, `gate` [sequences, heads * head_v],
    `beta_raw` and `decay_raw` [sequences, heads]. `states` is the window [sequences, channels, taps] and the float32
    memory [sequences, heads, head_k, head_v], both changed in place; with kernels also an int64 [2] of their
    addresses on the device, for one sequence.
    """
    if (kernel := _kernel("delta_step", mixed)) is not None:
        parts = (part.contiguous() for part in (mixed, gate, beta_raw, decay_raw))
        return _as_tensor(kernel(*parts, states, conv_weight, a_log, dt_bias, norm_weight, eps, head_k_dim))
    if isinstance(states, torch.Tensor):
        raise ValueError("addresses of states are for the kernel alone")
    dtype, (window, memory) = mixed.dtype, states
    sequences, heads = beta_raw.shape
    moved = torch.cat([window[..., 1:], mixed.unsqueeze(-1).to(window.dtype)], dim=-1)
    window.copy_(moved)
    convolved = F.silu((moved.float() * conv_weight.float()).sum(-1).to(dtype)).float()
    value_dim = gate.shape[-1]
    key_dim = (mixed.shape[1] - value_dim) // 2
    query, key, value = torch.split(convolved, [key_dim, key_dim, value_dim], dim=-1)
    query, key = (_unit(part.view(sequences, -1, head_k_dim)) for part in (query, key))
    group = heads // query.shape[1]
    query, key = (part.repeat_interleave(group, dim=1) for part in (query * head_k_dim**-0.5, key))
    beta = beta_raw.sigmoid().float().unsqueeze(-1)
    decay = (-a_log.float().exp() * F.softplus(decay_raw.float() + dt_bias.float())).exp()
    memory.mul_(decay[..., None, None])
    delta = (value.view(sequences, heads, -1) - (memory * key.unsqueeze(-1)).sum(-2)) * beta
    memory.add_(key.unsqueeze(-1) * delta.unsqueeze(-2))
    answer = (memory * query.unsqueeze(-1)).sum(-2).to(dtype).float()
    answer = answer * torch.rsqrt(answer.pow(2).mean(-1, keepdim=True) + eps)
    answer = norm_weight * answer.to(dtype)
    return (answer.float() * F.silu(gate.float()).view_as(answer)).to(dtype).view_as(gate)


def _unit(values: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt((values * values).sum(dim=-1, keepdim=True) + 1e-6)


def route(logits: torch.Tensor, top_k: int, is_normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores in the logits' type, expert numbers), both [tokens, top_k], by a softmax over all experts."""
    if (kernel := _kernel("route", logits)) is not None:
        scores, choice = kernel(logits, top_k, is_normed)
        return scores, choice
    top, choice = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    if is_normed:
        top = top / top.sum(dim=-1, keepdim=True)
    return top.to(logits.dtype), choice


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [rows, width] each."""
    if (kernel := _kernel("silu_mul", gate)) is not None and gate.stride(1) == up.stride(1) == 1:
        return _as_tensor(kernel(gate, up))
    return F.silu(gate) * up


def weighted_sum(pairs: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens * k, width] by [tokens, k] -> float32 [tokens, width]; a pair whose slot is negative is left out."""
    if (kernel := _kernel("weighted_sum", pairs)) is not None:
        return _as_tensor(kernel(pairs, weights, slots))
    weighted = pairs.view(*weights.shape, -1).float() * weights.unsqueeze(-1).float()
    if slots is not None:
        weighted = weighted.masked_fill_((slots < 0).unsqueeze(-1), 0.0)
    return weighted.sum(dim=1)


def add_gated(routed: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """routed + sigmoid(gate) * shared in the type of `shared`, [tokens, width] each, `gate` [tokens, 1]."""
    if (kernel := _kernel("add_gated", shared)) is not None:
        return _as_tensor(kernel(routed, shared.contiguous(), gate.contiguous()))
    return routed.to(shared.dtype) + torch.sigmoid(gate) * shared


def has_kernel(name: str, device: torch.device) -> bool:
    """Whether a kernel of this name is taken on `device`."""
    return device.type == "cuda" and name in _kernels(device).found


def describe(device: torch.device) -> str | None:
    """A sentence on which kernels are not taken on this device and why; None where all are."""
    return _kernels(device).problem if device.type == "cuda" else None


# ---------------------------------------------------------------------- choice and self-test


class _Kernels:
    """What works on one device."""

    def __init__(self) -> None:
        self.found: dict[str, Callable[..., Any]] = {}
        self.problem: str | None = None

    def probe(self, device: torch.device) -> None:
        """Compile and test each kernel; a failure takes that kernel out."""
        problems: list[str] = []
        try:
            from freetoken.engine.kernels import decode_triton
        except ImportError:
            self.problem = "decode steps take plain torch operations, which is slower: Triton is not installed"
            return
        for name in KERNELS:
            try:
                kernel = getattr(decode_triton, name)
                errors = {dtype: self_test(name, kernel, device, dtype) for dtype in TOLERANCE}
                if all(error < TOLERANCE[dtype] for dtype, error in errors.items()):
                    self.found[name] = kernel
                else:
                    problems.append(f"`{name}` is off by {' and '.join(f'{error:.2g}' for error in errors.values())}")
            except Exception as error:
                problems.append(f"`{name}` fails: {str(error).strip().splitlines()[0] if str(error) else error!r}")
        if problems:
            self.problem = "decode steps run without all kernels, which is slower: " + "; ".join(problems)


@lru_cache(maxsize=16)
def _kernels(device: torch.device) -> _Kernels:
    found = _Kernels()
    if device.type == "cuda":
        with torch.inference_mode(False), torch.no_grad():
            found.probe(device)
    return found


def _kernel(name: str, tensor: torch.Tensor) -> Callable[..., Any] | None:
    return _kernels(tensor.device).found.get(name) if tensor.is_cuda else None


def _as_tensor(value: Any) -> torch.Tensor:
    found: torch.Tensor = value
    return found


def self_test(
    name: str,
    kernel: Callable[..., Any],
    device: torch.device,
    model_dtype: torch.dtype,
    sizes: tuple[int, int, int, int] = (2, 4, 16, 32),
) -> float:
    """The largest error of `kernel` on small random cases, as a share of the largest right value.

    `sizes` are those of a delta net: key heads, value heads, key and value width of a head.
    """
    generator = torch.Generator().manual_seed(11)

    def noise(*shape: int, dtype: torch.dtype = model_dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    def on_host(*values: torch.Tensor) -> list[torch.Tensor]:
        return [value.cpu().clone() for value in values]

    if name == "rms_norm":
        inputs, weight = noise(3, 160), noise(160, dtype=torch.float32)
        halves = noise(2, 2, 128)[..., :48]
        return max(
            find_error(kernel(inputs, weight, 1e-6, True), rms_norm(inputs.cpu(), weight.cpu(), 1e-6, True)),
            find_error(
                kernel(halves, weight[:48], 1e-6, False), rms_norm(halves.cpu(), weight[:48].cpu(), 1e-6, False)
            ),
        )
    if name == "route":
        logits = noise(3, 40, dtype=torch.float32)
        errors = []
        for is_normed in (True, False):
            scores, choice = kernel(logits, 6, is_normed)
            right, where = route(logits.cpu(), 6, is_normed)
            errors.append(find_error(scores, right) if torch.equal(choice.cpu(), where) else float("inf"))
            _, choice = kernel(logits * torch.nan, 6, is_normed)
            errors.append(0.0 if bool(((choice >= 0) & (choice < 40)).all()) else float("inf"))
        return max(errors)
    if name == "silu_mul":
        both = noise(3, 80)
        return find_error(kernel(both[:, :40], both[:, 40:]), silu_mul(*both.cpu().chunk(2, dim=1)))
    if name == "weighted_sum":
        pairs, weights = noise(12, 72, dtype=torch.float32), noise(2, 6)
        slots = torch.tensor([[0, -1, 2, 3, -1, 5], [1, 1, 4, 0, 2, 9]], dtype=torch.int32, device=device)
        return max(
            find_error(kernel(pairs, weights, slots), weighted_sum(*on_host(pairs, weights, slots))),
            find_error(kernel(pairs, weights, None), weighted_sum(*on_host(pairs, weights))),
        )
    if name == "add_gated":
        given = (noise(2, 72), noise(2, 72), noise(2, 1))
        return find_error(kernel(*given), add_gated(*on_host(*given)))
    return max(_test_delta_step(kernel, device, noise, has_table, sizes) for has_table in (False, True))


def _test_delta_step(
    kernel: Callable[..., Any],
    device: torch.device,
    noise: Callable[..., torch.Tensor],
    has_table: bool,
    sizes: tuple[int, int, int, int],
) -> float:
    (key_heads, heads, head_k, head_v), taps = sizes, 4
    channels, sequences = 2 * key_heads * head_k + heads * head_v, 1 if has_table else 2
    steps = [
        (noise(sequences, channels), noise(sequences, heads * head_v), noise(sequences, heads), noise(sequences, heads))
        for _ in range(3)
    ]
    states = (noise(sequences, channels, taps), noise(sequences, heads, head_k, head_v, dtype=torch.float32))
    right_states = (states[0].cpu().clone(), states[1].cpu().clone())
    norm_weight = noise(head_v) if has_table else noise(head_v, dtype=torch.float32)
    weights = (noise(channels, taps), noise(heads), noise(heads), norm_weight)
    table = torch.tensor([state.data_ptr() for state in states], dtype=torch.int64).to(device)
    errors = []
    for step in steps:
        got = kernel(*step, table if has_table else states, *weights, 1e-6, head_k)
        mixed, gate, beta, decay = (part.cpu() for part in step)
        conv_weight, a_log, dt_bias, norm = (part.cpu() for part in weights)
        right = delta_step(mixed, gate, beta, decay, right_states, conv_weight, a_log, dt_bias, norm, 1e-6, head_k)
        errors.append(find_error(got, right))
    return max(*errors, *(find_error(*pair) for pair in zip(states, right_states, strict=True)))
