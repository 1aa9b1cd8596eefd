"""Dense linears that stay packed on the GPU, and an embedding that stays in host RAM.

A GPU is short of VRAM and rich in arithmetic: FP8 and NVFP4 weights are kept as stored and unpacked at each call, a
few tokens by a kernel that never writes the unpacked weights, many tokens in blocks of at most 64 MiB. A CPU is the
other way round, so there the loader unpacks once and plain linears run.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from freetoken.engine import formats
from freetoken.engine.kernels import packed

_BLOCK_BYTES = 64 << 20


class PackedLinear(nn.Module):
    """`y = x W^T + b` with W in FP8 or NVFP4. Shapes as in `nn.Linear`; the answer has the type of `x`."""

    scale: torch.Tensor
    matrix_scale: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, matrix_scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.weight_packed = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("matrix_scale", matrix_scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features = weight.shape[0]
        self.in_features = weight.shape[1] * (1 if matrix_scale is None else 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        flat = hidden.reshape(-1, self.in_features)
        out = packed.packed_linear(flat, self.weight_packed, self.scale, self.matrix_scale)
        if out is None:
            out = self._in_blocks(flat)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*hidden.shape[:-1], self.out_features)

    def _in_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        rows = max(16, _BLOCK_BYTES // (self.in_features * flat.element_size()))
        if rows >= self.out_features:
            return F.linear(flat, self.unpack(0, self.out_features, flat.dtype))
        out = flat.new_empty(flat.shape[0], self.out_features)
        for start in range(0, self.out_features, rows):
            end = min(start + rows, self.out_features)
            out[:, start:end] = F.linear(flat, self.unpack(start, end, flat.dtype))
        return out

    def unpack(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows `start` to `end` of W in `dtype`."""
        weight, scale = self.weight_packed[start:end], self.scale
        if self.matrix_scale is None:
            per_row = scale[start:end] if scale.numel() > 1 else scale
            return formats.dequantize_fp8(weight, per_row, dtype)
        scale, whole = scale[start:end], self.matrix_scale
        unpacked = packed.unpack("nvfp4", weight.unsqueeze(0), scale.unsqueeze(0), whole.unsqueeze(0), dtype)
        if unpacked is not None:
            return unpacked[0]
        return formats.dequantize_fp4(weight, formats.scale_of_nvfp4(scale, whole), dtype)


class HostEmbedding(nn.Module):
    """An embedding table in host RAM whose rows go to the device of the token ids."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    @property
    def weight(self) -> torch.Tensor:
        """The table, on the host."""
        return self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] ids -> [..., hidden] on the ids' device."""
        rows: torch.Tensor = self.embedding(ids.cpu())
        return rows.to(ids.device)
