"""Small files that must survive a kill at any moment: written to a temporary name, synced, renamed; and events.

Standard library only. A full disk is an answer here, not a surprise: `describe_os_error` says it in words.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from freetoken.outfile import replace_file

EventKind = Literal[
    "intended", "abandoned", "keeper_started", "keeper_ended", "engine_started", "engine_adopted", "engine_ready",
    "engine_unhealthy", "engine_exited", "engine_restarting", "engine_hung", "engine_idle", "port_dead",
    "request_too_large", "engine_stopped", "log_rotated", "log_full", "stop_requested", "failed", "proven",
    "not_proven", "resized", "corrected", "replaced", "restored",
]  # fmt: skip
EVENT_KINDS: tuple[str, ...] = get_args(EventKind)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def format_now() -> str:
    """The time now, UTC, ISO 8601 with milliseconds: sorts as text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_no_space(error: OSError) -> bool:
    """True where the disk, a quota or RLIMIT_FSIZE refused the bytes."""
    return error.errno in _NO_SPACE


def describe_os_error(error: OSError, path: Path | str) -> str:
    """`no space for runs/1/engine.log: No space left on device`, and the like."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"no space for {path}: {reason}" if is_no_space(error) else f"cannot write {path}: {reason}"


def write_json(path: Path, value: Any) -> None:
    """Writes `value` so that a reader sees the old file or the new one, also after a power cut. Raises OSError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """As `write_json`, for text."""
    replace_file(path, text.encode())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable; silent on file systems that cannot."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def read_json(path: Path) -> dict[str, Any] | None:
    """The document at `path`; None where there is none or it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Event:
    """One line of `events.jsonl`."""

    at: str
    kind: EventKind
    message: str
    data: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """`events.jsonl` of a run: appended by the keeper and by `ft`, one whole line a write.

    A refused write is kept in `problem` rather than raised: losing an event must not stop an engine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None

    def append(self, kind: EventKind, message: str, *, is_durable: bool = False, **data: Any) -> bool:
        """Appends one event; False, and `problem` says why, where that is refused."""
        line = json.dumps({"at": format_now(), "kind": kind, "message": message, "data": data}, ensure_ascii=False)
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                _write_whole(fd, line.encode() + b"\n")
                if is_durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self.problem = describe_os_error(error, self.path)
            return False
        self.problem = None
        return True


def _write_whole(fd: int, data: bytes) -> None:
    # One write keeps lines of several writers apart; what the disk cut short is not completed by a second one.
    written = os.write(fd, data)
    if written < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_events(path: Path) -> Iterator[Event]:
    """The events at `path`, oldest first; a line that was cut short is passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line)
            yield Event(value["at"], value["kind"], value["message"], value.get("data", {}))
        except (ValueError, KeyError, TypeError):
            continue
