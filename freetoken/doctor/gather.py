"""Reads what the checks need: power, WSL's settings, ports, PATH, state folder, database, deployments, engines.

Through the same `Reader` as the probe, so that recorded machines drive it; what belongs to this process alone (ports,
database, register) is asked of the rooms that own it, and left out with `is_here=False`.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

from freetoken import paths
from freetoken.adapters import ADAPTERS, get_adapter
from freetoken.adapters.base import EngineNeeds
from freetoken.doctor.facts import Facts, FoundFt, PortState, Power, ServiceState, StaleDeployment, WslSettings
from freetoken.errors import FtError
from freetoken.hardware.model import Hardware
from freetoken.hardware.reader import Reader
from freetoken.hardware.wsl import decode_windows

DEFAULT_PORT = 1919
_OOM_DAEMONS = frozenset(("earlyoom", "nohang", "oomd"))
_POWERCFG = "/mnt/c/Windows/System32/powercfg.exe"
#: Windows' own schemes, by the start of their GUID.
_SCHEMES: dict[str, Literal["saver", "balanced", "performance"]] = {
    "a1841308": "saver", "381b4222": "balanced", "8c5e7fda": "performance", "e9a42b02": "performance",
}  # fmt: skip


def gather_facts(
    hardware: Hardware, *, reader: Reader | None = None, is_here: bool = True, pinnable_bytes: int | None = None
) -> Facts:
    """Everything that the checks need beyond `hardware`. Reads only, but for a probe file in the state folder.

    `is_here` = False leaves out what is true of this process's own machine alone.
    """
    reader = reader or Reader()
    facts = Facts(
        power=read_power(reader, is_wsl=hardware.os.is_wsl),
        has_systemd=read_systemd(reader),
        wsl=read_wsl_settings(reader) if hardware.os.is_wsl else WslSettings(),
        pinnable_probed_bytes=pinnable_bytes,
        oom_daemons=read_oom_daemons(reader),
        ft_on_path=find_ft(reader, Path(sys.executable).parent),
    )
    return facts.model_copy(update=_own_facts()) if is_here else facts


def read_needs() -> dict[str, EngineNeeds]:
    """What each engine that `ft` can drive asks of a machine."""
    return {name: get_adapter(name).needs for name in ADAPTERS}


def read_power(reader: Reader, *, is_wsl: bool = False) -> Power:
    """Battery or mains, the firmware's profile, and Windows' scheme under WSL."""
    base = "/sys/class/power_supply"
    supplies = {name: reader.word(f"{base}/{name}/type") for name in reader.names(base)}
    mains = [reader.number(f"{base}/{name}/online") for name, kind in supplies.items() if kind in ("Mains", "USB")]
    batteries = [
        reader.word(f"{base}/{name}/status")
        for name, kind in supplies.items()
        # A mouse's or a headset's battery is a `Device`, the machine's own a `System` or nothing.
        if kind == "Battery" and reader.word(f"{base}/{name}/scope") != "Device"
    ]
    on_battery = None
    if batteries:
        on_battery = "Discharging" in batteries and 1 not in mains
    elif 1 in mains:
        on_battery = False
    return Power(
        on_battery=on_battery,
        platform_profile=reader.word("/sys/firmware/acpi/platform_profile") or None,
        windows_scheme=_windows_scheme(reader) if is_wsl else None,
    )


def read_systemd(reader: Reader) -> bool | None:
    """Whether systemd is the first process; None where /proc does not tell."""
    if reader.exists("/run/systemd/system"):
        return True
    first = reader.word("/proc/1/comm")
    return first == "systemd" if first else None


def read_wsl_settings(reader: Reader) -> WslSettings:
    """The `.wslconfig` of the Windows user, the first one found."""
    users = "/mnt/c/Users"
    for user in reader.names(users):
        name = f"{users}/{user}/.wslconfig"
        if not (text := reader.text(name)):
            continue
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        try:
            parser.read_string(text.lstrip("\ufeff"))
        except configparser.Error:
            return WslSettings(path=name)
        timeout = parser.get("wsl2", "vmIdleTimeout", fallback="").strip()
        return WslSettings(
            path=name,
            vm_idle_timeout_ms=int(timeout) if re.fullmatch(r"-?\d+", timeout) else None,
            memory=parser.get("wsl2", "memory", fallback=None),
            auto_memory_reclaim=parser.get("experimental", "autoMemoryReclaim", fallback=None),
        )
    return WslSettings()


def read_oom_daemons(reader: Reader) -> tuple[str, ...]:
    """Early OOM daemons among the running processes."""
    running = {reader.word(f"/proc/{pid}/comm") for pid in reader.names("/proc") if pid.isdigit()}
    return tuple(sorted(running & _OOM_DAEMONS))


def find_ft(reader: Reader, own_folder: Path) -> tuple[FoundFt, ...]:
    """Every `ft` on PATH, in the order in which a shell looks; `own_folder` holds our own."""
    found: dict[str, FoundFt] = {}
    for folder in reader.environ.get("PATH", "").split(os.pathsep):
        path = f"{folder.rstrip('/')}/ft"
        if not folder.startswith("/") or path in found or not reader.path(path).is_file():
            continue
        is_ours = str(own_folder) == folder.rstrip("/") or reader.resolve(folder) == reader.resolve(str(own_folder))
        found[path] = FoundFt(path=path, is_ours=is_ours, is_upstream=not is_ours and _is_upstream(reader, path))
    return tuple(found.values())


def _is_upstream(reader: Reader, script: str) -> bool:
    """Whether the environment of the script `ft` holds the upstream distribution."""
    first = reader.text(script).split("\n", 1)[0]
    match = re.match(r"#!\s*(/\S+/bin)/python", first)
    prefix = (match[1] if match else reader.resolve(script).rsplit("/", 1)[0]).removesuffix("/bin")
    for version in reader.names(f"{prefix}/lib"):
        for name in reader.names(f"{prefix}/lib/{version}/site-packages"):
            if re.fullmatch(r"freetoken-\d.*\.dist-info", name):
                return True
    return False


def _windows_scheme(reader: Reader) -> Literal["saver", "balanced", "performance", "other"] | None:
    program = reader.which("powercfg.exe") or (_POWERCFG if reader.exists(_POWERCFG) else None)
    output = reader.run((program, "/getactivescheme"), 3.0) if program else None
    match = re.search(r"\b([0-9a-f]{8})-[0-9a-f]{4}-", decode_windows(output or b"").lower())
    return _SCHEMES.get(match[1], "other") if match else None


def _own_facts() -> dict[str, object]:
    return _read_state() | _read_database() | {
        "ports": _read_ports(),
        "stale": _read_stale(),
        "services": _read_services(),
        "engines": _read_engines(),
        "upstream_in_our_environment": _has_upstream(),
    }  # fmt: skip


def _read_ports() -> tuple[PortState, ...]:
    from freetoken.supervisor.ports import find_port_holder

    found = ((port, find_port_holder("127.0.0.1", port)) for port in (DEFAULT_PORT, DEFAULT_PORT + 1))
    return tuple(PortState(port=port, holder=holder.describe() if holder else None) for port, holder in found)


def _read_state() -> dict[str, object]:
    folder = paths.state_dir()
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    problem = None
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".ft-doctor-"):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        problem, free = f"cannot be written: {(error.strerror or str(error)).lower()}", None
    return {"state_dir": str(folder), "state_problem": problem, "state_free_bytes": free}


def _read_database() -> dict[str, object]:
    from freetoken.store.database import open_for_reading, read_version

    try:
        connection = open_for_reading(paths.database_path())
    except FtError as error:
        return {"database_problem": error.message, "database_fix": error.hint}
    if connection is None:
        return {}
    try:
        return {"database_version": read_version(connection)}
    finally:
        connection.close()


def _read_stale() -> tuple[StaleDeployment, ...]:
    from freetoken.supervisor.life import examine_all

    try:
        lives = examine_all()
    except (FtError, OSError):
        return ()
    gone = [life for life in lives if life.condition in ("dead", "unkept")]
    return tuple(StaleDeployment(name=life.record.name, words=life.words or life.condition) for life in gone)


def _read_services() -> tuple[ServiceState, ...]:
    from freetoken.deploy.service import read_services
    from freetoken.supervisor.systemd import Systemd

    found = read_services((Systemd("user"), Systemd("system")))
    return tuple(
        ServiceState(deployment=one.deployment, scope=one.scope, condition=one.condition, problems=one.problems)
        for one in found
    )


def _read_engines() -> dict[str, str | None]:
    from freetoken.deploy.engines import find_engine
    from freetoken.recipe.model import EngineRef

    found: dict[str, str | None] = {}
    for name in ADAPTERS:
        try:
            home = find_engine(EngineRef.model_validate({"name": name}), get_adapter(name))
        except FtError:
            home = None
        found[name] = (home.version or "version unknown") if home else None
    return found


def _has_upstream() -> bool:
    from importlib import metadata

    try:
        metadata.distribution("freetoken")
    except metadata.PackageNotFoundError:
        return False
    return True
