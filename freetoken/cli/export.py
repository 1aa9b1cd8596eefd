"""`ft export`: a recipe with its lock and what was measured, as one file for others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from freetoken.cli.complete import complete_recipe
from freetoken.cli.output import emit, examples, json_option, note

if TYPE_CHECKING:
    from freetoken.recipe.load import LoadedRecipe
    from freetoken.recipe.model import Recipe
    from freetoken.share.bundle import Bundle
    from freetoken.share.model import StudyPoint


@click.command(
    "export", epilog=examples("ft export qwen3.6-35b-a3b-6gb", "ft export recipes/mine.yaml -o mine.ftbundle --sign")
)
@click.argument("target", metavar="[NAME|RECIPE]", required=False, shell_complete=complete_recipe)
@click.option("-o", "--output", metavar="FILE", help="Where the bundle goes; else NAME.ftbundle in this folder.")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Override a value of the recipe; repeatable.")
@click.option("--sign", "is_signed", is_flag=True, help="Sign it with this machine's key.")
@click.option("--new-key", is_flag=True, help="Make this machine's key, and print its public half.")
@json_option
def command(
    target: str | None, output: str | None, sets: tuple[str, ...], is_signed: bool, new_key: bool, as_json: bool
) -> None:
    """Write a recipe, its lock and what was measured with it into one file that others can judge.

    The file holds bytes and tokens rather than this machine's counts, and nothing personal: no path, host, user or
    serial. Without a name the one running deployment is meant. `-o -` writes to stdout.
    """
    from freetoken.errors import UsageError

    if new_key:
        from freetoken.share.sign import make_key

        key = make_key()
        emit({"public_key": key}, as_json=as_json, render=lambda _: click.echo(key))
        if target is None:
            return
    target = target or _find_running()
    if output is not None and output != "-":
        from freetoken.outfile import check_output

        check_output(Path(output))
    from freetoken.share.bundle import SUFFIX
    from freetoken.share.export import write_bundle

    loaded, bundle = make_export(target, sets=sets, is_signed=is_signed)
    data = bundle.data
    if output == "-":
        if sys.stdout.isatty():
            raise UsageError("a bundle is no text: give `-o FILE`, or a pipe")
        os.write(sys.stdout.fileno(), data)
        return
    path = Path(output or f"{loaded.recipe.name}{SUFFIX}")
    digest = write_bundle(data, path)
    value = {"path": str(path), "bytes": len(data), "sha256": digest, "name": loaded.recipe.name}
    emit(value, as_json=as_json, render=lambda _: click.echo(f"{path}  {len(data):,} bytes  sha256 {digest}"))
    note(describe_contents(bundle))


def make_export(
    target: str, *, sets: tuple[str, ...] = (), is_signed: bool = False
) -> tuple[LoadedRecipe, Bundle]:  # fmt: skip
    """The recipe that `target` names and its bundle, with what the tuner found here; what is left out is noted."""
    from freetoken.deploy.target import load_target
    from freetoken.share.export import check_readable, export_recipe

    loaded = load_target(target, sets=sets)
    data = export_recipe(
        loaded, is_signed=is_signed, study=read_study(loaded.recipe), say=lambda text: note(f"note: {text}")
    )
    return loaded, check_readable(data)


def read_study(recipe: Recipe) -> tuple[StudyPoint, ...]:
    """The trials of the tuner's studies of `recipe` in this state folder; a storage that is broken tells nothing."""
    from freetoken import paths
    from freetoken.errors import FtError

    path = paths.studies_path()
    if not path.is_file():
        return ()
    from freetoken.share.study import make_points
    from freetoken.tuner.seeds import read_trials

    try:
        return make_points(read_trials(recipe, path))
    except FtError as error:
        note(f"note: the tuner's trials are left out: {error.message}")
        return ()


def describe_contents(bundle: Bundle) -> str:
    """One line on what a bundle tells: lock, figures, signature."""
    from freetoken.share.compare import describe_evidence

    lock = "with lock" if bundle.lock is not None else "no lock"
    return f"{bundle.recipe.name}: {lock}, {bundle.signer.describe()}; evidence: {describe_evidence(bundle)}"


def _find_running() -> str:
    """The recipe in the run folder of the one running deployment."""
    from freetoken.deploy.connect import find_one
    from freetoken.errors import UsageError

    try:
        return str(find_one(None).record.folder / "recipe.yaml")
    except UsageError as error:
        raise UsageError(error.message, hint="name a recipe: `ft export RECIPE`") from error
