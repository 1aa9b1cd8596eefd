"""The tensors of a safetensors checkpoint: where each lies, checked before anything is allocated, and raw reads.

Reads are positioned (`os.preadv`) into memory of ours. Mapping the files was set aside: a mapped file that shrinks
kills the process by SIGBUS, page faults hold the interpreter lock, and a page of the map counts as ours. The page
cache serves repeated reads alike.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from freetoken.errors import BadFileError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.uint8,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20
_IOV_MAX = 1024


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: file number, type, shape and the bytes it takes in that file."""

    name: str
    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file that belong at `target` (a writable memoryview of the same length)."""

    file: int
    offset: int
    target: memoryview


class CheckpointFiles:
    """All tensors of a folder by name. Files stay open until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        named: dict[str, str] | None = _read_json(index).get("weight_map", {}) if index.is_file() else None
        self.names = _list_files(folder, named)
        self.entries: dict[str, TensorEntry] = {}
        self._descriptors: list[int] = []
        try:
            for number, name in enumerate(self.names):
                self._open(number, folder / name)
        except BaseException:
            self.close()
            raise
        if named and (lost := [name for name in named if name not in self.entries]):
            self.close()
            raise BadFileError(f"{index} names {len(lost)} tensors that no file holds, first `{lost[0]}`")

    def _open(self, number: int, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise BadFileError(f"{path} cannot be opened: {error.strerror}") from error
        self._descriptors.append(descriptor)
        self.entries.update(_read_header(path, descriptor, number))

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor in fresh host memory, with its stored type and shape."""
        raw = torch.empty(entry.nbytes, dtype=torch.uint8)
        if entry.nbytes:
            self.read_pieces([Piece(entry.file, entry.offset, byte_view(raw))])
        return raw.view(entry.dtype).view(entry.shape)

    def read_slice(self, entry: TensorEntry, index: int) -> torch.Tensor:
        """Row `index` of the first dimension, in fresh host memory."""
        size = entry.nbytes // entry.shape[0]
        part = TensorEntry(entry.name, entry.file, entry.dtype, entry.shape[1:], entry.offset + index * size, size)
        return self.read(part)

    def read_pieces(self, pieces: Iterable[Piece]) -> None:
        """Fill every target; neighbours in a file are read by one call. Safe from several threads."""
        for run in _join_neighbours(sorted(pieces, key=lambda piece: (piece.file, piece.offset))):
            self._read_run(run)

    def _read_run(self, run: Sequence[Piece]) -> None:
        wanted = sum(len(piece.target) for piece in run)
        views = [piece.target for piece in run]
        offset = run[0].offset
        done = 0
        while done < wanted:
            got = os.preadv(self._descriptors[run[0].file], views, offset + done)
            if got <= 0:
                path = self.folder / self.names[run[0].file]
                raise BadFileError(f"{path} ended {wanted - done} bytes early, at byte {offset + done}")
            done += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]

    def close(self) -> None:
        """Close the files; a second call is fine."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as writable bytes."""
    if not tensor.is_contiguous():
        raise ValueError(f"memory with strides {tensor.stride()} has no bytes in a row")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _join_neighbours(pieces: Sequence[Piece]) -> Iterable[list[Piece]]:
    run: list[Piece] = []
    end = -1
    for piece in pieces:
        if run and (piece.file != run[0].file or piece.offset != end or len(run) == _IOV_MAX):
            yield run
            run = []
        run.append(piece)
        end = piece.offset + len(piece.target)
    if run:
        yield run


def _list_files(folder: Path, named: dict[str, str] | None) -> list[str]:
    if named is not None:
        names = sorted(set(named.values()))
        if bad := [name for name in names if Path(name).name != name]:
            raise BadFileError(f"the index of {folder} names `{bad[0]}`, which is not a plain file name")
        if lost := [name for name in names if not (folder / name).is_file()]:
            raise BadFileError(f"{folder} lacks {len(lost)} of {len(names)} weight files, first `{lost[0]}`")
        return names
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f", only `{pickles[0]}`, and pickles are never loaded" if pickles else ""
        raise BadFileError(f"{folder} has no safetensors file{found}")
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadFileError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _read_header(path: Path, descriptor: int, number: int) -> dict[str, TensorEntry]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise BadFileError(
            f"{path}: the header claims {length} bytes, the file has {size}", hint="fetch the file again"
        )
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        items = [(name, item) for name, item in header.items() if name != "__metadata__"]
        return {name: _parse_entry(path, name, item, number, 8 + length, size) for name, item in items}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadFileError(f"{path}: the header cannot be read: {error}") from error


def _parse_entry(path: Path, name: str, item: dict[str, Any], number: int, base: int, size: int) -> TensorEntry:
    start, end = (int(value) for value in item["data_offsets"])
    shape = tuple(int(value) for value in item["shape"])
    if item["dtype"] not in DTYPES:
        raise BadFileError(f"{path}: `{name}` is stored as {item['dtype']}, which is not known here")
    dtype = DTYPES[item["dtype"]]
    if min(shape, default=0) < 0 or start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise BadFileError(f"{path}: `{name}` takes {end - start} bytes, {item['dtype']} of {list(shape)} needs others")
    if base + end > size:
        raise BadFileError(
            f"{path}: `{name}` ends at byte {base + end}, the file has {size}: it is truncated",
            hint="fetch the file again",
        )
    return TensorEntry(name, number, dtype, shape, base + start, end - start)
