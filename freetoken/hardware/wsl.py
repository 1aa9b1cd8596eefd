"""Whether this is WSL, which version, and what Windows itself has free: WSL's MemAvailable hides that.

The two Windows programs take up to a second each, so they run at once, only under WSL, and never longer than
`TIMEOUT_S`; without interop (a container, `interop.enabled=false`) their answers are simply not known.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from freetoken.hardware.reader import Reader

TIMEOUT_S = 3.0
_POWERSHELL = "/mnt/c/Windows/System32/WindowsPowerShell/v1.0/powershell.exe"
_FREE_MEMORY = "(Get-CimInstance Win32_OperatingSystem).FreePhysicalMemory"


@dataclass(frozen=True)
class WindowsFacts:
    """What only Windows knows; None where it did not answer."""

    wsl_version: str | None = None
    available_bytes: int | None = None


def is_wsl(reader: Reader) -> bool:
    """Whether this is WSL, also in a container on it or with a kernel of one's own."""
    marks = ("/dev/dxg", "/proc/sys/fs/binfmt_misc/WSLInterop", "/proc/sys/fs/binfmt_misc/WSLInterop-late")
    return "microsoft" in reader.word("/proc/sys/kernel/osrelease").lower() or any(map(reader.exists, marks))


def read_windows(reader: Reader) -> WindowsFacts:
    """WSL's own version and Windows' free memory, each None where it did not answer in time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        version = pool.submit(_wsl_version, reader)
        available = pool.submit(_windows_available_bytes, reader)
        return WindowsFacts(version.result(), available.result())


def decode_windows(output: bytes) -> str:
    """Text of a Windows program, which may be UTF-16 without a mark (as wsl.exe writes it) or UTF-8."""
    if output[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return output.decode("utf-16", errors="replace")
    if b"\0" in output[:64]:
        return output.decode("utf-16-le", errors="replace")
    return output.decode("utf-8", errors="replace")


def parse_wsl_version(output: bytes) -> str | None:
    """`2.7.13.0` from the first line of `wsl.exe --version`, whatever Windows' language is."""
    lines = decode_windows(output).strip().splitlines()
    match = re.search(r"\d+\.\d+\.\d+(\.\d+)?", lines[0]) if lines else None
    return match[0] if match else None


def _wsl_version(reader: Reader) -> str | None:
    program = reader.which("wsl.exe") or _existing(reader, "/mnt/c/Windows/System32/wsl.exe")
    output = reader.run((program, "--version"), TIMEOUT_S) if program else None
    return parse_wsl_version(output) if output else None


def _windows_available_bytes(reader: Reader) -> int | None:
    program = reader.which("powershell.exe") or _existing(reader, _POWERSHELL)
    argv = (program, "-NoProfile", "-NonInteractive", "-Command", _FREE_MEMORY) if program else None
    text = decode_windows(reader.run(argv, TIMEOUT_S) or b"").strip() if argv else ""
    return int(text) * 1024 if text.isdigit() else None  # Windows answers in KiB


def _existing(reader: Reader, name: str) -> str | None:
    return name if reader.exists(name) else None
