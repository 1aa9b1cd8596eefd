"""Matrix times vector on packed weights, without writing the unpacked weights anywhere; CUDA with Triton only.

Every function answers None where it cannot serve (no GPU, no Triton, another format, many tokens, failed self-test)
and the caller then takes plain torch operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from freetoken.engine.layout import ExpertLayout


def packed_linear(
    hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, matrix_scale: torch.Tensor | None
) -> torch.Tensor | None:
    """[tokens, in] times a packed [out, in] matrix -> [tokens, out], for few tokens."""
    return None


def expert_pairs(
    module: Any, layout: ExpertLayout, pool: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor | None:
    """Each (token, expert) pair through its record in `pool`, unweighted: [pairs, H]."""
    return None
