"""`ft pull`: a bundle out of a registry, judged like any other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from freetoken.cli.complete import complete_profile
from freetoken.cli.output import emit, examples, json_option, note, print_table
from freetoken.units import format_significant

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.share.registry import Index


@click.command("pull", epilog=examples("ft pull hf:owner/recipes --list", "ft pull git+https://host/team/recipes mine"))
@click.argument("target", metavar="TARGET")
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--list", "is_listing", is_flag=True, help="Show what the registry holds; fetch nothing.")
@click.option("-o", "--output", metavar="FILE", help="Only write the bundle there; judge it later with `ft import`.")
@click.option("--dry-run", is_flag=True, help="Judge and plan only; keep nothing.")
@click.option("--name", "own_name", metavar="NAME", help="Import it under this name.")
@click.option("--replace", "is_replacing", is_flag=True, help="Replace what was imported under the name.")
@click.option("--trusted", "is_trusted_only", is_flag=True, help="Refuse what no key of your trust list signed.")
@click.option("--profile", metavar="NAME", shell_complete=complete_profile, help="Plan for a machine that is not here.")
@json_option
def command(
    target: str, name: str | None, is_listing: bool, output: str | None, dry_run: bool, own_name: str | None,
    is_replacing: bool, is_trusted_only: bool, profile: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Fetch a recipe's bundle and show what this machine would run, as `ft import` does.

    TARGET is hf:owner/name[@revision], git+https://..., git+file://..., a folder of bundles, or a file. NAME chooses
    where there are several. Nothing is started.
    """
    from freetoken.share.places import list_registry, pull

    if is_listing:
        index = list_registry(target)
        emit(index, as_json=as_json, render=lambda console: _render_index(index, console))
        return 0
    if output is not None:
        from freetoken.outfile import check_output

        check_output(Path(output))
    file, data = pull(target, name)
    if output is not None:
        from freetoken.share.export import write_bundle

        digest = write_bundle(data, Path(output))
        value = {"path": output, "bytes": len(data), "sha256": digest}
        emit(value, as_json=as_json, render=lambda _: click.echo(f"{output}  {len(data):,} bytes  sha256 {digest}"))
        return 0
    from freetoken.cli.import_ import finish
    from freetoken.share.receive import receive_bytes

    outcome = receive_bytes(
        data, file, name=own_name, is_kept=not dry_run, is_replacing=is_replacing,
        is_trusted_only=is_trusted_only, profile=profile,
    )  # fmt: skip
    note(f"fetched {file} from {target}")
    return finish(outcome, as_json=as_json)


def _render_index(index: Index, console: Console) -> None:
    """What the index says: by whoever wrote it, and trusted for nothing."""
    heads = ("bundle", "model", "engine", "workload", "measured on", "decode tok/s", "day")
    rows = [
        (name, one.model, one.engine, one.workload, one.gpu or "", _figure(one.decode_tps), one.day or "")
        for name, one in index.bundles.items()
    ]
    if not rows:
        click.echo("the registry is empty")
        return
    print_table(console, heads, rows, align=("left", "left", "left", "left", "left", "right"))


def _figure(value: float | None) -> str:
    return "" if value is None else format_significant(value)
