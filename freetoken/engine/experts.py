"""`ExpertRuntime`: computes the routed experts of every layer, wherever they are, for one loaded model.

A forward pass is either a decode step or a prefill chunk (`decode()`, `prefill()`; without either, few tokens count
as decode). Decode asks the residency table, copies what is missing and computes on the slots. Prefill passes the
slots by and streams the layer's experts through two staging buffers, so lookups, hits and the LRU order are facts of
decode alone. Strategies differ in `strategies.py`; what they share is here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from freetoken.engine.banks import Bank
from freetoken.engine.compute import Routing, run_group
from freetoken.engine.layout import ExpertLayout
from freetoken.errors import UsageError
from freetoken.residency import HitCounters, TraceHeader, TraceWriter

#: Without a phase, a forward of at most this many tokens counts as a decode step.
DECODE_TOKENS = 16


class ExpertRuntime:
    """The experts of one model. `forward` is what the experts function calls for layer number `layer`."""

    def __init__(self, bank: Bank, modules: Sequence[nn.Module], device: torch.device, top_k: int) -> None:
        self.bank = bank
        self.layouts: list[ExpertLayout] = bank.layouts
        self.modules = list(modules)
        self.device = device
        self.top_k = top_k
        self.experts_per_layer = bank.experts
        #: Bytes of one slot: the largest record of any layer.
        self.slot_bytes = max(layout.nbytes for layout in self.layouts)
        self.min_slots = min(top_k, bank.experts)
        self.max_slots = len(self.layouts) * bank.experts
        self._phase: Literal["prefill", "decode"] | None = None
        self._trace: TraceWriter | None = None

    # ------------------------------------------------------------------ what the engine uses

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Forwards within are prefill chunks."""
        with self._in_phase("prefill"):
            yield

    @contextmanager
    def decode(self) -> Iterator[None]:
        """Forwards within are decode steps: one token of each of some sequences."""
        with self._in_phase("decode"):
            yield

    @contextmanager
    def _in_phase(self, phase: Literal["prefill", "decode"]) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @property
    @abstractmethod
    def expert_slots(self) -> int:
        """How many experts can be resident at once on the device."""

    @abstractmethod
    def counters(self) -> HitCounters:
        """Lookups, hits and misses of decode since the start."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes held for experts, by ledger key."""

    def resize(self, expert_slots: int) -> int:
        """Change the number of slots live; the number in force comes back. Raises UsageError, DoesNotFitError."""
        raise UsageError("this strategy has no expert slots to resize", hint="`settings.strategy: offload` has")

    def record_trace(self, writer_path: Any, model: str) -> None:
        """Record the routing of decode steps to a file from now on."""
        header = TraceHeader(len(self.layouts), self.experts_per_layer, self.top_k, max(1, self.expert_slots), model)
        self._trace = TraceWriter(writer_path, header)

    def flush_trace(self) -> None:
        """Make the trace file complete up to now."""
        if self._trace is not None:
            self._trace.flush()

    def close(self) -> None:
        """Give slots, bank and trace back; a second call is fine."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        self.bank.close()

    # ------------------------------------------------------------------ what the experts function calls

    def forward(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [tokens, H] through the experts of `layer` -> [tokens, H]."""
        run = self._decode if self.is_decoding(hidden.shape[0]) else self._prefill
        return run(layer, hidden, top_k_index, top_k_weights).to(hidden.dtype)

    # ------------------------------------------------------------------ what a decode step made of graphs uses

    #: Whether the host has to see the router's choice before a decode step can go on.
    needs_choice = True

    def is_decoding(self, tokens: int) -> bool:
        """Whether a forward of so many tokens counts as a decode step now."""
        return (self._phase or ("decode" if tokens <= DECODE_TOKENS else "prefill")) == "decode"

    def decode_records(self, layer: int) -> torch.Tensor | None:
        """The records on the device that a decode step of `layer` computes on; None where it computes elsewhere."""
        return None

    def decode_records_key(self) -> object:
        """Something that is another when `decode_records` lie elsewhere."""
        return None

    def place(self, layer: int, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """Count a step, bring what is missing, and say in which record each pair's expert is, [tokens, k].

        None where not all fit at once: `decode_placed` then does the step.
        """
        raise NotImplementedError

    def lend(self, layer: int, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """As `place`, for one token of a step that counts nowhere; within `lending` alone."""
        raise NotImplementedError

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Within, `lend` may put experts where others sit; afterwards they sit there again."""
        yield

    def decode_placed(
        self, layer: int, chosen: npt.NDArray[np.int64], hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The step whose experts `place` could not bring at once: the weighted sum, float32."""
        raise NotImplementedError

    def upload(self, values: npt.NDArray[np.int32], target: torch.Tensor) -> None:
        """Copy a small array to the device without waiting."""
        raise NotImplementedError

    def count_decode(self, lookups: int) -> None:
        """Count a step that the host did not see."""

    @abstractmethod
    def _decode(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum over each token's experts, float32."""

    @abstractmethod
    def _prefill(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same for many tokens."""

    def _note_step(self, layer: int, experts: Sequence[int]) -> None:
        if self._trace is not None:
            self._trace.step(layer, experts)

    def _on_records(
        self,
        layer: int,
        records: torch.Tensor,
        routing: Routing,
        hidden: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """All experts of `routing` on the layer's records, which hold every expert in order."""
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        ordered = routing.weights(weights)
        run_group(
            self.modules[layer], self.layouts[layer], records, routing.experts, routing, 0, hidden, ordered, total
        )
        return total


def host_indices(top_k_index: torch.Tensor) -> npt.NDArray[np.int64]:
    """The router's choice on the host, [tokens, k]; waits for the device once."""
    return top_k_index.cpu().numpy()
