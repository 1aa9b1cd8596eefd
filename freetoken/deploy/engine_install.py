"""Installs, verifies and removes the environments of engines under `<state>/engines/`.

An environment is built as `.<engine>-<version>.partial` and renamed when its files are checked, its engine has said its
version and `engine.json` is written: whatever has the final name is whole. A killed installation is gone on with (what
pip downloaded and installed is kept), a broken one is mended or made again. `uv` does the work where it is there and
no mirror is configured for pip alone; otherwise `venv` and `pip`, with pip's own configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken import paths
from freetoken.deploy import engine_manifest as manifests
from freetoken.deploy.engine_folders import LOG, PARTIAL, discard, refuse_in_use, sweep_doomed
from freetoken.deploy.engine_manifest import EngineManifest
from freetoken.deploy.engine_packages import clean_environment, has_pip_mirror, run_installer
from freetoken.deploy.engines import choose_version, find_engine
from freetoken.deploy.tools import Progress, Step, ignore_progress
from freetoken.deploy.values import DeployModel
from freetoken.errors import BadFileError, DoesNotFitError, FtError, UsageError
from freetoken.supervisor.files import describe_os_error, format_now
from freetoken.supervisor.locks import FileLock, LockHolder
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.recipe.model import EngineRef


@dataclass(frozen=True)
class Source:
    """Where packages come from, beside what pip's own environment and files say, and which Python runs them."""

    index_url: str | None = None
    find_links: tuple[str, ...] = ()
    is_without_index: bool = False
    python: str | None = None
    #: SHA-256 that the engine's own archive must have; None = whatever the index has.
    sha256: str | None = None


class InstallResult(DeployModel):
    """How an installation ended."""

    engine: str
    version: str
    folder: str
    #: False where it was there and whole already.
    is_new: bool
    manifest: EngineManifest


@dataclass
class Installer:
    """One environment of one engine and version."""

    adapter: EngineAdapter
    version: str
    extras: tuple[str, ...] = ()
    source: Source = field(default_factory=Source)
    progress: Progress = ignore_progress
    #: The lock that is held while it works; what is started inherits it, so that it outlives a killed `ft`.
    _lock_fd: int | None = None

    @property
    def folder(self) -> Path:
        """Where it lies when it is whole."""
        return paths.engines_dir() / f"{self.adapter.name}-{self.version}"

    @property
    def partial(self) -> Path:
        """Where it is built."""
        return self.folder.with_name(f".{self.folder.name}{PARTIAL}")

    @property
    def log(self) -> Path:
        """What the package installer printed."""
        return self.folder.with_name(f"{self.folder.name}{LOG}")

    def preview(self) -> dict[str, object]:
        """What `install` would do; touches nothing."""
        is_there, needed = manifests.read_manifest(self.folder) is not None, self._compute_needed_bytes()
        words = f"{self.folder} is there already" if is_there else (
            f"would install {self.adapter.distribution} {self.version} into {self.folder}, "
            f"about {format_bytes(needed)} of disk"
        )  # fmt: skip
        facts = {"engine": self.adapter.name, "version": self.version, "folder": str(self.folder)}
        return {**facts, "is_installed": is_there, "needed_bytes": needed, "words": words}

    def install(self) -> InstallResult:
        """Makes the environment, or finds it whole. Raises FtError, DoesNotFitError without the disk space for it."""
        with self._locked():
            sweep_doomed()
            known = manifests.read_manifest(self.folder)
            if known is not None and set(self.extras) <= set(known.extras) and not self._is_damaged(known):
                self._refuse_other_archive(known)
                return self._result(known, is_new=False)
            if self.folder.exists():
                refuse_in_use(self.folder)
            self._check_disk()
            manifest = self._build()
            if self.folder.exists():
                discard(self.folder)
            os.rename(self.partial, self.folder)
            self.log.unlink(missing_ok=True)
        return self._result(manifest, is_new=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        def tell(holder: LockHolder | None) -> None:
            self._say(f"waiting for {holder.describe() if holder else 'another `ft`'}")

        lock = FileLock(self.folder.with_name(f".{self.folder.name}.lock"))
        try:
            lock.acquire(on_wait=tell)
        except OSError as error:
            raise FtError(describe_os_error(error, paths.engines_dir())) from error
        with lock:
            self._lock_fd = lock.fileno()
            yield

    def _is_damaged(self, known: EngineManifest) -> bool:
        damage = next(manifests.find_damage(self.folder, known, is_thorough=False), None)
        if damage is not None:
            self._say(f"{damage}; installing it again")
        return damage is not None

    def _check_disk(self) -> None:
        """Raises DoesNotFitError where the disk cannot hold what is still to come."""
        needed, free = self._compute_needed_bytes(), shutil.disk_usage(paths.engines_dir()).free
        if free < needed:
            raise DoesNotFitError(
                f"`{self.folder.name}` needs about {format_bytes(needed)} of disk, {paths.engines_dir()} has "
                f"{format_bytes(free)} free: {format_bytes(needed - free)} are missing",
                hint="free some space, or `--state` a folder on a larger disk",
            )
        self._say(f"about {format_bytes(needed)} of disk are needed, {format_bytes(free)} are free")

    def _compute_needed_bytes(self) -> int:
        """Bytes of disk that are still to come, less what an interrupted installation left."""
        sizes = self.adapter.install_bytes
        whole = max((sizes.get(extra, 0) for extra in ("", *self.extras)), default=0)
        done = manifests.measure_bytes(self.partial) if self.partial.exists() else 0
        return max(0, whole - done)

    def _build(self) -> EngineManifest:
        try:
            self._make_venv()
            archives = self._add_packages()
            self._say("checking what was installed")
            self._refuse_wrong_hash(archives)
            python_version = self._ask_engine()
            _rename_scripts(self.partial, self.folder)
            manifest = EngineManifest(
                engine=self.adapter.name, version=self.version, extras=self.extras, python_version=python_version,
                installer="uv" if self._uv() else "pip", packages=manifests.list_packages(self.partial, archives),
                size_bytes=manifests.measure_bytes(self.partial), created_at=format_now(),
            )  # fmt: skip
            manifests.write_manifest(self.partial, manifest)
        except OSError as error:
            raise FtError(describe_os_error(error, self.partial), hint="run it again: it goes on from here") from error
        return manifest

    # -- the steps --------------------------------------------------------------------------------------------

    def _uv(self) -> str | None:
        """`uv` where it is there and sees the same mirrors as pip does: it reads none of pip's configuration."""
        return None if self.source.sha256 or has_pip_mirror() else shutil.which("uv")

    @property
    def _python(self) -> Path:
        return self.partial / "bin" / "python"

    def _make_venv(self) -> None:
        if self.partial.exists():
            if self._answers():
                self._say("going on with an installation that was interrupted")
                return
            shutil.rmtree(self.partial)
        self._say("making the environment")
        uv, base = self._uv(), self.source.python or sys.executable
        if uv:
            command = [uv, "venv", "--quiet", "--python", base, str(self.partial)]
        else:
            command = [base, "-m", "venv", str(self.partial)]
        self._run(command, "the environment could not be made")

    def _answers(self) -> bool:
        """Whether what an interrupted installation left can be gone on with."""
        command = [str(self._python), "-c", "pass"] if self._uv() else [str(self._python), "-m", "pip", "--version"]
        try:
            return subprocess.run(command, capture_output=True, cwd="/", check=False).returncode == 0
        except OSError:
            return False

    def _add_packages(self) -> dict[str, str]:
        """Installs the engine, mends what an interrupted installation left; back come archive hashes by name."""
        # Made before pip looks: it takes a distribution that is half there for one that is there.
        if half := manifests.find_half_installed(self.partial):
            self._say(f"mending {', '.join(half)}")
            self._install(["--no-deps", "--force-reinstall", *half], "mend.json")
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        archives = self._install([f"{self.adapter.distribution}{extras}=={self.version}"], "report.json")
        if half := manifests.find_half_installed(self.partial):
            raise FtError(f"{half[0]} is incomplete after its installation", hint=f"see {self.log}, and run it again")
        return archives

    def _install(self, wanted: list[str], report_name: str) -> dict[str, str]:
        report = self.partial / report_name
        uv, index = self._uv(), []
        if self.source.index_url:
            index += ["--index-url", self.source.index_url]
        for place in self.source.find_links:
            index += ["--find-links", place]
        if self.source.is_without_index:
            index.append("--no-index")
        if uv:
            command = [uv, "pip", "install", "--python", str(self._python), *index, *wanted]
        else:
            command = [
                str(self._python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check",
                "--progress-bar", "off", "--report", str(report), *index, *wanted,
            ]  # fmt: skip
        self._run(command, f"`{self.folder.name}` could not be installed")
        try:
            found = manifests.read_archive_hashes(json.loads(report.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}
        report.unlink()
        return found

    def _refuse_wrong_hash(self, archives: dict[str, str]) -> None:
        wanted, name = self.source.sha256, manifests.normalise(self.adapter.distribution or "")
        found = archives.get(name)
        if wanted is None or found is None or found == wanted.lower():
            return
        shutil.rmtree(self.partial)
        raise BadFileError(
            f"`{self.folder.name}`: its archive has SHA-256 {found}, {wanted} was asked for; nothing was kept"
        )

    def _refuse_other_archive(self, known: EngineManifest) -> None:
        name = manifests.normalise(self.adapter.distribution or "")
        found = next((one.archive_sha256 for one in known.packages if one.name == name), None)
        if self.source.sha256 and found and found != self.source.sha256.lower():
            raise BadFileError(
                f"`{self.folder.name}` was installed from an archive with SHA-256 {found}, "
                f"{self.source.sha256} was asked for",
                hint=f"`ft engine remove {self.adapter.name}@{self.version}` first",
            )

    def _ask_engine(self) -> str:
        """The environment's Python version; FtError where the engine in it is not the one that was asked for."""
        script = (
            "import importlib.metadata, platform, sys;"
            "print(importlib.metadata.version(sys.argv[1]), platform.python_version())"
        )
        done = subprocess.run(
            [str(self._python), "-I", "-c", script, str(self.adapter.distribution)], text=True, capture_output=True,
            env=clean_environment(), cwd=self.partial, check=False,
        )  # fmt: skip
        found = done.stdout.split()
        if done.returncode or found[:1] != [self.version]:
            said = (done.stderr.strip().splitlines() or [f"it says `{done.stdout.strip()}`"])[-1]
            raise FtError(f"`{self.folder.name}` is installed and does not answer: {said}", hint=f"see {self.log}")
        return found[1]

    def _run(self, command: list[str], failure: str) -> None:
        run_installer(command, self.log, failure, say=self._say, lock_fd=self._lock_fd)

    def _say(self, message: str) -> None:
        self.progress(Step("engine", message))

    def _result(self, manifest: EngineManifest, *, is_new: bool) -> InstallResult:
        return InstallResult(
            engine=self.adapter.name, version=self.version, folder=str(self.folder), is_new=is_new, manifest=manifest
        )


def make_installer(
    adapter: EngineAdapter, version: str | None, *, is_accelerated: bool = False, source: Source | None = None,
    progress: Progress = ignore_progress,
) -> Installer:  # fmt: skip
    """The installer of one version (None: the newest known). UsageError for an engine that has no package."""
    if adapter.distribution is None:
        raise UsageError(
            f"engine `{adapter.name}` is part of `ft`" if adapter.is_embedded else
            f"engine `{adapter.name}` cannot be installed by this version of `ft`",
        )  # fmt: skip
    chosen = version or adapter.installable[0]
    if not re.fullmatch(r"\d+(\.\d+)*([abcr.+-]?[a-z0-9.]+)?", chosen):
        raise UsageError(f"`{chosen}` is not a version", hint=f"known: {', '.join(adapter.installable)}")
    return Installer(adapter, chosen, ("accel",) if is_accelerated else (), source or Source(), progress)


def install_missing(ref: EngineRef, adapter: EngineAdapter, progress: Progress) -> bool:
    """Installs the newest version that `ref` allows where none is here; True where it did. Raises as `install` does."""
    if adapter.distribution is None or find_engine(ref, adapter) is not None:
        return False
    version = choose_version(ref, adapter)
    if version is None:
        known = ", ".join(adapter.installable)
        raise UsageError(f"no version of engine `{ref.name}` is known that is `{ref.version}`", hint=f"known: {known}")
    progress(Step("engine", f"installing `{ref.name}` {version} into an environment of its own"))
    make_installer(adapter, version, progress=progress).install()
    return True


def _rename_scripts(partial: Path, folder: Path) -> None:
    """Lets scripts and `pyvenv.cfg` name the folder in which the environment is going to lie."""
    old, new = os.fsencode(partial), os.fsencode(folder)
    for path in (partial / "pyvenv.cfg", *(partial / "bin").iterdir()):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if old in data and b"\0" not in data[:1024]:
            mode = path.stat().st_mode
            path.write_bytes(data.replace(old, new))
            path.chmod(mode)
