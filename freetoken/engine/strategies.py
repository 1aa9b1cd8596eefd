"""Experts that stay where they are: `fused` (all resident on the device) and `cpu` (all on the host)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from freetoken.engine.banks import Bank, Progress
from freetoken.engine.compute import Routing, run_pairs
from freetoken.engine.experts import ExpertRuntime, host_indices
from freetoken.engine.slots import Fetcher, allocate_records
from freetoken.engine.staging import Staging
from freetoken.residency import HitCounters


class FusedExperts(ExpertRuntime):
    """All experts on the device: no bank beside it on a GPU, the bank itself on the CPU."""

    def __init__(
        self, bank: Bank, modules: Sequence[nn.Module], device: torch.device, top_k: int, progress: Progress | None
    ) -> None:
        super().__init__(bank, modules, device, top_k)
        self._lookups = 0
        self._resident: list[torch.Tensor] = []
        self._owned_bytes = 0
        if device.type == "cuda":
            self._upload(progress)
        else:
            self._resident = [block for block in map(bank.records, range(len(self.layouts))) if block is not None]

    def _upload(self, progress: Progress | None) -> None:
        fetcher = Fetcher(self.bank, self.device, self.slot_bytes)
        everyone = range(self.experts_per_layer)
        total = sum(layout.nbytes for layout in self.layouts) * self.experts_per_layer
        for layer, layout in enumerate(self.layouts):
            block = allocate_records(self.experts_per_layer, layout.nbytes, self.device)
            fetcher.fetch(layer, everyone, everyone, block)
            self._resident.append(block)
            self._owned_bytes += block.numel()
            if progress is not None:
                progress("experts", self._owned_bytes, total)
        torch.cuda.synchronize(self.device)

    @property
    def expert_slots(self) -> int:
        """All experts."""
        return self.max_slots

    def counters(self) -> HitCounters:
        """Every lookup is a hit."""
        return HitCounters(self._lookups, self._lookups, 0, 0)

    def memory(self) -> dict[str, int]:
        """The resident records."""
        return {"expert_slots": self._owned_bytes or self.bank.nbytes}

    def _decode(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        records = self._resident[layer]
        if not hidden.is_cuda:
            routing = Routing.from_host(host_indices(index))
            self._count(layer, routing.experts)
            return self._on_records(layer, records, routing, hidden, weights)
        if self._trace is not None or hidden.shape[0] > 1:
            self._count(layer, np.unique(host_indices(index)).tolist())
        else:
            self._lookups += index.shape[-1]
        return run_pairs(self.modules[layer], self.layouts[layer], records, index, hidden, weights)

    def _prefill(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routing = Routing.from_device(index, self.experts_per_layer)
        return self._on_records(layer, self._resident[layer], routing, hidden, weights)

    @property
    def needs_choice(self) -> bool:  # type: ignore[override]
        """A trace is written on the host; otherwise all experts lie where a graph finds them."""
        return self._trace is not None

    def decode_records(self, layer: int) -> torch.Tensor | None:
        """All of the layer's records."""
        return self._resident[layer]

    def place(self, layer: int, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """An expert's record has its number."""
        self._count(layer, np.unique(chosen).tolist())
        return chosen.astype(np.int32)

    def lend(self, layer: int, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """An expert's record has its number."""
        return chosen.astype(np.int32)

    def upload(self, values: npt.NDArray[np.int32], target: torch.Tensor) -> None:
        """Waits, as a trace does not mind."""
        target.copy_(torch.from_numpy(values))

    def count_decode(self, lookups: int) -> None:
        """Every lookup is a hit."""
        self._lookups += lookups

    def _count(self, layer: int, experts: list[int]) -> None:
        self._lookups += len(experts)
        self._note_step(layer, experts)

    def close(self) -> None:
        """Free the records."""
        self._resident = []
        super().close()


class CpuExperts(ExpertRuntime):
    """Experts computed on the CPU from the bank; with a GPU, prefill still streams through its buffers."""

    def __init__(self, bank: Bank, modules: Sequence[nn.Module], device: torch.device, top_k: int) -> None:
        super().__init__(bank, modules, device, top_k)
        self._host = Staging(
            Fetcher(bank, torch.device("cpu"), self.slot_bytes), self.layouts, bank.experts, self.slot_bytes
        )
        if bank.is_resident:
            self._host.close()
        self._staging: Staging | None = None
        if device.type == "cuda":
            self._staging = Staging(Fetcher(bank, device, self.slot_bytes), self.layouts, bank.experts, self.slot_bytes)

    @property
    def expert_slots(self) -> int:
        """None on the device."""
        return 0

    def counters(self) -> HitCounters:
        """Nothing is looked up."""
        return HitCounters()

    def memory(self) -> dict[str, int]:
        """The bank, and the buffers."""
        staging = self._staging.nbytes if self._staging is not None else self._host.nbytes
        return {"expert_banks": self.bank.nbytes, "prefill_staging": staging}

    def _decode(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = host_indices(index)
        routing = Routing.from_host(chosen)
        self._note_step(layer, routing.experts)
        if not hidden.is_cuda:
            return self._compute(layer, routing, hidden, weights)
        # A CPU is quicker in float32 than in a 16-bit type that it has to emulate.
        return self._compute(layer, routing, hidden.cpu().float(), weights.cpu()).to(hidden.device)

    def _compute(self, layer: int, routing: Routing, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        records = self.bank.records(layer)
        if records is not None:
            return self._on_records(layer, records, routing, hidden, weights)
        return self._host.run(layer, self.modules[layer], routing, hidden, weights)

    def _prefill(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routing = Routing.from_device(index, self.experts_per_layer)
        if self._staging is None:
            return self._compute(layer, routing, hidden, weights)
        return self._staging.run(layer, self.modules[layer], routing, hidden, weights)

    def close(self) -> None:
        """Free the buffers and the bank."""
        self._host.close()
        if self._staging is not None:
            self._staging.close()
        super().close()
