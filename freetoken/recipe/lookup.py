"""Where recipes and workloads lie: a path as it is, a name in the folders of working folder, state and package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from freetoken import paths
from freetoken.errors import UsageError, did_you_mean
from freetoken.recipe.model import ModelRef

SUFFIXES = (".yaml", ".yml")


def find_recipe(target: str, *, base_dir: Path | None = None) -> Path:
    """The file of a recipe: a path as it is, a name in `recipes/` of working folder, state folder and package.

    Raises UsageError, with the nearest name, where there is none.
    """
    if "/" in target or target.endswith(SUFFIXES):
        path = (base_dir or Path.cwd()) / Path(target).expanduser()
        if path.is_file():
            return path
        what = "is a folder, not a recipe" if path.is_dir() else "does not exist"
        raise UsageError(f"{target} {what}", hint="`ft recipe list` shows the recipes that have a name")
    found = find_named_recipe(target)
    if found is None:
        known = [name for name, _ in list_recipes()]
        raise UsageError(
            f"no recipe `{target}` in recipes/{did_you_mean(target, known)}",
            hint="`ft recipe list` shows them all",
        )
    return found


def find_named_recipe(name: str) -> Path | None:
    """The file of the recipe called `name`, or None."""
    return find_named(name, paths.search_dirs("recipes"))


def list_recipes() -> tuple[tuple[str, Path], ...]:
    """Name and file of every recipe that a name finds, in the order of the folders searched."""
    return _list_named("recipes")


def list_workloads() -> tuple[tuple[str, Path], ...]:
    """The same for workloads."""
    return _list_named("workloads")


def find_workload(name: str, base_dir: Path) -> Path | None:
    """The file of a workload: a path relative to `base_dir`, or a name; None where there is none."""
    if "/" in name or name.endswith(SUFFIXES):
        path = base_dir / Path(name).expanduser()
        return path if path.is_file() else None
    return find_named(name, paths.search_dirs("workloads"))


def describe_no_workload(name: str) -> str:
    """`no workload `agnt-8k`; did you mean `agent-8k`?`."""
    return f"no workload `{name}`{did_you_mean(name, [one for one, _ in list_workloads()])}"


def find_named(name: str, folders: Iterable[Path], *, but: Path | None = None) -> Path | None:
    """The first file called `name` in `folders` that is not `but`."""
    if not re.fullmatch(r"[\w.-]+", name):
        return None
    for folder in folders:
        for suffix in SUFFIXES:
            path: Path = folder / f"{name}{suffix}"
            if path.is_file() and (but is None or path.resolve() != but.resolve()):
                return path
    return None


def _list_named(kind: str) -> tuple[tuple[str, Path], ...]:
    found: dict[str, Path] = {}
    for folder in paths.search_dirs(kind):
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if path.suffix in SUFFIXES and not path.name.startswith("."):
                    found.setdefault(path.stem, path)
    return tuple(found.items())


def show_path(path: Path) -> str:
    """How messages name a file: relative where it lies under the working folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def resolve_model_path(ref: ModelRef, base_dir: Path) -> Path | None:
    """The absolute folder of `model.path`, or None for a repository; `demo` is the bundled model."""
    if ref.path is None:
        return None
    return paths.package_data("demo-moe") if ref.path == "demo" else (base_dir / Path(ref.path).expanduser()).resolve()
