"""The strategy `offload`: every expert in a bank on the host, some in slots on the device, fetched when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from freetoken import units
from freetoken.engine.banks import Bank
from freetoken.engine.compute import Routing, run_group, run_pairs
from freetoken.engine.experts import ExpertRuntime, host_indices
from freetoken.engine.slots import Fetcher, allocate_records
from freetoken.engine.staging import Staging
from freetoken.errors import DoesNotFitError, UsageError
from freetoken.residency import Batch, HitCounters, SlotTable

_UPLOADS = 64


class OffloadExperts(ExpertRuntime):
    """Some experts in slots on the device, under one LRU over all layers; the rest in the bank."""

    def __init__(
        self, bank: Bank, modules: Sequence[nn.Module], device: torch.device, top_k: int, expert_slots: int
    ) -> None:
        super().__init__(bank, modules, device, top_k)
        slots = self._check_slots(expert_slots or self.min_slots)
        self._table = SlotTable(slots, self.experts_per_layer)
        self._miss_bytes = 0
        self._fetcher = Fetcher(bank, device, self.slot_bytes)
        self._pool: torch.Tensor = allocate_records(slots, self.slot_bytes, device)
        self._staging: Staging | None = None
        if device.type == "cuda" or not bank.is_resident:
            self._staging = Staging(self._fetcher, self.layouts, bank.experts, self.slot_bytes)
        self._lookup = np.full(self.experts_per_layer, -1, dtype=np.int32)
        self._uploads: torch.Tensor | None = None
        self._next_upload = 0
        self._unplaced: list[Batch] = []

    def _check_slots(self, expert_slots: int) -> int:
        if expert_slots < self.min_slots:
            raise UsageError(
                f"{expert_slots} expert slots, at least {self.min_slots} are needed: a token uses that many at once",
                hint=f"`--set settings.expert_slots={self.min_slots}`",
            )
        return min(expert_slots, self.max_slots)

    @property
    def expert_slots(self) -> int:
        """Slots in force."""
        return self._table.slots

    def counters(self) -> HitCounters:
        """What the table counted, and the bytes of all misses."""
        found = self._table.counters()
        return HitCounters(found.lookups, found.hits, found.misses, self._miss_bytes)

    def memory(self) -> dict[str, int]:
        """Slots, buffers and bank."""
        staging = self._staging.nbytes if self._staging is not None else 0
        bank = self.bank.nbytes + self._fetcher.ring_bytes
        return {"expert_slots": self._pool.numel(), "prefill_staging": staging, "expert_banks": bank}

    # ------------------------------------------------------------------ decode

    def _decode(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = host_indices(index)  # all earlier work on the device has ended: no slot is in use
        batches = self._serve(layer, chosen)
        if hidden.is_cuda:
            return self._decode_on_device(layer, batches, chosen, hidden, weights)
        return self._decode_on_host(layer, batches, chosen, hidden, weights)

    def _serve(self, layer: int, chosen: npt.NDArray[np.int64]) -> list[Batch]:
        experts = sorted(set(chosen.ravel().tolist()))
        self._note_step(layer, experts)
        return self._table.serve(layer, experts)

    def decode_records(self, layer: int) -> torch.Tensor | None:
        """All slots."""
        return self._pool

    def decode_records_key(self) -> object:
        """The slots' address and count, which a resize changes."""
        return self._pool.data_ptr(), self._pool.shape[0]

    def place(self, layer: int, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """The slots of a step whose experts fit at once."""
        batches = self._serve(layer, chosen)
        if len(batches) > 1:
            self._unplaced = batches
            return None
        self._bring(layer, batches[0])
        return self._slots_of(batches[0], chosen)

    def lend(self, layer: int, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """The first slots, whatever they hold."""
        experts = np.unique(chosen)
        self._fetcher.fetch(layer, experts.tolist(), range(experts.size), self._pool)
        self._fetcher.join()
        return np.searchsorted(experts, chosen).astype(np.int32)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Afterwards the first slots hold again what the table says."""
        try:
            yield
        finally:
            self._bring_back(self.min_slots)

    def decode_placed(
        self, layer: int, chosen: npt.NDArray[np.int64], hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Batch after batch."""
        batches, self._unplaced = self._unplaced, []
        if hidden.is_cuda:
            return self._decode_on_device(layer, batches, chosen, hidden, weights)
        return self._decode_on_host(layer, batches, chosen, hidden, weights)

    def _slots_of(self, batch: Batch, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        experts = list(batch.experts)
        self._lookup[experts] = batch.slots
        slots: npt.NDArray[np.int32] = self._lookup[chosen]
        self._lookup[experts] = -1
        return slots

    def _bring(self, layer: int, batch: Batch) -> None:
        """Copy a batch's misses in. After a failed copy no slot counts as filled."""
        if not batch.misses:
            return
        experts = [expert for expert, _ in batch.misses]
        try:
            self._fetcher.fetch(layer, experts, [slot for _, slot in batch.misses], self._pool)
            self._fetcher.join()
        except BaseException:
            self._forget()
            raise
        self._miss_bytes += len(experts) * self.layouts[layer].nbytes

    def _forget(self) -> None:
        self._table.reset()
        if self._trace is not None:
            self._trace.reset()

    def _decode_on_host(
        self,
        layer: int,
        batches: list[Batch],
        chosen: npt.NDArray[np.int64],
        hidden: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        routing = Routing.from_host(chosen)
        ordered = routing.weights(weights)
        total = torch.zeros(hidden.shape, dtype=torch.float32)
        place = {expert: position for position, expert in enumerate(routing.experts)}
        module, layout = self.modules[layer], self.layouts[layer]
        for batch in batches:
            self._bring(layer, batch)
            for expert, slot in zip(batch.experts, batch.slots, strict=True):
                run_group(module, layout, self._pool, (slot,), routing, place[expert], hidden, ordered, total)
        return total

    def _decode_on_device(
        self,
        layer: int,
        batches: list[Batch],
        chosen: npt.NDArray[np.int64],
        hidden: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        module, layout = self.modules[layer], self.layouts[layer]
        total: torch.Tensor | None = None
        for number, batch in enumerate(batches):
            if number:
                self._fetcher.hold()  # the batch before is still being computed on
            self._bring(layer, batch)
            slots = torch.empty(chosen.shape, dtype=torch.int32, device=self.device)
            self.upload(self._slots_of(batch, chosen), slots)
            out = run_pairs(module, layout, self._pool, slots, hidden, weights, has_holes=len(batches) > 1)
            total = out if total is None else total + out
        assert total is not None
        return total

    def upload(self, values: npt.NDArray[np.int32], target: torch.Tensor) -> None:
        """Through page-locked memory that is not waited for."""
        if not target.is_cuda:
            target.copy_(torch.from_numpy(values))
            return
        if self._uploads is None or values.size > self._uploads.shape[1]:
            self._uploads = torch.empty(_UPLOADS, max(64, values.size), dtype=torch.int32, pin_memory=True)
        # Every layer waits for the device once, so a row is long read when its turn comes again.
        row = self._uploads[self._next_upload, : values.size]
        self._next_upload = (self._next_upload + 1) % _UPLOADS
        row.numpy()[:] = values.ravel()
        target.view(-1).copy_(row, non_blocking=True)

    # ------------------------------------------------------------------ prefill

    def _prefill(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routing = Routing.from_device(index, self.experts_per_layer)
        if self._staging is not None:
            return self._staging.run(layer, self.modules[layer], routing, hidden, weights)
        records = self.bank.records(layer)
        assert records is not None
        return self._on_records(layer, records, routing, hidden, weights)

    # ------------------------------------------------------------------ live resize

    @torch.inference_mode(False)
    def resize(self, expert_slots: int) -> int:
        """Change the slots live, keeping the most recently used experts; the number in force comes back.

        Where old and new slots do not fit side by side, the old ones are freed first and the kept experts copied
        from the bank again. Raises DoesNotFitError where the new ones do not fit at all; the old number is then in
        force again.
        """
        wanted = self._check_slots(expert_slots)
        before = self._table.slots
        if wanted == before:
            return before
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._can_hold_both(wanted):
            self._resize_by_copy(wanted)
        else:
            self._resize_by_refill(wanted, before)
        return self._table.slots

    def _can_hold_both(self, wanted: int) -> bool:
        if self.device.type != "cuda":
            return True
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return wanted * self.slot_bytes + (256 << 20) < free

    def _resize_table(self, slots: int) -> list[Any]:
        moves = self._table.resize(slots)
        if self._trace is not None:
            self._trace.resize(slots)
        return moves

    def _resize_by_copy(self, wanted: int) -> None:
        pool = allocate_records(wanted, self.slot_bytes, self.device)
        for move in self._resize_table(wanted):
            pool[move.new_slot].copy_(self._pool[move.old_slot], non_blocking=True)
        self._pool = pool

    def _resize_by_refill(self, wanted: int, before: int) -> None:
        self._pool = allocate_records(0, self.slot_bytes, self.device)
        torch.cuda.empty_cache()
        try:
            self._pool = allocate_records(wanted, self.slot_bytes, self.device)
            self._resize_table(wanted)
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            self._pool = allocate_records(before, self.slot_bytes, self.device)
            self._refill()
            need = units.format_bytes(wanted * self.slot_bytes)
            raise DoesNotFitError(
                f"{wanted} expert slots need {need} of VRAM, {units.format_bytes(free)} can be had; "
                f"{before} slots are in force again",
                hint=f"at most {max(self.min_slots, free // self.slot_bytes)} slots fit",
            ) from error
        self._refill()

    def _refill(self) -> None:
        """Copy what the table says is resident from the bank; a bank on disk is too slow for that."""
        if not self.bank.is_resident:
            self._forget()
            return
        self._bring_back(self._table.slots)

    def _bring_back(self, slots: int) -> None:
        """Copy what the table says sits in the first `slots` from the bank; after a failure none counts as filled."""
        try:
            self._fetcher.hold()
            for layer, expert in self._table.residents():
                slot = self._table.slot_of(layer, expert)
                if slot is not None and slot < slots:
                    self._fetcher.fetch(layer, (expert,), (slot,), self._pool)
            self._fetcher.join()
        except BaseException:
            self._forget()
            raise

    def close(self) -> None:
        """Free slots, buffers and bank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._pool = allocate_records(0, self.slot_bytes, self.device)
        if self._staging is not None:
            self._staging.close()
        super().close()
