"""Confirmation: the winner against a baseline in A B B A order on prompts that the search has not seen.

Order A B B A cancels a drift that is linear in time (a machine that warms up); unseen prompts show what was only
learned by heart. "No gain" is an answer: the interval of the gain then reaches zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import model_validator

from freetoken.tuner.headline import compute_half_width
from freetoken.tuner.launching import Launcher
from freetoken.tuner.objectives import Objective
from freetoken.tuner.space import Space
from freetoken.tuner.values import Measurement, Outcome, Point, TunerModel

ORDER = "ABBA"
Verdict = Literal["gain", "no gain", "worse", "unfinished"]


class Confirmation(TunerModel):
    """What the comparison says. `gain` 0.25 reads as 25 % less time (or more speed per time) than the baseline."""

    verdict: Verdict
    objective: str
    #: Figures of the blocks in the order in which they were measured.
    baseline: tuple[float, ...] = ()
    winner: tuple[float, ...] = ()
    #: Cost of the baseline over that of the winner, less one, with its 95 % interval.
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    words: str = ""
    #: All that was measured in the blocks.
    baseline_blocks: tuple[Measurement, ...] = ()
    winner_blocks: tuple[Measurement, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_last_block(cls, value: Any) -> Any:
        """Studies of an older tool kept the winner's last block alone, which says nothing that may be shown."""
        return {k: v for k, v in value.items() if k != "winner_measurement"} if isinstance(value, dict) else value

    def describe(self) -> str:
        """One sentence with the interval."""
        if self.gain is None or self.gain_low is None or self.gain_high is None:
            return f"not confirmed: {self.words}"
        interval = f"{self.gain:+.1%} (95 %: {self.gain_low:+.1%} to {self.gain_high:+.1%})"
        return {
            "gain": f"confirmed on unseen prompts: {interval}",
            "no gain": f"no gain on unseen prompts: {interval}",
            "worse": f"worse on unseen prompts: {interval}",
        }.get(self.verdict, interval)


def confirm(
    launcher: Launcher,
    space: Space,
    baseline: Point,
    winner: Point,
    objective: Objective,
    *,
    say: Callable[[str], None] = lambda text: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Confirmation:
    """Measures both in A B B A order. Settings that share a start are resized between the blocks, not restarted.

    `is_over` is asked before each block: once the time is used up, no other one begins.
    """
    points = {"A": baseline, "B": winner}
    costs: dict[str, list[Measurement]] = {"A": [], "B": []}
    running: tuple[object, ...] | None = None
    current: Point | None = None
    for index, letter in enumerate(ORDER):
        point = points[letter]
        key = space.start_key(space.canonical(point))
        if is_over():
            words = f"the budget ended after {index} of {len(ORDER)} measurements"
            return Confirmation(verdict="unfinished", objective=objective.name, words=words)
        say(f"confirmation {index + 1} of {len(ORDER)}: {'baseline' if letter == 'A' else 'winner'}")
        outcome = Outcome(kind="ok")
        if point != current:
            outcome = launcher.resize(point) if key == running else launcher.start(point)
            if outcome.kind == "refused" and key == running:
                outcome = launcher.start(point)  # not while that one runs, which says nothing of a start of its own
        if outcome.kind == "ok":
            running, current = key, point
            outcome = launcher.measure(is_unseen=True)
        if outcome.measurement is None or objective.cost(outcome.measurement) is None:
            words = (
                f"{'the baseline' if letter == 'A' else 'the winner'} did not measure: {outcome.words or outcome.kind}"
            )
            return Confirmation(verdict="unfinished", objective=objective.name, words=words)
        costs[letter].append(outcome.measurement)
    return judge(costs["A"], costs["B"], objective)


def judge(baseline: Sequence[Measurement], winner: Sequence[Measurement], objective: Objective) -> Confirmation:
    """The gain with its interval from two blocks of each."""
    a = [math.log(cost) for one in baseline if (cost := objective.cost(one)) is not None]
    b = [math.log(cost) for one in winner if (cost := objective.cost(one)) is not None]
    half = compute_half_width([a, b], [objective.noise(one) for one in (*baseline, *winner)])
    mean = fmean(a) - fmean(b)
    low, high = math.expm1(mean - half), math.expm1(mean + half)
    verdict: Verdict = "gain" if low > 0 else "worse" if high < 0 else "no gain"
    return Confirmation(
        verdict=verdict,
        objective=objective.name,
        baseline=tuple(x for one in baseline if (x := objective.read(one)) is not None),
        winner=tuple(x for one in winner if (x := objective.read(one)) is not None),
        gain=math.expm1(mean),
        gain_low=low,
        gain_high=high,
        baseline_blocks=tuple(baseline),
        winner_blocks=tuple(winner),
    )
