"""The engine's command in what people have: a line of a shell's history, or the script that starts the engine.

No shell is run. Comments, `export`, wrappers such as `nohup`, redirections and a `&` at the end are understood and
told; any other command beside the engine's own is named as not understood.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from freetoken.errors import UsageError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S | re.ASCII)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>?|<)(?:&\d?-?)?(.*)", re.S)
_SEPARATORS = frozenset({";", "&", "&&", "||", "|"})
#: Commands that start another one: how many words of their own follow them; options are skipped.
_WRAPPERS = {"exec": 0, "nohup": 0, "time": 0, "sudo": 0, "setsid": 0, "env": 0, "nice": 0, "ionice": 0, "stdbuf": 0,
             "numactl": 0, "taskset": 1, "timeout": 1}  # fmt: skip
_WRAPPER_VALUES = frozenset({"-n", "-u", "-g", "-c", "-k", "-s", "-p", "-i", "-o", "-e"})
#: Commands that only prepare a shell.
_PREPARING = frozenset({"set", "cd", "source", ".", "ulimit", "umask", "echo", "true", ":", "sleep", "export"})


@dataclass
class ShellCommand:
    """One command: the variables before it, its words, and what was taken off it."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_shell(text: str) -> list[ShellCommand]:
    """The commands in `text`, in order, each with the variables that hold where it stands. Raises UsageError."""
    exported: dict[str, str] = {}
    found = []
    for words in _split_commands(text):
        command = read_words([_expand(one, exported) for one in words])
        is_export = command.words[:1] == ["export"]
        if is_export or not command.words:
            told = command.words[1:] if is_export else []
            exported |= command.env | dict(one.split("=", 1) for one in told if "=" in one)
            continue
        # A shell hands on what was exported; a plain assignment in a script is nearly always meant so.
        command.env = {**exported, **command.env}
        found.append(command)
    return found


def read_words(words: Sequence[str]) -> ShellCommand:
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
    _take_off(command)
    if redirected:
        command.notes.append(f"`{' '.join(redirected)}` is left out: `ft` keeps the engine's log itself (`ft logs`)")
    return command


def is_preparing(command: ShellCommand) -> bool:
    """It only prepares the shell."""
    return command.words[0] in _PREPARING


def _take_off(command: ShellCommand) -> None:
    """Assignments and wrappers in front of the command proper."""
    words = command.words
    while words:
        if _ASSIGNMENT.fullmatch(words[0]):
            name, _, value = words.pop(0).partition("=")
            command.env[name] = value
        elif words[0] in _WRAPPERS and len(words) > 1:
            wrapper = [words.pop(0)]
            own = _WRAPPERS[wrapper[0]]
            while words and words[0].startswith("-"):
                wrapper.append(words.pop(0))
                if wrapper[-1] in _WRAPPER_VALUES and words:
                    wrapper.append(words.pop(0))
            for _ in range(min(own, len(words))):
                wrapper.append(words.pop(0))
            command.notes.append(f"`{' '.join(wrapper)}` is left out: `ft` starts and keeps the engine itself")
        elif words[:2] == ["uv", "run"]:
            del words[:2]
            command.notes.append("`uv run` is left out: `ft` starts and keeps the engine itself")
        else:
            return


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
