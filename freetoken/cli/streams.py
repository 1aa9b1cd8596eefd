"""stdin, stdout and stderr as `ft` finds them: closed, broken or full, none of which may end what a command is at.

Progress and hints go to stderr, between steps that start and end engines. A line that nobody can read is dropped here,
below every way of printing (click, rich, logging, warnings), so that no command has to think of it. stdout is data:
what cannot be written there is an error, once the work is done.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ForgivingFile(io.FileIO):
    """A file that takes whatever is written; what the other end refuses is gone."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Bytes that were taken: all of them where the write failed."""
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def open_closed_streams() -> None:
    """Streams that the caller closed become /dev/null: else the first file we open would take their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open


def forgive_stderr() -> None:
    """From here on a write to stderr does not fail; nothing changes where a caller has put something in its place."""
    before = sys.__stderr__
    if before is None or sys.stderr is not before:
        return
    raw = ForgivingFile(before.fileno(), "wb", closefd=False)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=before.encoding, errors=before.errors, line_buffering=True
    )
