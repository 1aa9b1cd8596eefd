"""`Launcher`: what a study needs of the world. The real one stands on `deploy` and `bench`; tests have their own."""

from __future__ import annotations

from typing import Protocol

from freetoken.tuner.values import Outcome, Point


class Launcher(Protocol):
    """Starts one engine at a time and measures it. No method raises for what an engine does: that is an outcome."""

    @property
    def can_resize(self) -> bool:
        """Whether slots and KV can be changed while the engine runs."""
        ...

    def start(self, point: Point) -> Outcome:
        """Ends what runs and starts `point`; `ok` once it is proven, else why not."""
        ...

    def resize(self, point: Point) -> Outcome:
        """Changes the live knobs of what runs to those of `point`."""
        ...

    def measure(self, *, is_unseen: bool = False) -> Outcome:
        """Runs the workload once, with its repeats; `is_unseen` on prompts that no trial has seen."""
        ...

    def stop(self) -> None:
        """Ends what runs; harmless where nothing does."""
        ...
