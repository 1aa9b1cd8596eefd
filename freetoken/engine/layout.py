"""`ExpertLayout`: one expert as one contiguous record of bytes, so that a fetch is one copy.

A record holds the expert's projections in the order in which they are used, each with its scales and bias. Parts
start at multiples of 16 bytes and a record is a multiple of 256 bytes long, as vector loads on a GPU want.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from freetoken.engine import formats
from freetoken.engine.formats import StoredFormat
from freetoken.engine.kernels import packed

PART_ALIGN = 16
RECORD_ALIGN = 256


@dataclass(frozen=True)
class Part:
    """One tensor inside a record."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, records: torch.Tensor) -> torch.Tensor:
        """The tensor in each of the records [n, record bytes]: [n, *shape], no copy."""
        raw = records[:, self.offset : self.offset + self.nbytes]
        return raw.view(self.dtype).view(records.shape[0], *self.shape)


@dataclass(frozen=True)
class Projection:
    """One matrix of an expert: how it is stored, and its parts."""

    name: str
    format: StoredFormat
    #: True where the stored matrix is [inputs, outputs], as gpt-oss keeps it.
    is_transposed: bool
    weight: Part
    scale: Part | None = None
    #: fp32 scales of the whole matrix, one for each of the equal row ranges it was fused from.
    matrix_scale: Part | None = None
    bias: Part | None = None

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.weight.shape[1 if self.is_transposed else 0]

    @property
    def in_features(self) -> int:
        """Inputs of the matrix, packed or not."""
        stored = self.weight.shape[0 if self.is_transposed else 1]
        return stored * 2 if self.format in formats.GROUP else stored

    def matrices(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weights of all records in `dtype`: [n, out, in]; a view where nothing has to be computed."""
        stored = self.weight.view(records)
        if self.format == "plain":
            weights = stored.to(dtype)
            return weights.transpose(1, 2) if self.is_transposed else weights
        assert self.scale is not None
        scale = self.scale.view(records)
        matrix_scale = None if self.matrix_scale is None else self.matrix_scale.view(records)
        unpacked = None
        if self.format in formats.GROUP:
            unpacked = packed.unpack(self.format, stored, scale, matrix_scale, dtype)
        if unpacked is not None:
            return unpacked
        if self.format == "nvfp4":
            assert matrix_scale is not None
            return formats.dequantize_fp4(stored, formats.scale_of_nvfp4(scale, matrix_scale), dtype)
        if self.format == "mxfp4":
            return formats.dequantize_fp4(stored, formats.scale_of_mxfp4(scale), dtype)
        if self.format == "fp8":
            return formats.dequantize_fp8(stored, scale, dtype)
        return formats.dequantize_fp8_block(stored, scale, dtype)

    def biases(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """[n, out] in `dtype`, None where the projection has none."""
        return None if self.bias is None else self.bias.view(records).to(dtype)


@dataclass(frozen=True)
class ExpertLayout:
    """The record of one expert of a layer: `up` (gate and up fused, where there is a gate), then `down`."""

    up: Projection
    down: Projection
    nbytes: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order of their offsets."""
        found = (
            part
            for projection in (self.up, self.down)
            for part in (projection.weight, projection.scale, projection.matrix_scale, projection.bias)
            if part is not None
        )
        return tuple(sorted(found, key=lambda part: part.offset))

    @property
    def is_packed(self) -> bool:
        """Whether weights have to be computed before use."""
        return self.up.format != "plain"

    def unpacked_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of both matrices in `dtype`."""
        weights = sum(p.out_features * p.in_features for p in (self.up, self.down))
        return weights * dtype.itemsize


class RecordBuilder:
    """Hands out offsets of parts, one after the other."""

    def __init__(self) -> None:
        self._end = 0

    def part(self, name: str, dtype: torch.dtype, shape: Iterable[int]) -> Part:
        """A part behind all earlier ones."""
        part = Part(name, dtype, tuple(shape), self._end)
        self._end = round_up(self._end + part.nbytes, PART_ALIGN)
        return part

    def finish(self, up: Projection, down: Projection) -> ExpertLayout:
        """The layout of what was handed out."""
        return ExpertLayout(up, down, round_up(self._end, RECORD_ALIGN))


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
