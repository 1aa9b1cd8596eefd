"""Whether a result is good enough: each target of a recipe against its figure."""

from __future__ import annotations

from freetoken.bench.result import BenchModel, BenchResult
from freetoken.recipe.model import GoodEnough

#: Target -> (figure, factor from the figure's unit to the target's, whether the target is an upper limit).
_FIGURES: dict[str, tuple[str, float, bool]] = {
    "ttft_p50": ("ttft_p50_ms", 0.001, True),
    "ttft_p95": ("ttft_p95_ms", 0.001, True),
    "itl_p95": ("itl_p95_ms", 0.001, True),
    "turn_time": ("turn_time_s", 1.0, True),
    "decode_tps": ("decode_tps", 1.0, False),
    "prefill_tps": ("prefill_tps", 1.0, False),
}
_UNITS = {True: "s", False: "tok/s"}


class TargetCheck(BenchModel):
    """One target, and what was measured in its unit: seconds, or tok/s. None = it could not be measured."""

    name: str
    wanted: float
    measured: float | None
    unit: str
    is_met: bool

    @property
    def words(self) -> str:
        """`ttft_p95 is 9.1 s, at most 8 s wanted`."""
        bound = "at most" if self.unit == "s" else "at least"
        measured = "was not measured" if self.measured is None else f"is {self.measured:.3g} {self.unit}"
        return f"`{self.name}` {measured}, {bound} {self.wanted:g} {self.unit} wanted"


def check_targets(wanted: GoodEnough, result: BenchResult) -> tuple[TargetCheck, ...]:
    """A check for each target that is set. What could not be measured is not met."""
    checks = []
    for name, (figure, factor, is_upper) in _FIGURES.items():
        limit = getattr(wanted, name)
        if limit is None:
            continue
        mean = result.mean(figure)
        measured = mean * factor if mean is not None else None
        is_met = measured is not None and (measured <= limit if is_upper else measured >= limit)
        checks.append(TargetCheck(name=name, wanted=limit, measured=measured, unit=_UNITS[is_upper], is_met=is_met))
    return tuple(checks)
