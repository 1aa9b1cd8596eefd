"""A registry: a folder of bundles with an index, wherever it lies. A local folder, a git repository, a hub's dataset.

`index.json` names each bundle's file with its hash and enough to choose by. The index is a convenience and trusted for
nothing: a bundle is judged by its own contents, and has to have the hash that the index gives.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from freetoken.errors import BadFileError, FtError, UsageError, did_you_mean
from freetoken.outfile import replace_file
from freetoken.recipe.model import NAME_PATTERN, TextLike
from freetoken.share.archive import MAX_BUNDLE_BYTES
from freetoken.share.bundle import SUFFIX, Bundle, parse_json, read_bundle
from freetoken.share.model import Bytes, Day, Sha256, ShareModel, Text

INDEX = "index.json"
MAX_INDEX_BYTES = 1 << 20
MAX_LISTED = 1_500


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


class OutdatedError(FtError):
    """Somebody else wrote to the registry after it was read; reading again and writing again is safe."""


class Place(Protocol):
    """Where a registry lies. `read` gives None for a file that is not there; `write` puts all files there at once.

    `write` raises OutdatedError where what was read before is no longer what is there.
    """

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
    if index is None or (name is not None and name not in index.bundles):
        return _pull_unlisted(place, name, () if index is None else tuple(index.bundles))
    chosen = _choose(list(index.bundles), name, place)
    entry = index.bundles[chosen]
    hint = "whoever keeps the registry makes its index anew: `ft push TARGET --reindex`"
    data = place.read(entry.file, MAX_BUNDLE_BYTES)
    if data is None:
        raise BadFileError(f"{place.describe()}: the index has `{chosen}`, but there is no {entry.file}", hint=hint)
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise BadFileError(
            f"{place.describe()}: {entry.file} has SHA-256 {found}, the index has {entry.sha256}", hint=hint
        )
    return f"{chosen}{SUFFIX}", data


def push_bundle(place: Place, data: bytes, *, is_replacing: bool = False) -> tuple[str, str]:
    """Puts a bundle and the renewed index into `place`; its file there and what `write` gave.

    The bundle is judged first, as whoever pulls it will. Raises UsageError where another one has its name there.
    """
    bundle = read_bundle(data, "the bundle")
    index = read_index(place) or Index()
    file = f"bundles/{bundle.recipe.name}{SUFFIX}"
    there = None if is_replacing else place.read(file, MAX_BUNDLE_BYTES)
    if there is not None and there != data:
        raise UsageError(
            f"{place.describe()} holds another bundle `{bundle.recipe.name}` already",
            hint="`--replace` puts this one in its place; or export it under another name: `--set name=NAME`",
        )
    entries = {**index.bundles, bundle.recipe.name: make_entry(bundle, file)}
    if len(entries) > MAX_LISTED:
        raise UsageError(f"{place.describe()} holds {len(index.bundles):,} bundles, which is all that an index takes")
    index = Index(bundles=entries)
    return file, place.write({file: data, INDEX: dump_index(index)}, f"Add {bundle.recipe.name}")


def make_index(place: Place) -> tuple[Index, tuple[str, ...], str]:
    """Judges every bundle in `place` and writes an index of those that are fine; the others with what is wrong.

    The index that is there is not looked at, so that one that lies is put right.
    """
    entries: dict[str, Entry] = {}
    wrong: list[str] = []
    for file in place.list_bundles()[:MAX_LISTED]:
        try:
            data = place.read(file, MAX_BUNDLE_BYTES)
            if data is None or not file.startswith("bundles/"):
                wrong.append(f"{file}: not in bundles/, where an index looks")
                continue
            bundle = read_bundle(data, file)
            if file != f"bundles/{bundle.recipe.name}{SUFFIX}":
                wrong.append(
                    f"{file}: holds `{bundle.recipe.name}`, whose file is bundles/{bundle.recipe.name}{SUFFIX}"
                )
                continue
            entries[bundle.recipe.name] = make_entry(bundle, file)
        except BadFileError as error:
            wrong.append(error.message)
    index = Index(bundles=entries)
    return index, tuple(wrong), place.write({INDEX: dump_index(index)}, "Renew the index")


def dump_index(index: Index) -> bytes:
    """The index as a file, bundles in the order of their names."""
    plain = index.model_dump(mode="json", exclude_none=True)
    return (json.dumps(plain, indent=1, sort_keys=True) + "\n").encode()


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
        return parse_json(Index, data, INDEX, max_keys=MAX_LISTED)
    except BadFileError as error:
        raise BadFileError(
            f"{place.describe()}: its index cannot be read: {error.message}",
            hint="whoever keeps the registry makes it anew: `ft push TARGET --reindex`",
        ) from error


def _pull_unlisted(place: Place, name: str | None, listed: tuple[str, ...]) -> tuple[str, bytes]:
    """A bundle that no index names; `listed` are the names that one has."""
    files = [one for one in place.list_bundles() if one.count("/") == 0 or one.startswith("bundles/")]
    chosen = _choose([*listed, *(Path(one).name.removesuffix(SUFFIX) for one in files)], name, place)
    file = next((one for one in files if Path(one).name == f"{chosen}{SUFFIX}"), f"bundles/{chosen}{SUFFIX}")
    data = place.read(file, MAX_BUNDLE_BYTES)
    if data is None:
        raise BadFileError(f"{place.describe()}: there is no {file}")
    return f"{chosen}{SUFFIX}", data


def _choose(names: list[str], name: str | None, place: Place) -> str:
    names = [one for one in dict.fromkeys(names) if re.fullmatch(NAME_PATTERN, one)]
    if name is None and len(names) == 1:
        return names[0]
    if name in names and name is not None:
        return name
    shown = ", ".join(f"`{one}`" for one in names[:20]) or "none"
    if name is None and names:
        hint = f"it has: {shown}; `--list` shows what they are"
        raise UsageError(f"{place.describe()} holds {len(names)} bundles; name one", hint=hint)
    if name is None:
        raise UsageError(f"{place.describe()} holds no bundle", hint="`ft push TARGET RECIPE` puts one there")
    raise UsageError(f"{place.describe()} has no bundle `{name}`{did_you_mean(name, names)}", hint=f"it has: {shown}")


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
                replace_file(path, data)
        except OSError as error:
            raise FtError(f"{self.shown} cannot be written: {error.strerror}") from error
        return self.shown

    def _locate(self, name: str) -> Path:
        if name.startswith("/") or ".." in name.split("/"):
            raise BadFileError(f"{self.shown}: `{ascii(name)[1:61]}` leads out of it")
        return self.folder / name
