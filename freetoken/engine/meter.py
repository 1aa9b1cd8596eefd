"""Counts of what an engine has done: tokens in and out, requests, and the speed of the last seconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 5.0


@dataclass
class Rate:
    """Tokens per second of the last `WINDOW_S` seconds, counting only the time spent in this phase."""

    now: Callable[[], float] = time.monotonic
    _steps: deque[tuple[float, int, float]] = field(default_factory=deque, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, tokens: int, seconds: float) -> None:
        """One step that took `seconds`."""
        with self._lock:
            self._steps.append((self.now(), tokens, seconds))
            self._forget()

    def read(self) -> float:
        """Tokens per second; 0 when nothing ran lately."""
        with self._lock:
            self._forget()
            seconds = sum(step[2] for step in self._steps)
            return sum(step[1] for step in self._steps) / seconds if seconds > 0 else 0.0

    def _forget(self) -> None:
        oldest = self.now() - WINDOW_S
        while self._steps and self._steps[0][0] < oldest:
            self._steps.popleft()


@dataclass
class Meter:
    """Monotonic totals since the start, written by the engine's thread and read by any."""

    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    prefill: Rate = field(default_factory=Rate)
    decode: Rate = field(default_factory=Rate)
