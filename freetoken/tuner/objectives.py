"""Objectives and hard limits: what of a measurement is optimised, in which direction, and what rules a setting out.

Inside the tuner everything is a cost (smaller is better); a study shows the figure that a person asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from freetoken.errors import UsageError
from freetoken.recipe.model import GoodEnough
from freetoken.tuner.values import Measurement, Observation

Direction = Literal["minimize", "maximize"]


class Objective(NamedTuple):
    """One figure to optimise. `read` gives None where the measurement lacks it."""

    name: str
    unit: str
    direction: Direction
    read: Callable[[Measurement], float | None]

    def cost(self, measurement: Measurement) -> float | None:
        """The figure as a cost: itself, or its inverse where more is better."""
        figure = self.read(measurement)
        return None if figure is None else self.to_cost(figure)

    def noise(self, measurement: Measurement) -> float:
        """Relative standard error of the figure by the bench's word.

        Turns of a conversation differ in their prompts and so in their time, while all of them decode alike.
        """
        is_total = self.name == "throughput" and measurement.total_decode_tps is not None
        own = {
            "decode_tps": measurement.decode_noise_ratio,
            "throughput": measurement.total_noise_ratio if is_total else measurement.decode_noise_ratio,
        }.get(self.name)
        return measurement.noise_ratio if own is None else own

    def to_cost(self, figure: float) -> float:
        """A figure as a cost, and (its own inverse) a cost as a figure."""
        return figure if self.direction == "minimize" else 1 / figure


OBJECTIVES: dict[str, Objective] = {
    one.name: one
    for one in (
        Objective("turn_time", "s", "minimize", lambda m: m.turn_time_s),
        Objective("decode_tps", "tok/s", "maximize", lambda m: m.decode_tps),
        Objective("ttft", "s", "minimize", lambda m: m.ttft_s),
        Objective("throughput", "tok/s", "maximize", lambda m: m.total_decode_tps or m.decode_tps),
        Objective("efficiency", "J/token", "minimize", lambda m: m.joules_per_token),
    )
}


def pick_objectives(names: Sequence[str]) -> tuple[Objective, ...]:
    """One or two objectives by name. Raises UsageError."""
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown:
        raise UsageError(f"no objective `{unknown[0]}`", hint=f"one of: {', '.join(OBJECTIVES)}")
    if not 1 <= len(dict.fromkeys(names)) == len(names) <= 2:
        raise UsageError(f"one or two different objectives can be optimised, not {', '.join(names) or 'none'}")
    return tuple(OBJECTIVES[name] for name in names)


class Limit(NamedTuple):
    """A hard limit of `good_enough`: the figure may not be above (durations) or below (rates) `bound`."""

    name: str
    bound: float
    is_upper: bool
    read: Callable[[Measurement], float | None]

    def excess(self, measurement: Measurement) -> float | None:
        """How far it is missed as a share of the bound; 0 or less where it is met, None where nobody measured."""
        figure = self.read(measurement)
        if figure is None:
            return None
        return figure / self.bound - 1 if self.is_upper else self.bound / max(figure, 1e-9) - 1


def make_limits(targets: GoodEnough) -> tuple[Limit, ...]:
    """The limits of a recipe's `good_enough`, in its order."""
    known: tuple[tuple[str, float | None, bool, Callable[[Measurement], float | None]], ...] = (
        ("ttft_p50", targets.ttft_p50, True, lambda m: m.ttft_p50_s or m.ttft_s),
        ("ttft_p95", targets.ttft_p95, True, lambda m: m.ttft_p95_s or m.ttft_s),
        ("itl_p95", targets.itl_p95, True, lambda m: m.itl_p95_s),
        ("turn_time", targets.turn_time, True, lambda m: m.turn_time_s),
        ("decode_tps", targets.decode_tps, False, lambda m: m.decode_tps),
        ("prefill_tps", targets.prefill_tps, False, lambda m: m.prefill_tps),
    )
    return tuple(Limit(name, bound, upper, read) for name, bound, upper, read in known if bound is not None)


def missed_limits(measurement: Measurement, limits: Sequence[Limit]) -> tuple[str, ...]:
    """Names of the limits that a measurement misses."""
    return tuple(one.name for one in limits if (one.excess(measurement) or 0) > 0)


def penalised_cost(objective: Objective, measurement: Measurement, limits: Sequence[Limit]) -> float | None:
    """The cost, ten times heavier for every whole limit that is missed: what misses least still ranks first."""
    cost = objective.cost(measurement)
    if cost is None:
        return None
    return cost * (1 + 10 * sum(max(0.0, one.excess(measurement) or 0.0) for one in limits))


def pareto_front(
    observations: Sequence[Observation], objectives: Sequence[Objective], limits: Sequence[Limit] = (),
    *, noise: float = 0.0,
) -> tuple[Observation, ...]:  # fmt: skip
    """Observations that no other one beats in every objective, limits kept, ordered by the first objective.

    Where another is clearly better in one objective, being better in the other by no more than the relative `noise`
    of a measurement does not count.
    """
    found = {index: _costs(one, objectives, limits) for index, one in enumerate(observations)}
    costs = {index: cost for index, cost in found.items() if cost is not None}
    front = find_front(costs)
    kept = [one for one in front if not any(_outdoes(costs[other], costs[one], noise) for other in front)]
    return tuple(observations[index] for index in kept)


def _outdoes(left: tuple[float, ...], right: tuple[float, ...], noise: float) -> bool:
    """Nowhere worse than the noise, and somewhere better by more than twice of it."""
    pairs = list(zip(left, right, strict=True))
    return all(a <= b * (1 + noise) for a, b in pairs) and any(a * (1 + 2 * noise) < b for a, b in pairs)


def find_front(costs: Mapping[int, tuple[float, ...]]) -> list[int]:
    """Keys whose costs (one or two each) no others beat, ordered by the first; of equal costs the first key alone."""
    front: list[int] = []
    least = math.inf
    for cost, key in sorted((cost, key) for key, cost in costs.items()):
        # In this order whoever comes later is no better in the first cost, so it must be better in the last.
        if cost[-1] < least:
            front.append(key)
            least = cost[-1]
    return front


def _costs(
    observation: Observation, objectives: Sequence[Objective], limits: Sequence[Limit]
) -> tuple[float, ...] | None:
    measurement = observation.measurement
    if measurement is None or missed_limits(measurement, limits):
        return None
    costs = [one.cost(measurement) for one in objectives]
    return None if any(one is None for one in costs) else tuple(one for one in costs if one is not None)
