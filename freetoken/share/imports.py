"""The import folder `<state>/imports/`: for each bundle its bytes, and the recipe and lock that this machine would run.

`NAME.ftbundle` is what came, never changed; `NAME.yaml` is the recipe, as it came or with what this machine needs
otherwise; `NAME.lock` is the author's lock. Nothing else is written by an import, and nothing anywhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from freetoken import paths
from freetoken.deploy.lock import dump_lock
from freetoken.errors import FtError, UsageError
from freetoken.outfile import replace_file
from freetoken.recipe.dump import dump_recipe
from freetoken.recipe.model import NAME_PATTERN, Recipe
from freetoken.share.archive import read_bytes
from freetoken.share.bundle import SUFFIX, Bundle, read_bundle


@dataclass(frozen=True)
class Imported:
    """A bundle that was imported here, and whether its recipe still says what it said then."""

    bundle: Bundle
    recipe_path: Path
    is_unchanged: bool


def imports_dir() -> Path:
    """`<state>/imports`."""
    return paths.state_dir() / "imports"


def keep(bundle: Bundle, recipe: Recipe, *, is_replacing: bool = False) -> Path:
    """Writes an import; the path of its recipe. Raises UsageError where another bundle has the name already."""
    name = recipe.name
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"`{name}` is not a name")
    folder = imports_dir()
    kept = folder / f"{name}{SUFFIX}"
    if kept.exists() and not is_replacing and read_bytes(kept, str(kept)) != bundle.data:
        raise UsageError(
            f"another bundle was imported as `{name}` already ({kept})",
            hint="`--replace` takes the new one, `--name NAME` keeps both",
        )
    _write(kept, bundle.data)
    if bundle.lock is not None:
        _write(folder / f"{name}.lock", dump_lock(bundle.lock).encode())
    path = folder / f"{name}.yaml"
    _write(path, dump_recipe(recipe).encode())
    _write(folder / f"{name}.kept", dump_recipe(recipe).encode())
    return path


def find_import(recipe_path: Path | None) -> Imported | None:
    """The import that the recipe at `recipe_path` belongs to; None where it is no import."""
    if recipe_path is None or recipe_path.absolute().parent.resolve() != imports_dir().resolve():
        return None
    kept = recipe_path.with_suffix(SUFFIX)
    if not kept.is_file():
        return None
    bundle = read_bundle(read_bytes(kept, kept.name), kept.name)
    try:
        is_unchanged = recipe_path.read_bytes() == recipe_path.with_suffix(".kept").read_bytes()
    except OSError:
        is_unchanged = False
    return Imported(bundle, recipe_path, is_unchanged and recipe_path.stem == bundle.recipe.name)


def list_imports() -> tuple[Path, ...]:
    """The bundles in the import folder."""
    folder = imports_dir()
    return tuple(sorted(folder.glob(f"*{SUFFIX}"))) if folder.is_dir() else ()


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise FtError(f"{path} cannot be written: {error.strerror}") from error
