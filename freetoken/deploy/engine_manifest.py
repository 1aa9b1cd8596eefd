"""What an engine's environment holds: `engine.json` with versions and hashes, and whether the files still match.

Every distribution lists its files with their hashes in its own RECORD; the manifest keeps the hash of that list, so
that a changed file and a changed list are both seen.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from freetoken.deploy.values import DeployModel
from freetoken.supervisor.files import write_json

MANIFEST_FILE = "engine.json"
_BLOCK = 1 << 20


class Package(DeployModel):
    """One distribution: its version, the SHA-256 of its RECORD and, where the installer told it, of its archive."""

    name: str
    version: str
    record_sha256: str
    archive_sha256: str | None = None


class EngineManifest(DeployModel):
    """`engine.json`: written last, so that an environment that has one is whole."""

    engine: str
    version: str
    extras: tuple[str, ...] = ()
    python_version: str
    installer: str
    packages: tuple[Package, ...] = ()
    size_bytes: int = 0
    created_at: str = ""


def read_manifest(folder: Path) -> EngineManifest | None:
    """The manifest of the environment at `folder`; None where there is none that can be read."""
    try:
        return EngineManifest.model_validate_json((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def write_manifest(folder: Path, manifest: EngineManifest) -> None:
    """Writes it durably. Raises OSError."""
    write_json(folder / MANIFEST_FILE, json.loads(manifest.model_dump_json()))


def list_packages(folder: Path, archives: dict[str, str] | None = None) -> tuple[Package, ...]:
    """Every distribution in the environment, by name; `archives` is name -> SHA-256 of what was downloaded."""
    found = []
    for info in sorted(_info_folders(folder)):
        name, version = _read_identity(info)
        record = hashlib.sha256(_read_bytes(info / "RECORD")).hexdigest()
        archive = (archives or {}).get(normalise(name))
        found.append(Package(name=normalise(name), version=version, record_sha256=record, archive_sha256=archive))
    return tuple(found)


def normalise(name: str) -> str:
    """`Foo.Bar_baz` -> `foo-bar-baz`, as indexes compare names."""
    return name.lower().replace("_", "-").replace(".", "-")


def find_damage(folder: Path, manifest: EngineManifest, *, is_thorough: bool) -> Iterator[str]:
    """What is missing, changed or not as recorded, one sentence each; hashes are computed where `is_thorough`."""
    now = {one.name: one for one in list_packages(folder)}
    for package in manifest.packages:
        found = now.get(package.name)
        if found is None:
            yield f"`{package.name}` {package.version} is gone"
        elif found.version != package.version:
            yield f"`{package.name}` is {found.version}, {package.version} was installed"
        elif found.record_sha256 != package.record_sha256:
            yield f"`{package.name}`: its list of files was changed"
    for info in sorted(_info_folders(folder)):
        yield from find_broken_files(info, is_thorough=is_thorough)


def find_broken_files(info: Path, *, is_thorough: bool) -> Iterator[str]:
    """Files of one distribution that are missing, cut short or changed; the first of them is enough."""
    name, root = info.name.removesuffix(".dist-info"), info.parent
    rows = list(csv.reader(_read_bytes(info / "RECORD").decode("utf-8", "replace").splitlines()))
    if not rows:
        yield f"`{name}` is half installed: it has no list of files"
        return
    for row in rows:
        if len(row) < 3 or not row[1] or row[0].startswith("..") or Path(row[0]).is_absolute():
            continue  # scripts are rewritten when the environment gets its name; lists do not hash themselves
        path = root / row[0]
        problem = _judge_file(path, row[1], int(row[2] or 0), is_thorough)
        if problem:
            yield f"`{name}`: {path.name} {problem}"
            return


def _judge_file(path: Path, expected: str, size: int, is_thorough: bool) -> str | None:
    try:
        found = path.stat().st_size
    except OSError:
        return "is missing"
    if found != size:
        return f"has {found:,} bytes, {size:,} were installed"
    if is_thorough and expected.startswith("sha256=") and _hash_file(path) != expected.removeprefix("sha256="):
        return "has other contents than were installed"
    return None


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def find_half_installed(folder: Path) -> tuple[str, ...]:
    """`name==version` of every distribution in which a file is missing or cut short."""
    found = []
    for info in sorted(_info_folders(folder)):
        if next(find_broken_files(info, is_thorough=False), None):
            name, version = _read_identity(info)
            found.append(f"{name}=={version}")
    return tuple(found)


def measure_bytes(folder: Path) -> int:
    """Bytes on disk of everything under `folder`, links not followed."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink())


def read_archive_hashes(report: dict[str, Any]) -> dict[str, str]:
    """Name -> SHA-256 of the archives in pip's installation report."""
    found = {}
    for item in report.get("install", ()):
        hashes = ((item.get("download_info") or {}).get("archive_info") or {}).get("hashes") or {}
        if "sha256" in hashes:
            found[normalise(item["metadata"]["name"])] = str(hashes["sha256"])
    return found


def _info_folders(folder: Path) -> Iterator[Path]:
    return (folder / "lib").glob("python3*/site-packages/*.dist-info")


def _read_identity(info: Path) -> tuple[str, str]:
    headers = HeaderParser().parsestr(_read_bytes(info / "METADATA").decode("utf-8", "replace"))
    name, _, version = info.name.removesuffix(".dist-info").partition("-")
    return headers.get("Name", name), headers.get("Version", version)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
