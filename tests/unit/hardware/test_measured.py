"""Rates that were measured: merged, kept and read again."""

from pathlib import Path

import pytest

from freetoken.hardware.measured import measured_path, read_measured, write_measured
from freetoken.hardware.model import Bandwidth, Cpu, Disk, Hardware, Ram
from freetoken.units import GIB

MACHINE = Hardware(ram=Ram(total_bytes=8 * GIB, available_bytes=GIB), disk=Disk(free_bytes=0))


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
