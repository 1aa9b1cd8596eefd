"""Confirmation: the winner against a baseline in A B B A order on prompts that the search has not seen.

Order A B B A cancels a drift that is linear in time (a machine that warms up); unseen prompts show what was only
learned by heart. "No gain" is an answer: the interval of the gain then reaches zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from freetoken.tuner.launching import Launcher
from freetoken.tuner.objectives import Objective
from freetoken.tuner.space import Space
from freetoken.tuner.values import Measurement, Outcome, Point, TunerModel

ORDER = "ABBA"
#: Student's t for 95 % by degrees of freedom.
_T = {3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}
#: How many degrees of freedom the bench's own interval of a block counts for.
WITHIN_FREEDOM = 3
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
    winner_measurement: Measurement | None = None

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
) -> Confirmation:
    """Measures both in A B B A order. Settings that share a start are resized between the blocks, not restarted."""
    points = {"A": baseline, "B": winner}
    costs: dict[str, list[Measurement]] = {"A": [], "B": []}
    running: tuple[object, ...] | None = None
    current: Point | None = None
    for index, letter in enumerate(ORDER):
        point = points[letter]
        key = space.start_key(space.canonical(point))
        say(f"confirmation {index + 1} of {len(ORDER)}: {'baseline' if letter == 'A' else 'winner'}")
        outcome = Outcome(kind="ok")
        if point != current:
            outcome = launcher.resize(point) if key == running else launcher.start(point)
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
    """The gain with its interval from two blocks of each.

    Two blocks say little of their own spread, and what the bench says of a block knows nothing of drift between
    blocks: the variance is their mean, weighted by degrees of freedom (a moderated t-test).
    """
    a = [math.log(cost) for one in baseline if (cost := objective.cost(one)) is not None]
    b = [math.log(cost) for one in winner if (cost := objective.cost(one)) is not None]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    squares = sum((x - mean_a) ** 2 for x in a) + sum((x - mean_b) ** 2 for x in b)
    within = sum(one.noise_ratio**2 for one in (*baseline, *winner)) / (len(a) + len(b))
    freedom = len(a) + len(b) - 2
    variance = (WITHIN_FREEDOM * within + squares) / (WITHIN_FREEDOM + freedom)
    half = _T.get(WITHIN_FREEDOM + freedom, 2.0) * math.sqrt(variance * (1 / len(a) + 1 / len(b)))
    mean = mean_a - mean_b
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
        winner_measurement=winner[-1],
    )
