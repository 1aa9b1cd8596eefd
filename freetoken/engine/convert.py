"""From stored tensors to what the engine holds: dense parameters, and records of routed experts.

The names and fusions are those of transformers' own conversion mapping (`hf.Renamer`). Where a conversion only
stacks experts and puts gate and up side by side, an expert's record is a set of byte ranges of the checkpoint and is
read without touching a value; any other conversion is run on one expert at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from freetoken.engine import formats, hf
from freetoken.engine.files import CheckpointFiles, Piece, TensorEntry, byte_view
from freetoken.engine.hf import Renamed, Renamer
from freetoken.engine.layout import ExpertLayout, Part, Projection, RecordBuilder
from freetoken.engine.stored import StoredMatrix, parse_name
from freetoken.errors import BadFileError

#: Source pattern of the conversion -> expert number (None = stacked) -> what is stored.
Sources = dict[str, dict[int | None, StoredMatrix]]


@dataclass
class DenseParameter:
    """One dense parameter: where it comes from; `sources` has several entries where a conversion fuses them."""

    target: str
    renamed: Renamed
    sources: dict[str, list[StoredMatrix]] = field(default_factory=dict)

    @property
    def only(self) -> StoredMatrix | None:
        """The one stored matrix that is this parameter as it is; None where a conversion makes it."""
        return None if self.renamed.converter else self.sources[""][0]

    def read(self, files: CheckpointFiles, dtype: torch.dtype, config: Any) -> dict[str, torch.Tensor]:
        """Full parameter names -> tensors in host memory."""
        if self.only is not None:
            return {self.target: self.only.read(files, dtype)}
        tensors = {pattern: [m.read(files, dtype) for m in stored] for pattern, stored in self.sources.items()}
        return hf.convert(self.renamed, tensors, config)


@dataclass(frozen=True)
class Range:
    """Bytes of a checkpoint file that go to `target` within a record."""

    file: int
    offset: int
    nbytes: int
    target: int


@dataclass(frozen=True)
class Computed:
    """A part of a record that has to be computed from stored tensors."""

    part: Part
    renamed: Renamed
    #: Source pattern -> entry, and the row to take where experts are stacked.
    sources: dict[str, tuple[TensorEntry, int | None]]

    def write(self, files: CheckpointFiles, record: torch.Tensor, config: Any) -> None:
        """Compute the part and put it into the record."""
        read = {
            pattern: files.read(entry) if row is None else files.read_slice(entry, row).unsqueeze(0)
            for pattern, (entry, row) in self.sources.items()
        }
        if self.renamed.converter is None:
            (value,) = read.values()
        else:
            value = hf.convert(self.renamed, {p: [t] for p, t in read.items()}, config)[self.renamed.target]
        self.part.view(record.unsqueeze(0)).copy_(value.reshape(1, *self.part.shape))


@dataclass(frozen=True)
class LayerSource:
    """How to make the records of one layer: `ranges[expert]` and `computed[expert]`."""

    layout: ExpertLayout
    ranges: list[list[Range]]
    computed: list[list[Computed]]


@dataclass
class CheckpointPlan:
    """Where everything of a model comes from."""

    dense: list[DenseParameter]
    layers: list[LayerSource]


class ExpertReader:
    """Reads records of experts from the checkpoint. Safe from several threads."""

    def __init__(self, files: CheckpointFiles, layers: Sequence[LayerSource], config: Any) -> None:
        self.files = files
        self.layers = layers
        self._config = config

    def read(self, layer: int, experts: Iterable[int], records: torch.Tensor) -> None:
        """Fill `records[i]` (host memory, uint8 [n, at least record bytes]) with the i-th expert."""
        source = self.layers[layer]
        memory = byte_view(records)
        stride = records.shape[1]
        pieces = []
        for row, expert in enumerate(experts):
            base = row * stride
            for one in source.ranges[expert]:
                start = base + one.target
                pieces.append(Piece(one.file, one.offset, memory[start : start + one.nbytes]))
            for computed in source.computed[expert]:
                computed.write(self.files, records[row], self._config)
        self.files.read_pieces(pieces)


def plan_checkpoint(files: CheckpointFiles, model: Any, dtype: torch.dtype) -> CheckpointPlan:
    """Find a source for every parameter of the model. Raises BadFileError naming what is missing or left over."""
    renamer = Renamer(model)
    modules = hf.find_experts(model)
    numbers = {name: number for number, (name, _) in enumerate(modules)}
    tied = {tied for tied, _ in hf.tie_weights(model)}
    by_layer: list[dict[str, tuple[Renamed, Sources]]] = [{} for _ in modules]
    dense: dict[str, DenseParameter] = {}
    stored: dict[tuple[str, int | None], StoredMatrix] = {}
    renames: dict[str, Renamed | None] = {}
    left_over: list[str] = []
    for name, entry in files.entries.items():
        parsed = parse_name(name)
        if parsed.parameter not in renames:
            renames[parsed.parameter] = renamer.rename(parsed.parameter)
            if renames[parsed.parameter] is None and not renamer.is_ignored(name):
                left_over.append(name)
        renamed = renames[parsed.parameter]
        if renamed is None or renamed.target in tied:
            continue
        key = (parsed.parameter, parsed.expert)
        if key in stored:
            stored[key].roles[parsed.role] = entry
            continue
        stored[key] = matrix = StoredMatrix(name, {parsed.role: entry})
        module, _, parameter = renamed.target.rpartition(".")
        if module in numbers:
            _, sources = by_layer[numbers[module]].setdefault(parameter, (renamed, {}))
            sources.setdefault(renamed.pattern or "", {})[parsed.expert] = matrix
        else:
            found = dense.setdefault(renamed.target, DenseParameter(renamed.target, renamed))
            found.sources.setdefault(renamed.pattern or "", []).append(matrix)
    if left_over:
        raise BadFileError(_name_some(files, "has", left_over, "that the model has no place for"))
    _check_complete(files, model, dense, by_layer, modules, tied)
    layers = [
        _plan_layer(files, name, module, parameters, dtype)
        for (name, module), parameters in zip(modules, by_layer, strict=True)
    ]
    return CheckpointPlan(list(dense.values()), layers)


def _check_complete(
    files: CheckpointFiles,
    model: Any,
    dense: dict[str, DenseParameter],
    by_layer: list[dict[str, tuple[Renamed, Sources]]],
    modules: list[tuple[str, nn.Module]],
    tied: set[str],
) -> None:
    found = set(dense) | tied
    for parameter in dense.values():
        if (converter := parameter.renamed.converter) is not None:
            first = converter.target_patterns[0]
            found.update(parameter.target.replace(first, other) for other in converter.target_patterns)
    for (name, _), parameters in zip(modules, by_layer, strict=True):
        found.update(f"{name}.{parameter}" for parameter in parameters)
    if missing := [name for name in model.state_dict() if name not in found]:
        raise BadFileError(_name_some(files, "lacks", missing, "that the model needs"))


def _name_some(files: CheckpointFiles, verb: str, names: Sequence[str], why: str) -> str:
    some = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{files.folder} {verb} {len(names)} tensor{'s' if len(names) > 1 else ''} {why}: {some}"


def _plan_layer(
    files: CheckpointFiles,
    name: str,
    module: nn.Module,
    parameters: dict[str, tuple[Renamed, Sources]],
    dtype: torch.dtype,
) -> LayerSource:
    shapes = {key: tuple(value.shape) for key, value in module.named_parameters(recurse=False)}
    experts = next(iter(shapes.values()))[0]
    ranges: list[list[Range]] = [[] for _ in range(experts)]
    computed: list[list[Computed]] = [[] for _ in range(experts)]
    builder = RecordBuilder()
    planner = _RecordPlanner(files, name, experts, dtype, builder, ranges, computed)
    up = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
    known = {up, "down_proj", f"{up}_bias", "down_proj_bias"}
    if not {up, "down_proj"} <= shapes.keys() <= known:
        raise BadFileError(
            f"the experts of `{name}` have the parameters {', '.join(shapes)}, which no record is known for"
        )
    projections = [
        planner.add(key, shapes, parameters, is_transposed=bool(module.is_transposed)) for key in (up, "down_proj")
    ]
    return LayerSource(builder.finish(*projections), ranges, computed)


class _RecordPlanner:
    """Lays out one layer's record and notes for each expert where its parts come from."""

    def __init__(
        self,
        files: CheckpointFiles,
        name: str,
        experts: int,
        dtype: torch.dtype,
        builder: RecordBuilder,
        ranges: list[list[Range]],
        computed: list[list[Computed]],
    ) -> None:
        self._files, self._name, self._experts, self._dtype = files, name, experts, dtype
        self._builder, self._ranges, self._computed = builder, ranges, computed

    def add(
        self,
        key: str,
        shapes: dict[str, tuple[int, ...]],
        parameters: dict[str, tuple[Renamed, Sources]],
        *,
        is_transposed: bool,
    ) -> Projection:
        """Plan one projection with its scales and bias."""
        renamed, sources = parameters[key]
        self._check_sources(key, renamed, sources)
        kinds = {matrix.format for by_expert in sources.values() for matrix in by_expert.values()}
        if len(kinds) > 1:
            raise BadFileError(f"`{self._name}.{key}` mixes the formats {', '.join(sorted(kinds))} in one layer")
        (kind,) = kinds
        shape = shapes[key][1:]
        if kind == "plain":
            weight = self._plain(key, shape, renamed, sources)
            scale = matrix_scale = None
        else:
            logical = shape[::-1] if is_transposed else shape
            is_transposed = False
            weight, scale, matrix_scale = self._packed(kind, key, logical, renamed, sources)
        bias = None
        if f"{key}_bias" in shapes:
            bias_renamed, bias_sources = parameters[f"{key}_bias"]
            self._check_sources(f"{key}_bias", bias_renamed, bias_sources)
            bias = self._plain(f"{key}_bias", shapes[f"{key}_bias"][1:], bias_renamed, bias_sources)
        return Projection(key, kind, is_transposed, weight, scale, matrix_scale, bias)

    def _check_sources(self, key: str, renamed: Renamed, sources: Sources) -> None:
        wanted = renamed.converter.source_patterns if renamed.converter else [""]
        # A converter also takes what is fused already: then one source, found under no pattern or another one.
        lost = [p for p in wanted if p not in sources] if "" not in sources else []
        if lost and len(sources) != len(wanted):
            raise BadFileError(f"{self._files.folder} lacks the tensors {', '.join(lost)} of `{self._name}.{key}`")
        for pattern, by_expert in sources.items():
            if None not in by_expert and (gone := sorted(set(range(self._experts)) - by_expert.keys())):
                raise BadFileError(
                    f"{self._files.folder} lacks {len(gone)} of {self._experts} experts of `{self._name}.{key}` "
                    f"({pattern or 'stacked'}), first expert {gone[0]}"
                )

    def _plain(self, key: str, shape: tuple[int, ...], renamed: Renamed, sources: Sources) -> Part:
        ordered = _in_order(renamed, sources)
        stored = next(iter(ordered[0].values())).weight.dtype
        part = self._builder.part(key, _record_dtype(stored, self._dtype), shape)
        is_raw = _only_stacks(renamed) and all(
            matrix.weight.dtype == part.dtype for by_expert in ordered for matrix in by_expert.values()
        )
        if is_raw:
            self._raw(part, [{e: m.weight for e, m in by_expert.items()} for by_expert in ordered])
            return part
        for expert in range(self._experts):
            chosen: dict[str, tuple[TensorEntry, int | None]] = {
                pattern: (by[expert].weight, None) if expert in by else (by[None].weight, expert)
                for pattern, by in sources.items()
            }
            self._computed[expert].append(Computed(part, renamed, chosen))
        return part

    def _packed(
        self, kind: str, key: str, shape: tuple[int, ...], renamed: Renamed, sources: Sources
    ) -> tuple[Part, Part | None, Part | None]:
        if not _only_stacks(renamed):
            raise BadFileError(
                f"`{self._name}.{key}` is stored as {kind} and needs a conversion that only plain weights have"
            )
        rows, cols = shape
        ordered = _in_order(renamed, sources)
        build = self._builder.part

        def roles(role: str) -> list[dict[int | None, TensorEntry]]:
            return [{e: _role(m, role) for e, m in by_expert.items()} for by_expert in ordered]

        if kind in formats.GROUP:
            group = formats.GROUP[kind]
            weight = build(key, torch.uint8, (rows, cols // 2))
            scale_dtype = torch.float8_e4m3fn if kind == "nvfp4" else torch.uint8
            scale = build(f"{key}_scale", scale_dtype, (rows, cols // group))
            self._raw(weight, roles("weight" if kind == "nvfp4" else "blocks"))
            self._raw(scale, roles("scale" if kind == "nvfp4" else "exponents"))
            if kind == "mxfp4":
                return weight, scale, None
            matrix_scale = build(f"{key}_matrix_scale", torch.float32, (len(ordered),))
            self._raw(matrix_scale, roles("matrix_scale"))
            return weight, scale, matrix_scale
        weight = build(key, torch.float8_e4m3fn, (rows, cols))
        self._raw(weight, roles("weight"))
        if kind == "fp8":
            scale = build(f"{key}_scale", torch.float32, (len(ordered),))
            self._raw(scale, roles("scale"))
            return weight, scale, None
        stored = _role(next(iter(ordered[0].values())), "block_scale").dtype
        blocks = tuple(-(-size // formats.BLOCK) for size in shape)
        scale = build(f"{key}_scale", stored, blocks)
        self._raw(scale, roles("block_scale"))
        return weight, scale, None

    def _raw(self, part: Part, sources: list[dict[int | None, TensorEntry]]) -> None:
        """Note the byte ranges of `part`: the sources lie one behind the other in it."""
        share = part.nbytes // len(sources)
        for position, by_expert in enumerate(sources):
            stacked = by_expert.get(None)
            for expert in range(self._experts):
                entry = by_expert[expert] if stacked is None else stacked
                nbytes = entry.nbytes if stacked is None else entry.nbytes // self._experts
                if nbytes != share or entry.dtype.itemsize != part.dtype.itemsize:
                    raise BadFileError(
                        f"`{entry.name}` has the shape {list(entry.shape)} of {entry.dtype}, "
                        f"the model needs {list(part.shape)} of {part.dtype} from {len(sources)} such tensors".replace(
                            "torch.", ""
                        )
                    )
                offset = entry.offset + (0 if stacked is None else expert * nbytes)
                self._ranges[expert].append(Range(entry.file, offset, nbytes, part.offset + position * share))


def _role(matrix: StoredMatrix, role: str) -> TensorEntry:
    return matrix.roles[role]


def _in_order(renamed: Renamed, sources: Sources) -> list[dict[int | None, StoredMatrix]]:
    """The sources as the conversion lines them up."""
    if renamed.converter is None or "" in sources:
        return list(sources.values())
    order = {pattern: position for position, pattern in enumerate(renamed.converter.source_patterns)}
    return [sources[pattern] for pattern in sorted(sources, key=lambda pattern: order[pattern])]


def _only_stacks(renamed: Renamed) -> bool:
    """Whether a record is the stored bytes of the sources, one behind the other."""
    if renamed.converter is None:
        return True
    for operation in renamed.converter.operations:
        name = type(operation).__name__
        if name == "MergeModulelist" and getattr(operation, "dim", None) == 0:
            continue
        if name == "Concatenate" and getattr(operation, "dim", None) == 1:
            continue
        return False
    return True


def _record_dtype(stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The type in a record: as stored where that is no wider than what is computed with."""
    if stored == compute or (stored.itemsize < compute.itemsize):
        return stored
    return compute
