"""NVIDIA GPUs through a fake NVML and through recorded `nvidia-smi`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freetoken.hardware.model import Gpu, GpuHolder, PcieLink, Ram
from freetoken.hardware.nvidia import NvidiaFacts, is_laptop_name, read_nvidia
from freetoken.units import GIB, MIB
from tests.fakes.machines import NVIDIA_DRIVER, FakeNvml, make_reader, nvml_card

RAM = Ram(total_bytes=120 * GIB, available_bytes=100 * GIB)
SMI_CSV = (
    b"0, NVIDIA GeForce RTX 4060 Laptop GPU, GPU-1234, 8188, 7800, 8.9, 595.71, [N/A], [N/A], 1, 4, 8, 8, Disabled\n"
    b"1, NVIDIA GeForce RTX 3090, GPU-5678, 24576, 24240, 8.6, 595.71, 350.00, 350.00, 4, 4, 16, 16, Enabled\n"
)
SMI_TABLE = b"| NVIDIA-SMI 595.71    Driver Version: 595.71    CUDA Version: 13.2 |\n"


def read(root: Path, nvml: Any, files: dict[str, str] | None = None, **options: Any) -> NvidiaFacts:
    return read_nvidia(make_reader(root, files or NVIDIA_DRIVER, **options), RAM, lambda: nvml)


def test_a_machine_without_a_driver_never_loads_nvml(tmp_path: Path) -> None:
    def explode() -> Any:
        raise AssertionError("nvml was loaded")

    assert read_nvidia(make_reader(tmp_path, {}), RAM, explode) == NvidiaFacts()


def test_every_fact_of_a_card_is_read_and_nvml_is_shut_down(tmp_path: Path) -> None:
    card = nvml_card(
        "NVIDIA GeForce RTX 3060", 12288, 10000, cores=3584, link=(1, 16, 3, 16, 4), power=(130000, 170000),
        compute=[(10, 900 * MIB), (11, None)], graphics=[(10, 100 * MIB), (12, 300 * MIB)], display=True,
    )  # fmt: skip
    nvml = FakeNvml([card], driver="595.84", cuda=13020)
    facts = read(tmp_path, nvml, {**NVIDIA_DRIVER, "/proc/12/comm": "Xorg\n", "/proc/10/comm": "python\n"})
    gpu = Gpu(
        name="NVIDIA GeForce RTX 3060", uuid="GPU-11111111-2222-3333-4444-555555555555", compute_capability="8.6",
        vram_total_bytes=12 * GIB, vram_free_bytes=10000 * MIB,
        pcie=PcieLink(generation=1, width=16, max_generation=3, max_width=16, card_generation=4), sm_count=28,
        has_display=True, power_limit_w=130, power_default_w=170,
        holders=(
            GpuHolder(pid=10, name="python", used_bytes=900 * MIB),
            GpuHolder(pid=12, name="Xorg", used_bytes=300 * MIB),
            GpuHolder(pid=11, name="program11.exe", used_bytes=0),
        ),
    )  # fmt: skip
    assert facts == NvidiaFacts((gpu,), driver="595.84", cuda_driver="13.2")
    assert nvml.is_shut_down


def test_questions_that_a_card_does_not_support_leave_their_fields_empty(tmp_path: Path) -> None:
    card = {"nvmlDeviceGetMemoryInfo": SimpleNamespace(total=4 * GIB, free=3 * GIB)}
    assert read(tmp_path, FakeNvml([card])).gpus == (
        Gpu(name="NVIDIA GPU", vram_total_bytes=4 * GIB, vram_free_bytes=3 * GIB),
    )


def test_a_gpu_that_shares_the_hosts_memory_has_the_hosts_bytes(tmp_path: Path) -> None:
    card = {"nvmlDeviceGetName": "NVIDIA GB10", "nvmlDeviceGetCudaComputeCapability": (12, 1)}
    (gpu,) = read(tmp_path, FakeNvml([card])).gpus
    assert (gpu.is_integrated, gpu.vram_total_bytes, gpu.vram_free_bytes) == (True, 120 * GIB, 100 * GIB)


def test_mig_slices_stand_for_their_card_with_its_link_and_their_own_memory(tmp_path: Path) -> None:
    parent = nvml_card("NVIDIA H200", 143771, 100, (9, 0), link=(5, 16, 5, 16, 5)) | {"nvmlDeviceGetMigMode": (1, 1)}
    slices = [
        nvml_card("NVIDIA H200 MIG 1g.18gb", 16384, 16000, uuid=f"MIG-{n}")
        | {
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": parent,
            "nvmlDeviceGetAttributes": SimpleNamespace(multiprocessorCount=16),
        }
        for n in range(2)
    ]
    parent |= {"nvmlDeviceGetMaxMigDeviceCount": 7, "nvmlDeviceGetMigDeviceHandleByIndex": lambda slot: slices[slot]}
    gpus = read(tmp_path, FakeNvml([parent])).gpus
    found = [(gpu.index, gpu.uuid, gpu.compute_capability, gpu.sm_count, gpu.pcie.generation) for gpu in gpus]
    assert found == [(0, "MIG-0", "9.0", 16, 5), (1, "MIG-1", "9.0", 16, 5)]


TWO = [nvml_card("RTX 3090", 24576, 24000, uuid="GPU-aa11"), nvml_card("RTX 3090", 24576, 24000, uuid="GPU-bb22")]
OTHER = [nvml_card("RTX 3060", 12288, 12000, uuid="GPU-aa11"), nvml_card("RTX 3090", 24576, 24000, uuid="GPU-bb22")]


@pytest.mark.parametrize(
    ("cards", "environ", "uuids"),
    [
        (TWO, {}, ["GPU-aa11", "GPU-bb22"]),
        (TWO, {"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-bb22"]),
        (TWO, {"CUDA_VISIBLE_DEVICES": "1,0"}, ["GPU-aa11", "GPU-bb22"]),
        (TWO, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (TWO, {"CUDA_VISIBLE_DEVICES": "0,9,1"}, ["GPU-aa11"]),
        (OTHER, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, ["GPU-bb22"]),
        (OTHER, {"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-aa11", "GPU-bb22"]),
        (OTHER, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["GPU-bb22"]),
    ],
)
def test_cuda_visible_devices_hides_gpus_as_cuda_does(
    tmp_path: Path, cards: list[dict[str, Any]], environ: dict[str, str], uuids: list[str]
) -> None:
    facts = read(tmp_path, FakeNvml(cards), environ=environ)
    assert sorted(str(gpu.uuid) for gpu in facts.gpus) == uuids
    is_ambiguous = cards is OTHER and environ == {"CUDA_VISIBLE_DEVICES": "1"}
    assert len(facts.notes) == int(len(uuids) < 2 or is_ambiguous)


def test_without_the_library_nvidia_smi_is_asked(tmp_path: Path) -> None:
    programs = {"nvidia-smi": SMI_TABLE}
    fields = (
        "index,name,uuid,memory.total,memory.free,compute_cap,driver_version,power.limit,power.default_limit,"
        "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,display_active"
    )
    programs[f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits"] = SMI_CSV
    facts = read(tmp_path, None, {"/dev/dxg": "", "/usr/lib/wsl/lib/nvidia-smi": ""}, programs=programs)
    laptop = Gpu(
        index=0, name="NVIDIA GeForce RTX 4060 Laptop GPU", uuid="GPU-1234", compute_capability="8.9",
        vram_total_bytes=8188 * MIB, vram_free_bytes=7800 * MIB, is_laptop=True,
        pcie=PcieLink(generation=1, width=8, max_generation=4, max_width=8),
    )  # fmt: skip
    desktop = Gpu(
        index=1, name="NVIDIA GeForce RTX 3090", uuid="GPU-5678", compute_capability="8.6", vram_total_bytes=24 * GIB,
        vram_free_bytes=24240 * MIB, pcie=PcieLink(generation=4, width=16, max_generation=4, max_width=16),
        has_display=True, power_limit_w=350, power_default_w=350,
    )  # fmt: skip
    assert facts == NvidiaFacts((laptop, desktop), driver="595.71", cuda_driver="13.2")


@pytest.mark.parametrize(
    "output", [None, b"", b"No devices were found\n", b"Failed to initialize NVML\n", b"\xff\xfe,,,"]
)
def test_an_nvidia_smi_that_fails_leaves_no_gpu_and_never_raises(tmp_path: Path, output: bytes | None) -> None:
    programs = {} if output is None else {"nvidia-smi": output}
    facts = read(tmp_path, None, {**NVIDIA_DRIVER, "/usr/bin/nvidia-smi": ""}, programs=programs)
    assert facts.gpus == ()
    assert len(facts.notes) == int(output is None)


def test_a_driver_without_library_and_tool_becomes_a_note(tmp_path: Path) -> None:
    assert read(tmp_path, None).notes == (
        "an NVIDIA driver is here, but neither its library nor `nvidia-smi` can be used",
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4060 Laptop GPU", True),
        ("NVIDIA GeForce GTX 1650 Mobile / Max-Q", True),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", True),
        ("NVIDIA GeForce GTX 980M", True),
        ("NVIDIA GeForce RTX 2050", True),
        ("NVIDIA GeForce RTX 3060", False),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", False),
    ],
)
def test_a_laptop_card_is_known_by_its_name(name: str, expected: bool) -> None:
    assert is_laptop_name(name) is expected
