"""`verify_model`: the SHA-256 of every file of a model against what the hub, a lock or the download itself recorded.

Hugging Face's cache names each file by its hash, so a model fetched there is verified without a network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha1, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from freetoken.checkpoint.locate import SOURCE_NAME, read_source
from freetoken.checkpoint.transfer import Meter, ProgressCallback
from freetoken.errors import BadFileError

if TYPE_CHECKING:
    from freetoken.recipe.model import ModelRef

CHUNK_BYTES = 8 << 20


class FileCheck(BaseModel):
    """One file: what its hash should be, what it is, and where the first came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bytes: int
    algorithm: Literal["sha256", "git-sha1"] = "sha256"
    actual: str = ""
    expected: str | None = None
    expected_from: str = ""
    status: Literal["ok", "mismatch", "missing", "unknown"]


class VerifyReport(BaseModel):
    """All files of a model. `is_ok` is true when every file with a known hash has it and none is missing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    files: tuple[FileCheck, ...]

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong; files of unknown hash are not wrong."""
        return all(file.status in ("ok", "unknown") for file in self.files)

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 by file name, as a lock keeps them."""
        return {file.name: file.actual for file in self.files if file.algorithm == "sha256" and file.actual}

    def raise_for_mismatch(self) -> None:
        """Raises BadFileError (exit 2) that names every file that is wrong or missing."""
        wrong = [file for file in self.files if file.status in ("mismatch", "missing")]
        if wrong:
            details = tuple(_describe(file) for file in wrong)
            raise BadFileError(
                f"{self.path}: {len(wrong)} of {len(self.files)} files are not what they should be",
                details=details,
                hint="delete the files named and fetch again: `ft model fetch REPO`",
            )


def _describe(file: FileCheck) -> str:
    if file.status == "missing":
        return f"{file.name}: missing"
    return f"{file.name}: {file.algorithm} is {file.actual}, {file.expected_from} says {file.expected}"


def verify_model(
    path: Path,
    *,
    expected: Mapping[str, str] | None = None,
    ref: ModelRef | None = None,
    progress: ProgressCallback | None = None,
    workers: int | None = None,
) -> VerifyReport:
    """Hashes every file of the model in `path`, several at a time.

    A file's expected hash comes from `expected` (name → SHA-256), else from the cache's own file names or the record
    of the download, else from the hub where `ref` is given. A file that no source knows is hashed and `unknown`.
    """
    files = {path.name: path} if path.is_file() else list_files(path)
    known = _find_expected(path, files, expected, ref)
    sizes = {name: file.stat().st_size for name, file in files.items() if file.exists()}
    meter = Meter("verify", sum(sizes.values()), len(files), progress)

    def check(name: str) -> FileCheck:
        wanted, source = known.get(name, (None, ""))
        if name not in sizes:
            return FileCheck(name=name, bytes=0, expected=wanted, expected_from=source, status="missing")
        is_git = wanted is not None and len(wanted) == 40
        actual = hash_file(files[name], meter, name, is_git=is_git)
        meter.finish(name)
        status: Any = "unknown" if wanted is None else "ok" if actual == wanted.lower() else "mismatch"
        return FileCheck(
            name=name,
            bytes=sizes[name],
            algorithm="git-sha1" if is_git else "sha256",
            actual=actual,
            expected=wanted,
            expected_from=source,
            status=status,
        )

    names = sorted({*files, *(name for name, (_, source) in known.items() if source != "the hub")})
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        return VerifyReport(path=str(path), files=tuple(pool.map(check, names)))


def list_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder by name; hidden ones and unfinished downloads are left out."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if (
            not file.is_dir()
            and not any(part.startswith(".") for part in name.split("/"))
            and not name.endswith(".part")
        ):
            found[name] = file
    return found


def hash_file(path: Path, meter: Meter | None = None, name: str = "", *, is_git: bool = False) -> str:
    """SHA-256 of a file in hexadecimal; with `is_git` the SHA-1 under which git knows its content."""
    digest: Any = sha1(usedforsecurity=False) if is_git else sha256()
    if is_git:
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if meter is not None:
                meter.add(len(chunk), name)
    return str(digest.hexdigest())


def _find_expected(
    path: Path, files: Mapping[str, Path], expected: Mapping[str, str] | None, ref: ModelRef | None
) -> dict[str, tuple[str, str]]:
    """File name → (hash, where that was said)."""
    if expected is not None:
        return {name: (value.lower(), "the lock") for name, value in expected.items()}
    known: dict[str, tuple[str, str]] = {}
    recorded = read_source(path).get("files", {}) if path.is_dir() else {}
    for name, entry in recorded.items():
        if isinstance(entry, dict) and entry.get("sha256"):
            known[name] = (str(entry["sha256"]).lower(), SOURCE_NAME)
    for name, file in files.items():
        target = file.resolve().name
        if file.is_symlink() and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", target):
            known[name] = (target, "the hub's cache")
    if ref is not None and ref.repo is not None and set(files) - set(known):
        known = {**_ask_hub(ref), **known}
    return known


def _ask_hub(ref: ModelRef) -> dict[str, tuple[str, str]]:
    from freetoken.checkpoint.hub import is_offline, open_repo

    if is_offline():
        return {}
    found = open_repo(ref).files
    return {
        file.name: (file.sha256 or file.git_sha1 or "", "the hub") for file in found if file.sha256 or file.git_sha1
    }
