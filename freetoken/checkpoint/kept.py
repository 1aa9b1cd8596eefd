"""Shapes of local checkpoints, kept so that the headers of tens of thousands of tensors are read once.

A kept shape counts as long as every file that its reading looked at has the size, times and inode of then: a file that
was changed and given its old modification time back still has another change time.
"""

from __future__ import annotations

import json
import os
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from freetoken import __version__, paths
from freetoken.checkpoint.shape import ModelShape
from freetoken.outfile import replace_file

#: What is read faster than this is not worth keeping, s.
LEAST_S = 0.1
_SUFFIXES = (".json", ".safetensors", ".gguf")


def read_shape(path: Path) -> ModelShape:
    """As `header.read_shape`, from what was kept where nothing has changed since. Raises BadFileError."""
    key = _make_key(path)
    if key is not None and (shape := _read(path, key)) is not None:
        return shape
    # Imported where headers are read: a plan of a kept shape pays for no reader of checkpoints.
    from freetoken.checkpoint import header

    began_s = time.perf_counter()
    shape = header.read_shape(path)
    # Looked at again: what was written to meanwhile is not what was read.
    if key is not None and time.perf_counter() - began_s > LEAST_S and _make_key(path) == key:
        _write(path, key, shape)
    return shape


def _make_key(path: Path) -> list[Any] | None:
    """Sizes, times and inodes of what is looked at, and of the code that looks; None where that cannot be told."""
    try:
        folder = path if path.is_dir() else path.parent
        code = max(one.stat().st_mtime_ns for one in Path(__file__).parent.glob("*.py"))
        names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIXES))
        return [__version__, code, [[name, *stat_key(folder / name)] for name in names]]
    except (OSError, ValueError):
        return None


def stat_key(file: Path) -> list[int]:
    """What is another when a file was changed: size in bytes, times of modification and change in ns, inode. OSError.

    The change time cannot be set by hand.
    """
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _place(path: Path) -> Path:
    name = sha256(str(path.absolute()).encode(errors="surrogateescape")).hexdigest()[:16]
    return paths.state_dir() / "cache" / "shapes" / f"local-{name}.json"


def _read(path: Path, key: list[Any]) -> ModelShape | None:
    try:
        kept = json.loads(_place(path).read_bytes())
        return ModelShape.model_validate(kept["shape"]) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return None


def _write(path: Path, key: list[Any], shape: ModelShape) -> None:
    """Keeps it; a state folder that cannot be written costs time later, nothing else."""
    place = _place(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, json.dumps({"key": key, "shape": shape.model_dump(mode="json")}).encode())
    except OSError:
        pass
