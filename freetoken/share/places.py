"""Where `ft push` and `ft pull` go: `hf:owner/name[@rev]`, `git+https://…[@rev]`, `git+file://…`, a folder, a file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from freetoken import paths
from freetoken.errors import UsageError
from freetoken.share.archive import read_bytes
from freetoken.share.bundle import SUFFIX
from freetoken.share.registry import (
    FolderPlace,
    Index,
    OutdatedError,
    Place,
    make_index,
    pull_bundle,
    push_bundle,
    read_index,
)

T = TypeVar("T")
#: Times that a registry is read and written again where others write to it.
TRIES = 4

_HF = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_GIT = re.compile(r"git\+([a-z]+://[^@\s]+(?:@[^@/\s]+/[^@\s]+)?)(?:@([\w./-]+))?", re.ASCII)


def check_target(target: str) -> None:
    """Raises UsageError for what names no registry; asks nobody."""
    _parse(target)


@contextmanager
def open_place(target: str, *, is_private: bool = False) -> Iterator[Place]:
    """The registry at `target`. Raises UsageError for what names none."""
    kind, where, revision = _parse(target)
    if kind == "hf":
        from freetoken.share.hub import HubPlace

        yield HubPlace(where, revision, is_private=is_private)
    elif kind == "git":
        from freetoken.share.git import open_git

        with open_git(where, revision) as place:
            yield place
    else:
        yield FolderPlace(Path(where).expanduser(), target)


def _parse(target: str) -> tuple[str, str, str | None]:
    """`hf`, `git` or `folder`; where it is; its revision."""
    if target.startswith("hf:"):
        found = _HF.fullmatch(target)
        if found is None:
            raise UsageError(f"`{target}` names no dataset", hint="`hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`")
        return "hf", found[1], found[2]
    if target.startswith("git+"):
        found = _GIT.fullmatch(target)
        if found is None:
            raise UsageError(f"`{target}` names no repository", hint="`git+https://HOST/REPO`, `git+file:///FOLDER`")
        return "git", found[1], found[2]
    if "://" in target:
        raise UsageError(f"`{target}` is no registry", hint="`hf:OWNER/NAME`, `git+https://HOST/REPO`, or a folder")
    return "folder", target, None


def pull(target: str, name: str | None = None) -> tuple[str, bytes]:
    """File name and bytes of a bundle at `target`."""
    path = Path(target).expanduser()
    if path.is_file():
        return path.name, read_bytes(path, target)
    if not target.startswith(("hf:", "git+")) and "://" not in target and not path.is_dir():
        raise UsageError(f"{target} does not exist", hint=f"`hf:OWNER/NAME`, a folder, or a `{SUFFIX}` file")
    with open_place(target) as place:
        return pull_bundle(place, name)


def list_registry(target: str) -> Index:
    """The index of the registry at `target`. Raises UsageError where it has none."""
    with open_place(target) as place:
        index = read_index(place)
        if index is None:
            files = place.list_bundles()
            names = ", ".join(f"`{Path(one).name.removesuffix(SUFFIX)}`" for one in files[:20]) or "no bundle"
            raise UsageError(
                f"{place.describe()} has no index; it holds {names}", hint=f"`ft push {target} --reindex` makes one"
            )
        return index


def push(target: str, data: bytes, *, is_private: bool = False, is_replacing: bool = False) -> tuple[str, str]:
    """Puts a bundle into the registry at `target`; its file there, and where that can be seen.

    Raises UsageError where another bundle has its name there, unless `is_replacing`.
    """
    return _write(
        target, lambda place: push_bundle(place, data, is_replacing=is_replacing), is_private=is_private
    )  # fmt: skip


def reindex(target: str) -> tuple[Index, tuple[str, ...], str]:
    """The index of `target`, made anew from its bundles; what is wrong with the others, and where it can be seen."""
    return _write(target, make_index)


def _write(target: str, change: Callable[[Place], T], *, is_private: bool = False) -> T:
    """What `change` gives; begun anew with what is there where somebody else was faster."""
    with _lock_folder(target):
        for _ in range(TRIES - 1):
            try:
                with open_place(target, is_private=is_private) as place:
                    return change(place)
            except OutdatedError:
                continue
        with open_place(target, is_private=is_private) as place:
            return change(place)


@contextmanager
def _lock_folder(target: str) -> Iterator[None]:
    """One writer of this machine at a time in a plain folder, which has nobody else to keep order."""
    kind, where, _ = _parse(target)
    if kind != "folder":
        yield
        return
    from filelock import FileLock

    name = hashlib.sha256(str(Path(where).expanduser().resolve()).encode()).hexdigest()[:16]
    path = paths.runtime_dir() / f"registry-{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path):
        yield
