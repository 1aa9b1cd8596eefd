"""Decode steps of one sequence as CUDA graphs: what lies between two looks at the residency table is one launch.

A layer is a graph up to the router (two around an attention, whose look at a growing KV stays as it is), one for the
shared expert and one for the routed experts. Before the last the host reads the router's choice, asks the table and
starts the copies, while the one before keeps the GPU busy. A linear layer's states are reached through a table of
their addresses on the device, so one set of graphs serves all sequences, and nothing is copied when another sequence
has its turn.

They are captured by a step that no request waits for: after the load, and anew in a live resize of the slots; keys and
values are in none of them. A graph is compared with the same step run without it before it counts; the first failure of
any kind turns all graphs off, with a sentence in the log, and steps go on without. A graph reads only what was alive
when it was captured: its inputs are kept, and what is given later at another address is copied to them first. Whole
steps as one graph were set aside: experts that are in no slot need the host.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from freetoken import units
from freetoken.engine.decode_layers import Layer, Tensors, find_layer
from freetoken.engine.experts import ExpertRuntime
from freetoken.engine.fast_modules import FastModules, MismatchError, check_close, first_line
from freetoken.engine.kernels import decode
from freetoken.engine.rehearsal import check_layers

log = logging.getLogger("freetoken.engine")
#: VRAM that what graphs compute may hold; 2 MiB are usual, only experts without kernels, which are unpacked in between,
#: hold more. The planner's line `cuda_graphs` has their stream's work space and the driver's share in it too.
_MOST_BYTES = 40 << 20


class DecodeGraphs:
    """The graphs of one model. Used by the thread that runs the model, and by no other."""

    def __init__(self, runtime: ExpertRuntime, layers: list[Layer]) -> None:
        self.runtime, self.layers = runtime, layers
        #: Why there are no graphs any more; None while all is well.
        self.problem: str | None = None
        self.captured_count = self.replayed_count = 0
        #: VRAM that was taken for what graphs compute.
        self.held_bytes = 0
        self._is_rehearsing = False
        #: Whether something was left uncaptured in this step. Graphs share memory, and what one has freed is another's
        #: only as long as they run in the order of their capture: what follows waits for a later step.
        self._has_gap = False
        self._cache_id: int | None = None
        self._records: object = None
        self._rows = {layer: row for row, layer in enumerate(one for one in layers if one.delta is not None)}
        self._addresses: list[int] = []
        self._kept: dict[int, torch.Tensor] = {}  # outputs of graphs by address: alive, so never anything else
        self._angles: dict[object, tuple[Tensors, Tensors]] = {}  # by shapes: kept, and what they were copied from
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
    def install(
        cls, model: Any, runtime: ExpertRuntime, found: FastModules, note: Callable[[str], None]
    ) -> DecodeGraphs | None:
        """Give the model's layers a forward that replays graphs; where they cannot be cut, None and a sentence."""
        try:
            layers = [layer for module in model.modules() if (layer := find_layer(module, found)) is not None]
            if any(layer.delta for layer in layers) and not cls.can_run_delta_nets(runtime.device):
                raise MismatchError("the kernel `delta_step`, which finds states by their addresses, is not taken")
            if len(layers) != len(runtime.layouts):
                raise MismatchError(f"{len(layers)} of {len(runtime.layouts)} layers are of a known kind")
            check_layers(model, layers, runtime.device, note)
        except Exception as error:
            note(f"decode steps are not replayed as graphs, which is slower: {first_line(error)}")
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
        self.captured_count = self.held_bytes = 0
        if self._stream is not None:
            self._pool = torch.cuda.graph_pool_handle()

    def turn_off(self, problem: str) -> None:
        """No graphs from now on."""
        self.problem = self.problem or problem
        self.reset()

    @property
    def is_stale(self) -> bool:
        """Whether experts lie elsewhere than when the graphs were captured: the next step captures them anew."""
        return self.problem is None and self.runtime.decode_records_key() != self._records

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Steps within count nowhere and leave slots as they were, until a capture fails: the rest is a usual step."""
        self._is_rehearsing, replayed = True, self.replayed_count
        try:
            with self.runtime.lending():
                yield
        finally:
            self._is_rehearsing, self.replayed_count = False, replayed

    def begin(self, cache: Any, dtype: torch.dtype) -> bool:
        """Look at what the coming step's graphs will reach: the states of `cache`, and where experts lie."""
        self._cache_id, self._has_gap = None, False
        if self.problem is not None or cache is None or not torch.is_inference_mode_enabled():
            return False
        addresses = []
        for layer in self._rows:
            assert layer.delta is not None
            states = layer.delta.states_in(cache, dtype, 1)
            if states is None:
                return False
            addresses += [states[0].data_ptr(), states[1].data_ptr()]
        if any(address % 16 for address in addresses):
            return False  # the kernel is told that they are not
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
        """The rotary cosines and sines of a step where graphs find them; most models have the same in all layers."""
        shapes = tuple((one.shape, one.dtype) for one in given)
        kept, last = self._angles.get(shapes, (None, None))
        if kept is None:
            kept = tuple(one.clone() for one in given)
        elif last is not given:
            for one, fresh in zip(kept, given, strict=True):
                one.copy_(fresh)
        self._angles[shapes] = kept, given
        return kept

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
                self._chosen_at.record(torch.cuda.current_stream(runtime.device))
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
            placed = (runtime.lend if self._is_rehearsing else runtime.place)(number, chosen)
            if placed is None:
                self._has_gap = True
                routed = runtime.decode_placed(number, chosen, flat, scores)
                return layer.add(hidden, routed.to(flat.dtype), shared)
            runtime.upload(placed, self._slots)
            slots = self._slots
        elif not self._is_rehearsing:
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
        if segment is None and self._has_gap:
            return function(*inputs)
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
            self._synchronize()
            changed = [tensor.clone() for tensor in mutable]
            if not all(bool(one.isfinite().all()) for one in (*right, *changed)):
                self._has_gap = True  # nothing can be compared with that, which is no graph's fault
                return right
            _restore(mutable, saved)
            before_bytes = self._reserved_bytes()
            graph, outputs = self._record(function, static)
            self.held_bytes += self._reserved_bytes() - before_bytes
            if self.held_bytes > _MOST_BYTES:
                raise MemoryError(f"they hold {units.format_bytes(self.held_bytes)} of VRAM, more than is set aside")
            graph.replay()
            self._synchronize()
            for got, wanted in zip((*outputs, *mutable), (*right, *changed), strict=True):
                check_close(got, wanted, f"a graph ({name} of layer {layer.number})")
        except Exception as error:
            self.turn_off(f"{type(error).__name__}: {first_line(error)}")
            log.warning("decode steps are replayed as graphs no more, which is slower: %s", self.problem)
            self._synchronize()
            _restore(mutable, saved)
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

    def _reserved_bytes(self) -> int:
        return 0 if self._stream is None else torch.cuda.memory_reserved(self.runtime.device)

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies where it will lie in every step, and is alive as long as the graphs are."""
        if tensor is self._slots or any(tensor is one for kept, _ in self._angles.values() for one in kept):
            return True
        known = self._kept.get(tensor.data_ptr())
        return known is not None and (known.shape, known.stride(), known.dtype) == (
            tensor.shape, tensor.stride(), tensor.dtype,
        )  # fmt: skip


def _restore(tensors: Tensors, values: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _end_failed_capture(graph: Any, device: torch.device, pool: Any) -> None:
    """Ends a capture that something in it has spoilt, as far as that can be done; what spoilt it is told by others."""
    for end in (graph.capture_end, lambda: torch._C._cuda_endAllocateToPool(device.index, pool)):
        try:
            end()
        except Exception as error:
            log.debug("a failed capture's end: %s", error)
