"""Click's usage errors and our own bugs, told the way `ft` tells errors: one sentence, a hint, the exit code."""

from __future__ import annotations

import re
import traceback

import click

from freetoken import paths
from freetoken.errors import FtError, UsageError, did_you_mean


def is_help_wanted(error: click.ClickException) -> bool:
    """True where a group was called without a command: its help says more than an error would."""
    return type(error).__name__ == "NoArgsIsHelpError"


def describe_click_error(error: click.ClickException) -> FtError:
    """What a click error says, in our words, with the nearest command or option and where help is."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ft"
    message = _describe_message(error, context, command)
    return UsageError(message, hint=f"`{command} --help` shows what it takes")


def _describe_message(error: click.ClickException, context: click.Context | None, command: str) -> str:
    if isinstance(error, click.NoSuchOption):
        known = _option_names(context)
        return f"`{command}` has no option `{error.option_name}`{did_you_mean(error.option_name, known, cutoff=0.6)}"
    name, group = _missing_command_name(error), context.command if context is not None else None
    if name is not None and context is not None and isinstance(group, click.Group):
        known = group.list_commands(context)
        return f"`{command}` has no command `{name}`{did_you_mean(name, known, cutoff=0.6)}"
    if isinstance(error, click.MissingParameter):
        missing = error.param.get_error_hint(context) if error.param and context else "an argument"
        return f"`{command}` needs {_in_backticks(missing)}"
    if isinstance(error, click.BadParameter):
        where = error.param.get_error_hint(context) if error.param and context else error.param_hint or "a value"
        where = where if isinstance(where, str) else " / ".join(where)
        return f"{_in_backticks(where)}: {_lower(error.message)}"
    return _lower(error.format_message())


def _missing_command_name(error: click.ClickException) -> str | None:
    # click 8.2 and older raise a plain UsageError here, newer ones a NoSuchCommand with the name in it.
    named: str | None = getattr(error, "command_name", None)
    if named is not None:
        return named
    match = re.match(r"No such command '(.+?)'", getattr(error, "message", ""))
    return match[1] if match else None


def _option_names(context: click.Context | None) -> list[str]:
    if context is None:
        return []
    return [name for param in context.command.get_params(context) for name in param.opts if name.startswith("-")]


def describe_bug(error: Exception) -> FtError:
    """An error nobody foresaw: what it was, and the file that its traceback was appended to."""
    hint = "set FT_DEBUG=1 to see the traceback"
    target = paths.state_dir() / "errors.log"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)) + "\n")
        hint = f"full traceback in {target}; this is a bug in `ft`"
    except OSError:
        pass  # No place to write to: the variable above still shows it.
    return FtError(f"unexpected {type(error).__name__}: {error}", hint=hint)


def _in_backticks(text: str) -> str:
    return re.sub(r"'([^']*)'", r"`\1`", text) if "'" in text else f"`{text}`"


def _lower(text: str) -> str:
    text = re.sub(r"'([^']*)'", r"`\1`", text).strip().rstrip(".")
    return text[:1].lower() + text[1:]
