"""A file that a user asked for by name (`-o FILE`): written whole or not at all, and put where the name leads.

A symlink is followed, a device or a FIFO is written into: a rename would put a plain file in their place, and as root
that breaks the machine. The folder has to be there: a name with a slip in it should not make one.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from freetoken.errors import FtError, UsageError

#: Names of this process's own streams: what they lead to is open already, by whoever redirected it.
_STREAMS = re.compile(r"/dev/(stdout|stderr|fd/\d+)|/proc/self/fd/\d+")


def write_output(path: Path, content: str | bytes) -> int:
    """Writes `content` (text as UTF-8) to `path`; the bytes written.

    Raises UsageError for a folder and where the folder of the file is missing, FtError where writing fails.
    """
    data = content.encode() if isinstance(content, str) else content
    target = check_output(path)
    try:
        if _is_written_into(target):
            _write_into(target, data)
        else:
            replace_file(target, data)
    except OSError as error:
        raise FtError(f"cannot write {path}: {error.strerror or error}", hint=_hint_at(path)) from error
    return len(data)


def check_output(path: Path) -> Path:
    """Where `path` leads, symlinks resolved. Raises UsageError where no file can be there; touches nothing."""
    path = path.expanduser()
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", hint="name a file in it")
        if _is_written_into(path):
            return path
        target = Path(os.path.realpath(path))
        folder = target.parent if path.is_symlink() else path.parent
        if not folder.exists():
            raise UsageError(f"cannot write {path}: there is no folder {folder}", hint=f"mkdir -p {folder}")
        if not folder.is_dir():
            raise UsageError(f"cannot write {path}: {folder} is no folder", hint=_hint_at(path))
    except OSError as error:
        raise FtError(f"cannot write {path}: {error.strerror or error}", hint=_hint_at(path)) from error
    return target


def is_file_there(path: Path) -> bool:
    """Whether a plain file would be replaced by writing to `path`."""
    return check_output(path).is_file() and not _is_written_into(path)


def _is_written_into(path: Path) -> bool:
    """Whether a device, FIFO, socket or open stream is there."""
    if _STREAMS.fullmatch(str(path)):
        return True
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _write_into(path: Path, data: bytes) -> None:
    # Appending: where a stream was redirected to a file, what is in it stays.
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]


def replace_file(path: Path, data: bytes) -> None:
    """Puts `data` at `path` whole: a reader sees the old file or the new one. Raises OSError, leaving no piece."""
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _hint_at(path: Path) -> str:
    return f"a folder that is yours: `-o ~/{path.name}`"
