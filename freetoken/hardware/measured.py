"""The rates that were measured on this machine, kept in the state folder so that later plans start from them.

One file for each GPU (by uuid) and memory configuration: another card, other modules or another CPU make another file.
Within it stand general rates, and a row for each engine's kernel, expert format and shape.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from freetoken import paths
from freetoken.errors import FtError
from freetoken.hardware.model import Bandwidth, Gpu, Hardware
from freetoken.hardware.yaml_file import read_yaml_file, write_yaml_file
from freetoken.units import GIB


def read_measured(hardware: Hardware, *, gpu: Gpu | None = None) -> Bandwidth | None:
    """What was measured on `hardware` before; None where nothing was, or the file cannot be used."""
    path = measured_path(hardware, gpu=gpu)
    try:
        return read_yaml_file(path, Bandwidth) if path.is_file() else None
    except (FtError, OSError):
        # Rates only sharpen a plan; a damaged file must not stop a probe, and measuring again replaces it.
        return None


def write_measured(hardware: Hardware, bandwidth: Bandwidth, *, gpu: Gpu | None = None) -> Path:
    """Keeps `bandwidth` as measured on `hardware` with `gpu` (else the one that would be chosen). Returns the file."""
    path = measured_path(hardware, gpu=gpu)
    write_yaml_file(bandwidth, path)
    return path


def measured_path(hardware: Hardware, *, gpu: Gpu | None = None) -> Path:
    """Where the rates of `hardware` with `gpu` (else the one that would be chosen) are kept."""
    gpu = gpu or hardware.pick_gpu()
    identity = (gpu.uuid or gpu.name if gpu else "", hardware.cpu.model, hardware.cpu.usable_cores)
    text = repr((*identity, round(hardware.ram.total_bytes / GIB)))
    return paths.state_dir() / "bandwidth" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.yaml"
