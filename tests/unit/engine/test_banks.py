"""Page-locked banks against a stand-in for the CUDA runtime: what is locked is unlocked before its memory goes."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from freetoken.engine import banks
from freetoken.engine.banks import RamBank
from freetoken.engine.config import EngineConfig
from freetoken.engine.convert import ExpertReader
from freetoken.engine.loader import load_model
from freetoken.engine.slots import Fetcher
from tests.fakes.tiny_models import make_tiny_checkpoint


class FakeRuntime:
    """Locks by address, as the driver keeps them: none goes by itself."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []
        #: From this many locks on every further one is refused with `error`.
        self.most, self.error = 1000, 2
        #: A lock that someone left behind on whatever address is locked first.
        self.has_stale = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append("lock")
        if self.has_stale and not self.locked:
            self.locked[address], self.has_stale = 1, False
        if any(address < at + held and at < address + size for at, held in self.locked.items()):
            return 712
        if len(self.locked) >= self.most:
            return self.error
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unlock")
        assert is_mapped(address)
        return 0 if self.locked.pop(address, None) else 713


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return True
    return False


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.calls.append(f"wait for {device}"))
    monkeypatch.setattr(banks, "_clear_cuda_error", lambda: made.calls.append("clear"))
    return made


def open_reader(folder: Path) -> ExpertReader:
    path = make_tiny_checkpoint(folder, "qwen3_moe")
    return load_model(EngineConfig(model_path=path, strategy="offload", experts_from="disk")).experts.bank.reader


def lock(reader: ExpertReader, notes: list[str]) -> RamBank:
    return RamBank(reader, pin=True, progress=None, note=notes.append)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_bank_unlocks_its_memory_before_it_goes(is_closed: bool, runtime: FakeRuntime, tmp_path: Path) -> None:
    notes: list[str] = []
    bank = lock(open_reader(tmp_path), notes)
    layers = len(bank.layouts)
    assert (len(runtime.locked), bank.pinned_bytes, notes) == (layers, bank.nbytes, [])
    gc.collect()
    gc.disable()  # it goes with its last name, not when the collector finds a cycle
    try:
        if is_closed:
            bank.close()
            assert bank.pinned_bytes == 0
            bank.close()
        del bank
    finally:
        gc.enable()
    assert runtime.locked == {}
    assert runtime.calls == ["lock"] * layers + ["wait for 1"] + ["unlock"] * layers


def test_a_lock_that_someone_left_behind_is_taken_over(runtime: FakeRuntime, tmp_path: Path) -> None:
    runtime.has_stale, notes = True, []
    bank = lock(open_reader(tmp_path), notes)
    assert runtime.calls[:5] == ["lock", "clear", "unlock", "lock", "lock"]
    assert (len(runtime.locked), bank.pinned_bytes, notes) == (len(bank.layouts), bank.nbytes, [])
    bank.close()
    assert runtime.locked == {}


@pytest.mark.parametrize("error", [2, 712])
def test_a_bank_locked_in_part_is_copied_from_all_the_same(
    error: int, runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.most, runtime.error, notes = 2, error, []
    reader = open_reader(tmp_path)
    bank = lock(reader, notes)
    assert (len(runtime.locked), bank.pinned_bytes * 2) == (2, bank.nbytes)
    assert f"CUDA error {error}" in notes[0]
    assert runtime.calls[-1] == "clear"  # and no further layer was tried
    assert runtime.calls.count("lock") == 3 + (error == 712)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    fetcher = Fetcher(bank, torch.device("cpu"), bank.layouts[0].nbytes)
    fetcher.stream = object()
    for layer, layout in enumerate(bank.layouts):
        wanted = torch.empty(bank.experts, layout.nbytes, dtype=torch.uint8)
        reader.read(layer, range(bank.experts), wanted)
        slots = torch.zeros(bank.experts, layout.nbytes, dtype=torch.uint8)
        order = list(reversed(range(bank.experts)))
        fetcher.fetch(layer, order, order, slots)
        assert torch.equal(slots, wanted)
    bank.close()
    assert runtime.locked == {}
