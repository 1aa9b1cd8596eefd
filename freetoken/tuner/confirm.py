"""Confirmation: the winner against a baseline in A B B A order on prompts that the search has not seen.

Order A B B A cancels a drift that is linear in time (a machine that warms up); unseen prompts show what was only
learned by heart. "No gain" is an answer: the interval of the gain then reaches zero. Where a setting was imported from
another machine it is measured as C in the same run, A C B B C A: all three have their middle at the same moment.
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

ORDER, ORDER_OF_THREE = "ABBA", "ACBBCA"
_NAMES = {"A": "baseline", "B": "winner", "C": "imported setting"}
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
    #: The winner against the best imported setting, which stands for the baseline there; None where there was none.
    imported: Confirmation | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_last_block(cls, value: Any) -> Any:
        """Studies of an older tool kept the winner's last block alone, which says nothing that may be shown."""
        return {k: v for k, v in value.items() if k != "winner_measurement"} if isinstance(value, dict) else value

    def describe_interval(self) -> str:
        """The gain with its interval; why there is none where that is so."""
        if self.gain is None or self.gain_low is None or self.gain_high is None:
            return f"not compared: {self.words}"
        return f"{self.gain:+.1%} (95 %: {self.gain_low:+.1%} to {self.gain_high:+.1%})"

    def describe(self) -> str:
        """One sentence with the interval."""
        if self.gain is None:
            return f"not confirmed: {self.words}"
        interval = self.describe_interval()
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
    imported: Point | None = None,
    say: Callable[[str], None] = lambda text: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Confirmation:
    """Measures them in A B B A order. Settings that share a start are resized between the blocks, not restarted.

    `is_over` is asked before each block: once the time is used up, no other one begins. An imported setting that does
    not measure is left out, and its comparison says why.
    """
    points, order = {"A": baseline, "B": winner}, ORDER
    if imported is not None:
        points, order = points | {"C": imported}, ORDER_OF_THREE
    blocks: dict[str, list[Measurement]] = {"A": [], "B": [], "C": []}
    given_up = ""
    running: tuple[object, ...] | None = None
    current: Point | None = None
    for index, letter in enumerate(order):
        if letter == "C" and given_up:
            continue
        point = points[letter]
        key = space.start_key(space.canonical(point))
        if is_over():
            words = f"the budget ended after {index} of {len(order)} measurements"
            return Confirmation(verdict="unfinished", objective=objective.name, words=words)
        say(f"confirmation {index + 1} of {len(order)}: {_NAMES[letter]}")
        outcome = Outcome(kind="ok")
        if point != current:
            outcome = launcher.resize(point) if key == running else launcher.start(point)
            if outcome.kind == "refused" and key == running:
                outcome = launcher.start(point)  # not while that one runs, which says nothing of a start of its own
        if outcome.kind == "ok":
            running, current = key, point
            outcome = launcher.measure(is_unseen=True)
        if outcome.measurement is None or objective.cost(outcome.measurement) is None:
            words = f"the {_NAMES[letter]} did not measure: {outcome.words or outcome.kind}"
            if letter != "C":
                return Confirmation(verdict="unfinished", objective=objective.name, words=words)
            given_up, running, current = words, None, None
            continue
        blocks[letter].append(outcome.measurement)
    found = judge(blocks["A"], blocks["B"], objective)
    if imported is None:
        return found
    versus = Confirmation(verdict="unfinished", objective=objective.name, words=given_up)
    return found.model_copy(update={"imported": versus if given_up else judge(blocks["C"], blocks["B"], objective)})


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
