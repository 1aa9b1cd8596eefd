"""GPUs that the NVIDIA driver does not speak for: AMD, Intel, Apple, and NVIDIA cards without a working driver.

They are recognised by sysfs alone, so that the planner can refuse them in words instead of seeing no GPU.
"""

from __future__ import annotations

from typing import Literal

from freetoken.hardware.model import Gpu, PcieLink
from freetoken.hardware.reader import Reader

_VENDORS: dict[str, Literal["nvidia", "amd", "intel"]] = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_PCI = "/sys/bus/pci/devices"
_PCI_NAMES = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")
#: An integrated GPU carves a little out of RAM, or nothing at all.
_MOST_CARVED_BYTES = 2 << 30
#: GT/s of a PCIe lane -> generation.
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "16": 4, "32.0": 5, "32": 5, "64.0": 6}


def read_other_gpus(reader: Reader, first_index: int, is_nvidia_read: bool) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """GPUs of other vendors, numbered from `first_index`, and notes on NVIDIA cards that no driver speaks for."""
    gpus: list[Gpu] = []
    notes: list[str] = []
    for address in reader.names(_PCI):
        folder = f"{_PCI}/{address}"
        vendor = _VENDORS.get(reader.word(f"{folder}/vendor"))
        if vendor is None or not reader.word(f"{folder}/class").startswith("0x03"):
            continue
        if vendor != "nvidia":
            gpus.append(_read_gpu(reader, folder, vendor, first_index + len(gpus)))
        elif not is_nvidia_read:
            notes.append(_driverless_note(reader, folder))
    if apple := _apple_name(reader):
        shared = Gpu(name=apple, vendor="apple", vram_total_bytes=0, vram_free_bytes=0, is_integrated=True)
        gpus.append(shared.model_copy(update={"index": first_index + len(gpus)}))
    return tuple(gpus), tuple(notes)


def _read_gpu(reader: Reader, folder: str, vendor: Literal["nvidia", "amd", "intel"], index: int) -> Gpu:
    total = reader.number(f"{folder}/mem_info_vram_total") or 0
    used = reader.number(f"{folder}/mem_info_vram_used") or 0
    if not total:  # Intel's own driver for discrete cards
        total = reader.number(f"{folder}/tile0/vram0/size") or reader.number(f"{folder}/lmem_total_bytes") or 0
    return Gpu(
        index=index,
        name=_device_name(reader, folder, vendor),
        vendor=vendor,
        vram_total_bytes=total,
        vram_free_bytes=max(0, total - used),
        pcie=_link(reader, folder),
        is_integrated=total <= _MOST_CARVED_BYTES,
        has_display=_has_display(reader, folder),
    )


def _device_name(reader: Reader, folder: str, vendor: str) -> str:
    if name := reader.word(f"{folder}/product_name"):
        return name
    vendor_id, device_id = (reader.word(f"{folder}/{name}").removeprefix("0x") for name in ("vendor", "device"))
    title = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}[vendor]
    found = (_name_in_pci_ids(reader.text(path), vendor_id, device_id) for path in _PCI_NAMES)
    known = next(filter(None, found), None)
    return f"{title} {known}" if known else f"{title} GPU {vendor_id}:{device_id}"


def _name_in_pci_ids(text: str, vendor_id: str, device_id: str) -> str | None:
    start = text.find(f"\n{vendor_id}  ")
    lines = text[start + 1 :].split("\n")[1:] if start >= 0 else []
    for line in lines:
        if not line.startswith(("\t", "#")):
            return None
        if line.startswith(f"\t{device_id}  "):
            name = line.split("  ", 1)[1].strip()
            # `Navi 48 [Radeon RX 9070/9070 XT]`: the name in brackets is the one that people know.
            return name[name.index("[") + 1 : -1] if name.endswith("]") and "[" in name else name
    return None


def _link(reader: Reader, folder: str) -> PcieLink:
    def generation(name: str) -> int | None:
        return _GENERATIONS.get(reader.word(f"{folder}/{name}").split(" ")[0])

    def width(name: str) -> int | None:
        count = reader.number(f"{folder}/{name}")
        return count if count and count < 64 else None  # 255 and 63 mean "unknown"

    return PcieLink(
        generation=generation("current_link_speed"),
        width=width("current_link_width"),
        max_generation=generation("max_link_speed"),
        max_width=width("max_link_width"),
    )


def _has_display(reader: Reader, folder: str) -> bool:
    cards = [card for card in reader.names(f"{folder}/drm") if card.startswith("card")]
    outputs = [
        f"{folder}/drm/{card}/{output}/status"
        for card in cards
        for output in reader.names(f"{folder}/drm/{card}")
        if "-" in output
    ]
    return any(reader.word(status) == "connected" for status in outputs)


def _driverless_note(reader: Reader, folder: str) -> str:
    name = _device_name(reader, folder, "nvidia")
    driver = reader.resolve(f"{folder}/driver").rsplit("/", 1)[-1] if reader.exists(f"{folder}/driver") else None
    held = f"the driver `{driver}` holds it" if driver else "no driver holds it"
    return f"{name} is in this machine, but NVIDIA's driver does not speak for it ({held})"


def _apple_name(reader: Reader) -> str | None:
    """`Apple M2 GPU` on Linux for Apple silicon, by its device tree."""
    compatible = reader.text("/proc/device-tree/compatible").split("\0")
    if not any(entry.startswith("apple,") for entry in compatible):
        return None
    model = reader.word("/proc/device-tree/model").strip("\0")
    return f"Apple GPU ({model})" if model else "Apple GPU"
