"""`ft logs`: the engine's log of a deployment, or its events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import examples, json_option, to_json

if TYPE_CHECKING:
    from freetoken.supervisor.logs import Follower

_POLL_S = 0.2


@click.command("logs", epilog=examples("ft logs demo -n 50", "ft logs demo -f --events"))
@click.argument("name", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on printing what is added, until Ctrl-C.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True, help="How many to begin with."
)
@click.option("--events", "is_events", is_flag=True, help="The keeper's events instead of the engine's output.")
@json_option
def command(name: str | None, follow: bool, lines: int, is_events: bool, as_json: bool) -> int:
    """Print the log of a deployment; of the one that runs here where no name is given, also after it ended."""
    from freetoken.deploy.history import find_log, format_event
    from freetoken.supervisor.logs import Follower, read_tail

    found = find_log(name, is_events=is_events)
    follower = Follower(found.path)
    tail = read_tail(found.path, lines)
    shown = [format_event(line) for line in tail] if is_events and not as_json else tail
    if as_json and not follow:
        document = {"name": found.name, "run_id": found.run_id, "path": str(found.path), "lines": tail}
        click.echo(to_json(document))
        return 0
    for line in shown:
        click.echo(line)
    if follow:
        for line in _follow(follower):
            click.echo(format_event(line) if is_events and not as_json else line)
    return 0


def _follow(follower: Follower) -> Iterator[str]:
    while follower.path.exists():
        yield from follower.read_new()
        time.sleep(_POLL_S)
