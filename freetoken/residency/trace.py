"""A routing trace: what each decode step asked of each layer, in the order in which the engine served it.

File format, little endian: the 8 bytes `FTTRACE1`, a uint32 with the length of a JSON header
`{"layers", "experts", "top_k", "slots", "model"}`, the header, then records of uint16 words:

- `layer, n, expert x n`: one layer of one step needs these distinct experts, in the order served
- `0xFFFF, 2, low, high`: the slots were resized live to `low + (high << 16)`
- `0xFFFE, 0`: the residents were dropped

A file that a killed engine left ends within a record at worst; that record is dropped.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from freetoken.errors import BadFileError

_MAGIC = b"FTTRACE1"
_RESIZE, _RESET = 0xFFFF, 0xFFFE
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class TraceHeader:
    """What a trace is of: MoE layers, experts a layer, experts a token, and the slots at its start."""

    layers: int
    experts: int
    top_k: int
    slots: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of one decode step and the distinct experts it needs."""

    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resize:
    """The slots were changed live."""

    slots: int


@dataclass(frozen=True, slots=True)
class Reset:
    """All residents were dropped."""


Event = Step | Resize | Reset


@dataclass(frozen=True)
class Trace:
    """A whole trace in memory."""

    header: TraceHeader
    events: tuple[Event, ...]

    @property
    def largest_step(self) -> int:
        """The most experts that one layer needed at once; 0 for an empty trace."""
        return max((len(event.experts) for event in self.events if isinstance(event, Step)), default=0)


class TraceWriter:
    """Appends records to a trace file; buffered, so `close` (or the end of a `with`) completes it."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        if header.layers >= _RESET or header.experts > _RESET:
            raise ValueError(
                f"a trace holds at most {_RESET - 1} layers, not {header.layers} of {header.experts} experts"
            )
        text = json.dumps(asdict(header)).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb", buffering=1 << 16)
        self._file.write(_MAGIC + struct.pack("<I", len(text)) + text)

    def step(self, layer: int, experts: Sequence[int]) -> None:
        """Record one layer of one step."""
        self._file.write(struct.pack(f"<{len(experts) + 2}H", layer, len(experts), *experts))

    def resize(self, slots: int) -> None:
        """Record a live resize."""
        self._file.write(struct.pack("<4H", _RESIZE, 2, slots & 0xFFFF, slots >> 16))

    def reset(self) -> None:
        """Record that the residents were dropped."""
        self._file.write(struct.pack("<2H", _RESET, 0))

    def flush(self) -> None:
        """Hand what was recorded so far to the file."""
        self._file.flush()

    def close(self) -> None:
        """Complete the file; a second call is fine."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: Path) -> Trace:
    """The trace in `path`. Raises BadFileError where it is none; an unfinished last record is dropped."""
    data = path.read_bytes()
    header, start = _parse_header(path, data)
    words = np.frombuffer(data, dtype="<u2", count=(len(data) - start) // 2, offset=start).tolist()
    return Trace(header, tuple(_parse_events(path, header, words)))


def _parse_header(path: Path, data: bytes) -> tuple[TraceHeader, int]:
    if data[: len(_MAGIC)] != _MAGIC or len(data) < len(_MAGIC) + 4:
        raise BadFileError(f"{path} is not a routing trace: it does not start with `{_MAGIC.decode()}`")
    (length,) = struct.unpack_from("<I", data, len(_MAGIC))
    start = len(_MAGIC) + 4
    if length > _MAX_HEADER_BYTES or start + length > len(data):
        raise BadFileError(f"{path}: the header claims {length} bytes, the file has {len(data) - start} after it")
    try:
        header = TraceHeader(**json.loads(data[start : start + length]))
    except (ValueError, TypeError) as error:
        raise BadFileError(f"{path}: the trace header cannot be read: {error}") from error
    return header, start + length


def _parse_events(path: Path, header: TraceHeader, words: list[int]) -> list[Event]:
    events: list[Event] = []
    at = 0
    while at + 2 <= len(words):
        kind, count = words[at], words[at + 1]
        body = words[at + 2 : at + 2 + count]
        if len(body) < count:
            break
        at += 2 + count
        if kind == _RESIZE and count == 2:
            events.append(Resize(body[0] + (body[1] << 16)))
        elif kind == _RESET:
            events.append(Reset())
        elif kind < header.layers and all(expert < header.experts for expert in body):
            events.append(Step(kind, tuple(body)))
        else:
            raise BadFileError(
                f"{path}: record {len(events)} names layer {kind}, expert {max(body, default=0)}; "
                f"the header has {header.layers} layers of {header.experts} experts"
            )
    return events
