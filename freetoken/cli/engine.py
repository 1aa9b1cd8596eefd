"""`ft engine`: which engines can be driven, and whether they are here."""

from __future__ import annotations

from typing import Any

import click

from freetoken.cli.output import emit, examples, json_option, print_table


@click.group("engine", epilog=examples("ft engine list", "ft engine list --json"))
def command() -> None:
    """List the engines that can be driven, and their state here."""


@command.command("list", epilog=examples("ft engine list", "ft engine list --json"))
@json_option
def list_command(as_json: bool) -> None:
    """List every engine: what it is, the versions known, and whether it is here."""
    entries = list_engines()
    keys = ("name", "state", "version", "known_versions", "title")
    rows = [tuple(str(one[key] or "") for key in keys) for one in entries]
    headings = ("engine", "here", "version", "versions known", "what it is")
    emit(entries, as_json=as_json, render=lambda console: print_table(console, headings, rows))


def list_engines() -> list[dict[str, Any]]:
    """Each engine that a recipe may name, with its state on this machine."""
    from freetoken.adapters import ADAPTERS, PLANNED, get_adapter
    from freetoken.deploy.engines import find_engine
    from freetoken.recipe.model import EngineRef

    entries = []
    for name in ADAPTERS:
        adapter = get_adapter(name)
        home = find_engine(EngineRef(name=name), adapter)
        state = "embedded" if adapter.is_embedded else "not installed" if home is None else "installed"
        entries.append({
            "name": name,
            "state": state,
            "version": home.version if home is not None else None,
            "interpreter": str(home.interpreter) if home is not None else None,
            "known_versions": adapter.known_versions,
            "title": adapter.title,
            "capabilities": sorted(adapter.capabilities),
        })  # fmt: skip
    nothing: dict[str, Any] = {"version": None, "interpreter": None, "known_versions": "", "capabilities": []}
    return entries + [{"name": name, "state": "not driven yet", **nothing, "title": ""} for name in PLANNED]
