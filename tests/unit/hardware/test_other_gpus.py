"""GPUs of other vendors, and NVIDIA cards without a driver, by sysfs."""

from pathlib import Path

from freetoken.hardware.model import Gpu, PcieLink
from freetoken.hardware.other_gpus import read_other_gpus
from freetoken.units import GIB
from tests.fakes.machines import make_reader

PCI = "/sys/bus/pci/devices"
RADEON = {
    f"{PCI}/0000:03:00.0/vendor": "0x1002\n", f"{PCI}/0000:03:00.0/device": "0x7550\n",
    f"{PCI}/0000:03:00.0/class": "0x030000\n",
    f"{PCI}/0000:03:00.0/mem_info_vram_total": f"{16 * GIB}\n", f"{PCI}/0000:03:00.0/mem_info_vram_used": f"{GIB}\n",
    f"{PCI}/0000:03:00.0/current_link_speed": "32.0 GT/s PCIe\n", f"{PCI}/0000:03:00.0/current_link_width": "16\n",
    f"{PCI}/0000:03:00.0/max_link_speed": "32.0 GT/s PCIe\n", f"{PCI}/0000:03:00.0/max_link_width": "255\n",
    f"{PCI}/0000:03:00.0/drm/card1/card1-DP-1/status": "connected\n",
    "/usr/share/misc/pci.ids": (
        "# list\n8086  Intel\n\ta7a0  Iris\n1002  Advanced Micro Devices\n\t7480  Navi 33\n"
        "\t7550  Navi 48 [Radeon RX 9070/9070 XT/9070 GRE]\n\t\t1043 0605  TUF\n10de  NVIDIA\n\t7550  wrong vendor\n"
    ),
}  # fmt: skip


def test_a_radeon_is_recognised_with_its_name_memory_link_and_display(tmp_path: Path) -> None:
    gpu = Gpu(
        index=2, name="AMD Radeon RX 9070/9070 XT/9070 GRE", vendor="amd", vram_total_bytes=16 * GIB,
        vram_free_bytes=15 * GIB, pcie=PcieLink(generation=5, width=16, max_generation=5), has_display=True,
    )  # fmt: skip
    assert read_other_gpus(make_reader(tmp_path, RADEON), 2, is_nvidia_read=True) == ((gpu,), ())


def test_an_intel_gpu_without_memory_of_its_own_is_integrated(tmp_path: Path) -> None:
    folder = f"{PCI}/0000:00:02.0"
    files = {f"{folder}/vendor": "0x8086", f"{folder}/device": "0xa7a0", f"{folder}/class": "0x030000"}
    gpu = Gpu(name="Intel GPU 8086:a7a0", vendor="intel", vram_total_bytes=0, vram_free_bytes=0, is_integrated=True)
    assert read_other_gpus(make_reader(tmp_path, files), 0, is_nvidia_read=False) == ((gpu,), ())


def test_an_nvidia_card_that_no_driver_speaks_for_becomes_a_note_that_names_its_holder(tmp_path: Path) -> None:
    folder = f"{PCI}/0000:01:00.0"
    files = {f"{folder}/vendor": "0x10de", f"{folder}/device": "0x2520", f"{folder}/class": "0x030200"}
    files |= {f"{folder}/driver": "-> ../../drivers/nouveau", "/sys/bus/pci/drivers/nouveau": "[dir]"}
    gpus, notes = read_other_gpus(make_reader(tmp_path, files), 0, is_nvidia_read=False)
    assert gpus == ()
    assert notes == (
        "NVIDIA GPU 10de:2520 is in this machine, but NVIDIA's driver does not speak for it "
        "(the driver `nouveau` holds it)",
    )


def test_a_sound_card_of_a_gpu_vendor_is_no_gpu(tmp_path: Path) -> None:
    files = {f"{PCI}/0000:01:00.1/vendor": "0x10de", f"{PCI}/0000:01:00.1/class": "0x040300"}
    assert read_other_gpus(make_reader(tmp_path, files), 0, is_nvidia_read=False) == ((), ())


def test_apple_silicon_is_known_by_its_device_tree(tmp_path: Path) -> None:
    files = {
        "/proc/device-tree/compatible": "apple,j314s\0apple,t6000\0",
        "/proc/device-tree/model": "Apple MacBook Pro\0",
    }
    (gpu,), _ = read_other_gpus(make_reader(tmp_path, files), 0, is_nvidia_read=False)
    assert (gpu.vendor, gpu.name, gpu.is_integrated) == ("apple", "Apple GPU (Apple MacBook Pro)", True)
