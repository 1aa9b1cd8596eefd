"""What a finished search and its confirmation come to: the baseline, whether there is a gain, the figures of both.

Nothing is measured, kept or written here: `finishing.py` does that with what this says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from freetoken.tuner.confirm import Confirmation, judge
from freetoken.tuner.headline import Headline, make_headline
from freetoken.tuner.history import average, calm
from freetoken.tuner.objectives import OBJECTIVES, Limit, Objective, missed_limits, penalised_cost
from freetoken.tuner.outcome import TuneResult
from freetoken.tuner.space import Space
from freetoken.tuner.study import SearchEnd
from freetoken.tuner.values import INFEASIBLE, Measurement, Observation, Point

_BROKEN = ("crash", "hang", "garbage")


def find_default(observations: Sequence[Observation]) -> Observation | None:
    """The engine's own default, where it was measured."""
    return next((one for one in observations if one.stage == "default" and one.measurement is not None), None)


def has_default_failed(observations: Sequence[Observation]) -> bool:
    """Whether the engine's own default was tried and does not work; not so where nobody came to try it."""
    tried = [one for one in observations if one.stage == "default"]
    return find_default(tried) is None and any(one.outcome.kind in INFEASIBLE for one in tried)


def choose_baseline(observations: Sequence[Observation]) -> tuple[Point, str]:
    """The engine's default; where it did not work, the first setting that did. With words that say which.

    Something must have been measured.
    """
    if (found := find_default(observations)) is not None:
        return found.point, "the engine's own default"
    default = next((one for one in observations if one.stage == "default"), None)
    why = f"the engine's default did not work ({default.outcome.kind})" if default is not None else "no default"
    worked = next(one for one in observations if one.measurement is not None)
    return worked.point, f"{why}; the first setting that worked stands for it"


def find_imported(
    observations: Sequence[Observation], objective: Objective, limits: Sequence[Limit]
) -> Observation | None:
    """The best of the settings from another machine, as they were measured here; None where none was."""
    costs = [
        (cost, index)
        for index, one in enumerate(observations)
        if one.stage == "seed"
        and one.measurement is not None
        and (cost := penalised_cost(objective, one.measurement, limits)) is not None
    ]
    return observations[min(costs)[1]] if costs else None


class Choice(NamedTuple):
    """What is held against the baseline, and whether it is taken; with words where that is not plain."""

    candidate: Point
    confirmation: Confirmation | None = None
    is_gain: bool = False
    warning: str | None = None


def choose(winner: Point, imported: Point | None, confirmation: Confirmation, limits: Sequence[Limit]) -> Choice:
    """The search's winner, or the imported setting where that outdid it or is the only one of both to be taken."""
    ours, versus = _judge_gain(winner, confirmation, limits), confirmation.imported
    if imported is None or versus is None or not versus.baseline_blocks:
        return ours
    objective = OBJECTIVES[confirmation.objective]
    theirs = _judge_gain(imported, judge(confirmation.baseline_blocks, versus.baseline_blocks, objective), limits)
    if not theirs.is_gain or (ours.is_gain and versus.verdict != "worse"):
        return ours
    why = "outdid what the search found" if versus.verdict == "worse" else "is taken where what the search found is not"
    return theirs._replace(warning=f"the imported setting {why}, and stands in its place")


def _judge_gain(point: Point, confirmation: Confirmation, limits: Sequence[Limit]) -> Choice:
    """Taken is what is faster beyond doubt without missing a hard limit that the baseline keeps, or keeps one alone."""
    if not confirmation.baseline_blocks or not confirmation.winner_blocks:
        return Choice(point, confirmation)
    blocks = (confirmation.baseline_blocks, confirmation.winner_blocks)
    before, after = (set(missed_limits(average(one), limits)) for one in blocks)
    is_faster, warning = confirmation.verdict == "gain", None
    if after < before and not is_faster:
        warning = f"it is taken for keeping the hard limit on {_list(before - after)}, which the baseline misses"
    elif is_faster and not after <= before:
        warning = f"it is not taken: it misses the hard limit on {_list(after - before)}, which the baseline keeps"
    return Choice(point, confirmation, after < before or (is_faster and after <= before), warning)


@dataclass(frozen=True)
class Verdict:
    """A search that has ended, its baseline, and the comparison of it with the best where there was one."""

    end: SearchEnd
    space: Space
    objectives: Sequence[Objective]
    limits: Sequence[Limit]
    baseline: Point
    baseline_words: str
    confirmation: Confirmation | None

    def make_result(self, winner: Point, **told: Any) -> TuneResult:
        """What is said of `winner` and the baseline; `told` are the result's other fields, which are not known here."""
        base, best, relevant = self.headline(self.baseline), self.headline(winner), self.space.relevant
        measurement = best.measurement if best is not None else None
        return TuneResult(
            objectives=tuple(one.name for one in self.objectives), reason=self.end.reason,
            trials=len(self.end.observations), starts=self.end.starts,
            crashes=sum(one.outcome.kind in _BROKEN for one in self.end.observations),
            best=relevant(winner), best_headline=best,
            best_figures=measurement.model_dump(exclude_none=True) if measurement is not None else {},
            baseline=relevant(self.baseline), baseline_words=self.baseline_words, baseline_headline=base,
            front=tuple(self._list_front()), confirmation=self.confirmation,
            missed=missed_limits(measurement, self.limits) if measurement is not None else (), **told,
        )  # fmt: skip

    def _list_front(self) -> list[dict[str, Any]]:
        if len(self.objectives) < 2:
            return []
        return [
            {
                "point": self.space.relevant(one.point),
                **{each.name: each.read(one.measurement) for each in self.objectives if one.measurement},
            }
            for one in self.end.front
        ]

    def headline(self, point: Point) -> Headline | None:
        """Over the blocks of the confirmation, else over every measurement of the search."""
        return make_headline(self.blocks(point), self.objectives[0], is_unseen=bool(self._proven(point)))

    def blocks(self, point: Point) -> Sequence[Measurement]:
        """What was measured of `point`: in the confirmation, else in the search."""
        canonical = self.space.canonical
        return self._proven(point) or [
            one.measurement
            for one in calm(self.end.observations, canonical)
            if one.measurement and canonical(one.point) == canonical(point)
        ]

    def _proven(self, point: Point) -> Sequence[Measurement]:
        if self.confirmation is None:
            return ()
        is_baseline = self.space.canonical(point) == self.space.canonical(self.baseline)
        return self.confirmation.baseline_blocks if is_baseline else self.confirmation.winner_blocks


def _list(names: set[str]) -> str:
    return ", ".join(f"`{one}`" for one in sorted(names))
