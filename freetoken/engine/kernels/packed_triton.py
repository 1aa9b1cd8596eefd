"""Triton kernels on packed weights. Imported by `packed` alone, and only where Triton is.

Codes are decoded by moving their bits into a float16, whose exponent range holds them: e2m1 bits land so that the
value comes out 2^14 too small, e4m3 bits 2^8 too small, subnormals included. Both factors are powers of two and are
put back in float32. That needs no FP8 hardware, so it serves Ampere as well.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_KIND = {"nvfp4": 0, "mxfp4": 1, "fp8": 2, "plain": 3}
_GROUP = {"nvfp4": 16, "mxfp4": 32}


@triton.jit
def _e2m1(code):  # type: ignore[no-untyped-def]
    """The value of a 4-bit code (int32), times 2^-14."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e4m3(code):  # type: ignore[no-untyped-def]
    """The value of an 8-bit code (int32), times 2^-8."""
    bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_kernel(  # type: ignore[no-untyped-def]
    weight, scale, matrix_scale, slots, inputs, out,
    weight_stride, scale_stride, matrix_stride, rows, part_rows,
    COLS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, SHARE: tl.constexpr, HAS_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row block `program 0` of pair `program 1`: out[pair, rows] = W[slots[pair]][rows] . inputs[pair // SHARE]."""
    pair = tl.program_id(1)
    record = tl.full((), 0, tl.int64)
    if HAS_SLOTS:
        record = tl.maximum(tl.load(slots + pair).to(tl.int64), 0)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    row64 = row.to(tl.int64)
    source = inputs + (pair // SHARE) * COLS
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    if KIND < 2:
        weight_rows = weight + record * weight_stride + row64 * (COLS // 2)
        scale_rows = scale + record * scale_stride + row64 * (COLS // GROUP)
        for start in range(0, COLS // 2, BLOCK):
            byte = start + tl.arange(0, BLOCK)
            inside = byte < COLS // 2
            mask = live[:, None] & inside[None, :]
            codes = tl.load(weight_rows[:, None] + byte[None, :], mask=mask, other=0).to(tl.int32)
            factor = tl.load(scale_rows[:, None] + (byte // (GROUP // 2))[None, :], mask=mask, other=0).to(tl.int32)
            even = tl.load(source + 2 * byte, mask=inside, other=0.0).to(tl.float32)
            odd = tl.load(source + 2 * byte + 1, mask=inside, other=0.0).to(tl.float32)
            products = _e2m1(codes & 15) * even[None, :] + _e2m1(codes >> 4) * odd[None, :]
            products = products * _e4m3(factor) if KIND == 0 else products * (factor << 23).to(tl.float32, bitcast=True)
            total += tl.sum(products, axis=1)
    else:
        weight_rows = weight + record * weight_stride + row64 * COLS
        for start in range(0, COLS, BLOCK):
            col = start + tl.arange(0, BLOCK)
            inside = col < COLS
            mask = live[:, None] & inside[None, :]
            values = tl.load(source + col, mask=inside, other=0.0).to(tl.float32)
            stored = tl.load(weight_rows[:, None] + col[None, :], mask=mask, other=0)
            if KIND == 2:
                total += tl.sum(_e4m3(stored.to(tl.int32)) * values[None, :], axis=1)
            else:
                total += tl.sum(stored.to(tl.float32) * values[None, :], axis=1)
    if KIND == 0:
        total = total * 4194304.0  # 2^14 of the codes, 2^8 of their scales
    if KIND == 1:
        total = total * 16384.0
    if KIND == 2:
        total = total * 256.0
    if KIND == 0 or KIND == 2:
        total = total * tl.load(matrix_scale + record * matrix_stride + row // part_rows, mask=live, other=0.0)
    tl.store(out + pair.to(tl.int64) * rows + row, total.to(out.dtype.element_ty), mask=live)


def multiply(
    kind: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    matrix_scale: torch.Tensor | None,
    slots: torch.Tensor | None,
    inputs: torch.Tensor,
    share: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[pairs, rows]: row p is record `slots[p]` (record 0 without slots) times `inputs[p // share]`."""
    rows = weight.shape[1]
    cols = weight.shape[2] * (2 if kind in _GROUP else 1)
    pairs = inputs.shape[0] * share
    inputs = inputs.contiguous()
    out = torch.empty(pairs, rows, dtype=dtype, device=inputs.device)
    block_rows = 8
    raw_scale = weight if scale is None else _bytes(scale)
    factor = out if matrix_scale is None else matrix_scale
    parts = 1 if matrix_scale is None else matrix_scale.shape[1]
    block = min(512, triton.next_power_of_2(weight.shape[2]))
    _multiply_kernel[(triton.cdiv(rows, block_rows), pairs)](
        _bytes(weight) if weight.dtype.itemsize == 1 else weight, raw_scale, factor,
        inputs if slots is None else slots, inputs, out,
        weight.stride(0), raw_scale.stride(0), factor.stride(0), rows, rows // parts,
        COLS=cols, GROUP=_GROUP.get(kind, 1), KIND=_KIND[kind], SHARE=share, HAS_SLOTS=slots is not None,
        BLOCK_ROWS=block_rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _unpack_kernel(  # type: ignore[no-untyped-def]
    weight, scale, matrix_scale, out,
    weight_stride, scale_stride, matrix_stride, rows, part_rows,
    COLS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of rows and bytes of record `program 2`, as values."""
    record = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    mask = live[:, None] & (byte < COLS // 2)[None, :]
    row64 = row.to(tl.int64)
    codes = tl.load(
        (weight + record * weight_stride + row64 * (COLS // 2))[:, None] + byte[None, :], mask=mask, other=0
    )
    place = (scale + record * scale_stride + row64 * (COLS // GROUP))[:, None] + (byte // (GROUP // 2))[None, :]
    factor = tl.load(place, mask=mask, other=0).to(tl.int32)
    if KIND == 0:
        whole = tl.load(matrix_scale + record * matrix_stride + row // part_rows, mask=live, other=0.0)
        scales = _e4m3(factor) * 256.0 * whole[:, None]
    else:
        scales = (factor << 23).to(tl.float32, bitcast=True)
    codes = codes.to(tl.int32)
    low = _e2m1(codes & 15) * 16384.0 * scales
    high = _e2m1(codes >> 4) * 16384.0 * scales
    target = (out + record * rows * COLS + row64 * COLS)[:, None] + 2 * byte[None, :]
    tl.store(target, low.to(out.dtype.element_ty), mask=mask)
    tl.store(target + 1, high.to(out.dtype.element_ty), mask=mask)


def unpack(
    kind: str, weight: torch.Tensor, scale: torch.Tensor, matrix_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """FP4 records [n, rows, bytes] -> [n, rows, 2 x bytes] in `dtype`."""
    records, rows, width = weight.shape
    out = torch.empty(records, rows, 2 * width, dtype=dtype, device=weight.device)
    raw_scale = _bytes(scale)
    factor: Any = out if matrix_scale is None else matrix_scale
    parts = 1 if matrix_scale is None else matrix_scale.shape[1]
    block = min(256, triton.next_power_of_2(width))
    block_rows = 8
    _unpack_kernel[(triton.cdiv(rows, block_rows), triton.cdiv(width, block), records)](
        weight, raw_scale, factor, out,
        weight.stride(0), raw_scale.stride(0), factor.stride(0), rows, rows // parts,
        COLS=2 * width, GROUP=_GROUP[kind], KIND=_KIND[kind], BLOCK_ROWS=block_rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
