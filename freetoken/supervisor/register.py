"""The machine-wide register of this user: which deployments run, whose state folder they belong to, who launches now.

One file a run under the runtime folder (0700), written to a temporary name and renamed; locks beside them, which end
with their holder. A record only points: what is true of a run stands in its run folder and in /proc, and `life.py`
compares the two. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from freetoken import paths
from freetoken.errors import FtError
from freetoken.supervisor.files import read_json, write_json
from freetoken.supervisor.launch import Launch
from freetoken.supervisor.locks import FileLock
from freetoken.supervisor.process import ProcessId

#: How the lock of a study on a device is called.
STUDY_PREFIX = "tune-"


@dataclass(frozen=True)
class Deployment:
    """One run as the register knows it. Bytes are what its plan said."""

    run_id: str
    name: str
    run_dir: str
    state_dir: str
    engine: str
    model: str
    host: str
    port: int
    extra_ports: tuple[int, ...] = ()
    gpu: str | None = None
    planned_vram_bytes: int = 0
    planned_ram_bytes: int = 0
    keeper: ProcessId | None = None
    engine_process: ProcessId | None = None
    created_at: str = ""
    #: When a generation and a full prefill chunk succeeded; None while that is still to come.
    proven_at: str | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run_dir)

    @property
    def base_url(self) -> str:
        """Where the engine answers, as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Deployment:
        """The record in `value`. Raises KeyError, TypeError or ValueError."""
        names = {one.name for one in fields(cls)}
        known = {key: one for key, one in value.items() if key in names}
        known["extra_ports"] = tuple(known.get("extra_ports", ()))
        known["keeper"] = ProcessId.from_dict(known.get("keeper"))
        known["engine_process"] = ProcessId.from_dict(known.get("engine_process"))
        return cls(**known)


def make_record(launch: Launch, run_dir: Path) -> Deployment:
    """The record of a launch that is about to happen."""
    return Deployment(
        run_id=launch.run_id,
        name=launch.name,
        run_dir=str(run_dir),
        state_dir=launch.state_dir,
        engine=launch.engine,
        model=launch.model,
        host=launch.host,
        port=launch.port,
        extra_ports=launch.extra_ports,
        gpu=launch.gpu,
        planned_vram_bytes=launch.planned_vram_bytes,
        planned_ram_bytes=launch.planned_ram_bytes,
        created_at=launch.created_at,
    )


def open_runtime_dir() -> Path:
    """The runtime folder, made with 0700. Raises FtError where it belongs to somebody else."""
    folder = paths.runtime_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = os.stat(folder)
    if found.st_uid != os.geteuid():
        raise FtError(
            f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}",
            hint="set FT_RUNTIME_DIR to a folder of your own",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(folder, 0o700)
    return folder


def states_dir() -> Path:
    """Where a keeper writes its state when the run folder has no space."""
    return paths.runtime_dir() / "states"


def write_record(record: Deployment) -> None:
    """Registers a run, or replaces its record."""
    write_json(_record_path(record.run_id), asdict(record))


def update_record(run_id: str, **changes: Any) -> None:
    """Changes fields of a record; nothing happens where there is none any more."""
    record = read_record(run_id)
    if record is not None:
        write_record(replace(record, **changes))


def remove_record(run_id: str) -> None:
    """Takes a run out of the register, with what its keeper may have left beside it."""
    _record_path(run_id).unlink(missing_ok=True)
    (states_dir() / f"{run_id}.json").unlink(missing_ok=True)


def read_record(run_id: str) -> Deployment | None:
    """The record of a run; None where there is none."""
    value = read_json(_record_path(run_id))
    try:
        return Deployment.from_dict(value) if value is not None else None
    except (KeyError, TypeError, ValueError):
        return None


def read_records() -> tuple[Deployment, ...]:
    """Every record of this user on this machine, oldest first."""
    folder = paths.runtime_dir() / "deployments"
    names = sorted(path.stem for path in folder.glob("*.json") if not path.name.startswith("."))
    return tuple(record for record in (read_record(name) for name in names) if record is not None)


def deployment_lock(state_dir: Path, name: str, purpose: str = "") -> FileLock:
    """The lock that whoever changes the deployment `name` of `state_dir` holds."""
    open_runtime_dir()
    return FileLock(_locks_dir() / f"{name}-{_digest(state_dir)}.lock", purpose)


def list_locked_names(state_dir: Path) -> tuple[str, ...]:
    """Names of `state_dir` that an `ft` has ever held the lock of since the machine started."""
    end = f"-{_digest(state_dir)}.lock"
    return tuple(sorted(path.name.removesuffix(end) for path in _locks_dir().glob(f"*{end}")))


def request_stop(state_dir: Path, name: str) -> None:
    """Tells whoever is changing the deployment, or waits for that, to end without starting anything."""
    open_runtime_dir()
    write_json(_stop_path(state_dir, name), {"token": secrets.token_hex(8)})


def read_stop(state_dir: Path, name: str) -> str:
    """A word that is another one after each `request_stop`; "" before the first."""
    return str((read_json(_stop_path(state_dir, name)) or {}).get("token", ""))


def device_lock(device: str, purpose: str = "") -> FileLock:
    """The lock on a GPU (its uuid or index), or on `cpu`: one launch at a time reads free memory and takes it."""
    safe = "".join(one if one.isalnum() or one in "-._" else "_" for one in device)
    return FileLock(open_runtime_dir() / "gpus" / f"{safe}.lock", purpose)


def study_lock(device: str, purpose: str = "") -> FileLock:
    """The lock that a study holds on `device` from its first trial to its end: nothing else is to start there."""
    return device_lock(f"{STUDY_PREFIX}{device}", purpose)


def list_studied_devices() -> tuple[str, ...]:
    """Devices that a study was ever made on since the machine started, as the lock files are called."""
    folder = paths.runtime_dir() / "gpus"
    return tuple(sorted(path.stem.removeprefix(STUDY_PREFIX) for path in folder.glob(f"{STUDY_PREFIX}*.lock")))


def _locks_dir() -> Path:
    return paths.runtime_dir() / "locks"


def _digest(state_dir: Path) -> str:
    return hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12]


def _stop_path(state_dir: Path, name: str) -> Path:
    return _locks_dir() / f"{name}-{_digest(state_dir)}.stop"


def _record_path(run_id: str) -> Path:
    folder = open_runtime_dir() / "deployments"
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder / f"{run_id}.json"
