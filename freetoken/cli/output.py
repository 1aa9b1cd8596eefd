"""How `ft` prints: data on stdout, everything else on stderr; one JSON document where `--json` asks for it.

Tables are drawn from the same pydantic value that `--json` dumps. Colour adds to words, never replaces them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from freetoken.errors import FtError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """Adds `--json` as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(function)


def make_console(*, stderr: bool = False) -> Console:
    """A rich console: live on a terminal, plain elsewhere and under NO_COLOR."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 160
    return Console(file=stream, width=width, highlight=False, soft_wrap=not stream.isatty())


def emit(value: BaseModel | dict[str, Any] | list[Any], *, as_json: bool, render: Callable[[Console], None]) -> None:
    """Prints `value` as JSON, or lets `render` draw it on stdout."""
    if as_json:
        click.echo(to_json(value))
    else:
        render(make_console())


def to_json(value: Any) -> str:
    """`value` as an indented JSON document; pydantic values are dumped, also inside lists and dicts."""

    def default(one: Any) -> Any:
        if hasattr(one, "model_dump"):
            return one.model_dump(mode="json")
        return str(one)

    return json.dumps(value, default=default, indent=2, ensure_ascii=False)


def note(text: str) -> None:
    """A line for people on stderr: progress, hints."""
    click.echo(text, err=True)


def print_error(error: FtError, *, as_json: bool = False) -> None:
    """`error:` with all its findings and the hint on stderr; with `as_json` the same as a document on stdout."""
    if as_json:
        document = {"error": {"message": error.message, "hint": error.hint, "details": list(error.details), "exit_code": error.exit_code}}
        click.echo(to_json(document))
    for index, line in enumerate((error.message, *error.details)):
        click.echo(f"error: {line}" if index == 0 else f"       {line}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
