"""Host memory: what is there, what is really available, and how much of it may be page-locked."""

from __future__ import annotations

from pathlib import Path

from freetoken.hardware.cgroup import CgroupLimits
from freetoken.hardware.model import Os, Ram
from freetoken.hardware.reader import Reader, parse_table
from freetoken.hardware.wsl import WindowsFacts

#: Share of RAM that the upstream engine takes as WSL's page-lock ceiling; real ceilings differ, so it is a guess.
WSL_PINNABLE_RATIO = 0.4


def read_ram(reader: Reader, system: Os, limits: CgroupLimits, windows: WindowsFacts | None = None) -> Ram:
    """Host memory below `reader`; available is the least of the kernel's figure and what every cgroup leaves."""
    table = parse_table(reader.text("/proc/meminfo"))
    total = _kib(table, "MemTotal") or _total_by_psutil()
    available = _kib(table, "MemAvailable")
    if available is None:  # kernels before 3.14, and some sandboxes
        available = sum(_kib(table, name) or 0 for name in ("MemFree", "Cached", "Buffers"))
    memory = limits.memory if limits.memory and limits.memory.limit_bytes < total else None
    if memory is not None:
        available = min(available, memory.left_bytes)
    swap_total = _kib(table, "SwapTotal") or 0
    return Ram(
        total_bytes=total,
        available_bytes=min(available, total),
        cgroup_limit_bytes=memory.limit_bytes if memory else None,
        cgroup_used_bytes=memory.used_bytes if memory else None,
        swap_total_bytes=swap_total,
        swap_used_bytes=max(0, swap_total - (_kib(table, "SwapFree") or 0)),
        tmpfs_used_bytes=_tmpfs_used_bytes(reader),
        pinnable_bytes=int(total * WSL_PINNABLE_RATIO) if system.is_wsl else None,
        memlock_bytes=reader.memlock(),
        windows_available_bytes=windows.available_bytes if windows else None,
    )


def _kib(table: dict[str, str], name: str) -> int | None:
    number = table.get(name, "").removesuffix("kB").strip()
    return int(number) * 1024 if number.isdigit() else None


def _total_by_psutil() -> int:  # pragma: no cover - where there is no /proc
    import psutil

    return int(psutil.virtual_memory().total)


def _tmpfs_used_bytes(reader: Reader) -> int:
    """Bytes that tmpfs mounts hold; a file system that is mounted twice counts once."""
    used: dict[str, int] = {}
    for line in reader.text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) >= 5 and tail[:1] == ["tmpfs"] and fields[2] not in used:
            try:
                used[fields[2]] = reader.disk_usage(Path(_unescape(fields[4]))).used
            except OSError:
                continue
    return sum(used.values())


def _unescape(mount_point: str) -> str:
    """The kernel writes a space in a mount point as `\\040`."""
    return mount_point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
