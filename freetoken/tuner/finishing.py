"""What follows a search: the comparison on unseen prompts, the soak, and what is written and kept of the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from freetoken.deploy.launcher import uninterrupted
from freetoken.errors import FtError
from freetoken.tuner.confirm import Confirmation, confirm
from freetoken.tuner.keeping import keep_baseline, keep_winner
from freetoken.tuner.record import StudyResult, write_result
from freetoken.tuner.soak import Soak, soak
from freetoken.tuner.verdict import (
    Choice,
    Verdict,
    choose,
    choose_baseline,
    find_default,
    find_imported,
    has_default_failed,
)
from freetoken.tuner.written import describe_proof, write_tuned_recipe
from freetoken.units import format_seconds

if TYPE_CHECKING:
    from freetoken.recipe.load import LoadedRecipe
    from freetoken.tuner.launching import Launcher
    from freetoken.tuner.outcome import TuneResult
    from freetoken.tuner.pace import Pace
    from freetoken.tuner.site import PlannedSite
    from freetoken.tuner.study import Search, SearchEnd
    from freetoken.tuner.values import Point

#: The time of a confirmation is an estimate: so much more is kept for it, and so much less is enough to begin it.
SPARE = 1.15


class Ending(NamedTuple):
    """What is to be run, what is said at the head of its recipe, and whether that is written at all."""

    winner: Point
    lines: tuple[str, ...]
    stability: str
    is_written: bool
    is_gain: bool = False


@dataclass
class Finishing:
    """Takes a search to its result. `warnings` is the session's own list."""

    loaded: LoadedRecipe
    site: PlannedSite
    search: Search
    launcher: Launcher
    #: The launcher with its stop watch.
    pace: Pace
    budget_s: float
    soak_s: float
    warnings: list[str]
    say: Callable[[str, str], None]
    clock: Callable[[], float]
    #: Seconds of the budget that are left, and seconds of work, those of earlier processes counted.
    left_s: Callable[[], float]
    worked_s: Callable[[], float]
    #: How long the soak took; 0 without one.
    soaked_s: float = 0.0

    def finish(self, end: SearchEnd) -> TuneResult:
        """The result, written and kept. Raises FtError where nothing could be measured."""
        if end.best is None or end.best.measurement is None:
            if any(one.measurement is not None for one in end.observations):
                raise FtError(
                    f"nothing here measures `{self.search.objectives[0].name}`",
                    hint="`--objective turn_time` needs no more than the answers",
                )
            crashes = [one.outcome.words for one in end.observations if one.outcome.words]
            raise FtError("no setting that was tried could be measured", details=tuple(crashes[-5:]))
        baseline, words = choose_baseline(end.observations)
        # Of two objectives the best in the first one may be so by noise alone: then the front has another.
        best = end.front[0] if len(self.search.objectives) > 1 and end.front else end.best
        choice = self._compare(end, baseline, best.point)
        if choice.confirmation is None:
            words += "; " + _describe_nothing_better(self.site, end)
        ending = self._decide(end, choice, baseline, words)
        verdict = Verdict(
            end, self.site.space, self.search.objectives, self.search.limits, baseline, words, choice.confirmation
        )
        result = verdict.make_result(
            ending.winner, study=self.search.name, recipe=self.loaded.recipe.name,
            workload=self.loaded.recipe.workload.name, duration_s=self.worked_s(), soak=ending.stability,
        )  # fmt: skip
        with uninterrupted():  # a recipe with its lock and its rows, or none of them
            result = self._keep(ending, verdict, result, choice)
            write_result(self.search.study, StudyResult.of(result))
        return result

    def _compare(self, end: SearchEnd, baseline: Point, winner: Point) -> Choice:
        """The winner, and what was imported, against the baseline; and which of them is taken."""
        if self.site.space.canonical(baseline) == self.site.space.canonical(winner):
            return Choice(winner)
        found = find_imported(end.observations, self.search.objectives[0], self.search.limits)
        imported = found.point if found is not None else None
        confirmation = self._confirm(baseline, winner, imported)
        self.say("confirm", confirmation.describe())
        if confirmation.imported is not None:
            self.say("confirm", f"against the imported setting: {confirmation.imported.describe_interval()}")
        return choose(winner, imported, confirmation, self.search.limits)

    def _decide(self, end: SearchEnd, choice: Choice, baseline: Point, words: str) -> Ending:
        """What is to be run, after it was soaked where that was asked for."""
        # Where the default does not run, what was measured to run is the gain, the fastest unless it was outdone.
        has_failed, proof = has_default_failed(end.observations), choice.confirmation
        is_taken = choice.is_gain or (has_failed and proof is not None and proof.verdict == "unfinished")
        soaked = self._soak(choice.candidate if is_taken else baseline)
        if is_taken and not soaked.is_sound:
            self._warn("it is not taken: it did not last through the soak")
            return Ending(baseline, (words,), f"what was found is {soaked.words}", is_written=has_failed)
        self._warn(choice.warning)
        if is_taken and proof is not None:
            lines = (describe_proof(proof), soaked.words)
            return Ending(choice.candidate, lines, soaked.words, is_written=True, is_gain=choice.is_gain)
        if has_failed and not soaked.is_sound:
            self._warn("nothing is written: what ran did not last through the soak")
        return Ending(baseline, (words, soaked.words), soaked.words, is_written=has_failed and soaked.is_sound)

    def _keep(self, ending: Ending, verdict: Verdict, result: TuneResult, choice: Choice) -> TuneResult:
        """`result` with what was written, and rows in the store."""
        winner, proof = ending.winner, choice.confirmation
        if ending.is_written:
            written = write_tuned_recipe(self.loaded, self.site, winner, result, ending.lines, self.warnings)
            gain = proof if ending.is_gain else None
            self._warn(keep_winner(self.site, self.search.name, winner, verdict.blocks(winner), gain))
            result = result.model_copy(update={"is_tuned": True, "tuned_recipe": written})
        if proof is not None and winner is verdict.baseline:
            result = result.model_copy(update={"candidate": self.site.space.relevant(choice.candidate)})
            if proof.baseline_blocks and find_default(verdict.end.observations) is not None:
                self._warn(keep_baseline(self.site, self.search.name, winner, proof))
        return result.model_copy(update={"warnings": tuple(self.warnings)})

    def _confirm(self, baseline: Point, candidate: Point, imported: Point | None) -> Confirmation:
        """Both side by side, where the budget still holds that, and an imported setting that is neither of them."""
        canonical = self.site.space.canonical
        if imported is not None and canonical(imported) in (canonical(baseline), canonical(candidate)):
            imported = None
        needed_s, left_s = self._confirmation_s(baseline, candidate, imported), max(0.0, self.left_s())
        if imported is not None and needed_s > SPARE * left_s:
            self._warn("the imported setting was not compared with what was found: the time was too short")
            imported, needed_s = None, self._confirmation_s(baseline, candidate)
        # A search that ended a little late is not thrown away: no block begins after the end of the budget.
        if needed_s > SPARE * left_s:
            words = (
                f"the budget of {format_seconds(self.budget_s)} was too short: {format_seconds(left_s)} were left, "
                f"the confirmation takes about {format_seconds(needed_s)}"
            )
            return Confirmation(verdict="unfinished", objective=self.search.objectives[0].name, words=words)
        return confirm(
            self.pace, self.site.space, baseline, candidate, self.search.objectives[0], imported=imported,
            say=lambda text: self.say("confirm", text), is_over=lambda: self.left_s() <= 0,
        )  # fmt: skip

    def _confirmation_s(self, *points: Point | None) -> float:
        kept = [self.site.space.canonical(one) for one in points if one is not None]
        is_one_start = self.pace.can_resize and len({self.site.space.start_key(one) for one in kept}) == 1
        return self.pace.confirmation_s(shares_start=is_one_start, settings=len(kept))

    def _soak(self, point: Point) -> Soak:
        seconds = self.soak_s
        if seconds <= 0:
            return Soak()
        began_s = self.clock()
        found = soak(self.launcher, point, seconds, clock=self.clock, say=lambda text: self.say("soak", text))
        self.soaked_s = self.clock() - began_s
        return found

    def _warn(self, warning: str | None) -> None:
        if warning is not None and warning not in self.warnings:
            self.warnings.append(warning)


def _describe_nothing_better(site: PlannedSite, end: SearchEnd) -> str:
    settings = {str(site.space.canonical(one.point)) for one in end.observations if one.measurement is not None}
    return "nothing was found that beats it" if len(settings) > 1 else "nothing else was measured"
