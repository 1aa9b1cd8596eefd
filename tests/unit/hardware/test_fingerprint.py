"""What makes figures comparable, and what does not."""

from typing import Any

import pytest

from freetoken.hardware.fingerprint import compute_fingerprint
from freetoken.hardware.model import Cpu, Disk, Gpu, GpuHolder, Hardware, Os, PcieLink, Ram, Software
from freetoken.units import GIB, MIB

GPU = Gpu(name="RTX 3060", uuid="GPU-1", vram_total_bytes=12 * GIB, vram_free_bytes=11 * GIB,
          pcie=PcieLink(generation=1, width=16, max_generation=4, max_width=16), power_limit_w=170)  # fmt: skip
MACHINE = Hardware(
    gpus=(GPU,), cpu=Cpu(model="Ryzen", physical_cores=8, logical_cores=16, usable_cores=8),
    ram=Ram(total_bytes=32 * GIB, available_bytes=20 * GIB), disk=Disk(free_bytes=GIB),
    software=Software(driver="580.1"),
)  # fmt: skip


def change(**update: Any) -> Hardware:
    return MACHINE.model_copy(update=update)


def test_a_fingerprint_is_sixteen_hexadecimal_digits_and_the_same_every_time() -> None:
    assert compute_fingerprint(MACHINE, "native", "0.1.0") == compute_fingerprint(MACHINE, "native", "0.1.0")
    assert int(compute_fingerprint(MACHINE, "native", None), 16) < 16**16


@pytest.mark.parametrize(
    "other",
    [
        change(gpus=(GPU.model_copy(update={
            "uuid": "GPU-2", "vram_free_bytes": 0, "holders": (GpuHolder(pid=1, name="x", used_bytes=1),),
            "pcie": GPU.pcie.model_copy(update={"generation": 4}),
        }),)),
        change(ram=Ram(total_bytes=32 * GIB - 5 * MIB, available_bytes=1)),
        change(disk=Disk(path="/elsewhere", free_bytes=0), name="mine", is_probed=True, notes=("x",)),
    ],
    ids=["another card of the kind", "another boot", "another disk"],
)  # fmt: skip
def test_what_moves_or_names_a_person_does_not_change_it(other: Hardware) -> None:
    assert compute_fingerprint(other, "native", "1") == compute_fingerprint(MACHINE, "native", "1")


@pytest.mark.parametrize(
    "other",
    [
        change(gpus=()),
        change(gpus=(GPU, GPU)),
        change(gpus=(GPU.model_copy(update={"name": "RTX 3060 Ti"}),)),
        change(gpus=(GPU.model_copy(update={"power_limit_w": 130.0}),)),
        change(gpus=(GPU.model_copy(update={"pcie": PcieLink(max_generation=4, max_width=4)}),)),
        change(cpu=MACHINE.cpu.model_copy(update={"usable_cores": 4})),
        change(ram=Ram(total_bytes=64 * GIB, available_bytes=1)),
        change(os=Os(is_wsl=True)),
        change(software=Software(driver="595.1")),
    ],
)
def test_what_changes_speed_or_memory_changes_it(other: Hardware) -> None:
    assert compute_fingerprint(other, "native", "1") != compute_fingerprint(MACHINE, "native", "1")


def test_engine_and_version_change_it() -> None:
    found = {
        compute_fingerprint(MACHINE, *engine)
        for engine in (("native", "1"), ("native", "2"), ("freetoken", "1"), ("native", None))
    }
    assert len(found) == 4
