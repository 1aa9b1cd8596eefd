"""A registry: a folder of bundles with an index, wherever it lies. A local folder, a git repository, a hub's dataset.

`index.json` names each bundle's file with its hash and enough to choose by. The index is a convenience and trusted for
nothing: a bundle is judged by its own contents, and has to have the hash that the index gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field, ValidationError

from freetoken.errors import BadFileError, FtError, UsageError
from freetoken.recipe.lookup import nearest
from freetoken.recipe.model import NAME_PATTERN, TextLike
from freetoken.share.archive import MAX_BUNDLE_BYTES
from freetoken.share.bundle import SUFFIX, Bundle, read_bundle
from freetoken.share.model import Bytes, Day, Sha256, ShareModel, Text

INDEX = "index.json"
MAX_INDEX_BYTES = 1 << 20
MAX_LISTED = 2_000


class Entry(ShareModel):
    """One bundle in an index."""

    file: Annotated[str, TextLike(rf"^bundles/[a-z0-9][a-z0-9._-]{{0,79}}\{SUFFIX}$")]
    sha256: Sha256
    bytes: Bytes
    engine: Annotated[str, TextLike(r"^[a-z0-9]{1,40}$")]
    model: Text
    workload: Text
    gpu: Text | None = None
    decode_tps: float | None = None
    day: Day | None = None


class Index(ShareModel):
    """`index.json`."""

    format: Literal["ft-registry"] = "ft-registry"
    version: Literal[1] = 1
    bundles: Annotated[dict[Annotated[str, TextLike(NAME_PATTERN)], Entry], Field(max_length=MAX_LISTED)] = {}


class Place(Protocol):
    """Where a registry lies. `read` gives None for a file that is not there; `write` puts all files there at once."""

    def describe(self) -> str:
        """How messages name it."""
        ...

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """The bytes of a file, or None."""
        ...

    def list_bundles(self) -> list[str]:
        """Files that look like bundles, where there is no index."""
        ...

    def write(self, files: Mapping[str, bytes], message: str) -> str:
        """Writes `files`; what can be quoted to others (a commit, a path)."""
        ...


def pull_bundle(place: Place, name: str | None) -> tuple[str, bytes]:
    """File name and bytes of the bundle called `name`, or of the only one; UsageError where that is not clear."""
    index = read_index(place)
    if index is None:
        return _pull_unlisted(place, name)
    chosen = _choose(list(index.bundles), name, place)
    entry = index.bundles[chosen]
    data = place.read(entry.file, MAX_BUNDLE_BYTES)
    if data is None:
        raise BadFileError(f"{place.describe()}: the index has `{chosen}`, but there is no {entry.file}")
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise BadFileError(f"{place.describe()}: {entry.file} has SHA-256 {found}, the index has {entry.sha256}")
    return f"{chosen}{SUFFIX}", data


def push_bundle(place: Place, data: bytes) -> tuple[str, str]:
    """Puts a bundle and the renewed index into `place`; its file there and what `write` gave.

    The bundle is judged first, as whoever pulls it will.
    """
    bundle = read_bundle(data, "the bundle")
    index = read_index(place) or Index()
    file = f"bundles/{bundle.recipe.name}{SUFFIX}"
    renewed = Index(bundles=dict(sorted({**index.bundles, bundle.recipe.name: make_entry(bundle, file)}.items())))
    plain = renewed.model_dump(mode="json", exclude_none=True)
    files = {file: data, INDEX: (json.dumps(plain, indent=1, sort_keys=True) + "\n").encode()}
    return file, place.write(files, f"Add {bundle.recipe.name}")


def make_entry(bundle: Bundle, file: str) -> Entry:
    """What the index says of a bundle."""
    best, machine = bundle.evidence.best(), bundle.evidence.machine
    return Entry(
        file=file,
        sha256=bundle.sha256,
        bytes=len(bundle.data),
        engine=bundle.recipe.engine.name,
        model=bundle.recipe.model.repo or "demo",
        workload=bundle.recipe.workload.name,
        gpu=machine.gpu if machine is not None else None,
        decode_tps=best.figures["decode_tps"].median if best is not None else None,
        day=best.day if best is not None else None,
    )


def read_index(place: Place) -> Index | None:
    """The index, or None where there is none. Raises BadFileError where it cannot be read."""
    data = place.read(INDEX, MAX_INDEX_BYTES)
    if data is None:
        return None
    try:
        plain = json.loads(data)
        if isinstance(plain, dict) and plain.get("version", 1) != 1:
            said = ascii(plain["version"])[:20]
            raise BadFileError(f"{place.describe()}: its index has version {said}, this `ft` reads version 1")
        return Index.model_validate(plain)
    except (ValueError, RecursionError, ValidationError) as error:
        raise BadFileError(f"{place.describe()}: {INDEX} is not the index of a registry") from error


def _pull_unlisted(place: Place, name: str | None) -> tuple[str, bytes]:
    files = place.list_bundles()
    chosen = _choose([Path(one).name.removesuffix(SUFFIX) for one in files], name, place)
    file = next(one for one in files if Path(one).name == f"{chosen}{SUFFIX}")
    data = place.read(file, MAX_BUNDLE_BYTES)
    if data is None:
        raise BadFileError(f"{place.describe()}: there is no {file}")
    return f"{chosen}{SUFFIX}", data


def _choose(names: list[str], name: str | None, place: Place) -> str:
    names = [one for one in names if re.fullmatch(NAME_PATTERN, one)]
    if name is None and len(names) == 1:
        return names[0]
    if name in names and name is not None:
        return name
    shown = ", ".join(f"`{one}`" for one in names[:20]) or "none"
    if name is None:
        raise UsageError(f"{place.describe()} holds {len(names)} bundles; name one", hint=f"it has: {shown}")
    raise UsageError(f"{place.describe()} has no bundle `{name}`{nearest(name, names)}", hint=f"it has: {shown}")


class FolderPlace:
    """A registry in a folder of this machine; links in it are not followed."""

    def __init__(self, folder: Path, shown: str | None = None) -> None:
        self.folder, self.shown = folder, shown or str(folder)

    def describe(self) -> str:
        """The folder."""
        return self.shown

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """The bytes of a plain file, or None."""
        path = self._locate(name)
        if path.is_symlink() or path.parent.is_symlink():
            raise BadFileError(f"{self.shown}: {name} is a symbolic link, which is not followed")
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise BadFileError(f"{self.shown}: {name} is larger than {max_bytes:,} bytes")
        return data

    def list_bundles(self) -> list[str]:
        """Bundles in the folder and in its `bundles/`."""
        found = [*self.folder.glob(f"*{SUFFIX}"), *self.folder.glob(f"bundles/*{SUFFIX}")]
        return sorted(one.relative_to(self.folder).as_posix() for one in found[:MAX_LISTED])

    def write(self, files: Mapping[str, bytes], message: str) -> str:
        """Writes each under a temporary name and renames it; the index last."""
        try:
            for name, data in files.items():
                path = self._locate(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                temporary.write_bytes(data)
                os.replace(temporary, path)
        except OSError as error:
            raise FtError(f"{self.shown} cannot be written: {error.strerror}") from error
        return self.shown

    def _locate(self, name: str) -> Path:
        if name.startswith("/") or ".." in name.split("/"):
            raise BadFileError(f"{self.shown}: `{ascii(name)[1:61]}` leads out of it")
        return self.folder / name
