"""How fast this machine moves bytes, measured: host to GPU, host memory, GPU memory, both at once, and disk.

The one file of this room that imports torch. Copies go in pieces of an expert's size, since small pieces never reach
the link's peak. Every figure takes a fraction of a second; together they stay within a few seconds.

The general CPU expert rate is a float32 matrix-vector product over expert-sized pieces: it reads as an expert kernel
reads, but is no engine's own kernel, so it is marked as guessed. `measure_experts` asks the embedded engine's own
arithmetic for one format and shape; what another engine measures on its kernel is imported by its adapter.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from freetoken.errors import UsageError
from freetoken.hardware.cgroup import read_cgroup_limits
from freetoken.hardware.cpu import read_cache_bytes, read_cpu
from freetoken.hardware.disk_speed import measure_disk
from freetoken.hardware.expert_kernel import ExpertKernel, ExpertShape
from freetoken.hardware.model import Bandwidth, ExpertRates, Os, Source
from freetoken.hardware.ram import read_ram
from freetoken.hardware.reader import Reader
from freetoken.units import GIB, MIB

#: One expert of Qwen3.6-35B-A3B in NVFP4.
EXPERT_BYTES = 1_769_472
#: Each figure: warm up once, then repeat for about this long.
SECONDS_EACH = 0.3
_ROW_FLOATS = 2048  # an expert's usual input width


def measure_bandwidth(
    device: str = "auto",
    piece_bytes: int = EXPERT_BYTES,
    *,
    disk_folder: Path | None = None,
    threads: int | None = None,
    seconds_each: float = SECONDS_EACH,
) -> Bandwidth:
    """The rates of this machine and `device` (`auto`, `cpu`, `cuda`, `cuda:1` or a GPU's uuid).

    `threads` defaults to the cores that this process may use. With `disk_folder` its disk is read too. Changes
    torch's thread count while it runs and puts it back. Raises UsageError for a device that is not there.
    """
    chosen = find_device(device)
    reader = Reader()
    limits = read_cgroup_limits(reader)
    threads = threads or read_cpu(reader, limits).usable_cores
    rates: dict[str, float | None] = {}
    with _torch_threads(threads):
        host = _HostMemory(piece_bytes, _buffer_bytes(reader))
        rates["dram_bytes_per_s"] = host.stream_rate(seconds_each)
        rates["cpu_experts_bytes_per_s"] = host.piece_rate(seconds_each)
        if chosen.type == "cuda":
            rates |= _measure_gpu(chosen, host, piece_bytes, seconds_each)
    if disk_folder is not None:
        rates["disk_bytes_per_s"] = measure_disk(disk_folder)
    known = {name: rate for name, rate in rates.items() if rate}
    sources: dict[str, Source] = {name: "guessed" if name.startswith("cpu_experts") else "measured" for name in known}
    return Bandwidth.model_validate(
        known | {"sources": sources, "measured_at": _now(), "piece_bytes": piece_bytes, "threads": threads}
    )


def measure_experts(
    shape: ExpertShape,
    device: str = "auto",
    *,
    threads: int | None = None,
    seconds_each: float = SECONDS_EACH,
) -> ExpertRates:
    """The embedded engine's rate on experts of `shape`, and the link's in pieces of their size, alone and at once.

    Raises UsageError for a device that is not there or a format that is not computed, FtError where it fails.
    """
    chosen, reader = find_device(device), Reader()
    limits = read_cgroup_limits(reader)
    threads = threads or read_cpu(reader, limits).usable_cores
    rates: dict[str, float] = {}
    with ExpertKernel(shape, threads=threads, bank_bytes=_buffer_bytes(reader)) as kernel:
        rates["cpu_experts_bytes_per_s"] = kernel.measure(seconds_each)
        if chosen.type == "cuda":
            rates |= _measure_overlap(chosen, kernel, seconds_each)
        size = kernel.expert_bytes
    return ExpertRates(
        engine="native",
        format=shape.format,
        hidden=shape.hidden,
        inter=shape.inter,
        top_k=shape.top_k,
        threads=threads,
        expert_bytes=size,
        kernel=f"torch {torch.__version__}",
        measured_at=_now(),
        **rates,
    )


def _measure_overlap(device: torch.device, kernel: ExpertKernel, seconds: float) -> dict[str, float]:
    free, _ = torch.cuda.mem_get_info(device)
    count = max(1, min(512 * MIB, free // 4) // kernel.expert_bytes)
    pinned = torch.ones(count, kernel.expert_bytes, dtype=torch.uint8).pin_memory()
    copier = _Copier(pinned, torch.empty(count, kernel.expert_bytes, dtype=torch.uint8, device=device))
    alone = _rate(copier.copy_all, seconds)
    kernel.begin(2 * seconds)
    overlapped = _rate(copier.copy_all, seconds)
    return {
        "h2d_bytes_per_s": alone,
        "h2d_overlap_bytes_per_s": overlapped,
        "cpu_experts_overlap_bytes_per_s": kernel.end(),
    }


def find_device(device: str) -> torch.device:
    """The torch device that `device` names; `auto` is the first GPU, else the CPU. Raises UsageError."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    for index in range(count):
        if device.removeprefix("GPU-") == str(getattr(torch.cuda.get_device_properties(index), "uuid", "")):
            return torch.device("cuda", index)
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"`{device}` is no device: expected `auto`, `cpu`, `cuda:0` or a GPU's uuid") from error
    if found.type == "cpu" or (found.type == "cuda" and (found.index or 0) < count):
        return found
    raise UsageError(f"device `{device}` is not here: torch {torch.__version__} sees {count} CUDA GPUs")


def _buffer_bytes(reader: Reader) -> int:
    """Larger than any cache, and a small part of what is free."""
    available = read_ram(reader, Os(), read_cgroup_limits(reader)).available_bytes
    return min(max(256 * MIB, 4 * read_cache_bytes(reader)), 2 * GIB, available // 8)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class _HostMemory:
    """A buffer larger than any cache, read in one stream or in expert-sized pieces."""

    def __init__(self, piece_bytes: int, size_bytes: int) -> None:
        rows = max(1, size_bytes // (4 * _ROW_FLOATS))
        self.matrix = torch.ones(rows, _ROW_FLOATS)
        self.vector = torch.ones(_ROW_FLOATS)
        step = max(1, piece_bytes // (4 * _ROW_FLOATS))
        self.pieces = [self.matrix[row : row + step] for row in range(0, rows, step)]

    def stream_rate(self, seconds: float) -> float:
        """Bytes per second of one long read."""
        return _rate(lambda: self._read(self.matrix), seconds)

    def piece_rate(self, seconds: float) -> float:
        """Bytes per second of reads piece by piece, each a matrix-vector product of its own."""
        return _rate(lambda: sum(map(self._read, self.pieces)), seconds)

    def _read(self, matrix: torch.Tensor) -> int:
        torch.mv(matrix, self.vector)
        return matrix.nbytes


def _measure_gpu(device: torch.device, host: _HostMemory, piece_bytes: int, seconds: float) -> dict[str, float | None]:
    free, _ = torch.cuda.mem_get_info(device)
    count = max(1, min(512 * MIB, free // 4) // piece_bytes)
    pinned = torch.ones(count, piece_bytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(count, piece_bytes, dtype=torch.uint8, device=device)
    copier = _Copier(pinned, target)
    alone = _rate(copier.copy_all, seconds)
    with copier.running() as moved:
        start = time.perf_counter()
        experts = host.piece_rate(seconds)
        overlapped = moved() / (time.perf_counter() - start)
    pageable = _Copier(torch.ones(count, piece_bytes, dtype=torch.uint8), target)
    return {
        "h2d_bytes_per_s": alone,
        "h2d_overlap_bytes_per_s": overlapped or None,
        "cpu_experts_overlap_bytes_per_s": experts,
        "h2d_pageable_bytes_per_s": _rate(pageable.copy_all, seconds),
        "vram_bytes_per_s": _vram_rate(device, seconds),
    }


class _Copier:
    """Copies every piece of `source` to `target`, each on its own, and waits for the last one."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.pairs = tuple(zip(target.unbind(), source.unbind(), strict=True))
        self.nbytes = source.nbytes
        self.device = target.device
        self.stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]

    def copy_all(self) -> int:
        """Bytes copied."""
        with torch.cuda.stream(self.stream):
            for target, source in self.pairs:
                target.copy_(source, non_blocking=True)
        self.stream.synchronize()
        return self.nbytes

    @contextmanager
    def running(self) -> Iterator[Callable[[], int]]:
        """Copies in a thread of its own meanwhile; the value tells the bytes moved so far."""
        stop, total = threading.Event(), [0]

        def work() -> None:
            while not stop.is_set():
                total[0] += self.copy_all()

        thread = threading.Thread(target=work, name="ft-h2d", daemon=True)
        thread.start()
        try:
            yield lambda: total[0]
        finally:
            stop.set()
            thread.join()


def _vram_rate(device: torch.device, seconds: float) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    buffer = torch.ones(min(GIB, free // 4) // 4, device=device)

    def read() -> int:
        buffer.sum()
        torch.cuda.synchronize(device)
        return buffer.nbytes

    return _rate(read, seconds)


def _rate(work: Callable[[], int], seconds: float) -> float:
    """Bytes per second of `work`, which returns the bytes it moved; once for warmth, then again for `seconds`."""
    work()
    moved, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not moved:
        moved += work()
    return moved / max(time.perf_counter() - start, elapsed, 1e-9)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
