"""`ft export`: a recipe of this machine, its lock and what is known of it, as a bundle that may go anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken import paths
from freetoken.adapters import get_adapter
from freetoken.deploy.lock import Lock, find_lock_path, make_lock, read_lock
from freetoken.deploy.runs import read_plan
from freetoken.outfile import write_output
from freetoken.share import archive
from freetoken.share.bundle import Bundle, make_bundle, read_bundle
from freetoken.share.evidence import gather_evidence
from freetoken.share.imports import find_import
from freetoken.share.model import StudyPoint
from freetoken.share.personal import refuse_personal
from freetoken.share.portable import make_portable
from freetoken.store import read_store

if TYPE_CHECKING:
    from freetoken.recipe.load import LoadedRecipe


def export_recipe(
    loaded: LoadedRecipe, *, is_signed: bool = False, study: Sequence[StudyPoint] = (),
    say: Callable[[str], None] = lambda _: None,
) -> bytes:  # fmt: skip
    """The bundle of `loaded`. An imported recipe to which nothing was added gives the very bytes it came as.

    Raises UsageError for a model that only this machine has, BadFileError where something personal would leave.
    """
    imported = find_import(loaded.path)
    lock = find_lock(loaded)
    if lock is None:
        say("there is no lock: the bundle says neither engine version nor hashes (`ft apply` writes one)")
    store = read_store()
    try:
        base = imported.bundle.evidence if imported is not None else None
        evidence = gather_evidence(loaded.recipe, lock, store, study=study, base=base)
    finally:
        if store is not None:
            store.close()
    is_unchanged = imported is not None and imported.is_unchanged and evidence == imported.bundle.evidence
    if is_unchanged and imported is not None and not is_signed:
        return imported.bundle.data
    recipe = make_portable(loaded.recipe, lock.slot_bytes if lock is not None else 0, say)
    data = make_bundle(recipe, lock, evidence, is_signed=is_signed)
    refuse_personal(archive.unpack(data, "the export"))
    check_readable(data)
    return data


def find_lock(loaded: LoadedRecipe) -> Lock | None:
    """The lock of `loaded`, made of its run folder's plan where it lies in one; None where it was never applied."""
    path = find_lock_path(loaded.path, loaded.recipe.name)
    if path.is_file():
        return read_lock(path)
    is_run = loaded.path is not None and loaded.path.absolute().parent.parent == paths.runs_dir()
    plan = read_plan(loaded.path.parent) if loaded.path is not None and is_run else None
    return make_lock(loaded.recipe, plan, get_adapter(plan.engine)) if plan is not None else None


def check_readable(data: bytes) -> Bundle:
    """The export as an import sees it: what would be refused there is refused here, with the same words."""
    return read_bundle(data, "the export")


def write_bundle(data: bytes, path: Path) -> str:
    """Writes the bundle to the file that a user named; its SHA-256."""
    write_output(path, data)
    return hashlib.sha256(data).hexdigest()
