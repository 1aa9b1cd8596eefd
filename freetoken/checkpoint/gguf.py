"""GGUF: metadata and tensor table → `ModelShape`, without reading a weight and without trusting a length.

A GGUF file says everything itself: its metadata is the configuration, its tensor table has names, shapes and types.
Sizes follow from the types' block sizes. Multi-part files are read part by part.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from freetoken.checkpoint.build import make_shape
from freetoken.checkpoint.config import MAX_DIM, MAX_LAYERS, ConfigFacts
from freetoken.checkpoint.shape import AttentionKind, ModelShape, Shard
from freetoken.checkpoint.table import TensorTable
from freetoken.errors import BadFileError

MAX_METADATA_BYTES = 256 << 20
MAX_KEYS = 100_000
MAX_GGUF_TENSORS = 1_000_000
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
#: Arrays up to this length are kept; longer ones (the vocabulary) are only counted.
_KEPT_ARRAY = 4096

#: ggml type → (name, values in a block, bytes of a block), from ggml's own block layouts.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 36), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36),
}  # fmt: skip
_PART = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")
#: Families whose files do not say which layers slide: every n-th layer attends to everything.
_SLIDING_INTERVALS = {"gpt-oss": 2, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4}


class Cursor:
    """Reads little-endian values from a buffer that `need` may grow; every length is checked before it is used."""

    def __init__(self, where: str, size: int, need: Callable[[int], Any]) -> None:
        self.where, self.size, self._need = where, size, need
        self.position = 0
        self.buffer: Any = need(min(size, 24))

    def reserve(self, count: int) -> None:
        """Makes sure that `count` bytes can be read at the position; raises BadFileError past the end or the bound."""
        end = self.position + count
        if end > self.size:
            raise BadFileError(f"{self.where}: truncated: its header needs byte {end:,}, the file has {self.size:,}")
        if end > MAX_METADATA_BYTES:
            raise BadFileError(f"{self.where}: its header passes {MAX_METADATA_BYTES:,} bytes, more than any model's")
        if end > len(self.buffer):
            self.buffer = self._need(end)

    def read(self, layout: str) -> Any:
        """One value of a struct layout."""
        count = struct.calcsize(layout)
        self.reserve(count)
        (value,) = struct.unpack_from(layout, self.buffer, self.position)
        self.position += count
        return value

    def read_string(self, *, keep: bool = True) -> str:
        """A string with its length before it; empty where it is not kept."""
        count = self.read("<Q")
        self.reserve(count)
        begin, self.position = self.position, self.position + count
        return bytes(self.buffer[begin : self.position]).decode("utf-8", "replace") if keep else ""

    def read_value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value; a long array gives its length as `{"length": n}`."""
        if kind in _SCALARS:
            return self.read(_SCALARS[kind])
        if kind == _STRING:
            return self.read_string()
        if kind != _ARRAY or depth > 2:
            raise BadFileError(f"{self.where}: unknown metadata type {kind}")
        item, count = self.read("<I"), self.read("<Q")
        if count <= _KEPT_ARRAY:
            return [self.read_value(item, depth + 1) for _ in range(count)]
        self._skip_array(item, count, depth)
        return {"length": count}

    def _skip_array(self, item: int, count: int, depth: int) -> None:
        if item in _SCALARS:
            size = count * struct.calcsize(_SCALARS[item])
            self.reserve(size)
            self.position += size
        elif item == _STRING:
            self._skip_strings(count)
        else:
            self.reserve(count)
            for _ in range(count):
                self.read_value(item, depth + 1)

    def _skip_strings(self, count: int) -> None:
        self.reserve(8 * count)
        unpack, position = struct.Struct("<Q").unpack_from, self.position
        buffer, held = self.buffer, len(self.buffer)
        for _ in range(count):
            if position + 8 > held:
                self.position = position
                self.reserve(8)
                buffer, held = self.buffer, len(self.buffer)
            position += 8 + unpack(buffer, position)[0]
        self.position = position
        self.reserve(0)


class GgufPart:
    """One file's metadata and tensor table: (name, shape with the fastest dimension last, ggml type, offset)."""

    def __init__(self, cursor: Cursor) -> None:
        where = cursor.where
        magic, version = cursor.read("<I"), cursor.read("<I")
        if magic != 0x46554747:
            raise BadFileError(f"{where}: does not begin with `GGUF`")
        if version not in (2, 3):
            raise BadFileError(f"{where}: GGUF version {version} is not read, expected 2 or 3 in little-endian order")
        tensors, keys = cursor.read("<Q"), cursor.read("<Q")
        if tensors > MAX_GGUF_TENSORS or keys > MAX_KEYS:
            raise BadFileError(f"{where}: claims {tensors:,} tensors and {keys:,} metadata keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = cursor.read_string()
            self.metadata[name] = cursor.read_value(cursor.read("<I"))
        self.tensors = [self._read_tensor(cursor) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise BadFileError(f"{where}: `general.alignment` is {alignment}")
        self.header_bytes = cursor.position
        self.data_begin = -(-cursor.position // alignment) * alignment
        self._check(cursor)

    @staticmethod
    def _read_tensor(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.read_string()
        dims = cursor.read("<I")
        if dims > 8:
            raise BadFileError(f"{cursor.where}: tensor `{name[:200]}` claims {dims} dimensions")
        shape = tuple(cursor.read("<Q") for _ in range(dims))
        return name, shape[::-1], cursor.read("<I"), cursor.read("<Q")

    def _check(self, cursor: Cursor) -> None:
        reached, before = 0, ""
        for name, shape, kind, offset in sorted(self.tensors, key=lambda one: one[3]):
            size = count_ggml_bytes(name, shape, kind, cursor.where)
            if offset < reached:
                raise BadFileError(f"{cursor.where}: tensors `{before}` and `{name}` overlap")
            reached, before = offset + size, name
            if self.data_begin + reached > cursor.size:
                raise BadFileError(
                    f"{cursor.where}: truncated: tensor `{name}` ends at byte {self.data_begin + reached:,}, "
                    f"the file has {cursor.size:,}",
                    hint="fetch it again: `ft model fetch REPO`",
                )


def count_ggml_bytes(name: str, shape: tuple[int, ...], kind: int, where: str) -> int:
    """Bytes of a tensor of a ggml type. Raises BadFileError for an unknown type or rows that are not whole blocks."""
    if kind not in GGML_TYPES:
        raise BadFileError(f"{where}: tensor `{name[:200]}` has the unknown ggml type {kind}")
    word, block, size = GGML_TYPES[kind]
    row = shape[-1] if shape else 1
    if row % block or any(dim > 1 << 40 for dim in shape):
        raise BadFileError(
            f"{where}: tensor `{name[:200]}` of {word} has rows of {row} values, not a multiple of {block}"
        )
    return math.prod(shape) // block * size


def read_gguf_shape(path: Path) -> ModelShape:
    """The shape of a GGUF model, given its only or first file. Raises BadFileError."""
    paths = list_parts(path)
    parts = [(one.name, one.stat().st_size, _read_local(one)) for one in paths]
    return make_gguf_shape(_PART.sub(r"\g<stem>", path.name).removesuffix(".gguf"), parts)


def list_parts(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of. Raises BadFileError where one is missing."""
    match = _PART.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]
    if missing := [one.name for one in paths if not one.is_file()]:
        raise BadFileError(f"{path.parent}: {len(missing)} of {count} GGUF parts are missing: {', '.join(missing[:3])}")
    return paths


def _read_local(path: Path) -> GgufPart:
    try:
        size = path.stat().st_size
        if size < 24:
            raise BadFileError(f"{path}: truncated: {size} bytes are no GGUF file")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            cursor = Cursor(str(path), size, lambda _: mapped)
            part = GgufPart(cursor)
            cursor.buffer = b""
            return part
    except OSError as error:
        raise BadFileError(f"{path}: cannot be read: {error.strerror or error}") from error


def make_gguf_shape(name: str, parts: Iterable[tuple[str, int, GgufPart]]) -> ModelShape:
    """The shape of a model from its parts: (file name, bytes, header) of each."""
    parts = list(parts)
    metadata = parts[0][2].metadata
    tensors = [tensor for _, _, part in parts for tensor in part.tensors]
    facts = _make_facts(name, metadata, {one[0]: one[1] for one in tensors})
    table = TensorTable(facts.layers)
    for tensor, shape, kind, _ in tensors:
        word = GGML_TYPES[kind][0]
        dtype = word.upper() if word in ("f32", "f16", "bf16", "f64", "i32", "i64", "i16", "i8") else f"ggml:{word}"
        table.add(tensor, dtype, shape, count_ggml_bytes(tensor, shape, kind, name), math.prod(shape))
    shards = [Shard(name=file, bytes=size) for file, size, _ in parts]
    return make_shape(facts, table, shards=shards).model_copy(update={"file_format": "gguf"})


class _Reader:
    """Looks metadata up under the architecture's prefix, checked."""

    def __init__(self, name: str, metadata: dict[str, Any]) -> None:
        self.name, self.metadata = name, metadata
        self.architecture = str(metadata.get("general.architecture", "unknown"))

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def get_int(
        self, key: str, default: int | None = None, *, pick: Callable[[list[int]], int] = max, low: int = 0
    ) -> int:
        """A whole number; of an array with one entry a layer, the one that `pick` takes."""
        value = self.get(key)
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            value = pick(value)
        if value is None:
            if default is None:
                raise BadFileError(f"{self.name}: `{self.architecture}.{key}` is missing from the GGUF metadata")
            return default
        if type(value) is not int or not low <= value <= 1 << 31:
            raise BadFileError(
                f"{self.name}: `{self.architecture}.{key}` is `{value}`, expected a whole number from {low}"
            )
        return value


def _make_facts(name: str, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> ConfigFacts:
    read = _Reader(name, metadata)
    blocks = read.get_int("block_count", low=1)
    layers = blocks - read.get_int("nextn_predict_layers", 0)
    if not 1 <= layers <= MAX_LAYERS:
        raise BadFileError(f"{name}: `{read.architecture}.block_count` is {blocks}, expected 1 to {MAX_LAYERS}")
    hidden = read.get_int("embedding_length", low=1)
    heads = read.get_int("attention.head_count", 0)
    kinds = _find_kinds(read, layers, shapes)
    is_split = "sliding" in kinds and isinstance(read.get("attention.head_count_kv"), list)
    kv_list = read.get("attention.head_count_kv")
    by_kind = (
        {kind: [n for n, k in zip(kv_list, kinds, strict=False) if k == kind] for kind in kinds} if is_split else {}
    )
    head_dim = read.get_int("attention.key_length", hidden // heads if heads else 0)
    rank, rope = read.get_int("attention.kv_lora_rank", 0), read.get_int("rope.dimension_count", head_dim)
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    tokens = vocabulary.get("length", 0) if isinstance(vocabulary, dict) else len(vocabulary or ())
    return ConfigFacts(
        name=name,
        family=read.architecture,
        architecture=f"{read.architecture} (GGUF)",
        dtype="bfloat16",
        layers=layers,
        hidden_size=hidden,
        vocab_size=min(read.get_int("vocab_size", tokens), MAX_DIM),
        max_position_tokens=read.get_int("context_length", 0),
        rotary_dim=rope,
        tie_embeddings="output.weight" not in shapes,
        experts=read.get_int("expert_count", 0),
        top_k=read.get_int("expert_used_count", 0),
        expert_intermediate_size=read.get_int("expert_feed_forward_length", read.get_int("feed_forward_length", 0)),
        kinds=kinds,
        heads=heads,
        kv_heads=max(by_kind.get("full") or [read.get_int("attention.head_count_kv", heads)]),
        head_dim=head_dim,
        sliding_window=read.get_int("attention.sliding_window", 0) or None if "sliding" in kinds else None,
        sliding_kv_heads=max(by_kind["sliding"]) if by_kind.get("sliding") else None,
        sliding_head_dim=read.get_int("attention.key_length_swa", 0) or None,
        latent_dim=rank + rope if rank else None,
        index_head_dim=read.get_int("attention.indexer.key_length", 0) or None,
        linear=_read_linear(read) if "linear" in kinds else {},
        mamba_state_bytes=_count_mamba_bytes(read) * sum(kind == "mamba" for kind in kinds),
    )


def _find_kinds(read: _Reader, layers: int, shapes: dict[str, tuple[int, ...]]) -> tuple[AttentionKind, ...]:
    """What each layer keeps, told from the tensors that it has."""
    has: list[set[str]] = [set() for _ in range(layers)]
    for tensor in shapes:
        if (match := re.match(r"blk\.(\d+)\.([a-z0-9_]+)", tensor)) and int(match[1]) < layers:
            has[int(match[1])].add(match[2])
    recurrent: AttentionKind = "linear" if re.match(r"qwen3next|qwen35|qwen4|kimi", read.architecture) else "mamba"
    sliding = _find_sliding(read, layers)
    kinds: list[AttentionKind] = []
    for layer, names in enumerate(has):
        if any(one.startswith("ssm_") for one in names):
            kinds.append(recurrent)
        elif any(one.startswith("attn_kv_a") for one in names):
            kinds.append("mla")
        elif names & {"attn_k", "attn_qkv", "attn_v", "attn_kv"}:
            kinds.append("sliding" if sliding[layer] else "full")
        else:
            kinds.append("none")
    return tuple(kinds)


def _find_sliding(read: _Reader, layers: int) -> list[bool]:
    if not read.get_int("attention.sliding_window", 0):
        return [False] * layers
    pattern = read.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) >= layers:
        return [bool(one) for one in pattern[:layers]]
    interval = pattern if type(pattern) is int and pattern > 0 else _SLIDING_INTERVALS.get(read.architecture, 0)
    return [bool(not interval or (layer + 1) % interval) for layer in range(layers)]


def _read_linear(read: _Reader) -> dict[str, int]:
    value_heads, state = read.get_int("ssm.time_step_rank", low=1), read.get_int("ssm.state_size", low=1)
    return {
        "linear_key_heads": read.get_int("ssm.group_count", low=1),
        "linear_value_heads": value_heads,
        "linear_key_head_dim": state,
        "linear_value_head_dim": read.get_int("ssm.inner_size", value_heads * state) // value_heads,
        "linear_conv_kernel": read.get_int("ssm.conv_kernel", low=1),
    }


def _count_mamba_bytes(read: _Reader) -> int:
    """Bytes of Mamba-2 state of one layer and sequence: conv window in 16 bits, SSM state in 32."""
    inner, state = read.get_int("ssm.inner_size", 0), read.get_int("ssm.state_size", 0)
    conv = inner + 2 * read.get_int("ssm.group_count", 0) * state
    return conv * max(0, read.get_int("ssm.conv_kernel", 1) - 1) * 2 + inner * state * 4
