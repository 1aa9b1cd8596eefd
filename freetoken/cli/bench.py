"""`ft bench`: what this machine, and what runs on it, can do. Each subcommand is imported when it is used."""

from __future__ import annotations

from importlib import import_module

import click

from freetoken.cli.output import examples

#: Subcommand -> (module:attribute, one sentence for `ft bench --help`).
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "bw": ("freetoken.cli.bench_bw:command", "Measure link, memory and expert arithmetic of this machine."),
    "run": (
        "freetoken.cli.bench_run:command",
        "Measure a workload on what runs now: real text, fresh prompts, intervals.",
    ),
}


class BenchGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The subcommands, in order."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand `cmd_name`, imported now; None where there is none."""
        if cmd_name not in SUBCOMMANDS:
            return None
        module, _, attribute = SUBCOMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of subcommands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in SUBCOMMANDS.items()])


@click.group("bench", cls=BenchGroup, epilog=examples("ft bench bw", "ft bench run demo --workload code-4k --json"))
def command() -> None:
    """Measure what this machine can do (`bw`), or a workload on what runs now, with intervals (`run`)."""
