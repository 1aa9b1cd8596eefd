"""Where experts are that sit in no slot: all records in host RAM, or the checkpoint itself.

A bank in RAM is filled once by parallel readers, a layer at a time, and page-locked layer by layer when a GPU will
read it: a driver that refuses to lock more (WSL, memlock) costs speed and a note, never the start. The locks of a bank
that is dropped without `close` go before its memory does: a lock that outlives its mapping would fall on whatever is
mapped there next.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from freetoken import units
from freetoken.engine.convert import ExpertReader
from freetoken.engine.layout import ExpertLayout
from freetoken.errors import FtError

Progress = Callable[[str, int, int], None]
_READERS = 8
_READ_CHUNK_BYTES = 32 << 20
#: What `cudaHostRegister` answers for memory that it holds for locked already.
_ALREADY_LOCKED = 712


class Bank:
    """Records of all experts. `layouts[layer].nbytes` is the length of a layer's records."""

    #: Bytes of host RAM that the bank holds.
    nbytes: int = 0
    #: Of these, page-locked.
    pinned_bytes: int = 0
    is_resident: bool = False

    def __init__(self, reader: ExpertReader) -> None:
        self.reader = reader
        self.layouts: list[ExpertLayout] = [layer.layout for layer in reader.layers]
        self.experts = len(reader.layers[0].ranges)
        self.pool = ThreadPoolExecutor(_READERS, thread_name_prefix="ft-bank")

    def records(self, layer: int) -> torch.Tensor | None:
        """All records of a layer [experts, record bytes] where they are in RAM, else None."""
        return None

    def read(self, layer: int, experts: Sequence[int], records: torch.Tensor) -> None:
        """Copy experts into host memory `records` [n, at least record bytes]."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the memory back."""
        self.pool.shutdown(wait=True, cancel_futures=True)


class DiskBank(Bank):
    """Experts stay in the checkpoint and are read on a miss."""

    def read(self, layer: int, experts: Sequence[int], records: torch.Tensor) -> None:
        """Copy experts from the checkpoint into `records`, several at once."""
        if len(experts) == 1:
            self.reader.read(layer, experts, records)
            return
        jobs = [
            self.pool.submit(self.reader.read, layer, (expert,), records[row : row + 1])
            for row, expert in enumerate(experts)
        ]
        for job in jobs:
            job.result()


class RamBank(Bank):
    """All records in host RAM, one block a layer."""

    is_resident = True

    def __init__(
        self, reader: ExpertReader, *, pin: bool, progress: Progress | None, note: Callable[[str], None]
    ) -> None:
        super().__init__(reader)
        self._blocks: list[torch.Tensor] = []
        self._maps: list[mmap.mmap] = []
        self._locked: list[int] = []
        self._device: int = torch.cuda.current_device() if pin else 0
        # Called before the blocks and their mappings go; the list is all that it holds of the bank.
        weakref.finalize(self, _unlock, self._locked, self._device).atexit = False
        total = sum(self.experts * layout.nbytes for layout in self.layouts)
        try:
            for layer in range(len(self.layouts)):
                self._fill(layer)
                if pin:
                    pin = self._lock(layer, total, note)
                if progress is not None:
                    progress("experts", self.nbytes, total)
        except BaseException:
            self.close()
            raise

    def _fill(self, layer: int) -> None:
        size = self.layouts[layer].nbytes
        memory = _allocate(self.experts * size)
        self._maps.append(memory)
        block = torch.frombuffer(memory, dtype=torch.uint8).view(self.experts, size)
        self._blocks.append(block)
        self.nbytes += block.numel()
        step = max(1, min(_READ_CHUNK_BYTES // size, -(-self.experts // _READERS)))
        jobs = [
            self.pool.submit(self.reader.read, layer, range(at, min(at + step, self.experts)), block[at : at + step])
            for at in range(0, self.experts, step)
        ]
        for job in jobs:
            job.result()

    def _lock(self, layer: int, total: int, note: Callable[[str], None]) -> bool:
        block = self._blocks[layer]
        error = _register(block.data_ptr(), block.numel())
        if error == 0:
            self._locked.append(block.data_ptr())
            self.pinned_bytes += block.numel()
            return True
        note(
            f"the driver locks {units.format_bytes(self.pinned_bytes)} of {units.format_bytes(total)} of experts in "
            f"RAM and refused more (CUDA error {error}): copies from the rest are slower"
        )
        return False

    def records(self, layer: int) -> torch.Tensor:
        """All records of a layer: [experts, record bytes]."""
        return self._blocks[layer]

    def read(self, layer: int, experts: Sequence[int], records: torch.Tensor) -> None:
        """Copy experts into `records`."""
        block = self._blocks[layer]
        for row, expert in enumerate(experts):
            records[row, : block.shape[1]].copy_(block[expert])

    def close(self) -> None:
        """Unlock and free all blocks."""
        super().close()
        _unlock(self._locked, self._device)
        self._blocks = []
        self._maps = []  # unmapped once the last view of a block is gone
        self.nbytes = self.pinned_bytes = 0


def _register(address: int, size: int) -> int:
    """Page-lock a block that was just mapped; a CUDA error code, 0 where it is locked."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, size, 0))
    if error == _ALREADY_LOCKED:  # by whoever had this address before, and gave the memory back but not the lock
        _clear_cuda_error()
        runtime.cudaHostUnregister(address)
        error = int(runtime.cudaHostRegister(address, size, 0))
    if error != 0:
        _clear_cuda_error()
    return error


def _unlock(addresses: list[int], device: int) -> None:
    """Unlock all blocks and empty the list."""
    if not addresses:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.synchronize(device)  # no copy may be on its way from what is unlocked
    except RuntimeError:
        pass  # a lost context: there is nothing on its way any more
    while addresses:
        runtime.cudaHostUnregister(addresses.pop())


def _clear_cuda_error() -> None:
    """A refused lock stays behind as the runtime's last error, and the next launch would be blamed for it."""
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError:
        pass


def _allocate(size: int) -> mmap.mmap:
    """Page-aligned memory that no other block shares a page with, in huge pages where the system gives them."""
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, ValueError) as error:
        raise FtError(
            f"{units.format_bytes(size)} of RAM for one layer's experts cannot be had: {error}",
            hint="`experts_from: disk` reads experts from the checkpoint instead",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    return memory
