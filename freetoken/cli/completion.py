"""`ft completion`: the script that completes `ft`, as click writes it for each shell."""

from __future__ import annotations

import click

from freetoken.cli.output import emit, examples, json_option, note

_PLACES = {
    "bash": ("~/.local/share/bash-completion/completions/ft", "open a new shell"),
    "zsh": ("~/.zfunc/_ft", "have `fpath+=(~/.zfunc); autoload -Uz compinit; compinit` in ~/.zshrc, open a new shell"),
    "fish": ("~/.config/fish/completions/ft.fish", "open a new shell"),
}


@click.command(
    "completion",
    epilog=examples(
        "ft completion bash > ~/.local/share/bash-completion/completions/ft",
        "ft completion zsh > ~/.zfunc/_ft",
    ),
)
@click.argument("shell", type=click.Choice(sorted(_PLACES)))
@json_option
def command(shell: str, as_json: bool) -> None:
    """Print the script that completes `ft` in your shell.

    The script goes to stdout; where it belongs is said on stderr.
    """
    place, then = _PLACES[shell]
    script = make_script(shell)
    value = {"shell": shell, "place": place, "then": then, "script": script}
    emit(value, as_json=as_json, render=lambda console: click.echo(script))
    if not as_json:
        note(f"hint: `ft completion {shell} > {place}`, then {then}")


def make_script(shell: str) -> str:
    """The completion script of click for `ft` in `shell`."""
    from click.shell_completion import get_completion_class

    from freetoken.cli.main import cli

    completion = get_completion_class(shell)
    if completion is None:  # pragma: no cover - the choices are click's own
        raise ValueError(f"no completion for `{shell}`")
    # Not `.source()`: bash's asks the installed bash for its version, and this may be written for another machine.
    instance = completion(cli, {}, "ft", "_FT_COMPLETE")
    return instance.source_template % instance.source_vars()
