"""The engine's log: a file that the engine holds open for appending, kept under a cap while it writes.

The engine never writes to a pipe, so a dead keeper cannot kill it; and it keeps its descriptor, so a rotation
copies and truncates instead of renaming (O_APPEND makes the next write land at the new end). The few bytes that
are written between the copy's last look and the truncation are the price. Standard library only.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
from pathlib import Path

#: Less than this on the log's file system counts as full.
MIN_FREE_BYTES = 1 << 20
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_COPY_BYTES = 1 << 20


def open_log(path: Path) -> int:
    """A descriptor that appends to `path`, inheritable by the engine. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY, 0o644)
    os.set_inheritable(fd, True)
    return fd


def append_line(path: Path, text: str) -> None:
    """Appends a line of the keeper's own; raises OSError where there is no space for it."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY, 0o644)
    try:
        line = f"[keeper] {text}\n".encode()
        if os.write(fd, line) < len(line):  # what is cut short is refused whole at the next write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def limit_bytes(wanted_bytes: int) -> int:
    """The size at which the log is rotated: what was asked for, or half of RLIMIT_FSIZE where that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return wanted_bytes if soft == resource.RLIM_INFINITY else min(wanted_bytes, soft // 2)


def size_bytes(path: Path) -> int:
    """Bytes of a regular log file; 0 for a device and for none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def free_bytes(path: Path) -> int | None:
    """Bytes that this user can still write beside `path`; None where nothing is known."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def rotate(path: Path, max_bytes: int, keep: int) -> bool:
    """Copies a log larger than `max_bytes` to `path.1` (older ones move up to `path.<keep>`) and empties it.

    True when it did. Where there is no space for the copy the log is emptied all the same and OSError is raised:
    a log that fills the disk helps nobody.
    """
    if size_bytes(path) <= max_bytes:
        return False
    try:
        for index in range(keep - 1, 0, -1):
            older = _numbered(path, index)
            if older.exists():
                os.replace(older, _numbered(path, index + 1))
        if keep > 0:
            _copy_and_empty(path, _numbered(path, 1), max_bytes)
            return True
    except OSError:
        _numbered(path, 1).unlink(missing_ok=True)
        os.truncate(path, 0)
        raise
    os.truncate(path, 0)
    return True


def _numbered(path: Path, index: int) -> Path:
    return path.with_name(f"{path.name}.{index}")


def _copy_and_empty(source: Path, target: Path, max_bytes: int) -> None:
    with open(source, "r+b", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        # An engine that writes without pause must not make one copy outgrow the cap by itself.
        reader.seek(max(0, os.fstat(reader.fileno()).st_size - max_bytes))
        while data := reader.read(_COPY_BYTES):
            writer.write(data)
        os.ftruncate(reader.fileno(), 0)


def read_tail(path: Path, lines: int, *, max_bytes: int = 1 << 20) -> list[str]:
    """The last `lines` lines, of the rotated part too where the log was just emptied; [] where there is none."""
    text = _read_end(path, max_bytes)
    found = split_lines(text)
    if len(found) < lines:
        found = split_lines(_read_end(_numbered(path, 1), max_bytes)) + found
    return found[-lines:] if lines > 0 else []


def read_text(path: Path, *, max_bytes: int = 1 << 18) -> str:
    """The end of the log without colours, as a classifier wants it."""
    return "\n".join(read_tail(path, 2000, max_bytes=max_bytes))


def _read_end(path: Path, max_bytes: int) -> str:
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - max_bytes))
            data = file.read(max_bytes)
    except OSError:
        return ""
    if end > max_bytes:  # the first line is cut
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", errors="replace")


def split_lines(text: str) -> list[str]:
    """Lines without colours; of a progress bar that overwrites itself, what a terminal would show at last."""
    lines = text.removesuffix("\n").split("\n") if text else []
    return [_ANSI.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines]


class Follower:
    """Reads what is appended to a log, also across rotations (a file that shrank is read from its start)."""

    def __init__(self, path: Path, *, max_bytes: int | None = None) -> None:
        self.path = path
        #: The most that one call reads; what is older is passed over.
        self.max_bytes = max_bytes
        self._offset = size_bytes(path)
        self._rest = b""

    def read_new(self) -> list[str]:
        """The lines completed since the last call."""
        size = size_bytes(self.path)
        if size < self._offset:
            self._offset = 0
        if size == self._offset:
            return []
        if self.max_bytes is not None and size - self._offset > self.max_bytes:
            self._offset, self._rest = size - self.max_bytes, b""
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read(size - self._offset)
        self._offset += len(data)
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        return split_lines((whole + newline).decode("utf-8", errors="replace"))
