"""The engine's command in what people have: a line of a shell's history, or the script that starts the engine.

No shell is run. Comments, `export`, wrappers such as `nohup`, redirections and a `&` at the end are understood and
told; any other command beside the engine's own is named as not understood.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from freetoken.errors import UsageError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S | re.ASCII)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>?|<)(?:&\d?-?)?(.*)", re.S)
_SEPARATORS = frozenset({";", "&", "&&", "||", "|"})
#: Commands that start another one.
_WRAPPERS = frozenset(
    {
        "exec", "nohup", "time", "sudo", "setsid", "env", "nice", "ionice", "stdbuf", "numactl", "taskset", "timeout",
        "uv", "uvx", "poetry", "conda", "systemd-run", "chrt",
    }
)  # fmt: skip
#: Commands that only prepare a shell.
_PREPARING = frozenset({"set", "cd", "source", ".", "ulimit", "umask", "echo", "true", ":", "sleep", "export"})


@dataclass
class ShellCommand:
    """One command: the variables before it, its words, and what was taken off it."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_shell(text: str, is_engine: Callable[[Sequence[str]], bool]) -> list[ShellCommand]:
    """The commands in `text`, in order, each with the variables that hold where it stands. Raises UsageError.

    `is_engine` says whether words start an engine: it finds the command behind a wrapper.
    """
    known: dict[str, str] = {}
    exported: dict[str, str] = {}
    found = []
    for words in _split_commands(text):
        command = read_words([_expand(one, known) for one in words], is_engine)
        known |= command.env if not command.words else {}
        if command.words[:1] == ["export"]:
            for word in command.words[1:]:
                name, has_value, value = word.partition("=")
                known |= {name: value} if has_value else {}
                exported |= {name: known[name]} if name in known else {}
        elif command.words:
            command.env = {**exported, **command.env}
            found.append(command)
    return found


def read_words(words: Sequence[str], is_engine: Callable[[Sequence[str]], bool]) -> ShellCommand:
    """One command's words without assignments, wrappers and redirections."""
    rest, kept, redirected = list(words), list[str](), list[str]()
    while rest:
        word = rest.pop(0)
        match = _REDIRECTION.fullmatch(word)
        if match is None:
            kept.append(word)
            continue
        redirected.append(word)
        if not match[1] and "&" not in word[1:] and rest:
            redirected.append(rest.pop(0))
    command = ShellCommand(kept)
    _take_off(command, is_engine)
    if redirected:
        command.notes.append(f"`{' '.join(redirected)}` is left out: `ft` keeps the engine's log itself (`ft logs`)")
    return command


def is_preparing(command: ShellCommand) -> bool:
    """It only prepares the shell."""
    return command.words[0] in _PREPARING


def _take_off(command: ShellCommand, is_engine: Callable[[Sequence[str]], bool]) -> None:
    """Assignments and wrappers in front of the command proper."""
    words = command.words
    while words:
        if _ASSIGNMENT.fullmatch(words[0]):
            name, _, value = words.pop(0).partition("=")
            command.env[name] = value
            continue
        starts = range(1, len(words)) if words[0] in _WRAPPERS else ()
        begin = next((at for at in starts if _is_next(words[at:], is_engine)), None)
        if begin is None:
            return
        command.notes.append(f"`{' '.join(words[:begin])}` is left out: `ft` starts and keeps the engine itself")
        del words[:begin]


def _is_next(words: Sequence[str], is_engine: Callable[[Sequence[str]], bool]) -> bool:
    return words[0] in _WRAPPERS or _ASSIGNMENT.fullmatch(words[0]) is not None or is_engine(words)


def _split_commands(text: str) -> Iterator[list[str]]:
    pending = ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        if not pending and line.lstrip().startswith("#"):
            continue
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = shlex.split(pending, comments=False)
        except ValueError:
            continue  # a quote that goes on in the next line
        yield from _separate(words)
        pending = ""
    if pending:
        try:
            shlex.split(pending)
        except ValueError as error:
            raise UsageError(f"the command line cannot be read: {error}") from error


def _separate(words: Sequence[str]) -> Iterator[list[str]]:
    current: list[str] = []
    for word in words:
        if word.startswith("#"):
            break  # a comment up to the line's end
        if word in _SEPARATORS or (word.endswith(";") and len(word) > 1):
            current += [] if word in _SEPARATORS else [word[:-1]]
            if current:
                yield current
            current = []
        else:
            current.append(word)
    if current:
        yield current


def _expand(word: str, known: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[0]), word)
