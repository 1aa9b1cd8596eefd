"""Real text that every machine with Python has: the standard library's source, and the prose in and around it.

Random tokens and repeated filler take other ways through a model of experts than text does (one engine gave 54 tok/s
on real text and 102 on a repeating prompt), so nothing here is made up. The order is drawn from a seed; a quarter of
the files is kept for confirmation and never seen by a search. Another Python version has slightly other text.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from freetoken.errors import FtError

Kind = Literal["code", "prose"]
#: One file in so many is kept back for confirmation.
UNSEEN_SHARE = 4
#: Shorter texts are mostly imports or a licence line.
SHORTEST_CHARACTERS = 400
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3", "encodings"})
_DOCSTRING = re.compile(r'"""(.{200,}?)"""', re.DOTALL)


@dataclass(frozen=True)
class Passage:
    """A piece of text by the name that decides whether it belongs to the unseen part."""

    name: str
    read: Callable[[], str] = field(repr=False, compare=False)

    @property
    def is_unseen(self) -> bool:
        """Whether it is kept for confirmation; the same on every machine."""
        return hashlib.sha256(self.name.encode()).digest()[0] % UNSEEN_SHARE == 0


@cache
def list_passages(kind: Kind) -> tuple[Passage, ...]:
    """All passages of that kind, by name."""
    if kind == "code":
        return tuple(Passage(name, _reader(path)) for name, path in _source_files())
    docstrings = (Passage(f"docstrings of {name}", _reader(path, find_prose)) for name, path in _source_files())
    return tuple(sorted((*_topics(), *_licence(), *docstrings), key=lambda one: one.name))


@cache
def _source_files() -> tuple[tuple[str, Path], ...]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        parts = path.relative_to(folder).parts
        if not _LEFT_OUT.intersection(parts) and path.stat().st_size >= 2000:
            found.append(("/".join(parts), path))
    return tuple(found)


def _reader(path: Path, change: Callable[[str], str] = lambda text: text) -> Callable[[], str]:
    def read() -> str:
        try:
            text = change(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return ""
        return text if is_text(text) else ""

    return read


def is_text(text: str) -> bool:
    """Whether it reads like something a person wrote: tables of numbers and escapes do not."""
    if len(text) < SHORTEST_CHARACTERS:
        return False
    letters = sum(map(str.isalpha, text)) + text.count(" ")
    return text.isprintable() or letters / len(text) > 0.7


def find_prose(source: str) -> str:
    """The docstrings of `source` that are sentences rather than code."""
    found = (_dedent(match) for match in _DOCSTRING.findall(source))
    return "\n\n".join(one for one in found if ">>>" not in one and _is_prose(one))


def _is_prose(text: str) -> bool:
    plain = sum(character.isalpha() or character in " ,.;:'\n" for character in text)
    return plain / len(text) > 0.93


def _dedent(text: str) -> str:
    return re.sub(r"\n[ \t]+", "\n", text.strip())


def _topics() -> Iterator[Passage]:
    """The language reference that Python's own `help()` shows."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a Python packed without its documentation
        return
    for name in sorted(topics):
        text = str(topics[name])
        if len(text) >= SHORTEST_CHARACTERS:
            yield Passage(f"topic {name}", lambda text=text: text)  # type: ignore[misc]


def _licence() -> Iterator[Passage]:
    path = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if path.is_file():
        yield Passage("licence", _reader(path))


class TextSource:
    """An endless stream of text in an order that `seed` decides; a passage comes twice only after all others."""

    def __init__(self, kind: Kind, seed: int, *, is_unseen: bool = False) -> None:
        self._passages = [one for one in list_passages(kind) if one.is_unseen == is_unseen]
        self._kind, self._rng = kind, random.Random(f"{kind} {seed} {is_unseen}")
        self._order: list[Passage] = []
        self._rest = ""

    def take(self, characters: int) -> str:
        """The next `characters` of text, from the beginning of a line. Raises FtError where Python has no source."""
        parts: list[str] = []
        missing = characters
        while missing > 0:
            if not self._rest:
                self._rest = self._next_passage()
            part, self._rest = self._rest[:missing], self._rest[missing:]
            parts.append(part)
            missing -= len(part)
        # What follows belongs to another prompt, which should not start within a word.
        self._rest = self._rest.partition("\n")[2]
        return "".join(parts)

    def _next_passage(self) -> str:
        for _ in range(2 * len(self._passages) + 1):
            if not self._order:
                self._order = self._rng.sample(self._passages, len(self._passages))
            if not self._order:
                break
            if text := self._order.pop().read():
                return text.rstrip("\n") + "\n\n"
        raise FtError(
            f"this Python has no {self._kind} to take prompts from: its standard library lies in an archive",
            hint="`ft workload record` makes a workload of your own requests",
        )
