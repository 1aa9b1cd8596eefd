"""Stored number formats and what their bytes mean: FP8, NVFP4 and MXFP4 to plain tensors, on any device.

- `fp8`: e4m3 codes, one fp32 scale a matrix (or a row)
- `fp8_block`: e4m3 codes, one scale for each 128 x 128 block
- `nvfp4`: two e2m1 codes a byte (the even input in the low nibble), an e4m3 scale for 16 inputs, an fp32 scale a matrix
- `mxfp4`: the same codes, an e8m0 scale (a power of two) for 32 inputs

Values are computed as code x (block scale x matrix scale) in fp32 and rounded once, to the wanted type.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

StoredFormat = Literal["plain", "fp8", "fp8_block", "nvfp4", "mxfp4"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP = {"nvfp4": 16, "mxfp4": 32}
BLOCK = 128
#: Fewer 16-bit words are not worth a second thread.
_PARALLEL_WORDS = 1 << 15


@lru_cache(maxsize=8)
def _pair_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[256, 2]: the two values of each byte, the low nibble's first. Every value is exact in any float type."""
    values = torch.tensor(E2M1, dtype=torch.float32)
    codes = torch.arange(256)
    return torch.stack((values[codes & 15], values[codes >> 4]), dim=1).to(device=device, dtype=dtype)


@lru_cache(maxsize=4)
def _quad_table(dtype: torch.dtype) -> Any:
    """The four values of each pair of bytes as one item of a numpy array: 65,536 items of 4 values."""
    pairs = _pair_table(torch.device("cpu"), dtype)
    words = torch.arange(1 << 16)
    quads = torch.cat((pairs[words & 255], pairs[words >> 8]), dim=1).contiguous()
    item = np.dtype(np.complex128) if quads.element_size() == 4 else np.dtype(np.uint64)
    return quads.view(torch.uint8).numpy().view(item).reshape(-1)


@lru_cache(maxsize=1)
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="ft-unpack")


def _unpack_on_host(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One table look-up for two bytes, in several threads: an order of magnitude quicker than indexing by torch."""
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype)
    table = _quad_table(dtype)
    words = packed.contiguous().view(-1).numpy().view(np.uint16)
    items = out.view(-1).view(torch.uint8).numpy().view(table.dtype)
    threads = torch.get_num_threads()
    if threads == 1 or words.size < _PARALLEL_WORDS:
        np.take(table, words, out=items, mode="clip")
        return out
    share = -(-words.size // threads)
    jobs = [
        _workers().submit(np.take, table, words[at : at + share], out=items[at : at + share], mode="clip")
        for at in range(0, words.size, share)
    ]
    for job in jobs:
        job.result()
    return out


def unpack_fp4(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., n] bytes -> [..., 2n] e2m1 values, unscaled."""
    if not packed.is_cuda and packed.shape[-1] % 2 == 0 and dtype.itemsize in (2, 4):
        return _unpack_on_host(packed, dtype)
    table = _pair_table(packed.device, dtype)
    pairs = table.index_select(0, packed.reshape(-1).to(torch.int32))
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)


def dequantize_fp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., rows, n] bytes with fp32 scales [..., rows, groups] -> [..., rows, 2n] in `dtype`."""
    values = unpack_fp4(packed, dtype)
    grouped = values.view(*scales.shape, -1)
    # In place, computed in fp32 by type promotion and rounded to `dtype` once.
    torch.mul(grouped, scales.unsqueeze(-1), out=grouped)
    return values


def scale_of_nvfp4(scales: torch.Tensor, matrix_scales: torch.Tensor) -> torch.Tensor:
    """e4m3 [..., rows, groups] and fp32 [..., parts], each for rows / parts rows -> fp32 [..., rows, groups]."""
    rows = scales.shape[-2]
    wide = matrix_scales.repeat_interleave(rows // matrix_scales.shape[-1], dim=-1)
    return scales.to(torch.float32) * wide.unsqueeze(-1)


def scale_of_mxfp4(exponents: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes -> fp32 powers of two (127 = 1)."""
    return torch.exp2(exponents.to(torch.float32) - 127.0)


def dequantize_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 [..., rows, cols] with fp32 scales [..., parts], each for rows / parts rows -> `dtype`."""
    values = codes.to(dtype)
    rows = codes.shape[-2]
    wide = scales.repeat_interleave(rows // scales.shape[-1], dim=-1).unsqueeze(-1)
    return torch.mul(values, wide, out=values)


def dequantize_fp8_block(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 [..., rows, cols] with a scale for each block of 128 x 128, the last ones cut short -> `dtype`."""
    values = codes.to(dtype)
    rows, cols = codes.shape[-2:]
    wide = scales.to(torch.float32).repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    wide = wide.repeat_interleave(BLOCK, dim=-1)[..., :cols]
    return torch.mul(values, wide, out=values)
