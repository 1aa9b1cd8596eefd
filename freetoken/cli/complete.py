"""What the shell offers after a Tab: names of recipes, profiles, workloads and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[object]:
    """Recipes by name; and files, which the shell completes itself."""
    from click.shell_completion import CompletionItem

    from freetoken.recipe.lookup import list_recipes

    # All of one kind: click looks at the first to see whether they are texts.
    names = [CompletionItem(name) for name, _ in list_recipes() if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


def complete_profile(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Profiles by name."""
    return _stems("profiles", incomplete)


def complete_workload(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Workloads by name."""
    return _stems("workloads", incomplete)


def complete_study(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Studies of this state folder, and the recipes that they are of."""
    # By their status files alone: opening a storage takes a second.
    from freetoken import paths
    from freetoken.supervisor.files import read_json

    files = sorted((paths.state_dir() / "tune").glob("[!.]*.json"))
    names = {path.stem for path in files} | {str((read_json(path) or {}).get("recipe", "")) for path in files}
    return sorted(name for name in names if name and name.startswith(incomplete))


def complete_engine(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Engines that can be driven."""
    from freetoken.adapters import ADAPTERS

    return [name for name in ADAPTERS if name.startswith(incomplete)]


def _stems(kind: str, incomplete: str) -> list[str]:
    # By their file names alone: nothing is parsed while a Tab waits.
    from freetoken import paths

    found = {path.stem for folder in paths.search_dirs(kind) for path in folder.glob("[!.]*.yaml")}
    return sorted(name for name in found if name.startswith(incomplete))
