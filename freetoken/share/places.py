"""Where `ft push` and `ft pull` go: `hf:owner/name[@rev]`, `git+https://…[@rev]`, `git+file://…`, a folder, a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freetoken.errors import UsageError
from freetoken.share.archive import read_bytes
from freetoken.share.bundle import SUFFIX
from freetoken.share.registry import FolderPlace, Place, pull_bundle, push_bundle

_HF = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_GIT = re.compile(r"git\+([a-z]+://[^@\s]+(?:@[^@/\s]+/[^@\s]+)?)(?:@([\w./-]+))?", re.ASCII)


@contextmanager
def open_place(target: str, *, is_private: bool = False) -> Iterator[Place]:
    """The registry at `target`. Raises UsageError for what names none."""
    if target.startswith("hf:"):
        found = _HF.fullmatch(target)
        if found is None:
            raise UsageError(f"`{target}` names no dataset", hint="`hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`")
        from freetoken.share.hub import HubPlace

        yield HubPlace(found[1], found[2], is_private=is_private)
    elif target.startswith("git+"):
        found = _GIT.fullmatch(target)
        if found is None:
            raise UsageError(f"`{target}` names no repository", hint="`git+https://HOST/REPO`, `git+file:///FOLDER`")
        from freetoken.share.git import open_git

        with open_git(found[1], found[2]) as place:
            yield place
    elif "://" in target:
        raise UsageError(f"`{target}` is no registry", hint="`hf:OWNER/NAME`, `git+https://HOST/REPO`, or a folder")
    else:
        yield FolderPlace(Path(target).expanduser(), target)


def pull(target: str, name: str | None = None) -> tuple[str, bytes]:
    """File name and bytes of a bundle at `target`."""
    path = Path(target).expanduser()
    if path.is_file():
        return path.name, read_bytes(path, target)
    if not target.startswith(("hf:", "git+")) and "://" not in target and not path.is_dir():
        raise UsageError(f"{target} does not exist", hint=f"`hf:OWNER/NAME`, a folder, or a `{SUFFIX}` file")
    with open_place(target) as place:
        return pull_bundle(place, name)


def push(target: str, data: bytes, *, is_private: bool = False) -> tuple[str, str]:
    """Puts a bundle into the registry at `target`; its file there, and where that can be seen."""
    with open_place(target, is_private=is_private) as place:
        return push_bundle(place, data)
