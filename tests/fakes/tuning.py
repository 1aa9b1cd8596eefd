"""A simulated machine small enough for unit tests, and a launcher whose trials can end in any way that is asked."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.tuner.machines import SimulatedLauncher, SimulatedSite, make_machine
from freetoken.tuner.values import Measurement, Outcome, Point


class ScriptedLauncher(SimulatedLauncher):
    """`fate(number of the start, point)` gives an outcome that replaces what the machine would do, or None."""

    def __init__(
        self, seed: int = 1, fate: Callable[[int, Point], Outcome | None] = lambda number, point: None
    ) -> None:
        super().__init__(make_machine(seed), 0)
        self.fate, self.stops, self.log = fate, 0, []

    def start(self, point: Point) -> Outcome:
        self.log.append(("start", dict(point)))
        outcome = super().start(point)
        return self.fate(self.starts, point) or outcome

    def resize(self, point: Point) -> Outcome:
        self.log.append(("resize", dict(point)))
        return super().resize(point)

    def measure(self, *, is_unseen: bool = False) -> Outcome:
        self.log.append(("measure", is_unseen))
        return super().measure(is_unseen=is_unseen)

    def stop(self) -> None:
        self.stops += 1
        super().stop()


def make_site(seed: int = 1) -> SimulatedSite:
    return SimulatedSite(make_machine(seed))


def make_measurement(turn_time_s: float = 10.0, **changes: float) -> Measurement:
    fields = {"decode_tps": 50.0, "ttft_s": 2.0, "turn_time_s": turn_time_s, "noise_ratio": 0.01}
    return Measurement(**(fields | changes))
