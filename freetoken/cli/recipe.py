"""`ft recipe`: which recipes have a name, what one says once merged, and where each value comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.complete import complete_recipe
from freetoken.cli.output import emit, examples, json_option, note, print_table
from freetoken.cli.recipe_keys import key_command, trust_command

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.adapters.command_table import ParsedCommand
    from freetoken.recipe.load import LoadedRecipe


@click.group("recipe", epilog=examples("ft recipe list", "ft recipe show demo --provenance"))
def command() -> None:
    """List and show recipes, read them from what you have, and keep the keys that sign them."""


command.add_command(key_command)
command.add_command(trust_command)


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
@click.option("--command", "is_command", is_flag=True, help="Show the engine's own command line for it.")
@json_option
def show_command(name: str, sets: tuple[str, ...], is_explained: bool, is_command: bool, as_json: bool) -> None:
    """Show a recipe complete: parents, overrides, user defaults and defaults merged in.

    `--command` gives the engine's own command line for what the recipe fixes; what it leaves to the planner is not in
    it (`ft apply --dry-run` shows that).
    """
    from freetoken.recipe.load import load_recipe

    loaded = load_recipe(name, sets=sets)
    if is_command:
        from freetoken.adapters.command import format_command, join_command

        argv = format_command(loaded.recipe)
        emit({"command": argv}, as_json=as_json, render=lambda _: click.echo(join_command(argv)))
        return
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


@command.command(
    "from-command",
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        'ft recipe from-command "$(cat start-engine.sh)"',
        'ft recipe from-command "vllm serve org/model" -o mine.yaml',
    ),
)
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-o", "--output", metavar="FILE", help="Write the recipe there; else to stdout.")
@click.option("--as", "name", metavar="NAME", help="Name of the recipe; else the model's.")
@json_option
def from_command(words: tuple[str, ...], output: str | None, name: str | None, as_json: bool) -> None:
    """Turn an engine's command line into a recipe, every flag accounted for.

    Quote the command. Known are `ft serve`, `python -m freetoken`, `llama-server` and `vllm serve`; flags that nobody
    understood are named, and nothing is dropped in silence.
    """
    from freetoken.adapters.command import parse_command

    _write_parsed(parse_command(words[0] if len(words) == 1 else words), output, name, as_json)


@command.command(
    "from-yaml", epilog=examples("ft recipe from-yaml engine.yaml", "ft recipe from-yaml engine.yaml -o mine.yaml")
)
@click.argument("file", metavar="FILE")
@click.option("-o", "--output", metavar="FILE", help="Write the recipe there; else to stdout.")
@click.option("--as", "name", metavar="NAME", help="Name of the recipe; else the model's.")
@json_option
def from_yaml(file: str, output: str | None, name: str | None, as_json: bool) -> None:
    """Turn a plain engine configuration into a recipe, every key accounted for.

    Known keys: model_path, device, quantization.weight_bits, kv_cache_bits, expert_offload.enabled and .strategy,
    gpu_memory_utilization, max_seq_len, batch_size.
    """
    from freetoken.adapters.plain_config import parse_config
    from freetoken.errors import BadFileError
    from freetoken.recipe.nodes import read_yaml

    values = read_yaml(Path(file), file).plain()
    if not isinstance(values, dict):
        raise BadFileError(f"{file}: expected a mapping, such as `model_path: org/model`")
    _write_parsed(parse_config(values), output, name, as_json)


def _write_parsed(parsed: ParsedCommand, output: str | None, name: str | None, as_json: bool) -> None:
    from freetoken.adapters.command import make_recipe_values
    from freetoken.recipe.dump import dump_yaml
    from freetoken.recipe.load import make_recipe

    values = make_recipe_values(parsed, name=name or (Path(output).stem if output else None))
    make_recipe(values, "the command line")
    text = dump_yaml(values)
    if output is not None:
        from freetoken.errors import UsageError
        from freetoken.outfile import is_file_there, write_output

        if is_file_there(Path(output)):
            raise UsageError(f"{output} exists already", hint="another name: a recipe is never written over")
        write_output(Path(output), text)
    document = {"recipe": values, "notes": list(parsed.notes), "unknown": list(parsed.unknown), "path": output}
    emit(document, as_json=as_json, render=lambda _: click.echo(output or text.rstrip()))
    for one in parsed.notes:
        note(f"note: {one}")
    for one in parsed.unknown:
        note(f"not understood: `{one}`")


def _show(value: Any) -> str:
    from freetoken.cli.output import to_json

    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(to_json(value).split()) if isinstance(value, (dict, list)) else str(value)
