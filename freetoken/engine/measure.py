"""How fast this engine computes routed experts on the CPU: `python -m freetoken.engine.measure '{...}'`.

The engine's own arithmetic (`compute.run_group`) on records of the asked format and shape, one token at a time, out of
a bank larger than any cache. A process of its own, so that whoever measures copies beside it needs none of this: it
prints one line when it is ready, then for each line "SECONDS" that it reads one line with the rate.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from freetoken.engine import formats
from freetoken.engine.compute import Routing, run_group
from freetoken.engine.formats import StoredFormat
from freetoken.engine.layout import ExpertLayout, Projection, RecordBuilder
from freetoken.errors import UsageError

#: A checkpoint's word -> how a record stores it.
STORED: dict[str, tuple[StoredFormat, torch.dtype]] = {
    "f32": ("plain", torch.float32), "bf16": ("plain", torch.bfloat16), "f16": ("plain", torch.float16),
    "fp8": ("fp8", torch.float8_e4m3fn), "fp8_block": ("fp8_block", torch.float8_e4m3fn),
    "nvfp4": ("nvfp4", torch.uint8), "mxfp4": ("mxfp4", torch.uint8),
}  # fmt: skip


def make_layout(format_name: str, hidden: int, inter: int) -> ExpertLayout:
    """The record of an expert with a gate: [2 inter, hidden] and [hidden, inter]. Raises UsageError."""
    if format_name not in STORED:
        raise UsageError(f"experts in `{format_name}` are not computed here; known: {', '.join(STORED)}")
    group = formats.GROUP.get(STORED[format_name][0], 1)
    if hidden % group or inter % group:
        raise UsageError(f"{hidden} x {inter} is no expert in `{format_name}`: both are multiples of {group}")
    builder = RecordBuilder()
    up = _make_projection(builder, format_name, "gate_up_proj", (2 * inter, hidden), parts=2)
    down = _make_projection(builder, format_name, "down_proj", (hidden, inter), parts=1)
    return builder.finish(up, down)


def _make_projection(
    builder: RecordBuilder, format_name: str, name: str, shape: tuple[int, int], *, parts: int
) -> Projection:
    kind, dtype = STORED[format_name]
    rows, cols = shape
    if kind == "plain":
        return Projection(name, kind, False, builder.part(name, dtype, shape))
    if kind in formats.GROUP:
        weight = builder.part(name, dtype, (rows, cols // 2))
        scale_dtype = torch.float8_e4m3fn if kind == "nvfp4" else torch.uint8
        scale = builder.part(f"{name}_scale", scale_dtype, (rows, cols // formats.GROUP[kind]))
        if kind == "mxfp4":
            return Projection(name, kind, False, weight, scale)
        return Projection(
            name, kind, False, weight, scale, builder.part(f"{name}_matrix_scale", torch.float32, (parts,))
        )
    weight = builder.part(name, dtype, shape)
    if kind == "fp8":
        return Projection(name, kind, False, weight, builder.part(f"{name}_scale", torch.float32, (parts,)))
    blocks = tuple(-(-size // formats.BLOCK) for size in shape)
    return Projection(name, kind, False, weight, builder.part(f"{name}_scale", torch.float32, blocks))


class ExpertBench:
    """A bank of made-up experts and one token that is routed through `top_k` of them at each step."""

    def __init__(
        self, format_name: str, hidden: int, inter: int, top_k: int, *, bank_bytes: int, dtype: torch.dtype
    ) -> None:
        self.layout = make_layout(format_name, hidden, inter)
        self.top_k = top_k
        count = max(2 * top_k, bank_bytes // self.layout.nbytes)
        self.records = make_records(self.layout, count)
        self.hidden = torch.randn(1, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.weights = torch.full((1, top_k), 1.0 / top_k, dtype=dtype)
        self.module: Any = SimpleNamespace(has_gate=True, has_post_expert_norm=False, _apply_gate=_gate)
        self._order = np.random.default_rng(7).permutation(count)
        self._at = 0

    def step(self) -> int:
        """One token through `top_k` experts that were not used for longest. Bytes of the records."""
        if self._at + self.top_k > len(self._order):
            self._at = 0
        chosen = self._order[self._at : self._at + self.top_k].astype(np.int64)
        self._at += self.top_k
        routing = Routing.from_host(chosen.reshape(1, -1))
        total = torch.zeros(self.hidden.shape, dtype=torch.float32)
        ordered = routing.weights(self.weights)
        run_group(
            self.module, self.layout, self.records, routing.experts, routing, 0, self.hidden, ordered, total
        )  # fmt: skip
        return self.top_k * self.layout.nbytes

    def measure(self, seconds: float) -> float:
        """Bytes of experts per second, over about `seconds`."""
        moved, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or not moved:
            moved += self.step()
        return moved / max(time.perf_counter() - start, elapsed, 1e-9)


def make_records(layout: ExpertLayout, count: int) -> torch.Tensor:
    """`count` records with ordinary values: no NaN and no denormal, which a CPU computes more slowly."""
    records = torch.randint(0, 256, (count, layout.nbytes), dtype=torch.uint8)
    for projection in (layout.up, layout.down):
        weight = projection.weight
        if projection.format == "plain":
            for row in range(count):
                weight.view(records[row : row + 1]).copy_(torch.randn(1, *weight.shape) * 0.02)
        elif weight.dtype == torch.float8_e4m3fn:
            weight.view(records).view(torch.uint8).bitwise_and_(0xB7)  # magnitudes from 0 to 1.9, no NaN
        if projection.scale is not None:
            scale = projection.scale.view(records)
            scale.copy_(torch.full((), 121 if scale.dtype == torch.uint8 else 0.0625).to(scale.dtype))
        if projection.matrix_scale is not None:
            projection.matrix_scale.view(records).fill_(0.1)
    return records


def _gate(projected: torch.Tensor) -> torch.Tensor:
    gate, up = projected.chunk(2, dim=-1)
    return F.silu(gate) * up


def main(argv: list[str] | None = None) -> int:
    """Answers requests for rates until its input ends."""
    asked = json.loads((sys.argv[1:] if argv is None else argv)[0])
    torch.set_num_threads(int(asked["threads"]))
    try:
        bench = ExpertBench(
            asked["format"],
            int(asked["hidden"]),
            int(asked["inter"]),
            int(asked["top_k"]),
            bank_bytes=int(asked["bank_bytes"]),
            dtype=getattr(torch, asked.get("dtype", "float32")),
        )
    except UsageError as error:
        _tell({"error": error.message})
        return error.exit_code
    with torch.inference_mode():
        bench.measure(0.05)
        _tell({"expert_bytes": bench.layout.nbytes})
        for line in sys.stdin:
            _tell({"bytes_per_s": bench.measure(float(line))})
    return 0


def _tell(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
