"""`ft stop`: ends a deployment, or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import examples, json_option, note, to_json
from freetoken.errors import UsageError

if TYPE_CHECKING:
    from freetoken.deploy.stop import StopTarget
    from freetoken.supervisor.locks import LockHolder


@click.command("stop", epilog=examples("ft stop demo", "ft stop --all --dry-run"))
@click.argument("name", required=False)
@click.option("--all", "is_all", is_flag=True, help="Every deployment of this user on this machine.")
@click.option("--dry-run", is_flag=True, help="Show which processes would be ended; touch nothing.")
@json_option
def command(name: str | None, is_all: bool, dry_run: bool, as_json: bool) -> int:
    """Stop a deployment: SIGINT, then SIGTERM, then SIGKILL, to its own processes alone.

    Returns once they are gone and their ports are free. Stopping what does not run is no error.
    """
    from freetoken.deploy import stop
    from freetoken.units import format_bytes

    if is_all and name is not None:
        raise UsageError("give a name or `--all`, not both")
    if dry_run:
        targets = stop.preview(name, is_all=is_all)
        click.echo(to_json(targets)) if as_json else _show_targets(targets)
        return 0
    outcomes = stop.stop(
        name,
        is_all=is_all,
        on_stop=lambda one: note(f"stopping `{one.record.name}` (run {one.record.run_id})"),
        on_wait=_note_waiting,
    )
    if as_json:
        click.echo(to_json(outcomes))
        return 0
    if not outcomes:
        click.echo(f"`{name}` does not run" if name else "nothing runs here")
    for outcome in outcomes:
        freed = outcome.vram_freed_bytes
        click.echo(f"{outcome.name}: {outcome.how}" + (f"; {format_bytes(freed)} of VRAM came back" if freed else ""))
        if not outcome.is_port_free:
            note("warning: its port is still taken, by a process that is not ours")
        if outcome.warning:
            note(f"warning: {outcome.warning}")
    return 0


def _note_waiting(name: str, holder: LockHolder | None) -> None:
    note(f"waiting until {holder.describe() if holder else 'another `ft`'} has seen that `{name}` was stopped")


def _show_targets(targets: Sequence[StopTarget]) -> None:
    if not targets:
        click.echo("nothing to stop")
    for target in targets:
        ports = f", ports {', '.join(map(str, target.ports))}" if target.ports else ""
        click.echo(f"{target.name}: {target.condition}, run {target.run_id}{ports}")
        for process in target.processes:
            click.echo(f"  would end process {process}")
