"""`ft rollback`: back to a setting of a deployment that worked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import Align, emit, examples, json_option, note, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.deploy.rollback import GoodSetting


@click.command("rollback", epilog=examples("ft rollback", "ft rollback qwen3.6-35b-a3b-8gb --list"))
@click.argument("name", required=False)
@click.option("--to", metavar="SETTING", help="One of `--list`; else the last one that differs from what runs.")
@click.option("--list", "is_list", is_flag=True, help="List the settings that were proven, the newest first.")
@click.option("--dry-run", is_flag=True, help="Show the plan, the changes and the exact command line; touch nothing.")
@click.option("--yes", is_flag=True, help="Restart what runs without asking.")
@click.option("--no-wait", is_flag=True, help="Fail at once where another `ft` is changing this deployment.")
@json_option
def command(
    name: str | None, to: str | None, is_list: bool, dry_run: bool, yes: bool, no_wait: bool, as_json: bool
) -> None:
    """Make an earlier, proven setting of a deployment run again.

    Live where that is enough, by a restart otherwise. What runs is given back where that fails.
    """
    from freetoken.cli.apply import Printer, confirm_change, render_result
    from freetoken.deploy.rollback import choose_name, list_good_settings, rollback

    name = choose_name(name)
    if is_list:
        found = list_good_settings(name)
        emit(list(found), as_json=as_json, render=lambda console: _render(found, console))
        return
    is_asking = sys.stdin.isatty() and sys.stderr.isatty() and not yes and not dry_run
    result = rollback(
        name,
        to=to,
        is_dry_run=dry_run,
        is_waiting=not no_wait,
        confirm=confirm_change if is_asking else None,
        progress=Printer(as_json=as_json),
    )
    emit(result, as_json=as_json, render=lambda console: render_result(result, console))


def _render(found: tuple[GoodSetting, ...], console: Console) -> None:
    if not found:
        note("nothing of this name was ever proven")
        return
    rows = [
        (
            one.id, one.proven_at[:19].replace("T", " "), one.strategy, f"{one.expert_slots:,}", f"{one.kv_tokens:,}",
            "" if one.decode_tps is None else f"{one.decode_tps:.3g}", "now" if one.is_current else "",
        )
        for one in found
    ]  # fmt: skip
    headings = ("setting", "proven (UTC)", "strategy", "expert slots", "KV tokens", "tok/s", "")
    align: tuple[Align, ...] = ("left", "left", "left", "right", "right", "right", "left")
    print_table(console, headings, rows, align=align)
