"""`ft status`: what runs, declared, planned and measured side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.output import emit, examples, json_option, print_table
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.deploy.overview import DeploymentView, Overview, VramHolder

_LABELS = {
    "expert_slots": "expert slots", "kv_tokens": "KV tokens", "max_running_requests": "requests at once",
    "prefill_chunk_tokens": "prefill chunk, tokens", "vram_bytes": "VRAM", "ram_bytes": "host memory",
    "decode_tps": "decode, tok/s", "gpu": "GPU", "hit_ratio": "expert hit rate",
}  # fmt: skip


@click.command("status", epilog=examples("ft status", "ft status demo --json"))
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> int:
    """Show what runs: declared, planned and measured side by side, with drift and who holds the VRAM.

    Exit code 6: something is declared and not running as declared.
    """
    from freetoken.deploy.overview import read_overview

    overview = read_overview(name)
    emit(overview, as_json=as_json, render=lambda console: _render(overview, console))
    return 0 if overview.is_as_declared else 6


def _render(overview: Overview, console: Console) -> None:
    if not overview.deployments:
        click.echo("nothing runs and nothing is declared; `ft apply RECIPE` starts something")
    for index, view in enumerate(overview.deployments):
        if index:
            click.echo()
        _render_deployment(view, console)
    for study in overview.studies:
        click.echo(f"study on {study.device}: {study.purpose} (process {study.pid}) since {study.since}")
        click.echo(f"  `ft tune --status` shows it; `kill {study.pid}` ends it and keeps the best it has found")
    if overview.holders:
        click.echo()
        rows = [_holder_row(one) for one in overview.holders]
        print_table(console, ("GPU", "process", "VRAM", "deployment"), rows, align=("left", "left", "right", "left"))


def _render_deployment(view: DeploymentView, console: Console) -> None:
    forced = ", forced against the planner" if view.is_forced else ""
    elsewhere = "" if view.is_here else f" (of {view.state_dir})"
    # `stopped: stopped on request` says it twice.
    words = view.words.removeprefix(f"{view.condition} ")
    click.echo(f"{view.name}: {view.condition}{forced}{elsewhere}" + (f": {words}" if words else ""))
    if view.url is not None:
        click.echo(f"  {view.model} with {view.engine} at {view.url}")
        click.echo(f"  {_process_words(view)}")
    if view.last_restart:
        click.echo(f"  last restart {view.last_restart}")
    for text in (*view.problems, *(f"drift: {one}" for one in view.drift)):
        click.echo(f"  {text}")
    if view.rows:
        rows = [(_LABELS.get(one.field, one.field), *_cells(one.field, one)) for one in view.rows]
        print_table(console, ("", "declared", "planned", "measured"), rows, align=("left", "right", "right", "right"))
    if view.is_wrong and view.url is None:
        click.echo(f"  run folder {view.run_dir}; `ft apply` starts it again, `ft stop {view.name}` takes it back")


def _process_words(view: DeploymentView) -> str:
    engine = f"engine process {view.engine_pid}" if view.engine_pid else "no engine process"
    keeper = f"keeper {view.keeper_pid}" if view.keeper_pid else "no keeper"
    restarts = f", restarted {view.restarts} times" if view.restarts else ""
    return f"{engine}, {keeper}{restarts}, run {view.run_id}"


def _cells(field: str, row: Any) -> tuple[str, str, str]:
    return (_show(field, row.declared), _show(field, row.planned), _show(field, row.measured))


def _show(field: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return format_bytes(int(value.get("bytes", 0)))
    if field.endswith("_bytes"):
        return format_bytes(value)
    if field.endswith("_ratio"):
        return f"{100 * value:.3g} %"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _holder_row(holder: VramHolder) -> tuple[str, str, str, str]:
    return (holder.gpu, f"{holder.pid} {holder.name}", format_bytes(holder.used_bytes), holder.deployment or "")
