"""In place of the launcher that starts engines: figures that a test chooses, by what is measured and on which prompts.

Planner, session, study, storage and store around it are real.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from freetoken.recipe.load import load_recipe
from freetoken.recipe.model import GoodEnough
from freetoken.tuner import session
from freetoken.tuner.outcome import Options
from freetoken.tuner.seeds import Seeds
from freetoken.tuner.session import Session
from freetoken.tuner.values import Measurement, Outcome, Point

REPO = Path(__file__).resolve().parents[2]
#: Seconds of a turn and to the first token by point, whether the prompts are unseen, and the number of the measurement.
#: None is an engine that dies.
Figures = Callable[[Point, bool, int], tuple[float, float] | None]


class RiggedLauncher:
    """Answers at once, or after a pause on `tick`."""

    can_resize = True

    def __init__(
        self, figures: Figures, tick: Callable[[str], None] = lambda kind: None, *, is_default_broken: bool = False
    ) -> None:
        self.figures, self.tick, self.is_default_broken = figures, tick, is_default_broken
        self.point: Point = {}
        self.log: list[str] = []

    #: In place of the class, it is its own only instance.
    def __call__(self, *_: Any, **__: Any) -> RiggedLauncher:
        return self

    def start(self, point: Point) -> Outcome:
        return self._turn("start", point)

    def resize(self, point: Point) -> Outcome:
        return self._turn("resize", point)

    def _turn(self, kind: str, point: Point) -> Outcome:
        self.log.append(kind)
        self.tick(kind)
        if self.is_default_broken and self.log == ["start"]:
            return Outcome(kind="crash", words="out of memory")
        self.point = dict(point)
        return Outcome(kind="ok")

    def measure(self, *, is_unseen: bool = False) -> Outcome:
        self.log.append("unseen" if is_unseen else "measure")
        self.tick("measure")
        count = sum(one in ("unseen", "measure") for one in self.log)
        figures = self.figures(self.point, is_unseen, count)
        if figures is None:
            return Outcome(kind="crash", words="out of memory")
        turn_time_s, ttft_s = figures
        found = Measurement(decode_tps=400 / turn_time_s, ttft_s=ttft_s, turn_time_s=turn_time_s, noise_ratio=0.004)
        return Outcome(kind="ok", measurement=found)

    def stop(self) -> None:
        self.point = {}

    def settings_now(self) -> dict[str, Any]:
        return dict(self.point)


def make_session(
    monkeypatch: Any, folder: Path, launcher: RiggedLauncher, *, clock: Callable[[], float] = time.monotonic,
    targets: GoodEnough | None = None, seeds: Seeds | None = None, **options: Any,
) -> Session:  # fmt: skip
    """`ft tune demo.yaml` in `folder`, with a state folder of its own, and settings that came with the recipe."""
    monkeypatch.setenv("FT_STATE", str(folder / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setattr(session, "DeployLauncher", launcher)
    recipe = folder / "demo.yaml"
    shutil.copy(REPO / "recipes" / "demo.yaml", recipe)
    loaded = load_recipe(str(recipe))
    if targets is not None:
        loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"good_enough": targets}))
    found = seeds or Seeds()
    return Session(
        loaded, Options(**({"budget_s": 3600.0, "trials": 5} | options)), clock=clock, find_seeds=lambda site: found
    )
