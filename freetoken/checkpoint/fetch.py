"""`fetch_model`: a model from a hub onto this machine, once, resumed, checked; and the way to `locate_model`.

From Hugging Face into its own cache, so that every tool finds the model and no byte is stored twice: the large files
by `transfer.py` into the cache's `blobs`, then huggingface_hub's `snapshot_download` for the small ones and for the
cache's own book-keeping. From ModelScope into `<state>/models`, since its cache has no layout to share.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken import paths
from freetoken.checkpoint.files import pick_files
from freetoken.checkpoint.hub import (
    HubError,
    OfflineError,
    RemoteFile,
    RemoteRepo,
    describe,
    hf_endpoint,
    hf_token,
    hub_cache_dir,
    network_errors,
    open_repo,
)
from freetoken.checkpoint.locate import (
    SOURCE_NAME,
    LocatedModel,
    find_weights,
    list_candidates,
    locate_model,
    read_complete,
    read_source,
)
from freetoken.checkpoint.remote import list_weights
from freetoken.checkpoint.transfer import FetchProgress, Meter, ProgressCallback, Transfer, fetch_files
from freetoken.errors import DoesNotFitError, FtError
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetoken.recipe.model import ModelRef

__all__ = ["FetchPlan", "FetchProgress", "LocatedModel", "fetch_model", "locate_model", "make_fetch_plan"]

#: Plain HTTP does not serve larger files from Hugging Face; huggingface_hub fetches those itself.
MAX_PLAIN_BYTES = 50 * 1000**3
#: Files below this are left to huggingface_hub: there is nothing to resume.
MIN_OWN_BYTES = 1 << 20
#: Room that stays free on the disk beside the model.
SPARE_BYTES = 256 << 20


class FetchPlan:
    """What a fetch would do: the files, the bytes that are here already, the bytes to move, and where they go."""

    def __init__(self, repo: RemoteRepo, files: list[RemoteFile], root: Path) -> None:
        self.repo, self.files, self.root = repo, files, root
        self.transfers = [_make_transfer(repo, file, root) for file in files]
        self.total_bytes = sum(file.bytes for file in files)
        self.held_bytes = sum(transfer.count_held() for transfer in self.transfers)

    @property
    def needed_bytes(self) -> int:
        """Bytes that still have to be moved, and written."""
        return self.total_bytes - self.held_bytes

    def check_disk(self) -> int:
        """Free bytes where the model goes. Raises DoesNotFitError, in words, where they are too few."""
        free = shutil.disk_usage(_existing(self.root)).free
        if self.needed_bytes + SPARE_BYTES > free:
            short = self.needed_bytes + SPARE_BYTES - free
            raise DoesNotFitError(
                f"`{self.repo.repo}` needs {format_bytes(self.needed_bytes)} on the disk of {self.root} "
                f"and {format_bytes(SPARE_BYTES)} to spare, {format_bytes(free)} are free: "
                f"{format_bytes(short)} are missing",
                hint="put the cache on another disk with HF_HOME=FOLDER, or see `ft model list` for what can go",
            )
        return free


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _make_transfer(repo: RemoteRepo, file: RemoteFile, root: Path) -> Transfer:
    if repo.source == "modelscope":
        return Transfer(file, root / f"{file.name}.part", root / file.name)
    blob = root / "blobs" / (file.sha256 or file.git_sha1 or file.name.replace("/", "--"))
    return Transfer(file, blob.with_name(f"{blob.name}.incomplete"), blob)


def find_root(repo: RemoteRepo) -> Path:
    """The folder that a fetch writes into."""
    if repo.source == "modelscope":
        owner, _, name = repo.repo.rpartition("/")
        return paths.models_dir() / owner / name
    return hub_cache_dir() / f"models--{repo.repo.replace('/', '--')}"


def make_fetch_plan(ref: ModelRef, *, include: Sequence[str] = ()) -> FetchPlan:
    """What fetching `ref` would take; asks the hub for its list of files and moves nothing else."""
    repo = open_repo(ref)
    weights = list_weights(repo, include or ref.include)
    chosen = set(pick_files([file.name for file in repo.files], weights))
    return FetchPlan(repo, [file for file in repo.files if file.name in chosen], find_root(repo))


def fetch_model(
    ref: ModelRef,
    *,
    progress: ProgressCallback | None = None,
    include: Sequence[str] = (),
    base_dir: Path | None = None,
) -> Path:
    """The folder of the model (with `model.file` its first file), fetched as far as it is not here yet.

    Only safetensors or GGUF, configuration and tokenizer files are taken. Interrupted in any way, the next call goes
    on where this one stopped. Raises UsageError for what does not exist, DoesNotFitError for a disk too small,
    HubError for a hub out of reach, BadFileError for a wrong hash, and for a `model.path` where no model lies.
    """
    include = include or ref.include
    if ref.path is not None:
        found = locate_model(ref, base_dir, include=include).path
        assert found is not None  # a path either is a model or was refused
        return found
    try:
        plan = make_fetch_plan(ref, include=include)
    except OfflineError:
        for folder in list_candidates(ref):
            if read_complete(folder, include)[0] is not None:
                return find_weights(folder, ref)
        raise
    plan.check_disk()
    plan.root.mkdir(parents=True, exist_ok=True)
    with _lock(plan.root, plan.repo.repo):
        meter = Meter("download", plan.total_bytes, len(plan.files), progress)
        if plan.repo.source == "modelscope":
            _drop_changed(plan)
            fetch_files(plan.repo, plan.transfers, meter)
            _write_source(plan)
            return find_weights(plan.root, ref)
        return find_weights(_fetch_hf(plan, ref, meter), ref)


def _fetch_hf(plan: FetchPlan, ref: ModelRef, meter: Meter) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.file_download import are_symlinks_supported

    own = [one for one in plan.transfers if one.file.sha256 and MIN_OWN_BYTES <= one.file.bytes <= MAX_PLAIN_BYTES]
    if not are_symlinks_supported(plan.root.parent):
        own = []  # huggingface_hub would copy a finished blob there, and the model would be stored twice
    fetch_files(plan.repo, own, meter)
    rest = [one.file for one in plan.transfers if one not in own]
    try:
        folder = snapshot_download(
            plan.repo.repo,
            revision=ref.revision,
            cache_dir=plan.root.parent,
            endpoint=hf_endpoint(),
            token=hf_token(),
            allow_patterns=[_escape(file.name) for file in plan.files],
            tqdm_class=_make_tqdm(meter, {file.name for file in rest}),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise HubError(f"`{plan.repo.repo}`: {describe(error)}") from error
    except network_errors() as error:
        raise HubError(f"`{plan.repo.repo}`: {describe(error)}") from error
    for file in rest:
        meter.finish(file.name)
    return Path(folder)


def _escape(name: str) -> str:
    """`name` as a pattern that matches itself alone."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in name)


def _make_tqdm(meter: Meter, names: set[str]) -> type:
    """A silent progress bar that counts the bytes huggingface_hub moves itself towards `meter`."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Counter(tqdm):  # type: ignore[misc]
        """Draws nothing; the bar that counts bytes as they are written adds them up."""

        def __init__(self, *args: object, **options: object) -> None:
            # huggingface_hub 2 has a second bar for bytes on the wire, which would count them twice.
            self._is_bytes = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._is_bytes and n and names:
                meter.add(int(n), "small files")
            super().update(n)

    return Counter


def _drop_changed(plan: FetchPlan) -> None:
    """Deletes files of an older commit, so that none is taken for the new one because it has the same length."""
    recorded = read_source(plan.root).get("files", {})
    for transfer in plan.transfers:
        before = recorded.get(transfer.file.name)
        if isinstance(before, dict) and transfer.file.sha256 and before.get("sha256") != transfer.file.sha256:
            transfer.target.unlink(missing_ok=True)


def _write_source(plan: FetchPlan) -> None:
    files = {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in plan.files}
    document = {"source": plan.repo.source, "repo": plan.repo.repo, "commit": plan.repo.commit, "files": files}
    path = plan.root / SOURCE_NAME
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
    temporary.replace(path)


@contextmanager
def _lock(root: Path, repo: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(root.parent / f".{root.name}.ft-fetch.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FtError(f"`{repo}` is being fetched by another `ft` now", hint="wait for it, or end it") from error
    try:
        yield
    finally:
        lock.release()
