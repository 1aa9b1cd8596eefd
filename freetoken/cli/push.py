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
@click.argument("source", metavar="NAME|RECIPE|BUNDLE", required=False)
@click.option("--sign", "is_signed", is_flag=True, help="Sign it with this machine's key.")
@click.option("--private", "is_private", is_flag=True, help="Make the dataset a private one where it is new.")
@click.option("--replace", "is_replacing", is_flag=True, help="Replace another bundle of the same name there.")
@click.option("--reindex", "is_reindexing", is_flag=True, help="Make the registry's index anew from its bundles.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Make and judge the bundle; send nothing.")
@json_option
def command(
    target: str, source: str | None, is_signed: bool, is_private: bool, is_replacing: bool, is_reindexing: bool,
    yes: bool, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Put a recipe's bundle into a registry: hf:owner/name, git+https://..., git+file://..., or a folder.

    A registry is a folder with bundles/NAME.ftbundle and an index.json, which every push renews; where somebody changed
    the folder by hand, `--reindex` sets the index right. What is pushed can be seen by whoever sees the registry, so
    it asks first.
    """
    from freetoken.errors import UsageError
    from freetoken.share.bundle import SUFFIX, read_bundle
    from freetoken.share.places import check_target, push

    check_target(target)
    if is_reindexing:
        _reindex(target, yes=yes, dry_run=dry_run, as_json=as_json)
        return
    if source is None:
        raise UsageError("what is to be pushed?", hint="a recipe's name or file, or a bundle: `ft push TARGET mine`")
    if source.endswith(SUFFIX):
        if is_signed:
            raise UsageError(f"{source} is a bundle already", hint=f"`ft export RECIPE --sign -o {source}` signs one")
        from freetoken.share.archive import read_bytes

        bundle = read_bundle(read_bytes(Path(source), source), source)
    else:
        from freetoken.cli.export import make_export

        _, bundle = make_export(source, is_signed=is_signed)
    data = bundle.data
    value = {"name": bundle.recipe.name, "sha256": bundle.sha256, "bytes": len(data), "target": target}
    words = f"{bundle.recipe.name}, {len(data):,} bytes, {bundle.signer.describe()}"
    if dry_run:
        emit(value, as_json=as_json, render=lambda _: click.echo(f"would push {words} to {target}"))
        return
    _ask(f"push {words} to {target}", yes=yes)
    file, where = push(target, data, is_private=is_private, is_replacing=is_replacing)
    emit({**value, "file": file, "where": where}, as_json=as_json, render=lambda _: click.echo(f"{file}  {where}"))


def _reindex(target: str, *, yes: bool, dry_run: bool, as_json: bool) -> None:
    from freetoken.share.places import reindex

    if dry_run:
        click.echo(f"would read every bundle in {target} and write its index anew")
        return
    _ask(f"write the index of {target} anew", yes=yes)
    index, wrong, where = reindex(target)
    value = {"bundles": list(index.bundles), "wrong": list(wrong), "where": where}
    emit(value, as_json=as_json, render=lambda _: click.echo(f"{len(index.bundles)} bundles in the index  {where}"))
    for text in wrong:
        note(f"left out: {text}")


def _ask(question: str, *, yes: bool) -> None:
    from freetoken.errors import UsageError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"nobody can be asked here whether to {question}", hint="`--yes`")
    click.confirm(f"{question}?", abort=True, err=True)
