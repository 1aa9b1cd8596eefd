"""Checks of WSL: its version, what keeps it alive, and how much may be page-locked. Pure: every fact comes in."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from freetoken.doctor.facts import Facts
from freetoken.doctor.model import Check, failed, passed, skipped, warned
from freetoken.hardware.model import Hardware
from freetoken.units import GIB, format_bytes

LEAST_WSL = "2.7.13"
#: WSL ends an idle virtual machine after this long where nothing is set.
DEFAULT_IDLE_TIMEOUT_MS = 60_000
_CONFIG = "%UserProfile%\\.wslconfig"


def check_wsl(hardware: Hardware, facts: Facts) -> Iterator[Check]:
    """Everything about WSL; one skipped check elsewhere."""
    if not hardware.os.is_wsl:
        yield skipped("wsl", "this is not WSL")
        return
    yield check_version(hardware)
    yield check_idle_timeout(facts)
    yield check_pin_limit(hardware, facts)


def check_version(hardware: Hardware) -> Check:
    """2.7.13 or newer: older ones pin less host memory."""
    version = hardware.os.wsl_version
    if version is None:
        return warned(
            "wsl_version", "WSL's version cannot be read", "`wsl.exe --version` in a Windows terminal shows it"
        )
    try:
        is_older = Version(version) < Version(LEAST_WSL)
    except InvalidVersion:
        is_older = False
    if is_older:
        return failed(
            "wsl_version", f"WSL {version} is older than {LEAST_WSL}", "`wsl.exe --update`, then `wsl.exe --shutdown`"
        )
    return passed("wsl_version", f"WSL {version}")


def check_idle_timeout(facts: Facts) -> Check:
    """WSL ends its machine, and every server in it, when the last window closes."""
    timeout = facts.wsl.vm_idle_timeout_ms
    where = facts.wsl.path or _CONFIG
    fix = f"put `vmIdleTimeout=-1` under `[wsl2]` in {where}, then `wsl.exe --shutdown`"
    if timeout is None:
        found = f"vmIdleTimeout is not set: WSL ends {DEFAULT_IDLE_TIMEOUT_MS // 1000} s after its last window closes"
        return warned("wsl_idle", found, fix)
    if 0 <= timeout < 24 * 3600 * 1000:
        return warned("wsl_idle", f"vmIdleTimeout is {timeout} ms: a server ends with the last window", fix)
    return passed("wsl_idle", f"vmIdleTimeout is {timeout} in {where}")


def check_pin_limit(hardware: Hardware, facts: Facts) -> Check:
    """How much host memory can be page-locked, tried out where there is a GPU."""
    probed, guessed = facts.pinnable_probed_bytes, hardware.ram.pinnable_bytes
    if probed is None:
        found = f"pinning was not tried; usual is about {format_bytes(guessed or 0)}"
        return skipped("pin_limit", f"{found}; `ft doctor --pin` tries it")
    found = f"{format_bytes(probed)} of host memory can be pinned"
    fix = "raise `memory=` in .wslconfig and update WSL; a plan keeps the rest on the CPU"
    if probed < 2 * GIB:
        return failed("pin_limit", f"only {found}: experts cannot be fetched at full speed", fix)
    if guessed is not None and probed < guessed:
        return warned("pin_limit", f"{found}, less than the usual {format_bytes(guessed)}", fix)
    return passed("pin_limit", found)
