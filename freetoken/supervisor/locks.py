"""File locks that end with their holder: the kernel gives them back when a process dies, however it dies.

The file also says who holds it, so that whoever waits can be told. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from freetoken.supervisor.files import format_now
from freetoken.supervisor.process import ProcessId, identify_self, is_alive


@dataclass(frozen=True)
class LockHolder:
    """Who holds a lock, since when and for what."""

    process: ProcessId | None
    purpose: str
    since: str

    def describe(self) -> str:
        """`ft apply demo.yaml (process 123)`."""
        return f"{self.purpose} (process {self.process.pid})" if self.process else self.purpose


class FileLock:
    """An exclusive lock on `path`; a context manager. Not inherited by processes started meanwhile.

    Without `is_named` the file is left as it is: whoever it names is not this process.
    """

    def __init__(self, path: Path, purpose: str = "", *, is_named: bool = True) -> None:
        self.path = path
        self.is_named = is_named
        self.purpose = purpose or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        """True while this object holds it."""
        return self._fd is not None

    def try_acquire(self) -> bool:
        """Takes the lock if it is free."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        if self.is_named:
            self._write_holder(fd)
        return True

    def acquire(
        self,
        timeout_s: float | None = None,
        on_wait: Callable[[LockHolder | None], None] | None = None,
        poll_s: float = 0.05,
    ) -> bool:
        """Waits for the lock; `on_wait` is told once who holds it. False when `timeout_s` passed first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_told = False
        while not self.try_acquire():
            if on_wait is not None and not is_told:
                on_wait(read_holder(self.path))
                is_told = True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(poll_s)
        return True

    def fileno(self) -> int:
        """The descriptor that holds it: a child that inherits it holds the lock as well. ValueError without one."""
        if self._fd is None:
            raise ValueError("the lock is not held")
        return self._fd

    def release(self) -> None:
        """Gives the lock back; harmless when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> FileLock:
        if not self.is_held:
            self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _write_holder(self, fd: int) -> None:
        holder = {"process": identify_self().to_dict(), "purpose": self.purpose, "since": format_now()}
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(holder).encode(), 0)
        except OSError:
            pass  # the lock itself needs no bytes on a full disk


def read_holder(path: Path) -> LockHolder | None:
    """Who took the lock at `path` last and still lives; None where nobody does."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        process = ProcessId.from_dict(value["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (
        LockHolder(process, str(value.get("purpose", "")), str(value.get("since", ""))) if is_alive(process) else None
    )


def find_holder(path: Path) -> LockHolder | None:
    """Who holds the lock at `path` now; None where it is free, though whom its file names may live on."""
    holder = read_holder(path)
    if holder is None:
        return None
    lock = FileLock(path, is_named=False)
    if not lock.try_acquire():
        return holder
    lock.release()
    return None
