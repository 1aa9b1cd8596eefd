"""Parts of the expert runtime that the parity tests do not reach: batched arithmetic, failing reads, memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.engine import compute
from freetoken.engine.compute import Routing, run_group, run_pairs
from freetoken.engine.config import EngineConfig
from freetoken.engine.loader import LoadedModel, load_model
from freetoken.engine.offload import OffloadExperts
from freetoken.engine.slots import Fetcher, runs
from freetoken.engine.staging import Staging, group_size
from freetoken.errors import BadFileError
from freetoken.residency import HitCounters, read_trace, replay
from tests.fakes.tiny_models import FAMILIES, make_tiny_checkpoint


def open_model(folder: Path, family: str, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model_path=make_tiny_checkpoint(folder, family), **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_pairs_equal_experts_one_by_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = open_model(tmp_path, family, strategy="fused")
    runtime = loaded.experts
    module, layout, records = runtime.modules[1], runtime.layouts[1], runtime.bank.records(1)
    assert records is not None
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[0, 3], [7, 1], [3, 0], [2, 6], [5, 4]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(5, 64)
    routing = Routing.from_device(index, 8)
    run_group(module, layout, records, routing.experts, routing, 0, hidden, routing.weights(weights), total)
    assert torch.allclose(run_pairs(module, layout, records, index, hidden, weights), total, atol=1e-5)
    monkeypatch.setattr(compute, "UNPACK_BYTES", 3 * layout.unpacked_bytes(torch.float32))  # three pairs at a time
    assert torch.allclose(run_pairs(module, layout, records, index, hidden, weights), total, atol=1e-5)


def test_pairs_without_a_slot_add_nothing(tmp_path: Path) -> None:
    loaded = open_model(tmp_path, "qwen3_moe", strategy="fused")
    runtime = loaded.experts
    records = runtime.bank.records(0)
    assert records is not None
    hidden, weights = torch.randn(1, 64), torch.rand(1, 2)
    parts = [
        run_pairs(
            runtime.modules[0], runtime.layouts[0], records, torch.tensor([slots]), hidden, weights, has_holes=True
        )
        for slots in ([4, -1], [-1, 6], [4, 6])
    ]
    assert torch.allclose(parts[0] + parts[1], parts[2], atol=1e-6)


def test_routing_from_host_and_device_agree() -> None:
    index = torch.randint(0, 9, (13, 3), generator=torch.Generator().manual_seed(5))
    one, two = Routing.from_device(index, 12), Routing.from_host(index.numpy())
    assert (one.experts, one.bounds) == (two.experts, two.bounds)
    assert torch.equal(one.order, two.order)
    for number, expert in enumerate(one.experts):
        pairs = one.order[one.bounds[number] : one.bounds[number + 1]]
        assert (index.t().reshape(-1)[pairs] == expert).all()


def test_runs_join_what_is_adjacent_on_both_sides() -> None:
    assert runs([3, 4, 5, 9, 10], [0, 1, 2, 3, 5]) == [(3, 0, 3), (9, 3, 1), (10, 5, 1)]
    assert runs([], []) == []


def test_a_staging_buffer_holds_a_small_layer_whole_and_at_least_one_large_expert() -> None:
    assert group_size(8, 1024) == 8
    assert group_size(256, 1_769_728) == 37
    assert group_size(8, 1 << 30) == 1


class FakeStream:
    """Stands in for a CUDA stream and event: everything happens at once, waits are counted."""

    waits = 0

    def __init__(self, *_: object) -> None:
        pass

    def wait_event(self, *_: object) -> None:
        FakeStream.waits += 1

    wait_stream = record = wait_event

    def synchronize(self) -> None:
        pass


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("place", ["ram", "disk"])
def test_prefill_through_two_buffers_equals_prefill_on_the_records(place: str, group: int, tmp_path: Path) -> None:
    loaded = open_model(tmp_path, "qwen3_moe", strategy="cpu", experts_from=place)
    runtime = loaded.experts
    fetcher = Fetcher(runtime.bank, torch.device("cpu"), runtime.slot_bytes)
    fetcher.stream = FakeStream()
    fetcher._ring = torch.empty(8, runtime.slot_bytes, dtype=torch.uint8)
    staging = Staging(fetcher, runtime.layouts, 8, runtime.slot_bytes)
    staging.buffers = [torch.empty(group, runtime.slot_bytes, dtype=torch.uint8) for _ in range(2)]
    staging.group = group
    generator = torch.Generator().manual_seed(4)
    for layer, used in [(0, 8), (1, 8), (2, 8), (0, 8), (1, 3), (2, 8), (3, 1)]:
        hidden, weights = torch.randn(30, 64, generator=generator), torch.rand(30, 2, generator=generator)
        index = torch.stack((torch.randint(0, used, (30,), generator=generator), torch.full((30,), 7)), dim=1)
        index[:, 1] = (index[:, 0] + 1) % 8
        routing = Routing.from_device(index, 8)
        with runtime.prefill():
            expected = runtime.forward(layer, hidden, index, weights)
        assert torch.equal(staging.run(layer, runtime.modules[layer], routing, hidden, weights), expected)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("slots", [2, 3, 7, 32])
def test_the_device_path_of_decode_equals_the_host_path(slots: int, tmp_path: Path) -> None:
    loaded = open_model(tmp_path, "gpt_oss", strategy="offload", expert_slots=slots, experts_from="ram")
    runtime = loaded.experts
    assert isinstance(runtime, OffloadExperts)
    runtime._fetcher.stream = FakeStream()
    runtime._to_device = lambda values: torch.from_numpy(values.copy())
    generator = torch.Generator().manual_seed(4)
    for layer in (0, 1, 0, 2, 3, 1):
        hidden, weights = torch.randn(4, 64, generator=generator), torch.rand(4, 2, generator=generator)
        index = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(4)])
        chosen = index.numpy()
        batches = runtime._table.serve(layer, sorted(set(chosen.ravel().tolist())))
        got = runtime._decode_on_device(layer, batches, chosen, hidden, weights)
        with runtime.prefill():
            assert torch.allclose(got, runtime.forward(layer, hidden, index, weights), atol=1e-5)


def test_a_failed_read_leaves_no_slot_that_claims_to_be_filled(tmp_path: Path) -> None:
    path = tmp_path / "routing.trace"
    folder = tmp_path / "model"
    loaded = open_model(folder, "qwen3_moe", strategy="offload", expert_slots=6, experts_from="disk", trace_path=path)
    token = torch.tensor([[7]])
    with torch.inference_mode(), loaded.experts.decode():
        right = loaded.model(token).logits
        loaded.experts.resize(2)
        backup = {file: file.read_bytes() for file in folder.glob("*.safetensors")}
        for file in backup:
            with file.open("r+b") as opened:
                opened.truncate(1000)
        with pytest.raises(BadFileError, match="bytes early"):
            loaded.model(token)
        for file, data in backup.items():
            with file.open("r+b") as opened:
                opened.write(data)
        assert torch.equal(loaded.model(token).logits, right)
    loaded.close()
    counted, replayed = loaded.experts.counters(), replay(read_trace(path))
    assert (counted.lookups, counted.hits) == (replayed.lookups, replayed.hits)


@pytest.mark.parametrize("strategy", ["fused", "offload", "cpu"])
def test_memory_is_what_is_allocated(strategy: str, tmp_path: Path) -> None:
    loaded = open_model(tmp_path, "qwen3_5_moe", strategy=strategy, expert_slots=5, experts_from="disk")
    record = (2 * 32 * 64 + 64 * 32) * 4
    assert loaded.experts.slot_bytes == record
    experts = {
        "fused": {"expert_slots": 32 * record},
        "offload": {"expert_slots": 5 * record, "prefill_staging": 8 * record, "expert_banks": 0},
        "cpu": {"prefill_staging": 8 * record, "expert_banks": 0},
    }
    memory = loaded.memory()
    assert {key: memory[key] for key in experts[strategy]} == experts[strategy]
    dense = {key: size for key, size in memory.items() if key not in experts[strategy]}
    stored = dict(loaded.model.named_parameters())
    assert sum(dense.values()) == sum(p.numel() * 4 for p in stored.values()) + dense["rope"]
    assert dense["embedding"] == dense["head"] == 320 * 64 * 4
    assert not any("experts." in name and "shared" not in name for name in stored)


def test_strategies_without_slots_count_what_they_can(tmp_path: Path) -> None:
    fused = open_model(tmp_path / "a", "qwen3_moe", strategy="fused")
    cpu = open_model(tmp_path / "b", "qwen3_moe", strategy="cpu")
    with torch.inference_mode():
        for loaded in (fused, cpu):
            loaded.model(torch.tensor([[5]]))
    assert fused.experts.counters() == HitCounters(8, 8, 0, 0)
    assert cpu.experts.counters() == HitCounters()
    assert (fused.experts.expert_slots, cpu.experts.expert_slots) == (32, 0)


def test_phases_nest_and_few_tokens_count_as_decode_without_one(tmp_path: Path) -> None:
    loaded = open_model(tmp_path, "qwen3_moe", strategy="offload", expert_slots=8)
    experts = loaded.experts
    token = torch.tensor([[5]])
    with torch.inference_mode():
        with experts.decode(), experts.prefill():
            loaded.model(token)
        assert experts.counters().lookups == 0
        loaded.model(token)
        assert experts.counters().lookups == 8
        loaded.model(torch.arange(40).unsqueeze(0))
        assert experts.counters().lookups == 8
