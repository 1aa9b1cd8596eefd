"""`ft recipe key` and `ft recipe trust`: this machine's key for signing bundles, and the keys of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table

if TYPE_CHECKING:
    from rich.console import Console


@click.command("key", epilog=examples("ft recipe key --new", "ft recipe key"))
@click.option("--new", "is_new", is_flag=True, help="Make the key; there must be none yet.")
@json_option
def key_command(is_new: bool, as_json: bool) -> None:
    """Show the public half of this machine's key, which others put on their trust list.

    `ft export --sign` signs with the secret half, which never leaves the state folder.
    """
    from freetoken.share.sign import key_path, make_key, read_public_key

    key = make_key() if is_new else read_public_key()
    emit({"public_key": key}, as_json=as_json, render=lambda _: click.echo(key))
    if is_new:
        note(f"the secret half is {key_path()}; back it up, and give it to nobody")
        note("sign with it: `ft export RECIPE --sign`; others trust it: `ft recipe trust NAME KEY`")


@click.command("trust", epilog=examples("ft recipe trust", "ft recipe trust ann KEY"))
@click.argument("name", required=False)
@click.argument("key", required=False)
@click.option("--remove", "is_removing", is_flag=True, help="Take the key of that name off the list.")
@json_option
def trust_command(name: str | None, key: str | None, is_removing: bool, as_json: bool) -> None:
    """List the keys whose signatures count here, or add one that you got from its owner.

    A signature says who vouches for a bundle, not that it is safe: what an import refuses it refuses signed or not.
    `ft import --trusted` takes only what a key of this list signed.
    """
    from freetoken.errors import UsageError
    from freetoken.share.sign import forget, read_trusted, trust

    if is_removing:
        if name is None or key is not None:
            raise UsageError("which key is to be removed?", hint="`ft recipe trust NAME --remove`")
        forget(name)
    elif name is not None:
        if key is None:
            raise UsageError(f"which key is `{name}`?", hint=f"`ft recipe trust {name} KEY`, or `ft import --trust`")
        trust(name, key)
    keys = read_trusted()
    emit(keys, as_json=as_json, render=lambda console: _render(keys, console))


def _render(keys: dict[str, str], console: Console) -> None:
    if not keys:
        click.echo("no key is trusted here; `ft recipe trust NAME KEY` adds one")
        return
    print_table(console, ("name", "public key"), list(keys.items()))
