"""`ft recipe`: which recipes have a name, what one says once merged, and where each value comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.complete import complete_recipe
from freetoken.cli.output import emit, examples, json_option, note, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.recipe.load import LoadedRecipe


@click.group("recipe", epilog=examples("ft recipe list", "ft recipe show demo --provenance"))
def command() -> None:
    """List and show recipes, and where each value comes from."""


@command.command("list", epilog=examples("ft recipe list", "ft recipe list --json"))
@json_option
def list_command(as_json: bool) -> None:
    """List every recipe that can be named, and where its file lies.

    Names are looked up in the working folder's recipes/, the state folder's, then the package's.
    """
    from freetoken.recipe.load import list_recipes

    entries = [_describe(name, path) for name, path in list_recipes()]
    rows = [(one["name"], one["engine"], one["workload"], one["problem"] or one["description"]) for one in entries]
    emit(entries, as_json=as_json, render=lambda console: _render_list(console, rows))


def _render_list(console: Console, rows: list[tuple[str, str, str, str]]) -> None:
    print_table(console, ("recipe", "engine", "workload", "description"), rows)


def _describe(name: str, path: Path) -> dict[str, Any]:
    from freetoken.errors import FtError
    from freetoken.recipe.load import load_recipe
    from freetoken.recipe.lookup import show_path

    entry = {"name": name, "path": show_path(path), "engine": "", "workload": "", "description": "", "problem": ""}
    try:
        # The machine's own defaults stay out of a list of what the files say.
        recipe = load_recipe(str(path.absolute()), defaults={}).recipe
    except FtError as error:
        return entry | {"problem": f"not usable: {error.message}"}
    facts = {"engine": recipe.engine.name, "workload": recipe.workload.name, "description": recipe.description}
    return entry | facts


@command.command(
    "show", epilog=examples("ft recipe show demo", "ft recipe show demo --set settings.kv_tokens=8k --provenance")
)
@click.argument("name", metavar="NAME_OR_FILE", shell_complete=complete_recipe)
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Override a value; repeatable.")
@click.option("--provenance", "is_explained", is_flag=True, help="Say for each value where it comes from.")
@json_option
def show_command(name: str, sets: tuple[str, ...], is_explained: bool, as_json: bool) -> None:
    """Show a recipe complete: parents, overrides, user defaults and defaults merged in."""
    from freetoken.recipe.load import load_recipe

    loaded = load_recipe(name, sets=sets)
    value: dict[str, Any] = {"recipe": loaded.recipe.model_dump(mode="json"), "notes": list(loaded.notes)}
    value |= {"path": str(loaded.path), "provenance": loaded.provenance}
    emit(value, as_json=as_json, render=lambda console: _render(loaded, is_explained, console))
    if not as_json:
        for text in loaded.notes:
            note(f"note: {text}")


def _render(loaded: LoadedRecipe, is_explained: bool, console: Console) -> None:
    from freetoken.recipe.load import dump_recipe

    if not is_explained:
        click.echo(dump_recipe(loaded.recipe).rstrip())
        return
    rows = make_provenance_rows(loaded)
    print_table(console, ("key", "value", "from"), rows)


def make_provenance_rows(loaded: LoadedRecipe) -> list[tuple[str, str, str]]:
    """Every key that has a value: dotted key, value as YAML, where it came from."""
    rows = []
    for key, origin in loaded.provenance.items():
        value: Any = loaded.recipe.model_dump(mode="json")
        for step in key.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        if value not in (None, [], {}) and key != "workload":
            rows.append((key, _show(value), origin))
    return rows


def _show(value: Any) -> str:
    from freetoken.cli.output import to_json

    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(to_json(value).split()) if isinstance(value, (dict, list)) else str(value)
