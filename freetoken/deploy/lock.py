"""The lock `<recipe>.lock`: what a recipe came to, so that the same can be had again or a difference be told.

`ft apply` and the tuner write it after a proof; `ft apply --locked` obeys it: values that the recipe leaves open are
taken from the lock, and anything else that is not as locked is refused before a launch. It holds no path, no host
and no GPU's name, so it may travel. Without a time in it, an apply that changes nothing writes the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from freetoken import __version__, paths
from freetoken.deploy.hashes import LockedFile, LockedPackage, hash_model, read_packages
from freetoken.deploy.tools import Progress, Step, ignore_progress
from freetoken.errors import BadFileError, FtError, UsageError
from freetoken.outfile import replace_file
from freetoken.recipe.dump import dump_yaml
from freetoken.recipe.findings import describe_errors, raise_findings
from freetoken.recipe.lookup import show_path
from freetoken.recipe.model import NAME_PATTERN, Recipe, TextLike
from freetoken.recipe.nodes import Node, parse_yaml, read_yaml

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.planner.plan import Plan
    from freetoken.recipe.load import LoadedRecipe

VERSION = 1
HEADER = "# What this recipe came to on the machine that ran it. Written by `ft`; `ft apply --locked` holds to it.\n"
#: Resolved settings that name a device of one machine, so they are not locked.
_OF_THE_MACHINE = frozenset({"gpu", "device"})
#: Differences that are told one by one; the rest is counted.
_MAX_TOLD = 12


def _file_name(name: str) -> str:
    parts = name.split("/")
    if not name or len(name) > 255 or any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in name:
        raise ValueError(f"`{name[:80]}` is not the name of a file inside a model")
    if not name.isprintable():
        raise ValueError("a file's name has characters that cannot be printed")
    return name


class LockModel(BaseModel):
    """Base of the lock's parts: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LockedEngine(LockModel):
    """Which engine ran: version, and for each of its packages the version and a hash of what is installed."""

    name: Annotated[str, TextLike(r"^[a-z0-9]{1,40}$")]
    version: Annotated[str, TextLike(r"^[\w.+!-]{1,60}$")] | None = None
    packages: dict[Annotated[str, TextLike(r"^[A-Za-z0-9][\w.-]{0,99}$")], LockedPackage] = {}


class ModelLock(LockModel):
    """Which model ran: repository and commit where it has them, and every file's size and SHA-256."""

    name: Annotated[str, Field(max_length=200)]
    repo: Annotated[str, Field(max_length=200), TextLike(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")] | None = None
    source: Literal["huggingface", "modelscope"] = "huggingface"
    commit: Annotated[str, TextLike(r"^[0-9a-f]{40}([0-9a-f]{24})?$")] | None = None
    files: dict[Annotated[str, AfterValidator(_file_name)], LockedFile] = {}


class Lock(LockModel):
    """A recipe's lock. `settings` are the resolved ones, those that name a device left out."""

    version: Literal[1] = 1
    recipe: Annotated[str, TextLike(NAME_PATTERN)]
    #: Version of `ft` that wrote it.
    ft: Annotated[str, TextLike(r"^[\w.+!-]{1,60}$")]
    engine: LockedEngine
    model: ModelLock
    settings: dict[Annotated[str, TextLike(r"^[a-z_]{1,40}$")], bool | int | float | str | None]
    #: Bytes of one expert slot, so that a count of slots can be read as bytes elsewhere.
    slot_bytes: Annotated[int, Field(ge=0)] = 0


def make_lock(
    recipe: Recipe, plan: Plan, adapter: EngineAdapter, *, progress: Progress = ignore_progress,
    is_trusting: bool = True,
) -> Lock:  # fmt: skip
    """The lock of what `plan` runs; the model's files are hashed as `hash_model` says."""
    folder = Path(plan.model_path) if plan.model_path else None
    files = hash_model(folder, make_meter(progress), is_trusting=is_trusting) if folder else {}
    ref = recipe.model
    return Lock(
        recipe=recipe.name,
        ft=__version__,
        engine=LockedEngine(name=plan.engine, version=plan.engine_version, packages=_read_packages(recipe, adapter)),
        model=ModelLock(
            # A local folder's name may be anything; the bundled model is the same everywhere.
            name=ref.repo or ("demo" if ref.path == "demo" else "local"),
            repo=ref.repo,
            source=ref.source,
            commit=read_commit(folder) if ref.repo and folder else None,
            files=files,
        ),
        settings=_plain_settings(plan),
        slot_bytes=compute_slot_bytes(plan),
    )


def find_lock_path(path: Path | None, name: str) -> Path:
    """Where a recipe's lock lies: beside its file, or in `<state>/locks/` where that folder is not the user's."""
    if path is not None and _is_ours_to_write(path.absolute().parent):
        return path.with_suffix(".lock")
    return paths.state_dir() / "locks" / f"{name}.lock"


def write_lock(lock: Lock, path: Path) -> None:
    """Writes the lock under a temporary name and renames it; a file with the same bytes is left alone."""
    text = dump_lock(lock)
    try:
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise FtError(f"the lock {path} cannot be written: {error.strerror}") from error


def dump_lock(lock: Lock) -> str:
    """The lock as YAML; `read_lock` gives it back."""
    return HEADER + dump_yaml(lock.model_dump(mode="json", exclude_none=True))


def read_lock(path: Path) -> Lock:
    """The lock in a file. Raises UsageError where there is none, BadFileError where it is wrong or of a newer `ft`."""
    if not path.exists():
        raise UsageError(f"there is no lock {show_path(path)}", hint="`ft apply` without `--locked` writes one")
    return _validate(read_yaml(path, show_path(path)), show_path(path))


def parse_lock(text: str, source: str) -> Lock:
    """The lock in `text`. Raises BadFileError."""
    return _validate(parse_yaml(text, source), source)


def write_after_proof(
    loaded: LoadedRecipe, plan: Plan, adapter: EngineAdapter, *, progress: Progress = ignore_progress
) -> str | None:
    """Writes the lock of a proven launch; the warning where that failed, which never fails a launch."""
    try:
        lock = make_lock(loaded.recipe, plan, adapter, progress=progress)
        write_lock(lock, find_lock_path(loaded.path, loaded.recipe.name))
    except (FtError, OSError) as error:
        return f"no lock was written: {error}"
    return None


def pin(loaded: LoadedRecipe, lock: Lock) -> LoadedRecipe:
    """`loaded` with every value that it leaves open taken from the lock. BadFileError where it contradicts the lock."""
    recipe, wrong = loaded.recipe, list(_recipe_differences(loaded.recipe, lock))
    update: dict[str, Any] = {}
    for name, locked in lock.settings.items():
        asked = getattr(recipe.settings, name, None)
        # No slots follow from a strategy that has none, and are nothing that a recipe could ask for.
        if asked is None or locked is None or (name == "expert_slots" and locked == 0):
            continue
        if asked == "auto":
            update[name] = locked
        elif not _is_same(asked, locked, lock.slot_bytes):
            wrong.append(f"`settings.{name}` is {_show(asked)} in the recipe, {_show(locked)} in the lock")
    _refuse(wrong)
    try:
        settings = type(recipe.settings).model_validate(recipe.settings.model_dump() | update)
    except ValidationError as error:
        raise BadFileError(f"the lock's settings are not settings of a recipe: {error.errors()[0]['msg']}") from error
    provenance = loaded.provenance | {f"settings.{name}": "lock" for name in update}
    revision = {"revision": lock.model.commit} if lock.model.commit and recipe.model.repo else {}
    fresh = recipe.model_copy(update={"settings": settings, "model": recipe.model.model_copy(update=revision)})
    return replace(loaded, recipe=fresh, provenance=provenance)


def require_same(
    lock: Lock, recipe: Recipe, plan: Plan, adapter: EngineAdapter, *, progress: Progress = ignore_progress
) -> None:
    """Raises BadFileError (exit 2) that names every difference between the lock and what would be launched.

    Files that are not here yet cannot differ; they are looked at again once they are.
    """
    now = make_lock(recipe, plan, adapter, progress=progress, is_trusting=False)
    _refuse(list(find_differences(lock, now, plan.model_path)))


def find_differences(lock: Lock, now: Lock, model_path: str | None) -> Iterator[str]:
    """One sentence for each thing that is not as locked."""
    if lock.ft != now.ft:
        yield f"`ft` is {now.ft}, the lock was written by {lock.ft}"
    if lock.engine.name != now.engine.name:
        yield f"the engine is `{now.engine.name}`, the lock has `{lock.engine.name}`"
    elif now.engine.version is not None and lock.engine.version != now.engine.version:
        yield f"engine `{now.engine.name}` is {now.engine.version}, the lock has {lock.engine.version}"
    elif now.engine.packages:
        yield from _package_differences(lock, now)
    if lock.model.repo != now.model.repo:
        yield f"the model is `{now.model.repo or now.model.name}`, the lock has `{lock.model.repo or lock.model.name}`"
    if model_path is not None:
        if lock.model.commit != now.model.commit:
            yield f"the model's commit is {now.model.commit or 'unknown'}, the lock has {lock.model.commit or 'none'}"
        yield from compare_files(lock.model.files, now.model.files)
    for name in sorted(lock.settings.keys() | now.settings.keys()):
        before, after = lock.settings.get(name), now.settings.get(name)
        if before != after:
            yield f"`settings.{name}` would be {_show(after)}, the lock has {_show(before)}"


def compare_files(locked: dict[str, LockedFile], now: dict[str, LockedFile]) -> Iterator[str]:
    """One sentence for each file that is not as locked."""
    for name, file in locked.items():
        found = now.get(name)
        if found is None:
            yield f"{name} is missing"
        elif found.bytes != file.bytes:
            yield f"{name} has {found.bytes:,} bytes, the lock has {file.bytes:,}"
        elif found.sha256 != file.sha256:
            yield f"{name} has SHA-256 {found.sha256}, the lock has {file.sha256}"
    for name in now.keys() - locked.keys():
        yield f"{name} is not in the lock"


def compute_slot_bytes(plan: Plan) -> int:
    """Bytes of one expert slot by the plan's own ledger; 0 where it has no slots."""
    for ledger in (plan.vram, plan.ram):
        line = ledger.line("expert_slots") if ledger is not None else None
        if line is not None and line.bytes and plan.settings.expert_slots:
            return line.bytes // plan.settings.expert_slots
    return 0


def read_commit(folder: Path) -> str | None:
    """The hub's commit of a model folder: of the cache's snapshot, or as the download recorded it."""
    from freetoken.checkpoint.locate import read_source

    name = folder.name if folder.parent.name == "snapshots" else str(read_source(folder).get("commit", ""))
    is_commit = len(name) in (40, 64) and all(one in "0123456789abcdef" for one in name)
    return name if is_commit else None


# -- small parts ------------------------------------------------------------------------------------------------------


def _validate(tree: Node, shown: str) -> Lock:
    version = tree.child("version")
    if version is not None and version.value != VERSION:
        raise BadFileError(
            f"{version.mark}: the lock has version {version.text}, this `ft` reads version {VERSION}",
            hint="use the `ft` that wrote it, or `ft apply` without `--locked` to write a new one",
        )
    try:
        return Lock.model_validate(tree.plain())
    except ValidationError as error:
        raise_findings(describe_errors(error, tree, Lock)[:_MAX_TOLD])
        raise BadFileError(f"{shown}: not a lock") from error


def _refuse(wrong: list[str]) -> None:
    if not wrong:
        return
    told = wrong[:_MAX_TOLD]
    if len(wrong) > _MAX_TOLD:
        told.append(f"and {len(wrong) - _MAX_TOLD} more")
    raise BadFileError(
        f"not as locked ({len(wrong)} difference{'s' if len(wrong) > 1 else ''}): {told[0]}",
        details=tuple(told[1:]),
        hint="`ft apply` without `--locked` takes the new state and writes a new lock",
    )


def _recipe_differences(recipe: Recipe, lock: Lock) -> Iterator[str]:
    if recipe.engine.name != lock.engine.name:
        yield f"the recipe's engine is `{recipe.engine.name}`, the lock has `{lock.engine.name}`"
    if recipe.model.repo != lock.model.repo:
        asked, locked = recipe.model.repo or "a local folder", lock.model.repo or "a local folder"
        yield f"the recipe's model is `{asked}`, the lock has `{locked}`"


def _package_differences(lock: Lock, now: Lock) -> Iterator[str]:
    for name in sorted(lock.engine.packages.keys() | now.engine.packages.keys()):
        before, after = lock.engine.packages.get(name), now.engine.packages.get(name)
        if before is None or after is None:
            yield f"package `{name}` is {'not locked' if before is None else 'not installed'}"
        elif before.version != after.version:
            yield f"package `{name}` is {after.version}, the lock has {before.version}"
        elif before.sha256 != after.sha256:
            yield f"package `{name}` {after.version} holds other files than the locked one"


def _is_same(asked: Any, locked: Any, slot_bytes: int) -> bool:
    if hasattr(asked, "bytes"):  # a size in the recipe, a count in the lock
        return bool(slot_bytes) and asked.bytes // slot_bytes == locked
    return bool(asked == locked)


def _plain_settings(plan: Plan) -> dict[str, Any]:
    values = plan.settings.model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in _OF_THE_MACHINE and value is not None}


def _read_packages(recipe: Recipe, adapter: EngineAdapter) -> dict[str, LockedPackage]:
    from freetoken.deploy.engines import find_engine

    home = find_engine(recipe.engine, adapter)
    return read_packages(None if adapter.is_embedded else home.interpreter) if home is not None else {}


def _is_ours_to_write(folder: Path) -> bool:
    shipped, runs = paths.shipped_dir("recipes").resolve(), paths.runs_dir().resolve()
    real = folder.resolve()
    if real == shipped or real.is_relative_to(runs) or real.is_relative_to(paths.package_data().resolve()):
        return False
    return folder.is_dir() and os.access(folder, os.W_OK)


def make_meter(progress: Progress) -> Any:
    """Progress of hashing as steps of an apply."""

    def show(state: Any) -> None:
        progress(Step("lock", f"hashing {state.file}", state.done_bytes, state.total_bytes, is_update=True))

    return show


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "not set"}[value]
    if hasattr(value, "bytes"):
        return f"{value.bytes:,} bytes"
    return f"{value:,}" if isinstance(value, int) else f"`{value}`" if isinstance(value, str) else f"{value:g}"
