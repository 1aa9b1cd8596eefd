"""Cards by the names that people say, and machines that are not here: `--gpu "RTX 3060 Laptop 6GB" --ram 32GiB`.

Everything beyond the card's own specification is a guess and marked as one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from freetoken.errors import UsageError
from freetoken.hardware.cards import CARDS, Card
from freetoken.hardware.model import Bandwidth, Cpu, Disk, Gpu, Hardware, Os, PcieLink, Ram, Software, Source
from freetoken.units import GIB, MIB, parse_bytes

#: Bytes per second and lane that a pinned copy in expert-sized pieces reaches, by PCIe generation; published copies:
#: 12.1 to 13.2 GB/s on 3.0 x16, 11.8 on 4.0 x8, 25.1 to 25.8 on 4.0 x16, 49.0 to 57.7 on 5.0 x16.
H2D_BYTES_PER_S_PER_LANE = {1: 0.19e9, 2: 0.38e9, 3: 0.77e9, 4: 1.55e9, 5: 3.2e9, 6: 6.4e9}
#: What the driver keeps for itself: nvidia-smi's `reserved`, about 0.25 GiB on a 10 GB card and 0.63 on an 80 GB one.
_RESERVED_BYTES, _RESERVED_RATIO = 200 * MIB, 0.0054
#: VRAM that a desktop, an idle laptop and a server hold before any engine starts: (usual, spread either way).
_HELD_BYTES = {"desktop": (750 * MIB, 450 * MIB), "laptop": (150 * MIB, 150 * MIB), "server": (0, 64 * MIB)}
#: (streaming read, expert kernel) in bytes/s of two channels DDR4 and DDR5, and of a server's eight.
_DRAM = {"ddr4": (38e9, 32e9), "ddr5": (62e9, 50e9), "server": (120e9, 75e9)}
#: What a system with a desktop keeps in RAM, and the share of the modules that firmware and kernel take.
_SYSTEM_BYTES, _FIRMWARE_RATIO = 3 * GIB, 0.025
_FILLER = {
    "nvidia", "geforce", "rtx", "gtx", "quadro", "tesla", "gpu", "graphics", "amd", "radeon", "rx", "intel", "card",
    "blackwell", "generation", "workstation", "server", "edition", "desktop", "pcie", "sxm", "sxm2", "sxm4", "hbm3",
}  # fmt: skip


def find_card(name: str, vram_bytes: int | None = None) -> Card | None:
    """The card of that name, as people or drivers write it; None where it is not known or stands for several.

    `vram_bytes` tells cards of one name apart.
    """
    found = _matches(name)
    if vram_bytes is not None:
        found = [card for card in found if abs(card.vram_bytes - vram_bytes) <= GIB]
    return found[0] if len(found) == 1 else None


def pick_card(name: str) -> Card:
    """The card of that name. Raises UsageError that names the nearest ones, or all that share the name."""
    found = _matches(name)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"`{card.name}`" for card in found)
        raise UsageError(f"`{name}` stands for several cards: {names}", hint=f'e.g. `--gpu "{found[-1].name}"`')
    near = _nearest(name, (card.name for card in CARDS))
    guess = f"; did you mean `{near[0]}`?" if near else ""
    others = f"nearest known: {', '.join(near)}" if len(near) > 1 else "describe the machine in a profile instead"
    raise UsageError(f"no card `{name}` in the catalogue{guess}", hint=others)


def make_what_if(gpu: str | None, ram: str | int | None = None, cpu: str | None = None) -> Hardware:
    """A machine with the card `gpu` (None or `none`: without one), `ram` (default 32 GiB) and `cpu`.

    `cpu` is a model's name, a count of cores, or both (`Ryzen 7 5800X, 8 cores`). Raises UsageError for a card
    that is not known or a size that is not one.
    """
    card = None if gpu is None or gpu.strip().lower() in ("none", "cpu", "-") else pick_card(gpu)
    memory = _what_if_ram("32GiB" if ram is None else ram)
    sources: dict[str, Source] = {"ram.total_bytes": "vendor", "bandwidth.vram_bytes_per_s": "vendor"}
    if card is not None:
        sources |= {"gpus.0": "vendor", "gpus.0.vram_free_bytes": "guessed", "gpus.0.vram_free_spread_bytes": "guessed"}
    return Hardware(
        name=f"what if: {card.name if card else 'no GPU'}, {round(memory.total_bytes / GIB)} GiB RAM",
        description="A machine that is not here; everything but the card's specification is a guess.",
        gpus=(make_gpu(card),) if card else (),
        cpu=_what_if_cpu(cpu),
        ram=memory,
        disk=Disk(total_bytes=1000 * GIB, free_bytes=500 * GIB, kind="nvme"),
        bandwidth=make_bandwidth(card),
        os=Os(name="linux"),
        software=usual_software(card),
        sources=sources,
        default_source="guessed",
    )


def make_gpu(card: Card, index: int = 0) -> Gpu:
    """`card` as a GPU; free is what is usual before any engine starts, with its spread."""
    held, spread = _HELD_BYTES[card.form]
    free = card.vram_bytes - int(_RESERVED_BYTES + _RESERVED_RATIO * card.vram_bytes) - held
    return Gpu(
        index=index,
        name=_driver_name(card),
        vendor=card.vendor,
        compute_capability=card.compute_capability,
        vram_total_bytes=card.vram_bytes,
        vram_free_bytes=free // MIB * MIB,
        vram_free_spread_bytes=spread,
        pcie=PcieLink(max_generation=card.pcie_generation, max_width=card.pcie_width),
        sm_count=card.sm_count,
        is_laptop=card.form == "laptop",
        has_display=card.form == "desktop",
        power_limit_w=card.power_w,
    )


def make_bandwidth(card: Card | None) -> Bandwidth:
    """Usual rates around `card`: its memory's by specification, the rest guessed from its link and its years."""
    dram, experts = _DRAM[_memory_kind(card)]
    sources: dict[str, Source] = {
        "dram_bytes_per_s": "guessed",
        "cpu_experts_bytes_per_s": "guessed",
        "disk_bytes_per_s": "guessed",
    }
    if card is None:
        return Bandwidth(
            dram_bytes_per_s=dram, cpu_experts_bytes_per_s=experts, disk_bytes_per_s=2.5e9, sources=sources
        )
    return Bandwidth(
        h2d_bytes_per_s=round(H2D_BYTES_PER_S_PER_LANE.get(card.pcie_generation, 0.77e9) * card.pcie_width, -8),
        h2d_pageable_bytes_per_s=6e9 if card.pcie_generation > 3 else 4e9,
        dram_bytes_per_s=dram,
        vram_bytes_per_s=card.vram_gb_per_s * 1e9,
        disk_bytes_per_s=2.5e9,
        cpu_experts_bytes_per_s=experts,
        sources=sources
        | {"h2d_bytes_per_s": "guessed", "h2d_pageable_bytes_per_s": "guessed", "vram_bytes_per_s": "vendor"},
    )


def usual_software(card: Card | None) -> Software:
    """A driver and toolchain that every engine takes, where the card is NVIDIA's; compilers alone elsewhere."""
    if card is None or card.vendor != "nvidia":
        return Software(gxx="g++", ninja="ninja")
    return Software(driver="580.95.05", cuda_driver="13.0", cuda_toolkit="13.0", nvcc="nvcc", gxx="g++", ninja="ninja")


def _memory_kind(card: Card | None) -> str:
    if card is not None and card.form == "server":
        return "server"
    newer = card is None or card.compute_capability is None or float(card.compute_capability) >= 8.9
    return "ddr5" if newer else "ddr4"


def _what_if_ram(size: str | int) -> Ram:
    try:
        installed = parse_bytes(size)
    except ValueError as error:
        raise UsageError(str(error), hint="`--ram 32GiB`") from error
    if installed < GIB:
        raise UsageError(f"`{size}` of RAM is less than 1 GiB", hint="`--ram 32GiB`")
    total = int(installed * (1 - _FIRMWARE_RATIO)) // MIB * MIB
    return Ram(total_bytes=total, available_bytes=max(total // 2, total - _SYSTEM_BYTES))


def _what_if_cpu(text: str | None) -> Cpu:
    isa = ("sse4_2", "avx", "f16c", "fma", "avx2")
    match = re.search(r"(\d+)\s*(?:physical\s*)?cores?\b|^\s*(\d+)\s*$", text or "", re.IGNORECASE)
    cores = int(match[1] or match[2]) if match else 8
    if not 1 <= cores <= 1024:
        raise UsageError(f"`{text}` asks for {cores} cores, expected 1 to 1024", hint='`--cpu "8 cores"`')
    model = re.sub(r",?\s*\d+\s*(physical\s*)?cores?\b|^\s*\d+\s*$", "", text or "", flags=re.IGNORECASE).strip()
    return Cpu(model=model or "unknown", physical_cores=cores, logical_cores=2 * cores, usable_cores=cores, isa=isa)


def _driver_name(card: Card) -> str:
    """The name as the driver writes it: `NVIDIA GeForce RTX 3060 Laptop GPU`."""
    bare = re.sub(r" \d+GB$", "", card.name)
    if card.vendor != "nvidia":
        return ("AMD Radeon " if card.vendor == "amd" else "Intel ") + bare
    is_geforce = bare.startswith(("GTX", "RTX")) and not re.search(r"RTX (A\d|PRO)|\bAda\b", bare)
    bare = bare.replace("Laptop", "Laptop GPU") if is_geforce else bare
    return (
        f"NVIDIA GeForce {bare}" if is_geforce else bare if bare.startswith(("Quadro", "Tesla")) else f"NVIDIA {bare}"
    )


def _matches(name: str) -> list[Card]:
    key, gigabytes = _key(name)
    # Cards that exist for laptops alone are rarely called so: `RTX 2050`.
    found = [card for card in CARDS if key and _key(card.name)[0] == key] or [
        card for card in CARDS if key and _key(card.name)[0] == key | {"laptop"}
    ]
    sized = [card for card in found if gigabytes in (None, card.gigabytes)]
    return sized if gigabytes is not None else found


def _key(name: str) -> tuple[frozenset[str], int | None]:
    """(what tells cards apart, gigabytes where the name says them)."""
    text = name.lower().replace("mobile", "laptop")
    # A Max-Q is a laptop card, but not where it names the frugal edition of a workstation card.
    text = text.replace("max-q", "" if "workstation" in text else "laptop")
    memory = re.search(r"\b(\d+)\s*(?:gb|gib|g)\b", text)
    text = re.sub(r"\b\d+\s*(?:gb|gib|g)\b", " ", text)
    # `4060Ti`, `RTX4060`: letters and digits of different words run together, but `A4000` is one word.
    text = re.sub(r"(rtx|gtx|rx)(?=\d)", r"\1 ", text)
    text = re.sub(r"(\d{3,4})(ti|super|xtx|xt|laptop)\b", r"\1 \2", text)
    words = frozenset(re.findall(r"[a-z0-9]+", text))
    return words - _FILLER, int(memory[1]) if memory else None


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    lowered = {known.lower(): known for known in names}
    return [lowered[near] for near in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
