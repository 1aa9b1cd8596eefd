"""The command `ft`: finds the file of a command, imports it when it is used, and catches `FtError`.

Nothing heavy is imported here: `ft --help` must answer at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from freetoken import __version__, paths
from freetoken.errors import FtError

#: Command -> (module:attribute, one sentence for `ft --help`), in the order in which a user meets them.
COMMANDS: dict[str, tuple[str, str]] = {
    "probe": ("freetoken.cli.probe:command", "Read what this machine has; `--save` writes a profile."),
    "plan": ("freetoken.cli.plan:command", "Prove that a model fits this machine, before anything is downloaded."),
    "apply": ("freetoken.cli.apply:command", "Make a recipe run: plan, launch, prove; or change what runs."),
    "status": ("freetoken.cli.status:command", "Show what runs: declared, planned and measured side by side."),
    "logs": ("freetoken.cli.logs:command", "Print the log of a deployment."),
    "stop": ("freetoken.cli.stop:command", "Stop a deployment, or all of them."),
    "ctl": ("freetoken.cli.ctl:command", "Talk to a running engine: health, stats, cache, requests, generate."),
    "chat": ("freetoken.cli.chat:command", "Chat with the running model in the terminal."),
    "model": ("freetoken.cli.model:command", "Fetch, list, verify, inspect and remove models."),
    "engine": ("freetoken.cli.engine:command", "List the engines that can be driven, and their state here."),
    "recipe": ("freetoken.cli.recipe:command", "List and show recipes, and where each value comes from."),
    "results": ("freetoken.cli.results:command", "Show what was measured on this machine."),
    "schema": ("freetoken.cli.schema:command", "Print the JSON Schema of a recipe, profile or workload."),
    "serve": ("freetoken.cli.serve:command", "Run the native engine in the foreground."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command `cmd_name`, imported now; None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--state", metavar="FOLDER", help="State folder; else FT_STATE, ./state, or the user's state folder.")
@click.version_option(__version__, prog_name="ft", message="%(prog)s %(version)s")
def cli(state: str | None) -> None:
    """Deploy large Mixture-of-Experts models on machines too small for them, from one recipe."""
    if state is not None:
        paths.set_state_dir(state)


def main(argv: list[str] | None = None) -> Any:
    """Run `ft` and exit with the codes of DESIGN section 9."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = cli.main(args=arguments, prog_name="ft", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except FtError as error:
        from freetoken.cli.output import print_error

        print_error(error, as_json="--json" in arguments)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
