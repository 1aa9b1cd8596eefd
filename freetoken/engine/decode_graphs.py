"""Decode steps of one sequence as CUDA graphs: what lies between two looks at the residency table is one launch.

A layer is a graph up to the router (two around an attention, whose look at a growing KV stays as it is), one for the
shared expert and one for the routed experts. Before the last the host reads the router's choice, asks the table and
starts the copies, while the one before keeps the GPU busy. A linear layer's states are reached through a table of
their addresses on the device, so one set of graphs serves all sequences, and nothing is copied when another sequence
has its turn.

A graph is compared with the same step run without it before it counts; the first failure of any kind turns all graphs
off, with a sentence in the log, and steps go on without. A graph reads only what was alive when it was captured: its
inputs are kept, and what is given later at another address is copied to them first. Whole steps as one graph were set
aside: experts that are in no slot need the host.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from freetoken.engine.compute import run_pairs
from freetoken.engine.experts import ExpertRuntime
from freetoken.engine.fast_modules import (
    DeltaNet,
    FastModules,
    MoeBlock,
    check_close,
    find_attention,
    noise,
    stand_in,
)
from freetoken.engine.kernels import decode

log = logging.getLogger("freetoken.engine")
Tensors = tuple[torch.Tensor, ...]


class DecodeGraphs:
    """The graphs of one model. Used by the thread that runs the model, and by no other."""

    def __init__(self, runtime: ExpertRuntime, layers: list[Layer]) -> None:
        self.runtime, self.layers = runtime, layers
        #: Why there are no graphs any more; None while all is well.
        self.problem: str | None = None
        self.captured_count = self.replayed_count = 0
        self._cache_id: int | None = None
        self._records: object = None
        self._rows = {layer: row for row, layer in enumerate(one for one in layers if one.delta is not None)}
        self._addresses: list[int] = []
        self._kept: dict[int, torch.Tensor] = {}  # outputs of graphs by address: alive, so never anything else
        self._angles: Tensors = ()
        self._angles_given: Tensors = ()
        self._open()

    def _open(self) -> None:
        device = self.runtime.device
        self._stream: Any = None
        self._chosen_at: Any = None
        self._table = torch.zeros(max(1, len(self._rows)), 2, dtype=torch.int64, device=device)
        self._slots = torch.zeros(1, self.runtime.top_k, dtype=torch.int32, device=device)
        self._chosen = torch.empty(self.runtime.top_k, dtype=torch.int64, pin_memory=device.type == "cuda")
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
            self._chosen_at = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @classmethod
    def install(cls, model: Any, runtime: ExpertRuntime, found: FastModules) -> DecodeGraphs | None:
        """Give the model's layers a forward that replays graphs; None where its layers are of an unknown kind."""
        layers = [layer for module in model.modules() if (layer := find_layer(module, found)) is not None]
        if any(layer.delta for layer in layers) and not cls.can_run_delta_nets(runtime.device):
            return None
        if len(layers) != len(runtime.layouts):
            log.info("decode steps are not replayed as graphs: %d of %d layers fit", len(layers), len(runtime.layouts))
            return None
        try:
            for one in {layer.delta is not None: layer for layer in layers}.values():
                _check_either_way(model, one, layers, runtime.device)
        except Exception as error:
            log.info("decode steps are not replayed as graphs: %s", error)
            return None
        # The inference mode of all who use them: what is made here is changed there.
        with torch.inference_mode():
            made = cls(runtime, layers)
        for number, layer in enumerate(layers):
            layer.graphs, layer.number = made, number
            layer.module.forward = layer.forward
        return made

    @staticmethod
    def can_run_delta_nets(device: torch.device) -> bool:
        """Whether states can be reached through their addresses."""
        return decode.has_kernel("delta_step", device)

    def close(self) -> None:
        """Forget all graphs; steps go on without."""
        self.turn_off("closed")

    def reset(self) -> None:
        """Forget all graphs, to be captured anew."""
        self._synchronize()
        for layer in self.layers:
            layer.segments.clear()
        self._kept.clear()
        self.captured_count = 0
        if self._stream is not None:
            self._pool = torch.cuda.graph_pool_handle()

    def turn_off(self, problem: str) -> None:
        """No graphs from now on."""
        self.problem = self.problem or problem
        self.reset()

    def begin(self, cache: Any, dtype: torch.dtype) -> bool:
        """Look at what the coming step's graphs will reach: the states of `cache`, and where experts lie."""
        self._cache_id = None
        if self.problem is not None or cache is None or not torch.is_inference_mode_enabled():
            return False
        addresses = []
        for layer in self._rows:
            assert layer.delta is not None
            states = layer.delta.states_in(cache, dtype, 1)
            if states is None:
                return False
            addresses += [states[0].data_ptr(), states[1].data_ptr()]
        records = self.runtime.decode_records_key()
        if records != self._records:
            self.reset()
            self._records = records
        if addresses != self._addresses:
            self._table.view(-1)[: len(addresses)].copy_(torch.tensor(addresses, dtype=torch.int64))
            self._addresses = addresses
        self._cache_id = id(cache)
        return True

    def is_open_for(self, cache: Any) -> bool:
        """Whether `begin` was called for this cache, and nothing went wrong since."""
        return self.problem is None and self._cache_id is not None and self._cache_id == id(cache)

    def keep_angles(self, given: Tensors) -> Tensors:
        """The rotary cosines and sines of a step where graphs find them; they are the same in all its layers."""
        if len(self._angles) != len(given):
            self._angles = tuple(one.clone() for one in given)
            self._angles_given = ()
        if self._angles_given is not given:
            for kept, one in zip(self._angles, given, strict=True):
                kept.copy_(one)
            self._angles_given = given
        return self._angles

    def row(self, layer: Layer) -> torch.Tensor:
        """The addresses of a linear layer's states."""
        return self._table[self._rows[layer]]

    # ------------------------------------------------------------------ routed experts

    def run_experts(self, layer: Layer, mixed: Tensors) -> torch.Tensor:
        """Shared and routed experts added to the residual: what a layer answers."""
        hidden, flat, scores, choice = mixed
        runtime = self.runtime
        needs_choice = runtime.needs_choice
        if needs_choice:
            self._chosen.copy_(choice.view(-1), non_blocking=True)
            if self._chosen_at is not None:
                self._chosen_at.record()
        shared = self.run(layer, "shared", layer.share, (flat,)) if layer.block.has_shared else ()
        number = layer.expert_layer
        if runtime.decode_records(number) is None:
            routed = runtime.forward(number, flat, choice, scores)
            return layer.add(hidden, routed, shared)
        slots: torch.Tensor = choice
        if needs_choice:
            if self._chosen_at is not None:
                self._chosen_at.synchronize()  # all that ran before the router has ended: no slot is in use
            chosen = self._chosen.numpy().copy()[None]
            placed = runtime.place(number, chosen)
            if placed is None:
                routed = runtime.decode_placed(number, chosen, flat, scores)
                return layer.add(hidden, routed.to(flat.dtype), shared)
            runtime.upload(placed, self._slots)
            slots = self._slots
        else:
            runtime.count_decode(choice.shape[-1])
        return self.run(layer, "routed", layer.route_through, (slots, flat, scores, hidden, *shared))[0]

    # ------------------------------------------------------------------ capture and replay

    def run(
        self, layer: Layer, name: str, function: Callable[..., Tensors], inputs: Tensors, mutable: Tensors = ()
    ) -> Tensors:
        """`function(*inputs)`, which may change `mutable`, by its graph where there is or can be one."""
        if self.problem is not None:
            return function(*inputs)
        segment = layer.segments.get(name)
        if segment is None:
            return self._capture(layer, name, function, inputs, mutable)
        graph, static, outputs = segment
        for kept, given in zip(static, inputs, strict=True):
            if kept.data_ptr() != given.data_ptr():
                kept.copy_(given)
        graph.replay()
        self.replayed_count += 1
        return outputs

    def _capture(
        self, layer: Layer, name: str, function: Callable[..., Tensors], inputs: Tensors, mutable: Tensors
    ) -> Tensors:
        saved = [tensor.clone() for tensor in mutable]
        try:
            static = tuple(one if self._is_kept(one) else one.clone() for one in inputs)
            self._synchronize()
            with self._beside():
                right = function(*static)  # compiles what is to be compiled, and says what is right
                changed = [tensor.clone() for tensor in mutable]
                for tensor, before in zip(mutable, saved, strict=True):
                    tensor.copy_(before)
            graph, outputs = self._record(function, static)
            graph.replay()
            self._synchronize()
            for got, wanted in zip((*outputs, *mutable), (*right, *changed), strict=True):
                check_close(got, wanted, f"a graph ({name} of layer {layer.number})")
        except Exception as error:
            self.turn_off(f"{type(error).__name__}: {error}".splitlines()[0])
            log.warning("decode steps are replayed as graphs no more: %s", self.problem)
            self._synchronize()
            for tensor, before in zip(mutable, saved, strict=True):
                tensor.copy_(before)
            return function(*inputs)
        layer.segments[name] = (graph, static, outputs)
        self._kept.update((one.data_ptr(), one) for one in outputs)
        self.captured_count += 1
        return outputs

    def _record(self, function: Callable[..., Tensors], static: Tensors) -> tuple[Any, Tensors]:
        self._synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        was_collecting = gc.isenabled()
        gc.disable()  # what it frees might be another graph
        try:
            with self._beside():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = function(*static)
                except BaseException:
                    _end_failed_capture(graph, self.runtime.device, self._pool)
                    raise
                graph.capture_end()
        finally:
            if was_collecting:
                gc.enable()
        self._synchronize()
        return graph, outputs

    def _synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self.runtime.device)

    def _beside(self) -> AbstractContextManager[Any]:
        """Within, work goes to the stream that captures."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        return any(tensor is one for one in (self._slots, *self._angles)) or tensor.data_ptr() in self._kept


def _end_failed_capture(graph: Any, device: torch.device, pool: Any) -> None:
    """Ends a capture that something in it has spoilt, as far as that can be done; what spoilt it is told by others."""
    for end in (graph.capture_end, lambda: torch._C._cuda_endAllocateToPool(device.index, pool)):
        try:
            end()
        except Exception as error:
            log.debug("a failed capture's end: %s", error)


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


def _check_either_way(model: Any, layer: Layer, layers: list[Layer], device: torch.device) -> None:
    """As `check_layer`; where an attention cut in three is wrong, it stays whole in all layers."""
    try:
        check_layer(model, layer, device)
    except Exception as error:
        if layer.attention is None:
            raise
        log.info("attention is not replayed as graphs: %s", error)
        for one in layers:
            one.attention = None
        check_layer(model, layer, device)


def find_layer(module: Any, found: FastModules) -> Layer | None:
    """`module` as a decoder layer, None where it is none or not of the known kind."""
    parts = {name for name, _ in module.named_children()}
    block = found.blocks.get(id(getattr(module, "mlp", None)))
    for mixer in ("linear_attn", "self_attn"):
        if parts == {"input_layernorm", mixer, "post_attention_layernorm", "mlp"} and block is not None:
            delta = found.deltas.get(id(getattr(module, mixer)))
            return Layer(module, delta, block) if (mixer == "linear_attn") == (delta is not None) else None
    return None


@torch.inference_mode()
def check_layer(model: Any, layer: Layer, device: torch.device) -> None:
    """Raises where a layer's steps, one after the other, do not add up to its own forward."""
    config, width = model.config, layer.module.post_attention_layernorm.weight.shape[0]
    dtype = layer.module.post_attention_layernorm.weight.dtype
    rotary = next(module.rotary_emb for module in model.modules() if hasattr(module, "rotary_emb"))
    cache = DynamicCache(config=config)
    name = "cache" if "cache" in inspect.signature(layer.original).parameters else "past_key_values"

    def arguments(hidden: torch.Tensor, start: int, cache: Any) -> dict[str, Any]:
        positions = torch.arange(start, start + hidden.shape[1], device=device).unsqueeze(0)
        return {"position_embeddings": rotary(hidden, positions), "position_ids": positions, name: cache,
                "attention_mask": None}  # fmt: skip

    prompt, token = noise(1, 5, width, device=device, dtype=dtype), noise(1, 1, width, device=device, dtype=dtype)
    with stand_in(layer.block.module):
        layer.original(prompt, **arguments(prompt, 0, cache))
        mine = copy.deepcopy(cache)
        right = layer.original(token, **arguments(token, 5, cache))
        if layer.delta is not None:
            mixed = layer.mix(token, layer.delta.states_in(mine, dtype, 1))
        elif layer.attention is not None:
            given = arguments(token, 5, mine)
            query, key, value, *gate = layer.project(token, *given["position_embeddings"])
            mixed = layer.after_attention(token, layer.attention.attend(query, key, value, given), *gate)
        else:
            found = layer.module.self_attn(
                hidden_states=layer.module.input_layernorm(token), **arguments(token, 5, mine)
            )
            mixed = layer.after_mixer(token, found[0])
        hidden, flat, scores, choice = mixed
        shared = layer.share(flat) if layer.block.has_shared else ()
        got = layer.add(hidden, layer.experts(flat, choice, scores), shared)
    check_close(got, right, f"layer {type(layer.module).__name__} by its parts")
