"""How fast bytes move on a machine, every figure with how it is known: measured, vendor or guessed.

A rate that the profile lacks is derived from the link, the card and the disk, and said to be guessed.
"""

from __future__ import annotations

from typing import NamedTuple

from freetoken.hardware.model import Gpu, Hardware

#: Bytes per second and lane that a pinned copy in expert-sized pieces reaches, by PCIe generation
#: (measured: 12.3 GB/s on 3.0 x16, 11.8 on 4.0 x8, 25.1 on 4.0 x16, 52.7 on 5.0 x16).
PCIE_BYTES_PER_S_PER_LANE = {1: 0.19e9, 2: 0.38e9, 3: 0.77e9, 4: 1.55e9, 5: 3.25e9, 6: 6.4e9}
DISK_BYTES_PER_S = {"nvme": 2.5e9, "ssd": 0.5e9, "hdd": 0.15e9, "network": 0.1e9, "unknown": 0.5e9}
#: Dense 16-bit matrix FLOP/s of one SM with fp32 accumulation, by compute capability.
FLOPS_PER_SM = {7: 0.4e12, 8: 0.65e12, 9: 6.0e12, 10: 12.0e12, 12: 0.75e12}
#: fp32 FLOP/s of one CPU core with AVX2 at a sustained clock.
FLOPS_PER_CORE = 60e9


class Rates(NamedTuple):
    """Bandwidths in bytes/s and compute in FLOP/s, with the names of those that are guessed."""

    vram: float
    pcie: float
    pcie_pageable: float
    dram: float
    cpu_experts: float
    disk: float
    flops: float
    #: PCIe and CPU experts while both run; None where they were never measured together.
    pcie_overlap: float | None = None
    cpu_overlap: float | None = None
    guessed: tuple[str, ...] = ()


def resolve_rates(hardware: Hardware, gpu: Gpu | None) -> Rates:
    """The rates of `hardware` with `gpu` (None: on the CPU), gaps filled by stated guesses."""
    known, guessed = hardware.bandwidth, []

    def take(name: str, value: float | None, guess: float) -> float:
        if value is None or known.sources.get(f"{name}_bytes_per_s") == "guessed":
            guessed.append(name)
        return guess if value is None else value

    dram = take("dram", known.dram_bytes_per_s, _guess_dram(hardware))
    pcie = take("h2d", known.h2d_bytes_per_s, _guess_pcie(gpu)) if gpu is not None else dram
    return Rates(
        vram=take("vram", known.vram_bytes_per_s, _guess_vram(gpu)) if gpu is not None else dram,
        pcie=pcie,
        pcie_pageable=known.h2d_pageable_bytes_per_s or min(6e9, pcie / 2),
        dram=dram,
        cpu_experts=known.cpu_experts_bytes_per_s or 0.75 * dram,
        disk=take("disk", known.disk_bytes_per_s, DISK_BYTES_PER_S[hardware.disk.kind]),
        flops=_guess_flops(hardware, gpu),
        pcie_overlap=known.h2d_overlap_bytes_per_s,
        cpu_overlap=known.cpu_experts_overlap_bytes_per_s,
        guessed=tuple(guessed),
    )


def _guess_pcie(gpu: Gpu | None) -> float:
    link = gpu.pcie if gpu is not None else None
    if link is None or not (link.max_generation or link.generation):
        return 10e9
    # An idle card shows a lower link than it trains to under load.
    generation, width = link.max_generation or link.generation or 3, link.max_width or link.width or 8
    return PCIE_BYTES_PER_S_PER_LANE.get(generation, 3.25e9) * width


def _guess_vram(gpu: Gpu | None) -> float:
    major = _capability_major(gpu)
    per_sm = 25e9 if major in (9, 10) else 9.5e9
    return per_sm * gpu.sm_count if gpu is not None and gpu.sm_count else 300e9


def _guess_dram(hardware: Hardware) -> float:
    # One core streams about 10 GB/s; two channels of DDR4 end near 32 GB/s.
    return min(32e9, 10e9 * max(1, hardware.cpu.usable_cores))


def _guess_flops(hardware: Hardware, gpu: Gpu | None) -> float:
    if gpu is None:
        return FLOPS_PER_CORE * hardware.cpu.usable_cores
    return FLOPS_PER_SM.get(_capability_major(gpu), 0.5e12) * (gpu.sm_count or 30)


def _capability_major(gpu: Gpu | None) -> int:
    text = gpu.compute_capability if gpu is not None else None
    return int(text.split(".")[0]) if text else 8
