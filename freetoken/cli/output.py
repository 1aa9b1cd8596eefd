"""How `ft` prints: data on stdout, everything else on stderr; one JSON document where `--json` asks for it.

Tables are drawn from the same pydantic value that `--json` dumps. On a terminal they are rich's; elsewhere they
are plain lines, and rich is not even imported. Colour adds to words, never replaces them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from freetoken.errors import FtError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])
Align = Literal["left", "right"]


def json_option(function: F) -> F:
    """Adds `--json` as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(function)


def examples(*lines: str) -> str:
    """The end of a command's help, for `epilog=`: at least two lines that can be typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def make_console(*, stderr: bool = False) -> Console:
    """A rich console: live on a terminal, plain elsewhere and under NO_COLOR."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 160
    return Console(file=stream, width=width, highlight=False, soft_wrap=not stream.isatty())


class PlainConsole:
    """Stands in for rich's console where stdout is no terminal: text goes out as it is, at once.

    Markup and rich's own renderables still work; they are the only thing that imports rich.
    """

    is_terminal = False

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints `objects` separated by blanks, as rich's console would."""
        if options or any(not isinstance(one, str) or "[" in one for one in objects):
            make_console().print(*objects, **options)
        else:
            click.echo(" ".join(objects))

    def __getattr__(self, name: str) -> Any:
        return getattr(make_console(), name)


def emit(value: BaseModel | dict[str, Any] | list[Any], *, as_json: bool, render: Callable[[Console], None]) -> None:
    """Prints `value` as JSON, or lets `render` draw it on stdout."""
    if as_json:
        click.echo(to_json(value))
    elif sys.stdout.isatty():
        render(make_console())
    else:
        render(PlainConsole())  # type: ignore[arg-type]


def print_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], *,
    align: Sequence[Align] = (), title: str = "", notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """A table with units in `headings`; figures line up right where `align` says so.

    `notes` are lines under the table. Every cell is text already; markup in cells is not interpreted.
    """
    sides = [*align, *["left"] * (len(headings) - len(align))]
    if console.is_terminal:
        _print_rich_table(console, headings, rows, sides, title)
    else:
        for line in format_table(headings, rows, sides, title=title):
            click.echo(line)
    for text in notes:
        click.echo(f"  {text}")


def _print_rich_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], sides: Sequence[str], title: str
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold") if title else None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    for heading, side in zip(headings, sides, strict=True):
        table.add_column(Text(heading), justify="right" if side == "right" else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def format_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], sides: Sequence[str], *, title: str = ""
) -> list[str]:
    """The lines of a plain table: two blanks between columns, none at the end of a line."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if side == "right" else cell.ljust(width)
            for cell, width, side in zip(cells, widths, sides, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return [*([title] if title else []), line(headings), *(line(row) for row in rows)]


@contextmanager
def progress(label: str, *, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr that takes the bytes done so far; one line a tenth where that is no terminal."""
    bar = _live_progress if sys.stderr.isatty() else _plain_progress
    with bar(label, total_bytes) as update:
        yield update


@contextmanager
def _plain_progress(label: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    seen = -1

    def update(done: int) -> None:
        nonlocal seen
        tenth = int(10 * done / total_bytes) if total_bytes else 0
        if tenth > seen:
            seen = tenth
            note(f"{label}: {10 * tenth} %" if total_bytes else label)

    yield update


@contextmanager
def _live_progress(label: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=make_console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda done: bar.update(task, completed=done)


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


def describe_error(error: FtError) -> dict[str, Any]:
    """`error` as a part of a document."""
    return {
        "message": error.message,
        "hint": error.hint,
        "details": list(error.details),
        "exit_code": error.exit_code,
    }


def print_error(error: FtError, *, as_json: bool = False) -> None:
    """`error:` with all its findings and the hint on stderr; with `as_json` the same as a document on stdout."""
    if as_json:
        click.echo(to_json({"error": describe_error(error)}))
    has_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for index, line in enumerate((error.message, *error.details)):
        label = "error: " if index == 0 else "       "
        click.echo((click.style(label, fg="red", bold=True) if has_colour else label) + line, err=True)
    if error.hint:
        click.echo((click.style("hint:", bold=True) if has_colour else "hint:") + f" {error.hint}", err=True)
