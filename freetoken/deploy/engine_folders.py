"""Environments of engines that are there: whole or damaged, in use, half made, removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from freetoken import paths
from freetoken.deploy import engine_manifest as manifests
from freetoken.deploy.values import DeployModel
from freetoken.errors import FtError, UsageError
from freetoken.supervisor.locks import FileLock

#: Endings of names that no environment has: one that is being built, one that is being removed, an installer's log.
PARTIAL, DOOMED, LOG = ".partial", ".removing", ".install.log"


class Verification(DeployModel):
    """Whether an environment is as it was installed; `problems` are sentences."""

    engine: str
    version: str
    folder: str
    problems: tuple[str, ...] = ()


def verify_engine(name: str, version: str, folder: Path, *, is_thorough: bool = True) -> Verification:
    """Holds the environment at `folder` against what was installed there; every file is hashed where `is_thorough`."""
    known = manifests.read_manifest(folder)
    problems: tuple[str, ...]
    if known is None:
        problems = (f"no {manifests.MANIFEST_FILE}: it was not installed by `ft`, or not to the end",)
    else:
        problems = tuple(manifests.find_damage(folder, known, is_thorough=is_thorough))
    return Verification(engine=name, version=version, folder=str(folder), problems=problems)


def remove_engine(name: str, version: str) -> Path:
    """Removes an environment and what is left of making it. FtError where it is in use, UsageError without one."""
    folder = paths.engines_dir() / f"{name}-{version}"
    partial = folder.with_name(f".{folder.name}{PARTIAL}")
    if not folder.exists() and not partial.exists():
        raise UsageError(f"no environment `{folder.name}` under {paths.engines_dir()}", hint="`ft engine list`")
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    if not lock.try_acquire():
        raise FtError(f"`{folder.name}` is being installed by another `ft`")
    with lock:
        refuse_in_use(folder)
        for one in (folder, partial):
            if one.exists():
                discard(one)
        folder.with_name(f"{folder.name}{LOG}").unlink(missing_ok=True)
        lock.path.unlink(missing_ok=True)
    return folder


def list_half_made(name: str) -> tuple[str, ...]:
    """Versions whose installation was begun and not finished."""
    found = paths.engines_dir().glob(f".{name}-*{PARTIAL}")
    return tuple(sorted(path.name.removeprefix(f".{name}-").removesuffix(PARTIAL) for path in found))


def refuse_in_use(folder: Path) -> None:
    """Raises FtError where a process runs out of the environment at `folder`."""
    users = sorted(find_users(folder).items())
    if users:
        listed = ", ".join(f"{name} (process {pid})" for pid, name in users[:4])
        raise FtError(f"`{folder.name}` is in use by {listed}", hint="`ft stop` what runs on it first")


def find_users(folder: Path) -> dict[int, str]:
    """Pid -> name of every process whose command or working folder lies in `folder`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            name = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if command.startswith(f"{folder}{os.sep}"):
            found[int(entry.name)] = name
    return found


def sweep_doomed() -> None:
    """Finishes removals that were interrupted."""
    for path in paths.engines_dir().glob(f".*{DOOMED}"):
        shutil.rmtree(path, ignore_errors=True)


def discard(folder: Path) -> None:
    """Removes an environment."""
    # Renamed first: a removal that is interrupted leaves nothing that looks like an environment.
    doomed = folder.with_name(f".{folder.name.lstrip('.')}{DOOMED}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
