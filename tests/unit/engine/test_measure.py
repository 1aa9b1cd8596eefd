"""What is measured is the engine's own arithmetic: the same answer as with plain matrices, in every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from freetoken.engine.compute import Routing
from freetoken.engine.measure import STORED, ExpertBench, make_layout, make_records
from freetoken.errors import FtError, UsageError
from freetoken.hardware.bandwidth import measure_experts
from freetoken.hardware.expert_kernel import ExpertKernel, ExpertShape


@pytest.mark.parametrize("name", sorted(STORED))
def test_records_of_every_format_hold_ordinary_values_and_a_step_computes_them(name: str) -> None:
    bench = ExpertBench(name, 128, 64, 2, bank_bytes=1 << 20, dtype=torch.float32)
    layout = bench.layout
    up = layout.up.matrices(bench.records, torch.float32)
    down = layout.down.matrices(bench.records, torch.float32)
    assert (up.shape[1:], down.shape[1:]) == ((128, 128), (128, 64))
    for values in (up, down):
        assert torch.isfinite(values).all()
        assert 0 < values.abs().max() < 100
    assert bench.step() == 2 * layout.nbytes


def test_a_step_is_the_engines_own_answer() -> None:
    bench = ExpertBench("nvfp4", 64, 32, 2, bank_bytes=1 << 16, dtype=torch.float32)
    chosen = bench._order[:2].astype(np.int64)
    expected = torch.zeros(1, 64)
    for expert in chosen:
        record = bench.records[expert : expert + 1]
        up = bench.layout.up.matrices(record, torch.float32)[0]
        down = bench.layout.down.matrices(record, torch.float32)[0]
        gate, value = F.linear(bench.hidden, up).chunk(2, dim=-1)
        expected += 0.5 * F.linear(F.silu(gate) * value, down)
    from freetoken.engine import measure

    totals = []
    real = measure.run_group

    def spy(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        totals.append(arguments[-1])

    measure.run_group = spy  # type: ignore[assignment]
    try:
        bench.step()
    finally:
        measure.run_group = real
    torch.testing.assert_close(totals[0], expected)
    assert isinstance(Routing.from_host(chosen.reshape(1, -1)), Routing)


def test_a_record_has_the_size_that_the_model_card_says() -> None:
    # Qwen3.6-35B-A3B: three matrices of 2048 x 512 at half a byte, and a scale for 16 inputs.
    assert make_layout("nvfp4", 2048, 512).nbytes == 1_769_728
    assert make_records(make_layout("bf16", 64, 32), 3).shape == (3, 12_288)


@pytest.mark.parametrize(("name", "hidden", "message"), [
    ("gguf", 64, "experts in `gguf` are not computed here"),
    ("nvfp4", 60, "60 x 32 is no expert in `nvfp4`: both are multiples of 16"),
])  # fmt: skip
def test_a_format_or_shape_that_is_not_computed_is_refused(name: str, hidden: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_layout(name, hidden, 32)


def test_a_process_of_its_own_answers_with_rates_and_refuses_in_words() -> None:
    row = measure_experts(ExpertShape("nvfp4", 64, 32, 2), "cpu", threads=1, seconds_each=0.05)
    assert (row.key, row.expert_bytes) == ("native/nvfp4:64x32:top2:t1", 3_584)
    assert row.cpu_experts_bytes_per_s is not None
    assert row.cpu_experts_bytes_per_s > 1e5
    assert row.h2d_bytes_per_s is None
    with pytest.raises(UsageError, match="`gguf` are not computed here"), \
         ExpertKernel(ExpertShape("gguf", 64, 32, 2), threads=1, bank_bytes=1):  # fmt: skip
        pass
    with pytest.raises(FtError, match="the expert kernel does not run"):
        ExpertKernel(ExpertShape("bf16", 64, 32, 2), threads=1, bank_bytes=1).measure(0.1)
