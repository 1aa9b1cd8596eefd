"""`probe_hardware`: what this machine has, read now.

Fast where there is no GPU (well under 150 ms: files only), and silent about what is missing: a tool, a driver or a
sandbox that hides half of /proc leaves a field empty and never raises. Which figures are worth what is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from freetoken import paths
from freetoken.hardware.catalog import find_card
from freetoken.hardware.cgroup import read_cgroup_limits
from freetoken.hardware.cpu import read_cpu
from freetoken.hardware.disk import read_disk
from freetoken.hardware.measured import read_measured
from freetoken.hardware.model import Bandwidth, Hardware, Os, Source
from freetoken.hardware.nvidia import load_nvml, read_nvidia
from freetoken.hardware.other_gpus import read_other_gpus
from freetoken.hardware.ram import read_ram
from freetoken.hardware.reader import Reader, parse_table
from freetoken.hardware.toolchain import read_software
from freetoken.hardware.wsl import WindowsFacts, is_wsl, read_windows

_CACHE_VARIABLES = (
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
)


def probe_hardware(
    disk_path: Path | None = None,
    *,
    reader: Reader | None = None,
    nvml_loader: Callable[[], Any] = load_nvml,
) -> Hardware:
    """This machine as a `Hardware`; the disk is the one that holds `disk_path` (else the hub cache, where models land).

    Rates are the card's specified memory bandwidth and, on this very machine, what `ft probe --bandwidth` measured
    last. `reader` and `nvml_loader` are for tests and recordings. Never raises for a missing tool, driver or file.
    """
    is_here, reader = reader is None, reader or Reader()
    system, windows = read_system(reader)
    limits = read_cgroup_limits(reader)
    ram = read_ram(reader, system, limits, windows)
    nvidia = read_nvidia(reader, ram, nvml_loader)
    others, notes = read_other_gpus(reader, len(nvidia.gpus), is_nvidia_read=bool(nvidia.gpus))
    sources: dict[str, Source] = {"ram.pinnable_bytes": "guessed"} if ram.pinnable_bytes is not None else {}
    hardware = Hardware(
        gpus=nvidia.gpus + others,
        cpu=read_cpu(reader, limits),
        ram=ram,
        disk=read_disk(reader, disk_path or model_folder(reader)),
        os=system,
        software=read_software(reader, nvidia.driver, nvidia.cuda_driver),
        sources=sources,
        is_probed=True,
        notes=nvidia.notes + notes,
    )
    rates = specified_rates(hardware)
    if is_here and (measured := read_measured(hardware)) is not None:
        rates = rates.merged(measured)
    return hardware.model_copy(update={"bandwidth": rates})


def specified_rates(hardware: Hardware) -> Bandwidth:
    """The memory bandwidth that the vendor specifies for the GPU that would be chosen; empty where it is not known."""
    gpu = hardware.pick_gpu()
    card = find_card(gpu.name, gpu.vram_total_bytes) if gpu else None
    if card is None:
        return Bandwidth()
    return Bandwidth(vram_bytes_per_s=card.vram_gb_per_s * 1e9, sources={"vram_bytes_per_s": "vendor"})


def read_system(reader: Reader) -> tuple[Os, WindowsFacts | None]:
    """The operating system and, under WSL, what Windows answered."""
    windows = read_windows(reader) if is_wsl(reader) else None
    release = parse_table(reader.text("/etc/os-release").replace("=", ":")).get("PRETTY_NAME", "").strip("\"'")
    system = Os(
        name=reader.system,
        distribution=release or None,
        kernel=reader.word("/proc/sys/kernel/osrelease") or None,
        arch=reader.arch,
        is_wsl=windows is not None,
        wsl_version=windows.wsl_version if windows else None,
        is_container=_is_container(reader),
    )
    return system, windows


def model_folder(reader: Reader) -> Path:
    """Where the hub cache keeps models: `HF_HUB_CACHE`, `HF_HOME`/hub, else the user's cache; else our own folder."""
    for name, below in _CACHE_VARIABLES:
        if value := reader.environ.get(name):
            return Path(value).expanduser() / below
    try:
        return Path.home() / ".cache" / "huggingface" / "hub"
    except RuntimeError:  # a user without a home
        return paths.models_dir()


def _is_container(reader: Reader) -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    return any(map(reader.exists, marks)) or "container" in reader.environ
