"""How fast a file system reads: large sequential reads past the page cache, several at once. Torch-free."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from freetoken.units import MIB

BLOCK_BYTES = 4 * MIB
FILE_BYTES = 256 * MIB
READERS = 4
_SUFFIXES = (".safetensors", ".gguf")


def measure_disk(folder: Path, *, most_s: float = 2.0, file_bytes: int = FILE_BYTES) -> float | None:
    """Bytes per second read from the disk of `folder`; None where it cannot be read or written there.

    Reads the largest model file below `folder`, else a temporary file of `file_bytes` that is removed again. The
    page cache is passed by (O_DIRECT) or dropped for that file (posix_fadvise) before reading. Ends after `most_s`.
    """
    try:
        with _file_to_read(folder, file_bytes) as path:
            return _read_rate(path, most_s)
    except OSError:
        return None


@contextlib.contextmanager
def _file_to_read(folder: Path, file_bytes: int) -> Iterator[Path]:
    if (found := _largest_model_file(folder)) is not None and found.stat().st_size >= 64 * MIB:
        yield found
        return
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < 4 * file_bytes:
        raise OSError(f"{folder} has too little space for a test file")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".ft-disk-") as file:
        # Random bytes, since a file system that compresses would read zeros at the speed of memory.
        block = os.urandom(BLOCK_BYTES)
        for _ in range(file_bytes // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def _largest_model_file(folder: Path, most_entries: int = 20_000) -> Path | None:
    best: tuple[int, Path] | None = None
    seen = 0
    for parent, folders, names in os.walk(folder):
        seen += len(names) + len(folders)
        if seen > most_entries:
            break
        for path in (Path(parent, name) for name in names if name.endswith(_SUFFIXES)):
            with contextlib.suppress(OSError):
                best = max(best or (0, path), (path.stat().st_size, path))
    return best[1] if best else None


def _read_rate(path: Path, most_s: float) -> float | None:
    size = path.stat().st_size
    offsets = list(range(0, size - BLOCK_BYTES + 1, BLOCK_BYTES))
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    deadline = time.perf_counter() + most_s
    start = time.perf_counter()
    # Each reader takes its own contiguous part, as a loader of shards does.
    parts = [
        offsets[index * len(offsets) // READERS : (index + 1) * len(offsets) // READERS] for index in range(READERS)
    ]
    with ThreadPoolExecutor(READERS) as pool:
        counts = list(pool.map(lambda part: _read_blocks(path, part, deadline), parts))
    elapsed = time.perf_counter() - start
    return sum(counts) / elapsed if sum(counts) else None


def _read_blocks(path: Path, offsets: list[int], deadline: float) -> int:
    """Bytes read of the blocks at `offsets` until `deadline`; direct where the file system allows it."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, os.O_RDONLY | direct)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)
    total = 0
    # An anonymous map is page-aligned, which O_DIRECT asks for.
    with mmap.mmap(-1, BLOCK_BYTES) as buffer, memoryview(buffer) as view:
        try:
            for offset in offsets:
                if time.perf_counter() > deadline:
                    break
                total += os.preadv(descriptor, [view], offset)
        finally:
            os.close(descriptor)
    return total
