"""Arithmetic on packed weights by Triton kernels, where there are any; every function answers None where not.

None means: no GPU, no Triton, a format or shape that is not covered, or a self-test that failed on this machine (it
runs once a device, at load, and compares each kernel with `engine.formats`). Callers then take torch operations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from freetoken.engine import formats

if TYPE_CHECKING:
    from freetoken.engine.layout import ExpertLayout, Projection

#: Up to this many rows a dense linear reads its weights packed for each of them.
MAX_TOKENS = 8
_KINDS = ("nvfp4", "mxfp4", "fp8", "plain")


def packed_linear(
    hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, matrix_scale: torch.Tensor | None
) -> torch.Tensor | None:
    """[tokens, in] times a packed [out, in] matrix -> [tokens, out], for few tokens."""
    if not hidden.is_cuda or hidden.shape[0] > MAX_TOKENS:
        return None
    kind = "fp8" if matrix_scale is None else "nvfp4"
    kernels = _kernels(hidden.device)
    if kind not in kernels.covered:
        return None
    parts = [weight.unsqueeze(0), scale.unsqueeze(0), None if matrix_scale is None else matrix_scale.unsqueeze(0)]
    if matrix_scale is None:
        parts = [weight.unsqueeze(0), None, scale.unsqueeze(0)]
    return kernels.multiply(kind, parts, None, hidden, 1, hidden.dtype)


def expert_pairs(
    module: Any, layout: ExpertLayout, pool: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor | None:
    """Each (token, expert) pair through its record in `pool`, unweighted: [pairs, H] float32."""
    if not hidden.is_cuda:
        return None
    kernels = _kernels(hidden.device)
    if not all(_is_covered(projection, kernels, hidden.dtype) for projection in (layout.up, layout.down)):
        return None
    from freetoken.engine.compute import activate_pairs, finish

    share = slots.shape[0] // hidden.shape[0]
    up = _project(kernels, layout.up, pool, slots, hidden, share, hidden.dtype)
    gated = activate_pairs(module, up).contiguous()
    return finish(module, _project(kernels, layout.down, pool, slots, gated, 1, torch.float32))


def unpack(
    kind: str, weight: torch.Tensor, scale: torch.Tensor, matrix_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """FP4 records [n, rows, cols / 2] with their scales -> [n, rows, cols] in `dtype`."""
    if not weight.is_cuda or dtype == torch.float32:
        return None
    kernels = _kernels(weight.device)
    return kernels.unpack(kind, weight, scale, matrix_scale, dtype) if f"unpack {kind}" in kernels.covered else None


def grouped_product(inputs: torch.Tensor, matrices: torch.Tensor, cuts: list[int]) -> torch.Tensor | None:
    """Rows `cuts[i]` to `cuts[i + 1]` of `inputs` times the transpose of `matrices[i]` ([n, out, in]), in one call."""
    if not inputs.is_cuda or inputs.dtype != torch.bfloat16 or "grouped" not in _kernels(inputs.device).covered:
        return None
    return _grouped(inputs, matrices, cuts)


def describe(device: torch.device) -> str | None:
    """A sentence on what is not covered by kernels on this device and why; None where all is."""
    return _kernels(device).problem if device.type == "cuda" else None


# ---------------------------------------------------------------------- choice and self-test


class _Kernels:
    """What works on one device."""

    def __init__(self) -> None:
        self.covered: set[str] = set()
        self.problem: str | None = None
        self._triton: Any = None

    def probe(self, device: torch.device) -> None:
        """Compile and test each kernel; a failure takes that kernel out."""
        problems: list[str] = []
        try:
            from freetoken.engine.kernels import packed_triton

            self._triton = packed_triton
        except ImportError:
            problems.append("Triton is not installed")
        tests = [] if self._triton is None else [*_KINDS, "unpack nvfp4", "unpack mxfp4"]
        for name in [*tests, "grouped"]:
            try:
                error = _self_test(self, name, device)
                if error < 0.02:
                    self.covered.add(name)
                elif name != "grouped":
                    problems.append(f"`{name}` is off by {error:.3g}")
            except Exception as error:
                if name != "grouped":
                    problems.append(f"`{name}` fails: {str(error).strip().splitlines()[0] if str(error) else error!r}")
        if problems:
            self.problem = "experts run without all kernels, which is slower: " + "; ".join(problems)

    def multiply(
        self,
        kind: str,
        parts: list[torch.Tensor | None],
        slots: torch.Tensor | None,
        inputs: torch.Tensor,
        share: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`parts` = weight, block scale, matrix scale, each [records, ...]; row p of the answer uses `slots[p]`."""
        out: torch.Tensor = self._triton.multiply(kind, *parts, slots, inputs, share, dtype)
        return out

    def unpack(
        self,
        kind: str,
        weight: torch.Tensor,
        scale: torch.Tensor,
        matrix_scale: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """[n, rows, cols] in `dtype`."""
        out: torch.Tensor = self._triton.unpack(kind, weight, scale, matrix_scale, dtype)
        return out


@lru_cache(maxsize=16)
def _kernels(device: torch.device) -> _Kernels:
    found = _Kernels()
    if device.type == "cuda":
        with torch.inference_mode(False), torch.no_grad():
            found.probe(device)
    return found


def _is_covered(projection: Projection, kernels: _Kernels, dtype: torch.dtype) -> bool:
    if projection.is_transposed or projection.format not in kernels.covered:
        return False
    return projection.format != "plain" or projection.weight.dtype == dtype == torch.bfloat16


def _project(
    kernels: _Kernels,
    projection: Projection,
    pool: torch.Tensor,
    slots: torch.Tensor,
    inputs: torch.Tensor,
    share: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    weight = projection.weight.view(pool)
    scale = None if projection.scale is None else projection.scale.view(pool)
    matrix_scale = None if projection.matrix_scale is None else projection.matrix_scale.view(pool)
    if projection.format == "fp8":
        scale, matrix_scale = None, scale
    out = kernels.multiply(projection.format, [weight, scale, matrix_scale], slots, inputs, share, dtype)
    if projection.bias is not None:
        out = out + projection.bias.view(pool).index_select(0, slots.clamp(min=0)).to(out.dtype)
    return out


def _grouped(inputs: torch.Tensor, matrices: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    ends = torch.tensor(cuts[1:], dtype=torch.int32).to(inputs.device, non_blocking=True)
    product: torch.Tensor = torch.nn.functional.grouped_mm(inputs, matrices.transpose(1, 2), offs=ends)
    return product


def _self_test(kernels: _Kernels, name: str, device: torch.device) -> float:
    """The largest error of a kernel on a small random case, as a share of the largest right value."""
    generator = torch.Generator(device=device).manual_seed(7)

    def codes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    rows, cols, records = 48, 160, 3
    inputs = torch.randn(4, cols, device=device, generator=generator).to(torch.bfloat16)
    slots = torch.tensor([2, 0, 1, 2, 2, 1, 0, 0], dtype=torch.int32, device=device)
    if name == "grouped":
        if torch.cuda.get_device_capability(device) < (9, 0):
            return 1.0  # older cards take a loop inside torch that waits for the device
        matrices = torch.randn(3, 64, cols, device=device, generator=generator).to(torch.bfloat16)
        right = torch.cat([inputs[0:1] @ matrices[0].t(), inputs[1:4] @ matrices[2].t()])
        return find_error(_grouped(inputs, matrices, [0, 1, 1, 4]), right)
    kind = name.removeprefix("unpack ")
    scale: torch.Tensor | None = None
    matrix_scale: torch.Tensor | None = None
    if kind == "plain":
        weight = torch.randn(records, rows, cols, device=device, generator=generator).to(torch.bfloat16)
        matrices = weight
    elif kind == "fp8":
        weight = (codes(records, rows, cols) & 0xBF).view(torch.float8_e4m3fn)
        matrix_scale = torch.rand(records, 2, device=device, generator=generator) + 0.5
        matrices = formats.dequantize_fp8(weight, matrix_scale, torch.float32)
    else:
        weight = codes(records, rows, cols // 2)
        if kind == "nvfp4":
            scale = codes(records, rows, cols // 16, low=1, high=0x7F).view(torch.float8_e4m3fn)
            matrix_scale = torch.rand(records, 2, device=device, generator=generator) + 0.5
            wide = formats.scale_of_nvfp4(scale, matrix_scale)
        else:
            scale = codes(records, rows, cols // 32, low=118, high=132)
            wide = formats.scale_of_mxfp4(scale)
        matrices = formats.dequantize_fp4(weight, wide, torch.float32)
    if name.startswith("unpack"):
        assert scale is not None
        return find_error(kernels.unpack(kind, weight, scale, matrix_scale, torch.bfloat16), matrices)
    got = kernels.multiply(kind, [weight, scale, matrix_scale], slots, inputs, 2, torch.float32)
    right = torch.einsum("prc,pc->pr", matrices.float()[slots.long()], inputs.float().repeat_interleave(2, dim=0))
    return find_error(got, right)


def find_error(got: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference as a share of the largest right value, wherever the two lie; infinite for NaN."""
    right = right.float()
    difference = float((got.to(right.device).float() - right).abs().max()) / float(right.abs().max())
    return difference if difference == difference else float("inf")
