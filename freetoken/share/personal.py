"""Nothing personal leaves: what an export must not hold, looked for in its bytes.

A bundle is built from typed parts that have no place for a path or a name; this is the second line, for what people
write into free text.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from freetoken import paths
from freetoken.errors import BadFileError
from freetoken.share.archive import LOCK, RECIPE

_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("a path", re.compile(r"(?<![\w.:/-])(?:/(?!v1/|api/)(?:[\w.+@-]+/)+|~[\w-]*/|\$\{?HOME\b)[^\s'\"]*")),
    ("a path", re.compile(r"(?:\b[A-Za-z]:[\\/]|\bfile:/|\\\\+[\w.-]+\\)[^\s'\"]+")),
    ("a GPU's serial", re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{27}\b")),
    ("an identity", re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.I)),
    ("a token", re.compile(r"\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16})\b")),
    ("an e-mail address", re.compile(r"\b[\w.+-]+@[\w-]+\.[A-Za-z]{2,}\b")),
    ("an address", re.compile(r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}\b")),
    ("an address", re.compile(r"\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}\b|\b[0-9a-f]{1,4}::[0-9a-f:]*\b", re.I)),
)  # fmt: skip
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIAL", re.I)
#: A name of the machine or its user counts where it is long enough not to be a part of another word, and is no word
#: that a recipe has anyway.
_MIN_WORD = 4
_COMMON = frozenset(
    {
        "localhost", "admin", "ubuntu", "debian", "linux", "runner", "docker", "nobody", "root", "user", "test", "home",
        "host", "local", "main", "name", "code", "chat", "data", "model", "engine", "server", "desktop", "laptop",
        "agent", "batch", "auto", "default", "demo",
    }
)  # fmt: skip
_REPO = re.compile(r"^\s+repo: (\S+)$", re.M)


def find_personal(files: Mapping[str, bytes], words: Mapping[str, str] | None = None) -> Iterator[str]:
    """One sentence for each personal thing in `files`; `words` is what this machine would give away, by what it is."""
    known = read_words() if words is None else words
    repo = _REPO.search(files.get(RECIPE, b"").decode("utf-8", "replace"))
    for name, data in files.items():
        text = data.decode("utf-8", "replace")
        for what, pattern in _PATTERNS:
            if what == "an address" and name == LOCK:
                continue  # versions of packages look like addresses
            for found in dict.fromkeys(match[0] for match in pattern.finditer(text)):
                yield f"{name} holds {what}: `{found[:60]}`" if what != "a token" else f"{name} holds a token"
        # Whoever shares a model of their own shares the name that it has on the hub.
        rest = text.replace(repo[1], "") if repo is not None else text
        for word, what in known.items():
            if re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", rest, re.I):
                yield f"{name} holds {what}"


def refuse_personal(files: Mapping[str, bytes]) -> None:
    """Raises BadFileError that names every personal thing."""
    found = list(find_personal(files))
    if found:
        raise BadFileError(
            f"not exported: {found[0]}", details=tuple(found[1:]), hint="take it out of the recipe and export again"
        )


def read_words() -> dict[str, str]:
    """Words that name this machine or its user -> what they are; values of secret variables among them."""
    words = {str(Path.home()): "the home folder", str(paths.state_dir()): "the state folder"}
    try:
        words[getpass.getuser()] = "the user's name"
    except (KeyError, OSError):
        pass
    words[socket.gethostname().partition(".")[0]] = "the host's name"
    for name, value in os.environ.items():
        if _SECRET_NAMES.search(name) and len(value) >= 8:
            words[value] = f"the value of `{name}`"
    return {word: what for word, what in words.items() if len(word) >= _MIN_WORD and word.lower() not in _COMMON}
