"""The command `ft`: finds the file of a command, imports it when it is used, and catches `FtError`.

Nothing heavy is imported here: `ft --help` must answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from freetoken import __version__
from freetoken.cli.streams import forgive_stderr, open_closed_streams
from freetoken.errors import FtError, UsageError

#: Command -> (module:attribute, one sentence for `ft --help`), in the order in which a user meets them.
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("freetoken.cli.doctor:command", "Look for what is in the way on this machine, and show the fix."),
    "probe": ("freetoken.cli.probe:command", "Read what this machine has; `--save` writes a profile."),
    "plan": ("freetoken.cli.plan:command", "Prove that a model fits this machine, before anything is downloaded."),
    "apply": ("freetoken.cli.apply:command", "Make a recipe run: plan, launch, prove; or change what runs."),
    "status": ("freetoken.cli.status:command", "Show what runs: declared, planned and measured side by side."),
    "rollback": ("freetoken.cli.rollback:command", "Go back to a setting of a deployment that worked."),
    "logs": ("freetoken.cli.logs:command", "Print the log of a deployment."),
    "stop": ("freetoken.cli.stop:command", "Stop a deployment, or all of them."),
    "ctl": ("freetoken.cli.ctl:command", "Talk to a running engine: health, stats, cache, requests, generate."),
    "chat": ("freetoken.cli.chat:command", "Chat with the running model in the terminal."),
    "model": ("freetoken.cli.model:command", "Fetch, list, verify, inspect and remove models."),
    "engine": ("freetoken.cli.engine:command", "List the engines that can be driven, and their state here."),
    "recipe": ("freetoken.cli.recipe:command", "List and show recipes, and where each value comes from."),
    "bench": ("freetoken.cli.bench:command", "Measure this machine (`bw`), or what runs (`run`)."),
    "workload": ("freetoken.cli.workload:command", "List, show and record workloads: what is asked of the server."),
    "tune": ("freetoken.cli.tune:command", "Find the fastest setting that really fits this machine, with proof."),
    "results": ("freetoken.cli.results:command", "Show what was measured on this machine."),
    "report": ("freetoken.cli.report:command", "Write a study of `ft tune` as one HTML file with plots."),
    "export": ("freetoken.cli.export:command", "Write a recipe, its lock and evidence into one file for others."),
    "import": ("freetoken.cli.import_:command", "Judge a recipe from elsewhere, and plan it for this machine."),
    "push": ("freetoken.cli.push:command", "Put a recipe's bundle into a registry: a hub, a git repository, a folder."),
    "pull": ("freetoken.cli.pull:command", "Fetch a recipe's bundle from a registry, and plan it for this machine."),
    "db": ("freetoken.cli.db:command", "Back up, restore and check the database of results."),
    "schema": ("freetoken.cli.schema:command", "Print the JSON Schema of a recipe, profile, workload or plan."),
    "service": ("freetoken.cli.service:command", "Keep a deployment over logout and reboot, by systemd."),
    "serve": ("freetoken.cli.serve:command", "Run the native engine in the foreground."),
    "completion": ("freetoken.cli.completion:command", "Print the script that completes `ft` in your shell."),
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
        import gc
        from importlib import import_module

        from freetoken.cli.later import import_later

        import_later()
        # What is imported stays: looking through it again and again is 2 % of a short command. An engine keeps the
        # collector's own pace, since tensors hang on its cycles.
        if cmd_name != "serve":
            gc.set_threshold(50_000, 20, 20)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n  ft plan recipes/demo.yaml\n  ft apply recipes/demo.yaml",
)
@click.option("--state", metavar="FOLDER", help="State folder; else FT_STATE, ./state, or the user's state folder.")
@click.version_option(__version__, prog_name="ft", message="%(prog)s %(version)s")
def cli(state: str | None) -> None:
    """Deploy large Mixture-of-Experts models on machines too small for them, from one recipe."""
    if state is not None:
        from freetoken import paths

        paths.set_state_dir(state)


def main(argv: list[str] | None = None) -> Any:
    """Run `ft` and exit with the codes of DESIGN section 9."""
    arguments = sys.argv[1:] if argv is None else argv
    # pydantic would scan every installed distribution for plugins at import: a tenth of `ft plan`.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    open_closed_streams()
    forgive_stderr()
    try:
        code = cli.main(args=arguments, prog_name="ft", standalone_mode=False)
        _flush_stdout()
    except FtError as error:
        code = _report(error, arguments)
    except click.ClickException as error:
        code = _report_usage(error, arguments)
    except (KeyboardInterrupt, click.Abort):
        code = _report(_Interrupted("interrupted"), arguments)
    except BrokenPipeError:
        code = _close_broken_stdout()
    except Exception as error:
        if isinstance(error, OSError) and _comes_from_printing(error):
            code = _report(FtError(f"stdout cannot be written: {error.strerror}"), [])
            _close_broken_stdout()
        elif os.environ.get("FT_DEBUG"):
            raise
        else:
            code = _report(_describe_bug(error), arguments)
    sys.exit(code if isinstance(code, int) else 0)


class _Interrupted(FtError):
    exit_code = 130


def _report(error: FtError, arguments: list[str]) -> int:
    from freetoken.cli.output import print_error

    print_error(error, as_json="--json" in arguments)
    return error.exit_code


def _report_usage(error: click.ClickException, arguments: list[str]) -> int:
    from freetoken.cli.usage import describe_click_error, is_help_wanted

    if is_help_wanted(error):
        click.echo(error.format_message(), err=True)
        return UsageError.exit_code
    return _report(describe_click_error(error), arguments)


def _describe_bug(error: Exception) -> FtError:
    from freetoken.cli.usage import describe_bug

    return describe_bug(error)


def _flush_stdout() -> None:
    # A pipe that broke shows itself here rather than in the interpreter's own shutdown, where nobody catches it.
    sys.stdout.flush()


def _comes_from_printing(error: OSError) -> bool:
    """Whether `error` was raised where text goes out, and not in work on a file."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return False
    code = place.tb_frame.f_code
    return code.co_name in ("echo", "_flush_stdout") and error.filename is None


def _close_broken_stdout() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
