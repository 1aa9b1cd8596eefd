"""`ft push`: a bundle into a registry, where others can pull it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from freetoken.cli.output import emit, examples, json_option, note


@click.command(
    "push",
    epilog=examples("ft push hf:me/recipes qwen3.6-35b-a3b-6gb", "ft push git+https://host/recipes x.ftbundle"),
)
@click.argument("target", metavar="TARGET")
@click.argument("source", metavar="NAME|RECIPE|BUNDLE")
@click.option("--sign", "is_signed", is_flag=True, help="Sign it with this machine's key.")
@click.option("--private", "is_private", is_flag=True, help="Make the dataset a private one where it is new.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Make and judge the bundle; send nothing.")
@json_option
def command(
    target: str, source: str, is_signed: bool, is_private: bool, yes: bool, dry_run: bool, as_json: bool
) -> None:
    """Put a recipe's bundle into a registry: hf:owner/name, git+https://..., git+file://..., or a folder.

    A registry is a folder of bundles with an index. What is pushed can be seen by whoever sees the registry, so it
    asks first.
    """
    from freetoken.errors import UsageError
    from freetoken.share.bundle import SUFFIX, read_bundle
    from freetoken.share.places import push

    if source.endswith(SUFFIX):
        from freetoken.share.archive import read_bytes

        data = read_bytes(Path(source), source)
    else:
        from freetoken.deploy.target import load_target
        from freetoken.share.export import export_recipe

        data = export_recipe(load_target(source), is_signed=is_signed, say=lambda text: note(f"note: {text}"))
    bundle = read_bundle(data, source)
    value = {"name": bundle.recipe.name, "sha256": bundle.sha256, "bytes": len(data), "target": target}
    words = f"{bundle.recipe.name}, {len(data):,} bytes, {bundle.signer.describe()}"
    if dry_run:
        emit(value, as_json=as_json, render=lambda _: click.echo(f"would push {words} to {target}"))
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"nobody can be asked here whether to push {words} to {target}", hint="`--yes`")
        click.confirm(f"push {words} to {target}?", abort=True, err=True)
    file, where = push(target, data, is_private=is_private)
    emit({**value, "file": file, "where": where}, as_json=as_json, render=lambda _: click.echo(f"{file}  {where}"))
