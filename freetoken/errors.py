"""The `FtError` family: what went wrong, with numbers, a hint that can be typed, and the exit code.

Knows nothing of any other room. The command line is the one place that catches these.
"""

from __future__ import annotations

from collections.abc import Iterable


class FtError(Exception):
    """A failure that a user can act on: one sentence, an optional hint, an exit code (DESIGN section 9)."""

    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        #: Further findings of the same kind, one sentence each, so that all are reported at once.
        self.details = details


class UsageError(FtError):
    """Wrong usage: a bad option, a name that does not exist, several candidates."""

    exit_code = 2


class BadFileError(FtError):
    """A file that cannot be used as it is: recipe, profile, bundle, lock, checkpoint, hash mismatch."""

    exit_code = 2


class DoesNotFitError(FtError):
    """The planner's no: bytes are missing, or the hardware is not supported."""

    exit_code = 3


class NotReadyError(FtError):
    """The engine never became ready."""

    exit_code = 4


class TargetMissedError(FtError):
    """`good_enough` was not reached."""

    exit_code = 5


class DriftError(FtError):
    """Declared, but not running as declared."""

    exit_code = 6


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """`; did you mean `x`?` for the nearest of `known`, or an empty text where nothing is near."""
    import difflib  # only where something went wrong

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean `{near[0]}`?" if near else ""
