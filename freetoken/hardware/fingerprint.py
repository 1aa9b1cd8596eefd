"""The fingerprint: two figures with the same one may be compared.

It covers what changes speed and memory (GPU, its memory and link, CPU, RAM, OS, driver, engine version) and leaves
out what moves from minute to minute (free bytes) or names one person's machine (uuids, hosts).
"""

from __future__ import annotations

import hashlib
import json

from freetoken.hardware.model import Gpu, Hardware
from freetoken.units import GIB, MIB


def compute_fingerprint(hardware: Hardware, engine: str, engine_version: str | None) -> str:
    """16 hexadecimal digits for this class of machine with `engine` at `engine_version`."""
    facts = [
        "ft1",
        [_gpu_facts(gpu) for gpu in sorted(hardware.gpus, key=lambda gpu: (gpu.name, gpu.index))],
        hardware.cpu.model,
        hardware.cpu.physical_cores,
        hardware.cpu.usable_cores,
        # The kernel's own share of RAM differs by some MiB from boot to boot.
        round(hardware.ram.total_bytes / GIB),
        round(hardware.ram.cgroup_limit_bytes / GIB) if hardware.ram.cgroup_limit_bytes else None,
        hardware.os.arch,
        hardware.os.is_wsl,
        hardware.software.driver,
        engine,
        engine_version,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _gpu_facts(gpu: Gpu) -> list[str | int | float | None]:
    link = gpu.pcie
    return [gpu.vendor, gpu.name, gpu.vram_total_bytes // MIB, link.max_generation, link.max_width, gpu.power_limit_w]
