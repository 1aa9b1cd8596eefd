"""A model's shape before the download: config.json and the headers of its weight files, by ranged reads.

Moves the headers and nothing else: 8 bytes tell how long one is. The index is left where it is unless the shards'
names do not tell which belong together, since it repeats every tensor name (10 MB of 24 for 93,275 tensors). What was
read is kept in the state folder under the commit, so that the next plan moves a kilobyte, or nothing when offline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from freetoken import __version__, paths
from freetoken.checkpoint.build import make_shape
from freetoken.checkpoint.config import MAX_CONFIG_BYTES, parse_config, parse_json
from freetoken.checkpoint.files import INDEX_NAME, needs_index, pick_files, pick_weights
from freetoken.checkpoint.gguf import Cursor, GgufPart, make_gguf_shape
from freetoken.checkpoint.hub import HubError, RemoteRepo
from freetoken.checkpoint.shape import ModelShape, Shard
from freetoken.checkpoint.table import TensorTable, parse_header_length
from freetoken.errors import BadFileError

if TYPE_CHECKING:
    from freetoken.recipe.model import ModelRef

#: First read of a safetensors file: most headers are shorter, and a longer one costs one more request.
FIRST_READ_BYTES = 64 << 10
GGUF_BLOCK_BYTES = 4 << 20
HEADER_WORKERS = 8


@dataclass(frozen=True)
class RemoteShape:
    """A shape read from a hub: with the files that a download would take, and the bytes this reading moved."""

    shape: ModelShape
    files: tuple[str, ...]
    download_bytes: int
    moved_bytes: int


def read_remote_shape(repo: RemoteRepo, include: Sequence[str] = ()) -> RemoteShape:
    """The shape of a repository's model, from headers alone. Raises BadFileError, UsageError or HubError."""
    names = [file.name for file in repo.files]
    weights = list_weights(repo, include)
    files = tuple(pick_files(names, weights))
    sizes = {file.name: file.bytes for file in repo.files}
    read = _read_gguf if weights[0].endswith(".gguf") else _read_safetensors
    shape = read(repo, weights, sizes)
    note = f"headers read from {repo.source}, {repo.repo} at {repo.commit[:12]}"
    shape = shape.model_copy(update={"source": "remote_headers", "source_note": note})
    return RemoteShape(shape, files, sum(sizes[name] for name in files), repo.moved_bytes)


def list_weights(repo: RemoteRepo, include: Sequence[str] = ()) -> list[str]:
    """The weight files of a repository, in order. Raises BadFileError for one that the index names and nobody has."""
    names = [file.name for file in repo.files]
    shards: Iterable[str] = ()
    if needs_index(names) and INDEX_NAME in names and not include:
        index = parse_json(repo.read_file(INDEX_NAME), f"{repo.repo}/{INDEX_NAME}")
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        shards = {str(one) for one in weight_map.values()} if isinstance(weight_map, dict) else ()
    weights = pick_weights(repo.repo, names, include, shards)
    if missing := sorted(set(weights) - set(names)):
        raise BadFileError(f"{repo.repo}: {INDEX_NAME} names {missing[0]}, which the repository does not have")
    return weights


def _read_safetensors(repo: RemoteRepo, weights: list[str], sizes: dict[str, int]) -> ModelShape:
    if "config.json" not in sizes:
        raise BadFileError(f"{repo.repo}: has safetensors, but no config.json to say what model they are")
    config = parse_json(repo.read_file("config.json", MAX_CONFIG_BYTES), f"{repo.repo}/config.json")
    if isinstance(config, dict) and "quantization_config" not in config and "hf_quant_config.json" in sizes:
        side = parse_json(repo.read_file("hf_quant_config.json", MAX_CONFIG_BYTES), f"{repo.repo}/hf_quant_config.json")
        if isinstance(side, dict) and isinstance(side.get("quantization"), dict):
            config["quantization_config"] = {"quant_method": "modelopt", **side["quantization"]}
    facts = parse_config(config, name=repo.repo, where=f"{repo.repo}/config.json")
    table = TensorTable(facts.layers)
    with ThreadPoolExecutor(HEADER_WORKERS) as pool:
        headers = pool.map(lambda name: read_remote_header(repo, name, sizes[name]), weights)
        for name, header in zip(weights, headers, strict=True):
            table.add_safetensors(header, sizes[name] - 8 - len(header), f"{repo.repo}/{name}")
    return make_shape(facts, table, shards=[Shard(name=name, bytes=sizes[name]) for name in weights])


def read_remote_header(repo: RemoteRepo, name: str, size: int) -> bytes:
    """The JSON header of a remote safetensors file. Raises BadFileError before it asks for a header that cannot be."""
    where = f"{repo.repo}/{name}"
    first = repo.read_range(name, 0, min(size, FIRST_READ_BYTES))
    length = parse_header_length(first[:8], size, where)
    header = first[8 : 8 + length]
    if len(header) < length:
        header += repo.read_range(name, 8 + len(header), 8 + length)
    if len(header) < length:
        raise BadFileError(f"{where}: truncated inside its header: {len(header):,} of {length:,} bytes")
    return header


def _read_gguf(repo: RemoteRepo, weights: list[str], sizes: dict[str, int]) -> ModelShape:
    parts = []
    for name in weights:
        held = bytearray()

        def need(count: int, name: str = name, held: bytearray = held) -> bytearray:
            end = min(sizes[name], -(-count // GGUF_BLOCK_BYTES) * GGUF_BLOCK_BYTES)
            held += repo.read_range(name, len(held), max(end, count))
            if len(held) < count:
                raise HubError(f"{repo.repo}/{name}: the hub gave {len(held):,} of {count:,} bytes")
            return held

        parts.append((name, sizes[name], GgufPart(Cursor(f"{repo.repo}/{name}", sizes[name], need))))
    stem = weights[0].rpartition("/")[2].removesuffix(".gguf")
    return make_gguf_shape(f"{repo.repo}/{stem}", parts)


def shape_cache_path(ref: ModelRef, include: Sequence[str] = ()) -> Path:
    """Where the shape of a repository's revision is kept once it was read."""
    key = json.dumps([ref.source, ref.repo, ref.revision, sorted(include)])
    name = str(ref.repo).replace("/", "--")
    return paths.state_dir() / "cache" / "shapes" / f"{name}-{sha256(key.encode()).hexdigest()[:16]}.json"


def read_cached_shape(ref: ModelRef, include: Sequence[str] = (), *, commit: str | None = None) -> RemoteShape | None:
    """The kept shape, if it is of `commit` (of any, where that is None) and was read by this version; else None."""
    try:
        kept = json.loads(shape_cache_path(ref, include).read_text(encoding="utf-8"))
        if kept["version"] != __version__ or (commit is not None and kept["commit"] != commit):
            return None
        shape = ModelShape.model_validate(kept["shape"])
        return RemoteShape(shape, tuple(kept["files"]), int(kept["download_bytes"]), 0)
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return None


def write_cached_shape(ref: ModelRef, include: Sequence[str], commit: str, found: RemoteShape) -> None:
    """Keeps a shape; a state folder that cannot be written is no reason to fail."""
    path = shape_cache_path(ref, include)
    document = {
        "version": __version__,
        "commit": commit,
        "shape": found.shape.model_dump(mode="json"),
        "files": found.files,
        "download_bytes": found.download_bytes,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass
