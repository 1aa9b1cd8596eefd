"""Waiting without work: a poll over descriptors that a signal ends early, and the orderly stop as an exception."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time


class Stopped(Exception):
    """SIGTERM or SIGINT arrived: the orderly stop."""


class Waker:
    """SIGTERM and SIGINT end the wait with `Stopped`, SIGCHLD ends it early, SIGHUP is nothing to us."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_stop_asked = False

    def install(self) -> None:
        """Takes the signals of this process; once, from the main thread."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_stop)

    def wait(self, timeout_s: float, *descriptors: int) -> None:
        """Waits until a descriptor is readable, a signal comes or the time is over. Raises Stopped."""
        poll = select.poll()
        for fd in (self._read, *descriptors):
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 512)
        if self._is_stop_asked:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Waits the whole time, whatever children do meanwhile. Raises Stopped."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.wait(left)

    def _ask_stop(self, *_: object) -> None:
        self._is_stop_asked = True
