"""Files from a hub to the disk: resumed where a connection was cut or a process was killed, hashed as they arrive.

huggingface_hub 2 writes each file under a name of its own process and deletes it when the download fails, so that 4 GB
of a 5 GB shard are fetched again; a killed process leaves them behind, to be fetched beside a second time. Here the
unfinished file has one name, is taken up where it ends, and is renamed once its hash is right.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from freetoken.checkpoint.hub import RemoteFile, RemoteRepo, network_errors, pause
from freetoken.errors import BadFileError, FtError
from freetoken.units import format_bytes

WORKERS = 4
REPORT_EVERY_S = 0.2
RATE_WINDOW_S = 10.0


class FetchProgress(BaseModel):
    """How far a download or a verification is. `eta_s` is None until a rate is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: str
    file: str
    files_done: int
    files_total: int
    done_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    eta_s: float | None = None


ProgressCallback = Callable[[FetchProgress], None]


@dataclass(frozen=True)
class Transfer:
    """One file to fetch: from where, the unfinished file, and the finished one."""

    file: RemoteFile
    partial: Path
    target: Path

    def count_held(self) -> int:
        """Bytes that are already here, finished or not."""
        for path in (self.target, self.partial):
            if path.is_file():
                return min(path.stat().st_size, self.file.bytes)
        return 0


@dataclass
class Meter:
    """Adds up the progress of several threads and reports it at most five times a second."""

    phase: str
    total_bytes: int
    files_total: int
    callback: ProgressCallback | None = None
    clock: Callable[[], float] = time.monotonic
    done_bytes: int = 0
    files_done: int = 0
    _lock: Any = field(default_factory=threading.Lock)
    _reported: float = float("-inf")
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, count: int, file: str, *, is_moved: bool = True) -> None:
        """Counts bytes; those that were here before (`is_moved` False) do not count towards the rate."""
        with self._lock:
            self.done_bytes += count
            now = self.clock()
            if not is_moved or not self._marks:
                self._marks.clear()
                self._marks.append((now, self.done_bytes))
            if now - self._reported >= REPORT_EVERY_S:
                self._report(now, file)

    def finish(self, file: str) -> None:
        """Counts a file as done, and reports."""
        with self._lock:
            self.files_done += 1
            self._report(self.clock(), file)

    def _report(self, now: float, file: str) -> None:
        self._reported = now
        self._marks.append((now, self.done_bytes))
        while len(self._marks) > 2 and now - self._marks[0][0] > RATE_WINDOW_S:
            self._marks.popleft()
        begin, before = self._marks[0]
        rate = (self.done_bytes - before) / (now - begin) if now > begin else 0.0
        left = max(0, self.total_bytes - self.done_bytes)
        if self.callback is not None:
            self.callback(
                FetchProgress(
                    phase=self.phase,
                    file=file,
                    files_done=self.files_done,
                    files_total=self.files_total,
                    done_bytes=self.done_bytes,
                    total_bytes=self.total_bytes,
                    bytes_per_s=rate,
                    eta_s=left / rate if rate > 0 else None,
                )
            )


def fetch_files(repo: RemoteRepo, transfers: list[Transfer], meter: Meter, *, workers: int = WORKERS) -> None:
    """Fetches `transfers`, several at a time. What was fetched stays for the next attempt, whatever is raised.

    Raises HubError for a connection that does not come back, BadFileError for a wrong hash, FtError for a full disk.
    """
    stop = threading.Event()
    order = sorted(transfers, key=lambda one: -one.file.bytes)
    with ThreadPoolExecutor(max(1, min(workers, len(order)))) as pool:
        futures = [pool.submit(fetch_file, repo, one, meter, stop) for one in order]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def fetch_file(repo: RemoteRepo, transfer: Transfer, meter: Meter, stop: threading.Event) -> None:
    """Fetches one file, renamed once it is whole and its hash is right; a damaged beginning is fetched anew once."""
    if transfer.target.is_file() and transfer.target.stat().st_size == transfer.file.bytes:
        meter.add(transfer.file.bytes, transfer.file.name, is_moved=False)
        meter.finish(transfer.file.name)
        return
    transfer.partial.parent.mkdir(parents=True, exist_ok=True)
    transfer.target.parent.mkdir(parents=True, exist_ok=True)
    resumed = transfer.count_held()
    found = _pour(repo, transfer, meter, stop)
    if stop.is_set():
        return
    if transfer.file.sha256 and found != transfer.file.sha256 and resumed:
        meter.add(-transfer.file.bytes, transfer.file.name, is_moved=False)
        transfer.partial.unlink()
        found = _pour(repo, transfer, meter, stop)
    if stop.is_set():
        return
    if transfer.file.sha256 and found != transfer.file.sha256:
        transfer.partial.unlink()
        raise BadFileError(
            f"{repo.repo}/{transfer.file.name}: its SHA-256 is {found}, "
            f"the hub says {transfer.file.sha256}; it was deleted",
            hint="fetch again; if it stays so, the mirror is at fault",
        )
    transfer.partial.replace(transfer.target)
    meter.finish(transfer.file.name)


def _pour(repo: RemoteRepo, transfer: Transfer, meter: Meter, stop: threading.Event) -> str:
    """Appends what is missing to the partial file; the SHA-256 of all of it."""
    file, digest, failures = transfer.file, sha256(), 0
    with _open_partial(transfer) as out:
        held = _digest_held(out, digest, file.bytes)
        meter.add(held, file.name, is_moved=False)
        while held < file.bytes and not stop.is_set():
            before, reason = held, None
            try:
                for chunk in repo.iterate(file.name, held, file.bytes):
                    _write(out, chunk, transfer)
                    digest.update(chunk)
                    held += len(chunk)
                    meter.add(len(chunk), file.name)
                    if stop.is_set():
                        break
            except network_errors() as error:
                reason = error
            failures = 1 if held > before else failures + 1
            if held < file.bytes and not stop.is_set():
                pause(failures, reason, repo.make_url(file.name))
    return digest.hexdigest()


def _open_partial(transfer: Transfer) -> Any:
    try:
        if transfer.partial.is_file() and transfer.partial.stat().st_size > transfer.file.bytes:
            transfer.partial.unlink()
        return transfer.partial.open("a+b", buffering=0)
    except OSError as error:
        raise FtError(f"{transfer.partial}: cannot be written: {error.strerror or error}") from error


def _digest_held(out: Any, digest: Any, size: int) -> int:
    """Feeds what the partial file holds to the digest; how many bytes that is."""
    out.seek(0)
    held = 0
    while held < size and (chunk := out.read(min(4 << 20, size - held))):
        digest.update(chunk)
        held += len(chunk)
    return held


def _write(out: Any, chunk: bytes, transfer: Transfer) -> None:
    view = memoryview(chunk)
    try:
        while view:
            view = view[out.write(view) :]
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            held = format_bytes(transfer.partial.stat().st_size)
            text = f"no space left for {transfer.file.name}: {held} of {format_bytes(transfer.file.bytes)} are here"
            raise FtError(
                f"{text} and are kept", hint="make room, then run the same command: it goes on where it stopped"
            ) from error
        raise FtError(f"{transfer.partial}: cannot be written: {error.strerror or error}") from error
