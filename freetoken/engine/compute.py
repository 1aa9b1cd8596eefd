"""The arithmetic of routed experts on records, on any device: one by one, batched, or through kernels.

Each family's own gate (`_apply_gate`, activation, clamps) is called on its experts module, so a family costs no code
here. Sums over a token's experts are made in float32 in ascending expert order, as transformers' eager path does for
float32; 16-bit models are rounded once at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from freetoken.engine import hf
from freetoken.engine.kernels import decode, packed
from freetoken.engine.layout import ExpertLayout

#: Unpacked weights alive at once, beside the records themselves.
UNPACK_BYTES = 64 << 20


class Routing:
    """Which tokens go to which expert: pairs sorted by expert, rank and token, made once for a layer's call.

    A pair's number is rank x tokens + token. Within an expert that is the row order of transformers' eager path, so
    that matrix products see the same rows in the same places and float32 results are equal to the last bit.
    """

    def __init__(self, experts: list[int], bounds: list[int], order: torch.Tensor, token_count: int) -> None:
        #: Distinct experts, ascending; the pairs of `experts[i]` are `order[bounds[i]:bounds[i + 1]]`.
        self.experts = experts
        self.bounds = bounds
        self.order = order
        self.tokens = order % token_count

    @classmethod
    def from_device(cls, top_k_index: torch.Tensor, experts: int) -> Routing:
        """Sorted where the indices are; only the counts come to the host (the one wait of a prefill layer)."""
        flat = top_k_index.t().reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts).cpu().numpy()
        used = np.flatnonzero(counts)
        return cls(used.tolist(), [0, *np.cumsum(counts[used]).tolist()], order, top_k_index.shape[0])

    @classmethod
    def from_host(cls, top_k_index: npt.NDArray[np.int64]) -> Routing:
        """From indices [tokens, k] that are on the host already; cheap for few tokens and many experts."""
        flat = top_k_index.T.reshape(-1)
        order = flat.argsort(kind="stable")
        used, starts = np.unique(flat[order], return_index=True)
        bounds = [*starts.tolist(), flat.size]
        return cls(used.tolist(), bounds, torch.from_numpy(order), top_k_index.shape[0])

    def weights(self, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Routing weights of the pairs, in pair order: [pairs, 1]."""
        return top_k_weights.t().reshape(-1)[self.order].unsqueeze(1)


def activate(module: Any, projected: torch.Tensor) -> torch.Tensor:
    """What the experts module does between its two projections."""
    out: torch.Tensor = module._apply_gate(projected) if module.has_gate else module.act_fn(projected)
    return out


def activate_pairs(module: Any, projected: torch.Tensor) -> torch.Tensor:
    """`activate` for few rows on a GPU: one launch where the module gates by SiLU and has no gate of its own."""
    if hf.has_silu_gate(module):
        gate, up = projected.chunk(2, dim=-1)
        return decode.silu_mul(gate, up)
    return activate(module, projected)


def finish(module: Any, out: torch.Tensor) -> torch.Tensor:
    """What the experts module does after its second projection."""
    if not getattr(module, "has_post_expert_norm", False):
        return out
    normed: torch.Tensor = module.post_expert_norm(out)
    return normed


def run_one(module: Any, layout: ExpertLayout, record: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """One expert on its tokens: record [1, bytes], hidden [n, H] -> [n, H]."""
    dtype = hidden.dtype
    for projection in (layout.up, layout.down):
        weight = projection.matrices(record, dtype)[0]
        bias = projection.biases(record, dtype)
        hidden = F.linear(hidden, weight, None if bias is None else bias[0])
        if projection is layout.up:
            hidden = activate(module, hidden)
    return finish(module, hidden)


def run_group(
    module: Any,
    layout: ExpertLayout,
    records: torch.Tensor,
    rows: Sequence[int],
    routing: Routing,
    first: int,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Add experts `first ..` of `routing`, whose records are `records[rows]`, to the float32 `total` [tokens, H]."""
    unpacked = layout.unpacked_bytes(hidden.dtype) if layout.is_packed else 1
    together = max(1, UNPACK_BYTES // unpacked) if hidden.is_cuda else 1
    for at in range(0, len(rows), together):
        part = rows[at : at + together]
        chosen = _take(records, part)
        bounds = routing.bounds[first + at : first + at + len(part) + 1]
        start, end = bounds[0], bounds[-1]
        tokens = routing.tokens[start:end]
        cuts = [bound - start for bound in bounds]
        inputs = hidden if hidden.shape[0] == 1 and end - start == 1 else hidden[tokens]
        out = _run_sorted(module, layout, chosen, cuts, inputs) * weights[start:end]
        out = out.to(total.dtype)
        for low, high in itertools.pairwise(cuts):
            total.index_add_(0, tokens[low:high], out[low:high])  # a token meets an expert once: no clash


def _take(records: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if all(row == rows[0] + step for step, row in enumerate(rows)):
        return records[rows[0] : rows[0] + len(rows)]
    return records.index_select(0, torch.tensor(rows, device=records.device))


def _run_sorted(
    module: Any, layout: ExpertLayout, records: torch.Tensor, cuts: list[int], inputs: torch.Tensor
) -> torch.Tensor:
    """Inputs sorted by expert, cut at `cuts`, through their experts."""
    if len(cuts) == 2:
        return run_one(module, layout, records, inputs)
    dtype = inputs.dtype
    for projection in (layout.up, layout.down):
        matrices = projection.matrices(records, dtype)
        biases = projection.biases(records, dtype)
        grouped = packed.grouped_product(inputs, matrices, cuts) if biases is None else None
        out = inputs.new_empty(inputs.shape[0], projection.out_features) if grouped is None else grouped
        for number, (low, high) in enumerate(itertools.pairwise(cuts if grouped is None else ())):
            if biases is None:
                torch.mm(inputs[low:high], matrices[number].t(), out=out[low:high])
            else:
                torch.addmm(biases[number], inputs[low:high], matrices[number].t(), out=out[low:high])
        inputs = activate(module, out) if projection is layout.up else out
    return finish(module, inputs)


def run_pairs(
    module: Any,
    layout: ExpertLayout,
    pool: torch.Tensor,
    slots: torch.Tensor,
    hidden: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    has_holes: bool = False,
) -> torch.Tensor:
    """Few tokens at once on a GPU: `slots` [tokens, k] says which record of `pool` each pair uses -> [tokens, H].

    With `has_holes` a slot may be -1 and its pair adds nothing. The answer is float32.
    """
    top_k = slots.shape[1]
    flat = slots.reshape(-1)
    out = packed.expert_pairs(module, layout, pool, flat, hidden)
    if out is None:
        out = _run_batched(module, layout, pool, flat.clamp(min=0) if has_holes else flat, hidden, top_k)
    return decode.weighted_sum(out, top_k_weights, slots if has_holes else None)


def _run_batched(
    module: Any, layout: ExpertLayout, pool: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor, top_k: int
) -> torch.Tensor:
    together = max(1, UNPACK_BYTES // layout.unpacked_bytes(hidden.dtype))
    outs = []
    for start in range(0, slots.shape[0], together):
        chosen = slots[start : start + together]
        records = pool.index_select(0, chosen)
        pairs = torch.arange(start, start + chosen.shape[0], device=hidden.device)
        values = hidden[pairs // top_k].unsqueeze(1)
        for projection in (layout.up, layout.down):
            values = torch.bmm(values, projection.matrices(records, hidden.dtype).transpose(1, 2))
            if (biases := projection.biases(records, hidden.dtype)) is not None:
                values = values + biases.unsqueeze(1)
            if projection is layout.up:
                values = activate(module, values)
        outs.append(finish(module, values.squeeze(1)))
    return torch.cat(outs) if len(outs) > 1 else outs[0]
