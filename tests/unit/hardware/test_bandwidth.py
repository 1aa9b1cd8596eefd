"""Measuring on whatever this machine has; nothing here says how fast it should be."""

import time
from pathlib import Path

import pytest
import torch

from freetoken.errors import UsageError
from freetoken.hardware.bandwidth import find_device, measure_bandwidth
from freetoken.hardware.disk_speed import BLOCK_BYTES, measure_disk
from freetoken.hardware.measured import measured_path, read_measured, write_measured
from freetoken.hardware.model import Bandwidth, Cpu, Disk, Hardware, Ram
from freetoken.units import GIB, MIB

MACHINE = Hardware(ram=Ram(total_bytes=8 * GIB, available_bytes=GIB), disk=Disk(free_bytes=0))


def test_host_memory_is_measured_in_bounded_time_and_torchs_threads_are_put_back() -> None:
    before, start = torch.get_num_threads(), time.monotonic()
    rates = measure_bandwidth("cpu", 1 * MIB, threads=1, seconds_each=0.02)
    assert time.monotonic() - start < 30
    assert torch.get_num_threads() == before
    assert rates.sources == {"dram_bytes_per_s": "measured", "cpu_experts_bytes_per_s": "guessed"}
    assert rates.dram_bytes_per_s is not None
    assert 1e8 < rates.dram_bytes_per_s < 2e12
    assert (rates.piece_bytes, rates.threads, rates.h2d_bytes_per_s) == (MIB, 1, None)
    assert rates.measured_at is not None
    assert rates.measured_at.endswith("+00:00")


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "GPU-does-not-exist", "mps"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="device"):
        find_device(device)


def test_the_automatic_device_is_one_that_torch_has() -> None:
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert find_device("cpu") == torch.device("cpu")


def test_a_disk_is_read_through_a_temporary_file_that_is_removed(tmp_path: Path) -> None:
    rate = measure_disk(tmp_path / "not" / "yet", file_bytes=4 * BLOCK_BYTES)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []


def test_the_largest_model_file_is_read_where_there_is_one_and_nothing_is_written(tmp_path: Path) -> None:
    model = tmp_path / "models" / "a.safetensors"
    model.parent.mkdir()
    with model.open("wb") as file:
        file.truncate(80 * MIB)
    tmp_path.chmod(0o500)
    try:
        assert measure_disk(tmp_path, most_s=0.5) is not None
        assert [path.name for path in model.parent.iterdir()] == ["a.safetensors"]
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_cannot_hold_the_test_file_has_no_rate(tmp_path: Path) -> None:
    assert measure_disk(tmp_path, file_bytes=1 << 62) is None


def test_newer_rates_replace_older_ones_and_the_rest_stays() -> None:
    old = Bandwidth(
        vram_bytes_per_s=3e11,
        dram_bytes_per_s=1e10,
        sources={"vram_bytes_per_s": "vendor", "dram_bytes_per_s": "guessed"},
    )
    new = Bandwidth(dram_bytes_per_s=2e10, sources={"dram_bytes_per_s": "measured"}, measured_at="now")
    assert old.merged(new) == Bandwidth(
        vram_bytes_per_s=3e11, dram_bytes_per_s=2e10, measured_at="now",
        sources={"vram_bytes_per_s": "vendor", "dram_bytes_per_s": "measured"},
    )  # fmt: skip


def test_measured_rates_are_kept_for_this_machine_and_a_damaged_file_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_STATE", str(tmp_path))
    rates = Bandwidth(dram_bytes_per_s=2.5e10, sources={"dram_bytes_per_s": "measured"})
    assert read_measured(MACHINE) is None
    write_measured(MACHINE, rates)
    assert read_measured(MACHINE) == rates
    assert read_measured(MACHINE.model_copy(update={"cpu": Cpu(model="another")})) is None
    measured_path(MACHINE).write_text("dram_bytes_per_s: fast\n")
    assert read_measured(MACHINE) is None
