"""When to stop: what one more trial could gain, against the noise of a measurement.

Beside budgets there is one rule: a search ends when the next trial's expected gain is below what the bench could see,
or when the last starts were promised gains and brought none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from freetoken.tuner.objectives import Limit, Objective, penalised_cost
from freetoken.tuner.values import Observation

#: Below this share no trial is worth a start, however quiet the machine is.
LEAST_GAIN = 0.003
#: Starts in a row that gained less than `SMALL_GAIN` before the search ends.
FRUITLESS_STARTS, SMALL_GAIN = 3, 0.01


def expected_gain(mean: np.ndarray | float, deviation: np.ndarray | float) -> np.ndarray:
    """Expected improvement E[max(0, x)] of a normal gain: relative, where `mean` and `deviation` are logarithms."""
    mean, deviation = np.asarray(mean, dtype=float), np.maximum(np.asarray(deviation, dtype=float), 1e-9)
    z = mean / deviation
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return np.asarray(mean * _normal_cdf(z) + deviation * density)


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    # Not `scipy.special`: its import takes seconds on a small machine, and these are a few dozen numbers.
    return np.asarray(0.5 * (1 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2))))


def should_stop(
    gain: float, noise_ratio: float, history: Sequence[Observation], objective: Objective, limits: Sequence[Limit] = ()
) -> str | None:
    """Why another trial is not worth it, in words; None where it is."""
    threshold = max(LEAST_GAIN, noise_ratio / 4)
    if gain < threshold:
        return f"another start could gain {gain:.1%}, less than the {threshold:.1%} that could be seen"
    fruitless = count_fruitless(history, objective, limits)
    if fruitless >= FRUITLESS_STARTS and gain < 4 * threshold:
        return f"the last {fruitless} starts gained less than {SMALL_GAIN:.0%} each"
    return None


def count_fruitless(history: Sequence[Observation], objective: Objective, limits: Sequence[Limit] = ()) -> int:
    """Starts at the end of `history` that improved on everything before them by less than 1 %."""
    best, fruitless, seen = float("inf"), 0, {0}
    for one in history:
        # In a shared study the starts of several machines alternate.
        if one.start not in seen:
            seen.add(one.start)
            fruitless += 1
        if one.measurement is None:
            continue
        cost = penalised_cost(objective, one.measurement, limits)
        if cost is not None and cost < best:
            if cost < best * (1 - SMALL_GAIN):
                fruitless = 0
            best = cost
    return fruitless
