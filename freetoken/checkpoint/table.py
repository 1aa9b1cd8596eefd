"""`TensorTable`: what is kept of a checkpoint's tensors while its headers are read.

Sums by (template, dtype), by layer and by expert; no object per tensor outlives its header, so that 93,275 tensors
take about as much memory as one shard's header. Every fault of a header is refused here: safetensors files come from
strangers, and their lengths and offsets are claims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from freetoken.checkpoint.config import parse_json
from freetoken.checkpoint.names import Role, find_role, has_layer, split_name
from freetoken.errors import BadFileError
from freetoken.units import format_bytes

#: What the safetensors format itself allows; a longer header is a lie or an attack.
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 4_000_000

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass
class TensorClass:
    """All tensors of one template and dtype."""

    template: str
    dtype: str
    role: Role
    tensors: int = 0
    bytes: int = 0
    elements: int = 0
    #: Output rows of all its matrices: a quantised matrix may have a scale for each.
    rows: int = 0
    #: Dimensions of the first tensor seen: all of a class have the same number of them.
    shape: tuple[int, ...] = ()
    bytes_by_layer: dict[int, int] = field(default_factory=dict)
    elements_by_layer: dict[int, int] = field(default_factory=dict)


class TensorTable:
    """Sums over tensors, filled header by header with `add_safetensors` or tensor by tensor with `add`."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.classes: dict[tuple[str, str], TensorClass] = {}
        #: Bytes of each (layer, expert) that has tensors of its own; stacked experts are not among them.
        self.expert_bytes: dict[tuple[int, int], int] = {}
        self.tensors = 0
        self._roles: dict[str, tuple[Role, bool]] = {}

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], count_bytes: int, elements: int, tensors: int = 1
    ) -> tuple[Role, int]:
        """Counts a tensor in, or `tensors` of the same template and layer; their role and layer (-1 for none)."""
        template, numbers = split_name(name)
        known = self._roles.get(template)
        if known is None:
            known = self._roles[template] = find_role(template), has_layer(template)
        role, is_layered = known
        layer = numbers[0] if is_layered and numbers else -1
        if layer >= self.layers and role != "vision":
            # DeepSeek and GLM keep their draft layers behind the last layer of the model.
            role, template = "draft", "draft:" + template
        one = self.classes.get((template, dtype))
        if one is None:
            one = self.classes[template, dtype] = TensorClass(template, dtype, role, shape=shape)
        one.tensors += tensors
        one.bytes += count_bytes
        one.elements += elements
        if len(shape) > 1:
            one.rows += shape[-2] * tensors
        if layer >= 0:
            one.bytes_by_layer[layer] = one.bytes_by_layer.get(layer, 0) + count_bytes
            one.elements_by_layer[layer] = one.elements_by_layer.get(layer, 0) + elements
        self.tensors += tensors
        return role, layer

    def add_expert(self, layer: int, expert: int, count_bytes: int) -> None:
        """Counts bytes towards one routed expert."""
        self.expert_bytes[layer, expert] = self.expert_bytes.get((layer, expert), 0) + count_bytes

    def add_safetensors(self, header: bytes, data_bytes: int, where: str) -> Any:
        """Counts a safetensors header in (its JSON, without the length before it); the names of its tensors.

        `data_bytes` is what the file holds behind the header. Raises BadFileError for anything that does not add up:
        offsets that overlap, leave a hole or pass the end of the file, and shapes that do not match their bytes.
        """
        table = parse_json(header, f"{where} (header)")
        if not isinstance(table, dict):
            raise BadFileError(f"{where}: the header is not a JSON object")
        table.pop("__metadata__", None)
        if self.tensors + len(table) > MAX_TENSORS:
            raise BadFileError(f"{where}: more than {MAX_TENSORS:,} tensors")
        spans: list[tuple[int, int, str]] = []
        sizes: dict[tuple[Any, ...], int] = {}
        # Per-expert tensors are by far the most: they are summed by (layer part, rest, dtype) first, and named once.
        cells: dict[tuple[str, str, str, int], list[int]] = {}
        experts: dict[tuple[str, str], int] = {}
        for name, entry in table.items():
            try:
                dtype, shape = entry["dtype"], entry["shape"]
                begin, end = entry["data_offsets"]
                size = sizes.get((dtype, *shape))
                if size is None:
                    size = sizes[(dtype, *shape)] = _count_bytes(name, dtype, shape, where)
                if end - begin != size or begin < 0:
                    raise BadFileError(
                        f"{where}: tensor `{name}` of {dtype} {shape} needs {size:,} bytes, "
                        f"its offsets are {begin} to {end}"
                    )
                spans.append((begin, end, name))
            except (KeyError, TypeError, ValueError) as error:
                text = f"{where}: the entry of tensor `{name[:200]}` is not a dtype, a shape and two offsets"
                raise BadFileError(text) from error
            head, found, tail = name.rpartition(".experts.")
            expert, dot, rest = tail.partition(".")
            if found and dot and expert.isdecimal():
                cell = cells.get((head, rest, dtype, size))
                if cell is None:
                    cells[head, rest, dtype, size] = [1, *shape]
                else:
                    cell[0] += 1
                experts[head, expert] = experts.get((head, expert), 0) + size
            else:
                self.add(name, dtype, tuple(shape), size, math.prod(shape))
        self._fold(cells, experts)
        _check_spans(spans, data_bytes, where)
        return table.keys()

    def _fold(self, cells: dict[tuple[str, str, str, int], list[int]], experts: dict[tuple[str, str], int]) -> None:
        """Counts the sums over per-expert tensors in."""
        layers: dict[str, int] = {}
        for (head, rest, dtype, size), (count, *shape) in cells.items():
            elements = math.prod(shape)
            name = f"{head}.experts.0.{rest}"
            role, layer = self.add(name, dtype, tuple(shape), size * count, elements * count, tensors=count)
            if role == "expert" and layer >= 0:
                layers[head] = layer
        for (head, expert), size in experts.items():
            if head in layers:
                self.add_expert(layers[head], int(expert), size)


def _count_bytes(name: str, dtype: Any, shape: Any, where: str) -> int:
    """Bytes of a tensor; raises BadFileError for a dtype or a dimension that cannot be."""
    if dtype not in DTYPE_BITS:
        raise BadFileError(f"{where}: tensor `{name}` has the unknown dtype `{dtype}`")
    if any(type(dim) is not int or dim < 0 for dim in shape):
        raise BadFileError(f"{where}: tensor `{name}` has the impossible shape {shape}")
    bits: int = math.prod(shape) * DTYPE_BITS[dtype]
    return -(-bits // 8)


def _check_spans(spans: list[tuple[int, int, str]], data_bytes: int, where: str) -> None:
    """Tensors must follow one another from 0 to the end of the file, as the format asks."""
    spans.sort()
    reached, before = 0, ""
    for begin, end, name in spans:
        if begin < reached:
            raise BadFileError(f"{where}: tensors `{before}` and `{name}` overlap at byte {begin:,} of the data")
        if begin > reached:
            raise BadFileError(f"{where}: {begin - reached:,} bytes before tensor `{name}` belong to no tensor")
        if end > data_bytes:
            raise BadFileError(
                f"{where}: truncated: tensor `{name}` ends at byte {end:,} of the data, the file holds {data_bytes:,} "
                f"({format_bytes(data_bytes)})",
                hint="fetch it again: `ft model fetch REPO`",
            )
        reached, before = end, name
    if reached < data_bytes:
        raise BadFileError(f"{where}: {data_bytes - reached:,} bytes after the last tensor belong to no tensor")


def parse_header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Length in bytes of a safetensors header, from the file's first 8 bytes. Raises BadFileError for a lie."""
    if len(prefix) < 8:
        raise BadFileError(f"{where}: truncated: {len(prefix)} bytes, a safetensors file has at least 8")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise BadFileError(
            f"{where}: claims a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are allowed: "
            "not a safetensors file"
        )
    if length < 2 or 8 + length > file_bytes:
        raise BadFileError(f"{where}: claims a header of {length:,} bytes, the file has {file_bytes:,} in all")
    return length
