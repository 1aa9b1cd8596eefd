"""Which models are on this machine, and how one is taken away again.

Counts what hub caches and model folders hold; removes only what a hub can give back, never a folder that a recipe
names by path.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from freetoken import paths
from freetoken.checkpoint.hub import hub_cache_dir
from freetoken.checkpoint.locate import modelscope_dirs, read_complete, read_model_dirs
from freetoken.errors import BadFileError, UsageError

Place = Literal["hf_cache", "state", "model_dir", "modelscope_cache"]


class LocalModel(BaseModel):
    """A model on this machine. `bytes` is what removing it would free; shared and linked bytes count once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: str
    place: Place
    path: str  # the folder to load from
    root: str  # the folder that removing takes away
    bytes: int
    revisions: tuple[str, ...] = ()
    is_complete: bool
    problem: str = ""
    quantization: str = ""
    family: str = ""

    @property
    def is_removable(self) -> bool:
        """Whether `ft model remove` may take it: only what a hub can give back."""
        return self.place in ("hf_cache", "state")


def list_local() -> tuple[LocalModel, ...]:
    """Every model found on this machine, by name; a download that was interrupted is among them."""
    found = [*_list_hf(), *_list_folders(paths.models_dir(), "state")]
    for folder in read_model_dirs():
        found += _list_folders(folder, "model_dir")
    for folder in modelscope_dirs()[:2]:
        found += _list_folders(folder, "modelscope_cache")
    unique = {one.root: one for one in reversed(found)}
    return tuple(sorted(unique.values(), key=lambda one: one.repo.lower()))


def find_local(name: str) -> LocalModel:
    """The model on this machine that `name` means: a repository id, or its last part. Raises UsageError."""
    models = list_local()
    wanted = name.lower()
    matches = [one for one in models if one.repo.lower() == wanted] or [
        one for one in models if one.repo.rpartition("/")[2].lower() == wanted
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"`{name}` is here {len(matches)} times: {', '.join(one.root for one in matches)}")
    raise UsageError(f"no model `{name}` on this machine", hint="`ft model list` shows what is here")


def remove_local(model: LocalModel) -> int:
    """Takes a model off this machine; the bytes that frees. Raises UsageError for a folder that is not ours to take."""
    if not model.is_removable:
        raise UsageError(f"`{model.repo}` lies in {model.root}, which `ft` did not fill; remove it by hand")
    root = Path(model.root)
    if model.place == "hf_cache":
        _remove_hf(root)
    if root.exists():
        shutil.rmtree(root)
    (root.parent / f".{root.name}.ft-fetch.lock").unlink(missing_ok=True)
    if model.place == "state" and root.parent != paths.models_dir() and not any(root.parent.iterdir()):
        root.parent.rmdir()
    return model.bytes


def _remove_hf(root: Path) -> None:
    """Lets huggingface_hub delete the revisions, since blobs may be shared between repositories."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(root.parent)
    commits = [
        revision.commit_hash for repo in cache.repos if Path(repo.repo_path) == root for revision in repo.revisions
    ]
    if commits:
        cache.delete_revisions(*commits).execute()


def _list_hf() -> Iterator[LocalModel]:
    cache = hub_cache_dir()
    for root in sorted(cache.glob("models--*")) if cache.is_dir() else ():
        snapshots = sorted((root / "snapshots").glob("*"), key=lambda one: one.stat().st_mtime, reverse=True)
        refs = [one for one in (root / "refs").rglob("*") if one.is_file()] if (root / "refs").is_dir() else []
        names = {one.read_text(encoding="utf-8").strip(): one.relative_to(root / "refs").as_posix() for one in refs}
        current = next((one for one in snapshots if names.get(one.name) == "main"), snapshots[0] if snapshots else root)
        if not snapshots and not any((root / "blobs").glob("*")):
            continue
        yield LocalModel(
            repo=root.name.removeprefix("models--").replace("--", "/", 1),
            place="hf_cache",
            path=str(current),
            root=str(root),
            bytes=count_bytes(root),
            revisions=tuple(names.get(one.name, one.name[:12]) for one in snapshots),
            **(_describe(current) if snapshots else {"is_complete": False, "problem": "no file is whole yet"}),
        )


def _list_folders(parent: Path, place: Place) -> Iterator[LocalModel]:
    """Models in `parent`, one or two folders deep: NAME or OWNER/NAME."""
    if not parent.is_dir():
        return
    folders = [one for one in sorted(parent.iterdir()) if one.is_dir() and not one.name.startswith(".")]
    for folder in folders:
        below = [one for one in sorted(folder.iterdir()) if one.is_dir() and not one.name.startswith(".")]
        for one in [folder] if _has_weights(folder) else [each for each in below if _has_weights(each)]:
            yield LocalModel(
                repo=one.relative_to(parent).as_posix(),
                place=place,
                path=str(one),
                root=str(one),
                bytes=count_bytes(one),
                **_describe(one),
            )


def _has_weights(folder: Path) -> bool:
    return any(one.name.removesuffix(".part").endswith((".safetensors", ".gguf")) for one in folder.iterdir())


def _describe(folder: Path) -> dict[str, Any]:
    """The fields of a `LocalModel` that its headers tell."""
    try:
        shape, missing = read_complete(folder)
    except BadFileError as error:
        return {"is_complete": False, "problem": error.message}
    if shape is None:
        return {"is_complete": False, "problem": missing}
    return {"is_complete": True, "quantization": shape.quantization, "family": shape.family}


def count_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take, each once however often it is linked."""
    seen: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())
