"""How long a start, a resize and a measurement take here, and so what a budget must keep back.

A launcher in front of another one takes the times; the estimates are 0 until something has worked, since nothing that
is known forbids the first trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from freetoken.tuner.launching import Launcher
from freetoken.tuner.values import Outcome, Point


class Pace:
    """`launcher` with a stop watch."""

    def __init__(self, launcher: Launcher, clock: Callable[[], float] = time.monotonic) -> None:
        self.launcher, self.clock = launcher, clock
        self._took_s: dict[str, list[float]] = {"start": [], "resize": [], "measure": []}
        #: Seconds that the search must leave, asked before each trial.
        self.keep_back: Callable[[], float] = lambda: 0.0

    @property
    def can_resize(self) -> bool:
        """As the launcher says."""
        return self.launcher.can_resize

    def start(self, point: Point) -> Outcome:
        """Timed."""
        return self._time("start", lambda: self.launcher.start(point))

    def resize(self, point: Point) -> Outcome:
        """Timed."""
        return self._time("resize", lambda: self.launcher.resize(point))

    def measure(self, *, is_unseen: bool = False) -> Outcome:
        """Timed."""
        return self._time("measure", lambda: self.launcher.measure(is_unseen=is_unseen))

    def stop(self) -> None:
        """As it is."""
        self.launcher.stop()

    def step_s(self, *, is_live: bool) -> float:
        """Seconds of one more trial: a measurement after a resize, or after a start."""
        return self._estimate("resize" if is_live else "start") + self._estimate("measure")

    def start_s(self) -> float:
        """Seconds of a start."""
        return self._estimate("start")

    def confirmation_s(self, *, shares_start: bool, settings: int = 2) -> float:
        """Seconds of A B B A: two measurements of each, and a start at each change or one start with resizes."""
        changes = 2 * settings - 1
        starts, resizes = (1, changes - 1) if shares_start else (changes, 0)
        measurements = 2 * settings * self._estimate("measure")
        return starts * self._estimate("start") + resizes * self._estimate("resize") + measurements

    def reserve_s(self) -> float:
        """Seconds that whatever follows the search takes."""
        return self.keep_back()

    def _time(self, kind: str, act: Callable[[], Outcome]) -> Outcome:
        began_s = self.clock()
        outcome = act()
        # What failed was over sooner, or later, than what works.
        if outcome.kind in ("ok", "invalid"):
            self._took_s[kind].append(self.clock() - began_s)
        return outcome

    def _estimate(self, kind: str) -> float:
        """The median, or the last one where that took longer: a machine that gets slower is not believed too fast."""
        took = self._took_s[kind]
        return max(median(took), took[-1]) if took else 0.0
