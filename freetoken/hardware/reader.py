"""The machine as files, mounts and programs: the one door through which `hardware/` looks at it.

Everything is injectable, so that a folder of recorded files plays a laptop, a server or WSL. Nothing here raises
for what is not there: a missing file reads as `""`, a missing program or one that hangs answers None.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

#: argv, timeout in seconds -> stdout as bytes; None where it is missing, fails or takes too long.
Runner = Callable[[tuple[str, ...], float], bytes | None]


class DiskUsage(Protocol):
    """What `shutil.disk_usage` answers, in bytes."""

    @property
    def total(self) -> int:
        """Size of the file system."""

    @property
    def used(self) -> int:
        """In use."""

    @property
    def free(self) -> int:
        """Free for this user."""


def run_program(argv: tuple[str, ...], timeout_s: float) -> bytes | None:
    """Standard output of `argv`; None where the program is missing, fails or exceeds `timeout_s`."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout if done.returncode == 0 else None


def _own_affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # pragma: no cover - not Linux


def _own_memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _package_folder(name: str) -> Path | None:
    """Folder of an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    return Path(folder) if folder else None


@dataclass(frozen=True)
class Reader:
    """Files below `root`, programs through `run`, and this process's own limits."""

    root: Path = Path("/")
    run: Runner = run_program
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    #: Logical CPUs of this process's affinity mask.
    affinity: Callable[[], frozenset[int]] = _own_affinity
    #: RLIMIT_MEMLOCK in bytes; None = unlimited.
    memlock: Callable[[], int | None] = _own_memlock
    disk_usage: Callable[[Path], DiskUsage] = shutil.disk_usage
    package_folder: Callable[[str], Path | None] = _package_folder
    #: Kernel and machine in lower case: `linux`, `x86_64`.
    system: str = field(default_factory=lambda: os.uname().sysname.lower())
    arch: str = field(default_factory=lambda: os.uname().machine)

    def path(self, name: str) -> Path:
        """`/proc/meminfo` below the root; `name` is absolute."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """The file's text, `""` where it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def word(self, name: str) -> str:
        """The file's text without surrounding white space."""
        return self.text(name).strip()

    def number(self, name: str) -> int | None:
        """The file as one whole number, None where it is not one."""
        try:
            return int(self.word(name), 0)
        except ValueError:
            return None

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder of that name."""
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def names(self, folder: str) -> tuple[str, ...]:
        """Names in `folder`, sorted; empty where it cannot be listed."""
        try:
            return tuple(sorted(entry.name for entry in self.path(folder).iterdir()))
        except OSError:
            return ()

    def resolve(self, name: str) -> str:
        """`name` with symbolic links followed, as seen from the root."""
        try:
            real = self.path(name).resolve()
            return "/" + str(real.relative_to(self.root.resolve()))
        except (OSError, ValueError, RuntimeError):
            return name

    def which(self, program: str) -> str | None:
        """Where `program` lies on PATH, as seen from the root; None where it does not."""
        for folder in self.environ.get("PATH", "").split(os.pathsep):
            candidate = f"{folder.rstrip('/')}/{program}"
            if folder.startswith("/") and os.access(self.path(candidate), os.X_OK) and self.path(candidate).is_file():
                return candidate
        return None


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs of `0-3,8,10-11`; parts that are not numbers are left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.strip().isdigit() and (not high or high.strip().isdigit()):
            cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


def parse_table(text: str) -> dict[str, str]:
    """`Key: value` lines as a dict; the first of several lines with one key counts."""
    table: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            table.setdefault(key.strip(), value.strip())
    return table
