"""`ft db`: back up, restore and check the database of results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from freetoken.cli.output import emit, examples, json_option, note
from freetoken.errors import BadFileError, UsageError


@click.group("db", epilog=examples("ft db backup results.db", "ft db check"))
def command() -> None:
    """Back up, restore and check the database of results."""


@command.command("backup", epilog=examples("ft db backup", "ft db backup /mnt/team/results.db"))
@click.argument("file", metavar="[FILE]", required=False)
@json_option
def backup_command(file: str | None, as_json: bool) -> None:
    """Copy the database into one file, while others write to it; the copy is checked."""
    from freetoken import paths
    from freetoken.outfile import check_output
    from freetoken.store.backup import backup
    from freetoken.store.rows import make_timestamp

    stamp = make_timestamp()[:19].replace(":", "")
    target = check_output(Path(file)) if file is not None else paths.state_dir() / "backups" / f"ft-{stamp}.db"
    found = backup(paths.database_path(), target)
    emit(found, as_json=as_json, render=lambda _: click.echo(found.describe()))


@command.command("restore", epilog=examples("ft db restore results.db", "ft db restore results.db --yes"))
@click.argument("file", metavar="FILE")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def restore_command(file: str, yes: bool, as_json: bool) -> None:
    """Put a backup in the database's place, checked first; what is there now is kept beside it."""
    from freetoken import paths
    from freetoken.store.backup import check, restore

    source, target = Path(file), paths.database_path()
    with _of_a_copy(source):
        check(source)
    if target.exists() and not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"nobody can be asked here whether to replace {target} by {source}", hint="`--yes`")
        click.confirm(f"replace {target} by {source}?", abort=True, err=True)
    found = restore(source, target)
    if found.kept is not None:
        note(f"what was there is kept as {found.kept}")
    emit(found, as_json=as_json, render=lambda _: click.echo(found.describe()))


@command.command("check", epilog=examples("ft db check", "ft db check results.db --json"))
@click.argument("file", metavar="[FILE]", required=False)
@json_option
def check_command(file: str | None, as_json: bool) -> None:
    """Read every page of the database and every row of it.

    Exits with 2 where something is wrong.
    """
    from freetoken import paths
    from freetoken.store.backup import check

    path = Path(file) if file is not None else paths.database_path()
    with _of_a_copy(path):
        found = check(path)
    emit(found, as_json=as_json, render=lambda _: click.echo(found.describe()))


@contextmanager
def _of_a_copy(path: Path) -> Iterator[None]:
    """What is wrong with a copy is no reason to make the living database anew."""
    from freetoken import paths

    try:
        yield
    except BadFileError as error:
        if path.absolute() != paths.database_path():
            error.hint = "take another copy; `ft db backup` checks each that it makes"
        raise
