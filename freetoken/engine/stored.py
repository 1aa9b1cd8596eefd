"""`StoredMatrix`: one parameter as a checkpoint keeps it, its weight with the scales that belong to it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from freetoken.engine import formats
from freetoken.engine.files import CheckpointFiles, TensorEntry
from freetoken.engine.formats import StoredFormat
from freetoken.errors import BadFileError

#: Ending of a stored name -> ending of the parameter it belongs to, and the role it has there.
_ROLES = (
    (".weight_scale_2", ".weight", "matrix_scale"),
    (".weight_scale_inv", ".weight", "block_scale"),
    (".weight_scale", ".weight", "scale"),
    (".input_scale", ".weight", "input_scale"),
    ("_blocks", "", "blocks"),
    ("_scales", "", "exponents"),
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class StoredName:
    """A stored name taken apart: parameter, role, expert number (None where experts are stacked or none)."""

    parameter: str
    role: str
    expert: int | None


def parse_name(name: str) -> StoredName:
    """`a.experts.7.up_proj.weight_scale` -> parameter `a.experts.0.up_proj.weight`, role `scale`, expert 7.

    The expert number is replaced by 0 in the parameter, so that one look-up serves all experts of a layer.
    """
    parameter, role = name, "weight"
    for ending, instead, what in _ROLES:
        if name.endswith(ending):
            parameter, role = name.removesuffix(ending) + instead, what
            break
    match = _EXPERT.search(parameter)
    if match is None:
        return StoredName(parameter, role, None)
    return StoredName(parameter[: match.start(1)] + "0" + parameter[match.end(1) :], role, int(match[1]))


@dataclass
class StoredMatrix:
    """Entries of one parameter by role: `weight`, `scale`, `matrix_scale`, `block_scale`, `blocks`, `exponents`."""

    name: str
    roles: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def weight(self) -> TensorEntry:
        """The entry that holds the numbers."""
        entry = self.roles.get("weight") or self.roles.get("blocks")
        if entry is None:
            raise BadFileError(f"`{self.name}` has {', '.join(sorted(self.roles))}, but no weight")
        return entry

    @property
    def format(self) -> StoredFormat:
        """How it is stored. Raises BadFileError for a mix of parts that means nothing."""
        roles = self.roles.keys() - {"input_scale"}
        dtype = self.weight.dtype
        if roles == {"weight"} and dtype.is_floating_point and dtype.itemsize > 1:
            return "plain"
        if roles == {"blocks", "exponents"}:
            return "mxfp4"
        if roles == {"weight", "scale", "matrix_scale"} and dtype == torch.uint8:
            return "nvfp4"
        if roles == {"weight", "scale"} and dtype == torch.float8_e4m3fn:
            return "fp8"
        if roles == {"weight", "block_scale"} and dtype == torch.float8_e4m3fn:
            return "fp8_block"
        parts = ", ".join(f"{role} {self.roles[role].dtype}".replace("torch.", "") for role in sorted(roles))
        raise BadFileError(f"`{self.name}` is stored in a format that is not known here ({parts})")

    def read(self, files: CheckpointFiles, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in host memory: `dtype` where it was packed, the stored type where it was plain."""
        kind = self.format
        weight = files.read(self.weight)
        if kind == "plain":
            return weight
        if kind == "nvfp4":
            scales = formats.scale_of_nvfp4(files.read(self.roles["scale"]), self.read_scale(files, "matrix_scale"))
            return formats.dequantize_fp4(weight, scales, dtype)
        if kind == "fp8":
            return formats.dequantize_fp8(weight, self.read_scale(files, "scale"), dtype)
        if kind == "fp8_block":
            return formats.dequantize_fp8_block(weight, files.read(self.roles["block_scale"]), dtype)
        raise BadFileError(f"`{self.name}` is stored as {kind}, which is read for routed experts only")

    def read_scale(self, files: CheckpointFiles, role: str) -> torch.Tensor:
        """A per-matrix scale as a float32 vector: one value, or one a row."""
        return files.read(self.roles[role]).to(torch.float32).reshape(-1)
