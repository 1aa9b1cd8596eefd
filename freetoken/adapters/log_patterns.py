"""Reading the end of a log: patterns in order, first match wins, with the bytes that a message carries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from freetoken.adapters.base import Failure
from freetoken.units import GIB, parse_bytes

ANSI = re.compile(r"\x1b\[[0-9;]*m")
CUDA_OOM = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|"
    r"CUDA driver error: (?:device not ready|out of memory)|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED",
    re.I,
)
ASKED = re.compile(r"Tried to allocate ([\d.]+) ?([KMGT]iB)")
FREE = re.compile(r"of which ([\d.]+) ?([KMGT]iB) is free")


class Pattern(NamedTuple):
    """What a message looks like, and what it means. Compiled when a log is read: a plan never needs them."""

    regex: str | re.Pattern[str]
    make: Callable[[re.Match[str], str], Failure]
    flags: int = 0


def classify(text: str, patterns: Iterable[Pattern]) -> Failure | None:
    """The failure that the last matching message of the first matching pattern stands for; None without a match.

    Colours are stripped. The last match counts, since a log may hold earlier attempts.
    """
    plain = ANSI.sub("", text)
    for pattern in patterns:
        matches = re.finditer(pattern.regex, plain, pattern.flags)
        found = max(matches, key=lambda match: match.start(), default=None)
        if found is not None:
            failure = pattern.make(found, plain)
            return failure.model_copy(update={"excerpt": line_of(plain, found)})
    return None


def line_of(text: str, match: re.Match[str]) -> str:
    """The line that holds the match, at most 400 characters."""
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return text[start : end if end >= 0 else len(text)].strip()[:400]


def make_cuda_oom(match: re.Match[str], text: str, *, line: str | None, field: str | None, hint: str | None) -> Failure:
    """A VRAM failure with the overshoot that PyTorch's message states: asked minus free."""
    tail = text[match.start() : match.start() + 1500]
    asked, free = ASKED.search(tail), FREE.search(tail)
    missing = None
    if asked is not None:
        missing = parse_bytes(f"{asked[1]}{asked[2]}") - (parse_bytes(f"{free[1]}{free[2]}") if free else 0)
        # Asked for less than is free: it is in pieces, and how much more is needed cannot be told.
        missing = missing if missing > 0 else None
    cause = "the GPU ran out of memory" + (f" {asked[1]} {asked[2]} were asked for" if asked else "")
    cause = cause.replace("memory ", "memory: ") if asked else cause
    return Failure(kind="vram_oom", cause=cause, line=line, missing_bytes=missing, field=field, hint=hint)


def gib(number: str) -> int:
    """Bytes of a GiB figure as logs print it."""
    return int(float(number) * GIB)


def say(
    regex: str,
    kind: str,
    cause: str,
    *,
    line: str | None = None,
    field: str | None = None,
    hint: str | None = None,
    flags: int = 0,
) -> Pattern:
    """A pattern without bytes; `{1}` in `cause` and `hint` is the first group."""

    def make(match: re.Match[str], text: str) -> Failure:
        groups = (match[0], *match.groups())
        return Failure.model_validate(
            {
                "kind": kind,
                "cause": cause.format(*groups),
                "line": line,
                "field": field,
                "hint": hint.format(*groups) if hint else None,
            }
        )

    return Pattern(regex, make, flags)
