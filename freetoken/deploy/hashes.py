"""Hashes for the lock: a model's files, known ones from a cache, and the packages of an engine's environment.

A file's hash is remembered with its size, modification and change time and inode. The change time cannot be set by
hand, so a file that was tampered with and given its old modification time back is hashed again. What a hub's cache
or a download has already checked is taken from there when a lock is written, and hashed when one is held to.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from freetoken import __version__, paths
from freetoken.checkpoint.kept import stat_key
from freetoken.checkpoint.locate import read_source
from freetoken.checkpoint.transfer import Meter, ProgressCallback
from freetoken.checkpoint.verify import hash_file, list_files
from freetoken.errors import FtError
from freetoken.outfile import replace_file
from freetoken.recipe.model import TextLike

Sha256 = Annotated[str, TextLike(r"^[0-9a-f]{64}$")]
_HEX = re.compile(r"[0-9a-f]{64}")
CACHE_NAME = "hashes.json"
MAX_CACHED = 20_000
#: What the embedded engine's answers and bytes depend on.
EMBEDDED_PACKAGES = ("numpy", "safetensors", "tokenizers", "torch", "transformers")
_LOW_PRIORITY = 10
#: Files of an installed package that name this machine or this moment.
_OF_THE_PLACE = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")


class LockedFile(BaseModel):
    """A file's size in bytes and its SHA-256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class LockedPackage(BaseModel):
    """An installed package: its version and a hash over the hashes of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[str, TextLike(r"^[\w.+!-]{1,60}$")]
    sha256: Sha256 | None = None


def hash_model(
    path: Path, progress: ProgressCallback | None = None, *, is_trusting: bool = False
) -> dict[str, LockedFile]:
    """Size and SHA-256 of every file of a model, by name; only what changed since the last time is read.

    With `is_trusting` a hash that the hub gave and the download checked is taken instead of reading the file.
    """
    files = {path.name: path} if path.is_file() else list_files(path)
    cache = _read_cache()
    keys = {name: stat_key(file) for name, file in files.items()}
    # Not kept in the cache: there stands only what was read here.
    trusted = _read_recorded(path, files) if is_trusting else {}
    missing = [name for name in files.keys() - trusted if cache.get(_entry(files[name]), [0])[:-1] != keys[name]]
    if missing:
        meter = Meter("lock", sum(keys[name][0] for name in missing), len(missing), progress)

        def work(name: str) -> str:
            digest = hash_file(files[name], meter, name)
            meter.finish(name)
            return digest

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for name, digest in zip(missing, pool.map(work, missing), strict=True):
                cache[_entry(files[name])] = [*keys[name], digest]
        _write_cache(cache)
    found = {name: trusted.get(name) or str(cache[_entry(files[name])][-1]) for name in sorted(files)}
    return {name: LockedFile(bytes=keys[name][0], sha256=digest) for name, digest in found.items()}


class HashingAhead:
    """Hashes a model's files in a thread of low priority while an engine loads them: both read the same pages.

    What it has done by then, `hash_model` finds in the cache.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._is_over = path, threading.Event()
        self._files: dict[str, Path] = {}
        self._names: deque[str] = deque()
        self._meter: Meter | None = None
        self._keeping = threading.Lock()
        self._thread = threading.Thread(target=self._begin, name="hashing ahead", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def finish(self, progress: ProgressCallback | None = None) -> None:
        """Returns when all is hashed, now with every core."""
        sizes = [_size(self._files[name]) for name in tuple(self._names)]
        self._meter = Meter("lock", sum(sizes), len(sizes), progress)
        others = [threading.Thread(target=self._work, daemon=True) for _ in range(min(8, os.cpu_count() or 1) - 1)]
        for thread in others:
            thread.start()
        for thread in (*others, self._thread):
            thread.join()

    def abandon(self) -> None:
        """Ends it after the file in hand, which is not waited for."""
        self._is_over.set()

    def _begin(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)  # of a thread, on Linux
        try:
            files = {self._path.name: self._path} if self._path.is_file() else list_files(self._path)
            cache = _read_cache()
            unknown = files.keys() - _read_recorded(self._path, files).keys()
            wanted = [name for name in unknown if cache.get(_entry(files[name]), [0])[:-1] != stat_key(files[name])]
        except (FtError, OSError):
            return  # whoever needs the hashes meets the trouble, and has words for it
        self._files = files
        self._names.extend(sorted(wanted))
        self._work()

    def _work(self) -> None:
        while not self._is_over.is_set():
            try:
                name = self._names.popleft()
            except IndexError:
                return
            file = self._files[name]
            try:
                key, digest = stat_key(file), hash_file(file, self._meter, name)
            except OSError:
                continue
            with self._keeping:
                _write_cache({**_read_cache(), _entry(file): [*key, digest]})


def _read_recorded(path: Path, files: dict[str, Path]) -> dict[str, str]:
    """Hashes that are known without reading: blobs of the hub's cache are named by them, our downloads record them."""
    recorded = read_source(path).get("files", {}) if path.is_dir() else {}
    known = {}
    for name, file in files.items():
        entry = recorded.get(name)
        digest = file.resolve().name if file.is_symlink() else entry.get("sha256") if isinstance(entry, dict) else None
        if digest and _HEX.fullmatch(str(digest)):
            known[name] = str(digest)
    return known


def read_packages(interpreter: Path | None) -> dict[str, LockedPackage]:
    """Packages of the environment of `interpreter`; with None what our own engine is made of. Starts nothing."""
    if interpreter is None:
        return {"freetoken-deploy": LockedPackage(version=__version__, sha256=hash_sources()), **_read_own()}
    found, cache = {}, _read_cache()
    before = dict(cache)
    for folder in sorted(interpreter.parent.parent.glob("lib/python3*/site-packages/*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        if version:
            found[name] = LockedPackage(version=version, sha256=_recall_record(folder, cache))
    if cache != before:
        _write_cache(cache)
    return found


def _recall_record(folder: Path, cache: dict[str, list[int | str]]) -> str | None:
    """As `_hash_record`; what RECORD said the last time counts while it is the same file."""
    record = folder / "RECORD"
    try:
        key, entry = stat_key(record), _entry(record)
    except OSError:
        return None
    if cache.get(entry, [0])[:-1] == key:
        return str(cache[entry][-1])
    digest = _hash_record(folder)
    if digest is not None:
        cache.pop(entry, None)
        cache[entry] = [*key, digest]
    return digest


def hash_sources() -> str:
    """SHA-256 over our own package's source files."""
    root = paths.package_data().parent
    digest = sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _read_own() -> dict[str, LockedPackage]:
    from importlib import metadata

    found = {}
    for name in EMBEDDED_PACKAGES:
        try:
            one = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        folder = getattr(one, "_path", None)
        found[name] = LockedPackage(version=one.version, sha256=_hash_record(Path(folder)) if folder else None)
    return found


def _hash_record(folder: Path) -> str | None:
    """A hash over what RECORD says of the package's own files; scripts outside hold the environment's path."""
    try:
        with (folder / "RECORD").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if len(row) == 3 and row[1]]
    except (OSError, ValueError, csv.Error):
        return None
    kept = [
        f"{row[0]} {row[1]}"
        for row in rows
        if not row[0].startswith("..") and row[0].split("/")[-1] not in _OF_THE_PLACE
    ]
    return sha256("\n".join(sorted(kept)).encode()).hexdigest()


def _entry(file: Path) -> str:
    return str(file.absolute())


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read_cache() -> dict[str, list[int | str]]:
    try:
        value = json.loads((paths.state_dir() / CACHE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(value, dict) and all(
        isinstance(one, list) and len(one) == 5 and re.fullmatch(r"[0-9a-f]{64}", str(one[-1]))
        for one in value.values()
    )
    return value if is_ours else {}


def _write_cache(cache: dict[str, list[int | str]]) -> None:
    """Keeps the cache; one that cannot be written only costs time later."""
    path = paths.state_dir() / CACHE_NAME
    kept = dict(list(cache.items())[-MAX_CACHED:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(kept).encode())
    except OSError:
        pass
