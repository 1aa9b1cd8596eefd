"""The expert slots of a device: one block of equal records, and the copies into it. Who sits where is `residency`'s."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freetoken.engine.banks import Bank

_RING = 8


class Fetcher:
    """Copies records of a bank to a device, asynchronously on a stream of its own where the device is a GPU.

    A bank in RAM is copied from directly (page-locked memory needs no detour). A bank on disk is read into a small
    ring of page-locked records first; a record of the ring is used again only once its copy has ended.
    """

    def __init__(self, bank: Bank, device: torch.device, record_bytes: int) -> None:
        self.bank = bank
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ring: torch.Tensor | None = None
        self._events: list[torch.cuda.Event | None] = [None] * _RING
        self._next = 0
        if self.stream is not None and not bank.is_resident:
            self._ring = torch.empty(_RING, record_bytes, dtype=torch.uint8, pin_memory=True)

    @property
    def ring_bytes(self) -> int:
        """Host bytes of the ring."""
        return 0 if self._ring is None else self._ring.numel()

    def fetch(self, layer: int, experts: Sequence[int], rows: Sequence[int], target: torch.Tensor) -> None:
        """Start copying `experts` into `target[rows]`; `join` makes the current stream wait for it."""
        if self.stream is None:
            self._fetch_on_host(layer, experts, rows, target)
            return
        with torch.cuda.stream(self.stream):
            block = self.bank.records(layer)
            if block is None:
                self._fetch_from_disk(layer, experts, rows, target)
                return
            size = block.shape[1]
            for first, row, count in runs(experts, rows):
                if target.shape[1] == size:
                    target[row : row + count].copy_(block[first : first + count], non_blocking=True)
                    continue
                for step in range(count):  # a copy between different strides would detour through a temporary
                    target[row + step, :size].copy_(block[first + step], non_blocking=True)

    def _fetch_on_host(self, layer: int, experts: Sequence[int], rows: Sequence[int], target: torch.Tensor) -> None:
        for first, row, count in runs(experts, rows):
            self.bank.read(layer, range(first, first + count), target[row : row + count])

    def _fetch_from_disk(self, layer: int, experts: Sequence[int], rows: Sequence[int], target: torch.Tensor) -> None:
        ring = self._ring
        assert ring is not None
        size = self.bank.layouts[layer].nbytes
        for at in range(0, len(experts), _RING):
            part = list(zip(experts[at : at + _RING], rows[at : at + _RING], strict=True))
            places = [(self._next + step) % _RING for step in range(len(part))]
            self._next = (self._next + len(part)) % _RING
            for place in places:
                if (event := self._events[place]) is not None:
                    event.synchronize()
            jobs = [
                self.bank.pool.submit(self.bank.read, layer, (expert,), ring[place : place + 1])
                for place, (expert, _) in zip(places, part, strict=True)
            ]
            for place, (_, row), job in zip(places, part, jobs, strict=True):
                job.result()
                target[row, :size].copy_(ring[place, :size], non_blocking=True)
                self._events[place] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()

    def hold(self) -> None:
        """Let copies started from now on wait for the work that the current stream has been given."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """Let the current stream wait for all copies started so far."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def runs(experts: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first expert, first row, count) of the stretches in which both go up by one."""
    found: list[tuple[int, int, int]] = []
    for expert, row in zip(experts, rows, strict=True):
        if found:
            first, start, count = found[-1]
            if expert == first + count and row == start + count:
                found[-1] = (first, start, count + 1)
                continue
        found.append((expert, row, 1))
    return found


def allocate_records(count: int, record_bytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised records [count, record bytes] on `device`."""
    return torch.empty(count, record_bytes, dtype=torch.uint8, device=device)
