"""A decoder layer's decode step as functions of tensors, cut where the host has to look: what graphs are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from freetoken.engine.compute import run_pairs
from freetoken.engine.fast_modules import DeltaNet, FastModules, MoeBlock, find_attention
from freetoken.engine.kernels import decode

if TYPE_CHECKING:
    from freetoken.engine.decode_graphs import DecodeGraphs

Tensors = tuple[torch.Tensor, ...]


class Layer:
    """A decoder layer: norm, mixer, residual, norm, experts, residual; the mixer is a delta net or attention."""

    graphs: DecodeGraphs
    number: int

    def __init__(self, module: Any, delta: DeltaNet | None, block: MoeBlock) -> None:
        self.module, self.delta, self.block = module, delta, block
        self.attention = None if delta is not None else find_attention(module.self_attn)
        self.original: Callable[..., Any] = module.forward
        self.experts = block.module.experts
        self.expert_layer: int = self.experts.ft_layer
        #: Where the layer's states are in a cache.
        self.cache_index: int = (module.self_attn if delta is None else module.linear_attn).layer_idx
        self.segments: dict[str, tuple[Any, Tensors, Tensors]] = {}

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """One token of one sequence by graphs, anything else by the module's own forward."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        graphs = self.graphs
        if args or hidden_states.shape[:2] != (1, 1) or not graphs.runtime.is_decoding(1):
            return self.original(hidden_states, *args, **kwargs)
        is_open = graphs.begin(cache, hidden_states.dtype) if self.number == 0 else graphs.is_open_for(cache)
        if not is_open or (self.delta is not None and kwargs.get("attention_mask") is not None):
            return self.original(hidden_states, **kwargs)
        if self.delta is None:
            mixed = self.attend(hidden_states, kwargs)
        else:
            states = self.delta.states_in(cache, hidden_states.dtype, 1) if "mixer" not in self.segments else None
            mixed = graphs.run(self, "mixer", self.mix, (hidden_states,), states or ())
        return graphs.run_experts(self, mixed)

    def attend(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Tensors:
        """As `mix`, for a layer with attention."""
        graphs, attention = self.graphs, self.attention
        if attention is None:
            found = self.module.self_attn(hidden_states=self.module.input_layernorm(hidden), **kwargs)
            return graphs.run(self, "router", self.after_mixer, (hidden, found[0]))
        angles = graphs.keep_angles(kwargs["position_embeddings"])
        query, key, value, *gate = graphs.run(self, "query", self.project, (hidden, *angles))
        out = attention.attend(query, key, value, kwargs)
        return graphs.run(self, "router", self.after_attention, (hidden, out, *gate))

    def step_plainly(self, hidden: torch.Tensor, kwargs: dict[str, Any], cache: Any) -> torch.Tensor:
        """One token by the same steps without graphs, wherever its experts are computed."""
        attention = self.attention
        if self.delta is not None:
            mixed = self.mix(hidden, self.delta.states_in(cache, hidden.dtype, 1))
        elif attention is not None:
            query, key, value, *gate = self.project(hidden, *kwargs["position_embeddings"])
            mixed = self.after_attention(hidden, attention.attend(query, key, value, kwargs), *gate)
        else:
            found = self.module.self_attn(hidden_states=self.module.input_layernorm(hidden), **kwargs)
            mixed = self.after_mixer(hidden, found[0])
        hidden, flat, scores, choice = mixed
        shared = self.share(flat) if self.block.has_shared else ()
        return self.add(hidden, self.experts(flat, choice, scores), shared)

    def project(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        """Query, key, value, maybe a gate."""
        assert self.attention is not None
        return self.attention.project(self.module.input_layernorm(hidden), cos, sin)

    def after_attention(self, hidden: torch.Tensor, out: torch.Tensor, *gate: torch.Tensor) -> Tensors:
        """From what was attended to the router."""
        assert self.attention is not None
        return self.after_mixer(hidden, self.attention.finish(out, *gate))

    def mix(self, hidden: torch.Tensor, states: decode.States | None = None) -> Tensors:
        """Up to the router of a linear layer; states are those in the table where none are given."""
        assert self.delta is not None
        normed = self.module.input_layernorm(hidden)
        return self.after_mixer(hidden, self.delta.step(normed, self.graphs.row(self) if states is None else states))

    def after_mixer(self, hidden: torch.Tensor, mixed: torch.Tensor) -> Tensors:
        """(residual, what the experts see [1, hidden], scores, choice)."""
        hidden = hidden + mixed
        flat = self.module.post_attention_layernorm(hidden).view(1, -1)
        return hidden, flat, *self.block.route(flat)

    def share(self, flat: torch.Tensor) -> Tensors:
        """The shared expert and its gate."""
        return self.block.share(flat) or ()

    def route_through(
        self, slots: torch.Tensor, flat: torch.Tensor, scores: torch.Tensor, hidden: torch.Tensor, *shared: torch.Tensor
    ) -> Tensors:
        """The routed experts from where they lie on the device, and all that follows."""
        runtime, number = self.graphs.runtime, self.expert_layer
        records = runtime.decode_records(number)
        assert records is not None
        routed = run_pairs(runtime.modules[number], runtime.layouts[number], records, slots, flat, scores)
        return (self.add(hidden, routed.to(flat.dtype), shared),)

    def add(self, hidden: torch.Tensor, routed: torch.Tensor, shared: Tensors) -> torch.Tensor:
        """The layer's answer."""
        both = (shared[0], shared[1]) if shared else None
        return hidden + self.block.combine(routed, both).view_as(hidden)


def find_layer(module: Any, found: FastModules) -> Layer | None:
    """`module` as a decoder layer, None where it is none or not of the known kind."""
    parts = {name for name, _ in module.named_children()}
    block = found.blocks.get(id(getattr(module, "mlp", None)))
    for mixer in ("linear_attn", "self_attn"):
        if parts == {"input_layernorm", mixer, "post_attention_layernorm", "mlp"} and block is not None:
            delta = found.deltas.get(id(getattr(module, mixer)))
            return Layer(module, delta, block) if (mixer == "linear_attn") == (delta is not None) else None
    return None
