"""Modules of `transformers` whose decode step is made of many small operations, given a forward of few.

No family is named here: a module is recognised by its parts, its new forward is compared with its own on random
inputs at load, and kept only where the two agree. What does not fit at call time (a prompt, a mask, a state of an
unknown kind) goes to the module's own forward. That is why nothing is subclassed or copied from a model's file: a
version of `transformers` that changes a module makes it slow again, never wrong.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from freetoken.engine.kernels import decode

#: More tokens than this are a prompt, and go to a module's own forward.
MAX_TOKENS = 8
#: How far a new forward may be off, as a share of the largest value: another formula is further off than rounding is.
#: (A GPU's own convolutions of float32 round to TF32.)
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
Forward = Callable[..., Any]


@dataclass
class FastModules:
    """What was replaced, by kind, and sentences on what could not be."""

    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    #: The steps of a token mixer and of an expert block, for `decode_graphs`: by module id.
    deltas: dict[int, DeltaNet] = field(default_factory=dict)
    blocks: dict[int, MoeBlock] = field(default_factory=dict)

    def describe(self) -> str:
        """A sentence for the log."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "none"


@torch.inference_mode()
def install(model: Any, device: torch.device, dtype: torch.dtype) -> FastModules:
    """Give `model`, which is loaded, the fast forwards that agree with its own on `device`."""
    found = FastModules()
    # Blocks last: one is compared with its own forward after its parts were.
    for kind, make in (("norms", _make_norm), ("delta nets", _make_delta_net), ("expert blocks", _make_block)):
        for name, module in model.named_modules():
            try:
                fast = make(module, model.config, device, dtype)
            except Exception as error:
                found.notes.append(f"`{name}` keeps its own forward: {first_line(error)}")
                continue
            if fast is None:
                continue
            found.counts[kind] = found.counts.get(kind, 0) + 1
            module.forward = fast.forward
            if isinstance(fast, DeltaNet):
                found.deltas[id(module)] = fast
            if isinstance(fast, MoeBlock):
                found.blocks[id(module)] = fast
    found.notes = found.notes[:3]  # the first of each kind says it all
    return found


def first_line(error: BaseException) -> str:
    """What an error says, without what follows for who wrote the program."""
    return str(error).strip().splitlines()[0] if str(error) else repr(error)


class MismatchError(Exception):
    """A new forward that does not agree with the module's own."""


def noise(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    """The same normal numbers at every call with the same `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def _difference(got: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference as a share of the largest right value; infinite where a value is none."""
    if got.shape != right.shape or got.dtype != right.dtype:
        return float("inf")
    largest = float(right.float().abs().max())
    found = float((got.float() - right.float()).abs().max()) / (largest or 1.0)
    return found if found == found else float("inf")


def check_close(got: torch.Tensor, right: torch.Tensor, what: str) -> None:
    """Raises MismatchError where the two differ by more than rounding."""
    difference = _difference(got, right)
    if difference > _TOLERANCE.get(right.dtype, 1e-5):
        raise MismatchError(f"{what} is off by {difference:.2g}")


# ---------------------------------------------------------------------- norms


@dataclass
class Norm:
    """An RMS norm. `weight` is float32, with the one already added where the family adds one."""

    weight: torch.Tensor
    eps: float
    is_rounded: bool

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The same as the module's own."""
        return decode.rms_norm(hidden_states, self.weight, self.eps, self.is_rounded)


def _make_norm(module: nn.Module, config: Any, device: torch.device, dtype: torch.dtype) -> Norm | None:
    names = {name for name, _ in module.named_parameters(recurse=False)}
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if not type(module).__name__.endswith("RMSNorm") or names != {"weight"} or not isinstance(eps, float):
        return None
    weight: Any = module.weight
    if weight.dim() != 1 or any(True for _ in module.children()):
        return None
    inputs = noise(3, weight.shape[0], device=device, dtype=dtype)
    right = module(inputs)
    found, least = None, float("inf")
    for is_rounded in (True, False):
        for one in (0.0, 1.0):
            norm = Norm(weight.float() + one, eps, is_rounded)
            difference = _difference(norm.forward(inputs), right)
            if difference < least:
                found, least = norm, difference
    if found is None or least > _TOLERANCE.get(dtype, 1e-5):
        raise MismatchError(f"its norm is off by {least:.2g}")
    return found


# ---------------------------------------------------------------------- delta nets


@dataclass
class DeltaNet:
    """A gated delta net with the parts that Qwen3.5 has: separate projections, one window, one memory."""

    module: Any
    original: Forward
    conv_weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One token of each sequence here, anything else by the module's own forward."""
        states = None if args else self._states(hidden_states, kwargs)
        if states is None:
            out: torch.Tensor = self.original(hidden_states, *args, **kwargs)
            return out
        return self.step(hidden_states, states)

    def step(self, hidden_states: torch.Tensor, states: decode.States | torch.Tensor) -> torch.Tensor:
        """[sequences, 1, hidden] -> the same; `states` as `decode.delta_step` takes them."""
        module = self.module
        flat = hidden_states.view(hidden_states.shape[0], -1)
        mixed, gate = module.in_proj_qkv(flat), module.in_proj_z(flat)
        beta, decay = module.in_proj_b(flat), module.in_proj_a(flat)
        norm = module.norm
        out = decode.delta_step(
            mixed, gate, beta, decay, states, self.conv_weight,
            module.A_log, module.dt_bias, norm.weight, norm.variance_epsilon, module.head_k_dim,
        )  # fmt: skip
        answer: torch.Tensor = module.out_proj(out)
        return answer.view_as(hidden_states)

    def _states(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> decode.States | None:
        if hidden_states.shape[1] != 1 or kwargs.get("attention_mask") is not None:
            return None
        cache = kwargs.get("cache", kwargs.get("cache_params"))
        if kwargs.get("cu_seq_lens_q") is not None:
            return None
        return self.states_in(cache, hidden_states.dtype, hidden_states.shape[0])

    def states_in(self, cache: Any, dtype: torch.dtype, sequences: int) -> decode.States | None:
        """The layer's window and memory in `cache`, None where a step cannot change them in place."""
        layer = cache.layers[self.module.layer_idx] if cache is not None else None
        if not isinstance(layer, LinearAttentionCacheLayerMixin) or getattr(layer, "record_past", False):
            return None
        windows, memories = layer.conv_states, layer.recurrent_states
        if not isinstance(windows, dict) or len(windows) != 1 or not layer.has_previous_state[0]:
            return None
        window, memory = windows[0], memories[0]
        if window is None or memory is None or memory.dtype != torch.float32 or window.dtype != dtype:
            return None
        if not window.is_contiguous() or not memory.is_contiguous() or window.shape[0] != sequences:
            return None
        return (window, memory) if window.shape[-1] == self.conv_weight.shape[-1] else None


def _make_delta_net(module: Any, config: Any, device: torch.device, dtype: torch.dtype) -> DeltaNet | None:
    parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d", "norm")
    if not all(isinstance(getattr(module, part, None), nn.Module) for part in parts):
        return None
    if module.conv1d.bias is not None or module.activation != "silu" or module.norm.activation != "silu":
        return None
    sizes = (module.head_k_dim, module.head_v_dim)
    if any(size & (size - 1) or not 8 <= size <= 256 for size in sizes) or sizes[0] * sizes[1] > 128 * 256:
        return None
    made = DeltaNet(module, module.forward, module.conv1d.weight.squeeze(1).contiguous())
    cache = DynamicCache(config=config)
    name = "cache" if "cache" in inspect.signature(module.forward).parameters else "cache_params"
    arguments = {name: cache}
    width = module.in_proj_qkv.in_features
    module(noise(1, 5, width, device=device, dtype=dtype), **arguments)
    for seed in (1, 2):
        inputs = noise(1, 1, width, device=device, dtype=dtype, seed=seed)
        states = made.states_in(cache, dtype, 1)
        if states is None:
            return None
        mine = (states[0].clone(), states[1].clone())
        right = module(inputs, **arguments)
        check_close(made.step(inputs, mine), right, "its step")
        for got, wanted in zip(mine, states, strict=True):
            check_close(got, wanted, "its state")
    return made


# ---------------------------------------------------------------------- attention


@dataclass
class Attention:
    """An attention cut in three: up to the rotated query and key, over the cache, and from there on.

    The first and the last have shapes that do not grow; the middle is left to `transformers`. Nothing is replaced.
    """

    module: Any
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    has_gate: bool

    def project(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value [1, heads, 1, head], and the gate where there is one."""
        module, shape = self.module, (*hidden.shape[:-1], -1, self.module.head_dim)
        query = module.q_proj(hidden)
        gate: tuple[torch.Tensor, ...] = ()
        if self.has_gate:
            query, opened = query.view(*shape[:-1], 2 * module.head_dim).chunk(2, dim=-1)
            gate = (opened.reshape(*hidden.shape[:-1], -1),)
        query, key, value = (one.view(shape) for one in (query, module.k_proj(hidden), module.v_proj(hidden)))
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        query, key = self.rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        return query, key, value.transpose(1, 2), *gate

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """[1, 1, heads * head], the new token's key and value being added to the cache."""
        module = self.module
        cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
        key, value = cache.update(key, value, module.layer_idx)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
        rest = {name: kwargs[name] for name in kwargs if name not in _NOT_PASSED_ON}
        out, _ = interface(
            module, query, key, value, kwargs.get("attention_mask"), dropout=0.0, scaling=module.scaling, **rest
        )
        answer: torch.Tensor = out.reshape(1, 1, -1)
        return answer

    def finish(self, out: torch.Tensor, *gate: torch.Tensor) -> torch.Tensor:
        """What the attention answers."""
        answer: torch.Tensor = self.module.o_proj(out * torch.sigmoid(gate[0]) if gate else out)
        return answer


_NOT_PASSED_ON = {"attention_mask", "position_embeddings", "cache", "past_key_values"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def find_attention(module: Any) -> Attention | None:
    """`module` in three parts, None where it has other parts than those."""
    names = {name for name, _ in module.named_children()}
    if names not in (_ATTENTION_PARTS, _ATTENTION_PARTS | {"q_norm", "k_norm"}):
        return None
    if list(module.named_parameters(recurse=False)) or getattr(module, "sliding_window", None) is not None:
        return None
    if "q_norm" in names and any(norm.weight.shape != (module.head_dim,) for norm in (module.q_norm, module.k_norm)):
        return None
    rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    wide = module.q_proj.out_features // module.o_proj.in_features
    if rotate is None or wide not in (1, 2) or not hasattr(module, "scaling"):
        return None
    return Attention(module, rotate, wide == 2)


# ---------------------------------------------------------------------- expert blocks


@dataclass
class MoeBlock:
    """A router over a softmax, routed experts, and maybe a shared expert behind a gate of its own."""

    module: Any
    original: Forward
    is_normed: bool

    @property
    def has_shared(self) -> bool:
        """Whether there is a shared expert."""
        return isinstance(getattr(self.module, "shared_expert", None), nn.Module)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Few tokens here, a prompt by the module's own forward."""
        if args or kwargs or hidden_states.numel() // hidden_states.shape[-1] > MAX_TOKENS:
            return self.original(hidden_states, *args, **kwargs)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, choice = self.route(flat)
        routed = self.module.experts(flat, choice, scores)
        return self.combine(routed, self.share(flat)).view_as(hidden_states)

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, expert numbers), both [tokens, top_k]."""
        gate = self.module.gate
        return decode.route(F.linear(flat, gate.weight), gate.top_k, self.is_normed)

    def share(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The shared expert's answer [tokens, hidden] and its gate [tokens, 1], None where there is none."""
        if not self.has_shared:
            return None
        shared = self.module.shared_expert
        inner = decode.silu_mul(shared.gate_proj(flat), shared.up_proj(flat))
        return shared.down_proj(inner), self.module.shared_expert_gate(flat)

    def combine(self, routed: torch.Tensor, shared: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Routed and shared experts together, [tokens, hidden]."""
        return routed if shared is None else decode.add_gated(routed, *shared)


def _make_block(module: Any, config: Any, device: torch.device, dtype: torch.dtype) -> MoeBlock | None:
    gate: Any = getattr(module, "gate", None)
    experts = getattr(module, "experts", None)
    if not isinstance(gate, nn.Module) or not hasattr(experts, "ft_layer"):
        return None
    if [name for name, _ in gate.named_parameters()] != ["weight"] or not isinstance(getattr(gate, "top_k", 0), int):
        return None
    known = {"gate", "experts", "shared_expert", "shared_expert_gate"}
    if {name for name, _ in module.named_children()} - known:
        return None
    if isinstance(getattr(module, "shared_expert", None), nn.Module) and not _is_silu(module.shared_expert):
        return None
    weight: Any = gate.weight
    experts_count, width, top_k = weight.shape[0], weight.shape[1], int(gate.top_k)  # type: ignore[arg-type]
    inputs = noise(1, MAX_TOKENS, width, device=device, dtype=dtype)
    logits = F.linear(inputs[0], weight).float().sort(dim=-1, descending=True).values
    # Where the last chosen and the first left out are alike, either may be taken.
    clear = logits[:, top_k - 1] > (logits[:, top_k] if top_k < experts_count else float("-inf"))
    with stand_in(module):
        right = module(inputs)
        if not isinstance(right, torch.Tensor) or not clear.any():
            return None
        made = [MoeBlock(module, module.forward, is_normed) for is_normed in (True, False)]
        differences = [_difference(block.forward(inputs)[0, clear], right[0, clear]) for block in made]
    best = min(range(2), key=differences.__getitem__)
    if differences[best] > _TOLERANCE.get(dtype, 1e-5):
        raise MismatchError(f"its expert block is off by {differences[best]:.2g}")
    return made[best]


def _is_silu(shared: Any) -> bool:
    parts = {name for name, _ in shared.named_children()}
    return {"gate_proj", "up_proj", "down_proj"} <= parts and is_silu(getattr(shared, "act_fn", None))


def is_silu(function: Any) -> bool:
    """Whether an activation is SiLU, by what it does."""
    probe = torch.linspace(-3.0, 3.0, 13)
    try:
        return callable(function) and torch.equal(function(probe), F.silu(probe))
    except Exception:
        return False


@contextmanager
def stand_in(block: Any) -> Iterator[None]:
    """Within, the routed experts of `block` are something cheap that tells choices and weights apart."""
    block.experts.forward = _stand_in
    try:
        yield
    finally:
        del block.experts.forward


def _stand_in(hidden: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    factors = (weights.float() * torch.cos(choice.float() + 1.0)).sum(dim=-1, keepdim=True)
    return (hidden.float() * factors).to(hidden.dtype)
