"""When silence is a hang, an idle device a fault and a port dead, and when an engine may be started again.

Arithmetic on given times.

No clock, no process, no file: the keeper passes in what it saw and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from freetoken.supervisor.process import Activity

#: Share of one core below which a process set is idle: answering `/health` costs a little as well.
IDLE_CPU_RATIO = 0.03
#: CPU time that is counted in the kernel's whole ticks (10 ms): two of them prove nothing about a short time.
CPU_NOISE_S = 0.02
#: Bytes a second below which its I/O is only the watch itself.
IDLE_IO_BYTES_PER_S = 64 << 10
#: Share of the time below which a GPU is idle; the driver rounds to whole percents.
IDLE_GPU_RATIO = 0.02


@dataclass
class HangWatch:
    """Measures how long an engine that ought to get on has shown no progress and used neither CPU nor I/O."""

    stall_timeout_s: float
    _quiet_since: float | None = None
    _last: tuple[float, Activity] | None = None
    _progress: Hashable = None

    def reset(self) -> None:
        """Forgets the past: the engine is idle because nobody asks anything, or was just started."""
        self._quiet_since = self._last = self._progress = None

    def observe(self, now_s: float, progress: Hashable, activity: Activity) -> float:
        """Seconds of silence so far; 0 as long as something moves. At or above the time-out it is a hang."""
        is_first = self._last is None
        is_moving = is_first or progress != self._progress or self._is_active(now_s, activity)
        self._last, self._progress = (now_s, activity), progress
        if is_moving or self._quiet_since is None:
            self._quiet_since = now_s
        return now_s - self._quiet_since

    def is_hung(self, silence_s: float) -> bool:
        """True once the silence has lasted as long as it may."""
        return silence_s >= self.stall_timeout_s

    def _is_active(self, now_s: float, activity: Activity) -> bool:
        if self._last is None:
            return True
        since_s, before = self._last
        elapsed_s = max(1e-3, now_s - since_s)
        cpu_ratio = (activity.cpu_s - before.cpu_s - CPU_NOISE_S) / elapsed_s
        io_rate = (activity.io_bytes - before.io_bytes) / elapsed_s
        is_faulting = activity.major_faults - before.major_faults > elapsed_s
        return cpu_ratio > IDLE_CPU_RATIO or io_rate > IDLE_IO_BYTES_PER_S or is_faulting


@dataclass
class IdleWatch:
    """Measures how long a request has waited while no token came and the device that ought to work did nothing.

    Unlike `HangWatch` it does not ask whether the CPU moves: an engine that spins on a request it can never serve
    (too large for the KV pool, say) burns a core and leaves the GPU idle.
    """

    _since: float | None = None
    _progress: Hashable = None

    def reset(self) -> None:
        """Nothing waits, or something came."""
        self._since = self._progress = None

    def observe(self, now_s: float, progress: Hashable, *, is_idle: bool) -> float:
        """Seconds for which the device has been idle without progress so far."""
        if not is_idle or self._since is None or progress != self._progress:
            self._since = now_s if is_idle else None
        self._progress = progress
        return 0.0 if self._since is None else now_s - self._since


@dataclass
class DeadPortWatch:
    """Measures how long a port that has answered before has answered nothing, though its process lives."""

    _since: float | None = None

    def reset(self) -> None:
        """It answered, or was just started."""
        self._since = None

    def observe(self, now_s: float, *, is_answered: bool) -> float:
        """Seconds without an answer so far."""
        if is_answered:
            self._since = None
            return 0.0
        self._since = now_s if self._since is None else self._since
        return now_s - self._since


@dataclass
class CpuMeter:
    """The share of one core that a set of processes used between two looks."""

    _last: tuple[float, float] | None = None

    def observe(self, now_s: float, cpu_s: float) -> float | None:
        """Cores' worth of CPU time since the last look; None at the first one."""
        before, self._last = self._last, (now_s, cpu_s)
        return None if before is None else max(0.0, cpu_s - before[1]) / max(1e-3, now_s - before[0])


@dataclass
class RestartBudget:
    """At most `max_restarts` within `window_s`, each later than the one before by a doubling pause."""

    max_restarts: int = 3
    window_s: float = 600.0
    backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    _times: deque[float] = field(default_factory=deque)

    def count(self, now_s: float) -> int:
        """Restarts within the window."""
        while self._times and now_s - self._times[0] > self.window_s:
            self._times.popleft()
        return len(self._times)

    def next_pause_s(self, now_s: float) -> float | None:
        """Seconds to wait before the next restart, which is counted now; None when the cap is reached."""
        used = self.count(now_s)
        if used >= self.max_restarts:
            return None
        self._times.append(now_s)
        return float(min(self.max_backoff_s, self.backoff_s * 2**used))
