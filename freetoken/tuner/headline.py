"""What is said of a setting: the mean over all its measurements with an interval, never one lucky repeat.

Summary, `--status`, tuned recipe, report and bundle all take their figures from here, so that they agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from freetoken.tuner.history import average
from freetoken.tuner.objectives import Objective
from freetoken.tuner.values import Measurement, TunerModel
from freetoken.units import format_significant

#: Student's t for 95 % by degrees of freedom.
_T = {3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
#: How many degrees of freedom the bench's own interval of a measurement counts for.
WITHIN_FREEDOM = 3


class Headline(TunerModel):
    """Figures of a setting over `count` measurements; `low` to `high` is the 95 % interval of `figure`."""

    measurement: Measurement
    objective: str
    unit: str
    #: The objective's.
    figure: float
    low: float
    high: float
    count: int
    #: Measured on prompts that the search has not seen, side by side with the other setting.
    is_unseen: bool = False

    def describe(self) -> str:
        """`turn_time 7.05 s (95 %: 6.51 to 7.63), mean of 2 measurements on unseen prompts`."""
        low, figure, high = (format_significant(one) for one in (self.low, self.figure, self.high))
        times = "1 measurement" if self.count == 1 else f"mean of {self.count} measurements"
        unseen = " on unseen prompts" if self.is_unseen else ""
        return f"{self.objective} {figure} {self.unit} (95 %: {low} to {high}), {times}{unseen}"


def make_headline(
    measurements: Sequence[Measurement], objective: Objective, *, is_unseen: bool = False
) -> Headline | None:
    """What `measurements` of one setting come to; None where none has the objective's figure."""
    told = [one for one in measurements if objective.cost(one) is not None]
    figures = [figure for one in told if (figure := objective.read(one)) is not None]
    if not figures:
        return None
    half = compute_half_width([[math.log(one) for one in figures]], [objective.noise(one) for one in told])
    figure = fmean(figures)
    return Headline(
        measurement=average(told), objective=objective.name, unit=objective.unit, figure=figure,
        low=figure * math.exp(-half), high=figure * math.exp(half), count=len(told), is_unseen=is_unseen,
    )  # fmt: skip


def compute_half_width(groups: Sequence[Sequence[float]], noises: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean of logarithms, or of the difference of two means: one group for each.

    A few measurements say little of their own spread, and what the bench says of one knows nothing of drift between
    them: the variance is their mean, weighted by degrees of freedom (a moderated t-test).
    """
    squares = sum((x - fmean(group)) ** 2 for group in groups for x in group)
    within = sum(one**2 for one in noises) / len(noises)
    freedom = WITHIN_FREEDOM + sum(len(group) - 1 for group in groups)
    variance = (WITHIN_FREEDOM * within + squares) / freedom
    return _T.get(freedom, 2.0) * math.sqrt(variance * sum(1 / len(group) for group in groups))
