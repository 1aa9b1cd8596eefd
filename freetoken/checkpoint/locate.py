"""Where a model is: on this machine, on a card, or on a hub; and what a download would cost.

Looked for in this order: the path that a recipe gives, Hugging Face's cache, `<state>/models`, the model folders of
`<state>/local.yaml` and ModelScope's cache; then a bundled card; then the hub's headers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.checkpoint.cards import find_card_info, read_card
from freetoken.checkpoint.shape import ModelShape
from freetoken.errors import BadFileError, FtError, UsageError
from freetoken.local import read_section
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.recipe.model import ModelRef

#: A recipe's `path: demo` is the model inside the package.
SOURCE_NAME = ".ft-source.json"
DEMO_NAMES = ("demo", "demo-moe")


@dataclass(frozen=True)
class LocatedModel:
    """What is known of a model: where it is (None = not here), its shape (None = not to be had), bytes to download."""

    path: Path | None
    shape: ModelShape | None
    download_bytes: int
    note: str


def locate_model(
    ref: ModelRef, base_dir: Path | None = None, *, include: Sequence[str] = (), prefer_hub: bool = False
) -> LocatedModel:
    """Where the model of `ref` is and what its shape is; a relative path starts from `base_dir`.

    A checkpoint that is here but cannot be used raises BadFileError. Nothing is raised for a hub that does not answer:
    `shape` is None then, and `note` says why. `prefer_hub` reads the hub's headers even where there is a card.
    """
    if ref.path is not None:
        from freetoken.checkpoint.kept import read_shape

        path = resolve_path(ref.path, base_dir)
        path = find_weights(path, ref) if path.is_dir() else path
        return LocatedModel(path, read_shape(path), 0, f"local folder {path}")
    repo = str(ref.repo)
    include = include or ref.include
    partial = ""
    for folder in list_candidates(ref):
        shape, missing = read_complete(folder, include)
        if shape is not None:
            path = find_weights(folder, ref)
            return LocatedModel(path, shape.model_copy(update={"name": repo}), 0, f"on this machine: {path}")
        partial = f"a download in {folder} is not complete ({missing}); "
    info = None if prefer_hub else find_card_info(repo)
    if info is not None and ref.file is not None and not info.name.endswith(ref.file.lower().strip("*")):
        info = None  # the card is of another file of this repository
    if info is not None:
        shape = read_card(Path(info.path))
        left = max(0, shape.disk_bytes - count_held(ref))
        return LocatedModel(
            None, shape, left, f"{partial}not on this machine; figures from the model card `{info.name}`"
        )
    return _ask_hub(ref, include, partial)


def resolve_path(text: str, base_dir: Path | None = None) -> Path:
    """The folder or file of a recipe's `model.path`. Raises BadFileError where there is none."""
    if text in DEMO_NAMES and not ((base_dir or Path.cwd()) / text).exists():
        return paths.package_data("demo-moe")
    path = Path(os.path.expandvars(text)).expanduser()
    path = path if path.is_absolute() else (base_dir or Path.cwd()) / path
    if not path.exists():
        raise BadFileError(f"model path `{text}`: {path} does not exist")
    return path


def find_weights(folder: Path, ref: ModelRef) -> Path:
    """What an engine is given of a model's folder: the folder, or the first file of the GGUF that `model.file` means.

    Raises UsageError where that is not one model.
    """
    return folder if ref.file is None else pick_local_gguf(folder, ref.include)


def pick_local_gguf(folder: Path, include: Sequence[str]) -> Path:
    """The first file of the one GGUF model below `folder` that `include` matches. Raises UsageError."""
    from freetoken.checkpoint.files import pick_gguf

    names = [one.relative_to(folder).as_posix() for one in sorted(folder.rglob("*.gguf"))]
    return folder / pick_gguf(str(folder), names, include)[0]


def list_candidates(ref: ModelRef) -> Iterator[Path]:
    """Folders of this machine that hold, or are about to hold, the repository of `ref`."""
    repo = str(ref.repo)
    if ref.source == "huggingface" and (snapshot := find_snapshot(repo, ref.revision)) is not None:
        yield snapshot
    owner, _, name = repo.rpartition("/")
    roots = [paths.models_dir(), *read_model_dirs()]
    folders = [root / owner / name for root in roots]
    # Another tool's folder with the right name may hold another revision, so it is asked for the default one alone.
    if ref.revision in ("main", "master"):
        folders += [root / name for root in read_model_dirs()]
        folders += [root / owner / name.replace(".", "___") for root in modelscope_dirs()]
        folders += [root / owner / name for root in modelscope_dirs()]
    for folder in dict.fromkeys(folders):
        if folder.is_dir() and any(folder.iterdir()):
            yield folder


def find_snapshot(repo: str, revision: str) -> Path | None:
    """The folder of a revision in Hugging Face's cache; it may not be complete."""
    from freetoken.checkpoint.hub import hub_cache_dir

    if ".." in revision.split("/") or revision.startswith("/"):
        return None
    storage = hub_cache_dir() / f"models--{repo.replace('/', '--')}"
    commit = revision
    try:
        commit = (storage / "refs" / revision).read_text(encoding="utf-8").strip() or revision
    except (OSError, ValueError):
        pass
    snapshot = storage / "snapshots" / commit
    return snapshot if snapshot.is_dir() and any(snapshot.iterdir()) else None


def count_held(ref: ModelRef) -> int:
    """Bytes that an interrupted download of `ref` left here, to be gone on with."""
    from freetoken.checkpoint.hub import hub_cache_dir

    if ref.source == "modelscope":
        owner, _, name = str(ref.repo).rpartition("/")
        folder = paths.models_dir() / owner / name
    else:
        folder = hub_cache_dir() / f"models--{str(ref.repo).replace('/', '--')}" / "blobs"
    if not folder.is_dir():
        return 0
    return sum(one.stat().st_size for one in folder.iterdir() if one.is_file() and not one.is_symlink())


def read_complete(folder: Path, include: Sequence[str] = ()) -> tuple[ModelShape | None, str]:
    """The shape of a complete checkpoint; or None, and in a few words what it lacks. `include` says which GGUF.

    Raises BadFileError for one that has everything and still cannot be used.
    """
    names = {entry.name for entry in folder.iterdir()}
    if partial := sorted(name for name in names if name.endswith(".part")):
        return None, f"{partial[0]} is not whole"
    if dangling := sorted(name for name in names if not (folder / name).exists()):
        return None, f"{dangling[0]} points nowhere"
    expected = read_source(folder).get("files", {})
    if absent := sorted(name for name in expected if not (folder / name).is_file()):
        return None, f"{absent[0]} is not there yet"
    from freetoken.checkpoint.kept import read_shape

    path = folder
    if any("gguf" in one.lower() for one in include):
        try:
            path = pick_local_gguf(folder, include)
        except UsageError as error:
            return None, error.message
    elif not any(name.endswith((".safetensors", ".gguf")) for name in names):
        return None, "it has no weights"
    try:
        return read_shape(path), ""
    except BadFileError as error:
        if "missing" in error.message or "no config.json" in error.message:
            return None, error.message
        raise


def read_source(folder: Path) -> dict[str, Any]:
    """What `ft model fetch` wrote into a folder of its own: repository, commit, and each file's bytes and hash."""
    try:
        document = json.loads((folder / SOURCE_NAME).read_text(encoding="utf-8"))
        return document if isinstance(document, dict) else {}
    except (OSError, ValueError):
        return {}


def read_model_dirs() -> tuple[Path, ...]:
    """`model_dirs` of the machine-local file: where this machine keeps models. Raises BadFileError."""
    listed = read_section("model_dirs") or ()
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        listed = (listed,)
    return tuple(Path(str(one)).expanduser() for one in listed)


def modelscope_dirs() -> tuple[Path, ...]:
    """Where ModelScope's own client keeps models."""
    root = Path(os.environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope").expanduser()
    return (root / "models", root / "hub" / "models", root)


def _ask_hub(ref: ModelRef, include: Sequence[str], partial: str) -> LocatedModel:
    from freetoken.checkpoint import remote
    from freetoken.checkpoint.hub import OfflineError, open_repo

    try:
        repo = open_repo(ref)
        found = remote.read_cached_shape(ref, include, commit=repo.commit)
        if found is None:
            found = remote.read_remote_shape(repo, include)
            remote.write_cached_shape(ref, include, repo.commit, found)
        note = f"{partial}not on this machine; {found.shape.source_note}, {format_bytes(found.moved_bytes)} moved"
        return LocatedModel(None, found.shape, max(0, found.download_bytes - count_held(ref)), note)
    except OfflineError as error:
        kept = remote.read_cached_shape(ref, include)
        if kept is None:
            return LocatedModel(None, None, 0, f"{partial}{error.message}")
        return LocatedModel(None, kept.shape, kept.download_bytes, f"{partial}offline; {kept.shape.source_note}")
    except FtError as error:
        return LocatedModel(None, None, 0, f"{partial}{error.message}" + (f"; {error.hint}" if error.hint else ""))
