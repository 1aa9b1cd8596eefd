"""What follows a search: the comparison on unseen prompts, the soak, and what is written and kept of the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    #: Seconds of the budget that are left, and seconds since the session began.
    left_s: Callable[[], float]
    elapsed_s: Callable[[], float]
    #: How long the soak took; 0 without one.
    soaked_s: float = 0.0

    def finish(self, end: SearchEnd) -> TuneResult:
        """The result, written and kept. Raises FtError where nothing could be measured."""
        if end.best is None or end.best.measurement is None:
            crashes = [one.outcome.words for one in end.observations if one.outcome.words]
            raise FtError("no setting that was tried could be measured", details=tuple(crashes[-5:]))
        (baseline, words), space = choose_baseline(end.observations), self.site.space
        search, choice = self.search, Choice(end.best.point)
        if space.canonical(baseline) == space.canonical(choice.candidate):
            settings = {str(space.canonical(one.point)) for one in end.observations if one.measurement is not None}
            words += "; nothing was found that beats it" if len(settings) > 1 else "; nothing else was measured"
        else:
            choice = self._compare(end, baseline, choice.candidate)
        # Where the default does not run, what was measured to run is the gain, the fastest unless it was outdone.
        has_failed, proof = has_default_failed(end.observations), choice.confirmation
        is_open = proof is not None and proof.verdict == "unfinished"
        is_taken = choice.is_gain or (is_open and has_failed)
        soaked = self._soak(choice.candidate if is_taken else baseline)
        stability, is_dropped = soaked.words, is_taken and not soaked.is_sound
        if is_dropped:
            self._warn("it is not taken: it did not last through the soak")
            is_taken, stability = False, f"what was found is {soaked.words}"
        else:
            self._warn(choice.warning)
        winner, about = (
            (choice.candidate, describe_proof(proof)) if is_taken and proof is not None else (baseline, words)
        )
        verdict = Verdict(end, space, search.objectives, search.limits, baseline, words, proof)
        result = verdict.make_result(
            winner, study=search.name, recipe=self.loaded.recipe.name, workload=self.loaded.recipe.workload.name,
            duration_s=self.elapsed_s(), soak=stability,
        )  # fmt: skip
        if is_taken or (has_failed and (soaked.is_sound or is_dropped)):
            lines = [about, "" if is_dropped else stability]
            written = write_tuned_recipe(self.loaded, self.site, winner, result, lines, self.warnings)
            gain = proof if is_taken and choice.is_gain else None
            self._warn(keep_winner(self.site, search.name, winner, verdict.blocks(winner), gain))
            result = result.model_copy(update={"is_tuned": True, "tuned_recipe": written})
        elif has_failed:
            self._warn("nothing is written: what ran did not last through the soak")
        if proof is not None and winner is baseline:
            result = result.model_copy(update={"candidate": space.relevant(choice.candidate)})
            if proof.baseline_blocks and find_default(end.observations) is not None:
                self._warn(keep_baseline(self.site, search.name, baseline, proof))
        result = result.model_copy(update={"warnings": tuple(self.warnings)})
        write_result(search.study, StudyResult.of(result))
        return result

    def _compare(self, end: SearchEnd, baseline: Point, winner: Point) -> Choice:
        """The winner, and what was imported, against the baseline; and which of them is taken."""
        found = find_imported(end.observations, self.search.objectives[0], self.search.limits)
        imported = found.point if found is not None else None
        confirmation = self._confirm(baseline, winner, imported)
        self.say("confirm", confirmation.describe())
        if confirmation.imported is not None:
            self.say("confirm", f"against the imported setting: {confirmation.imported.describe_interval()}")
        return choose(winner, imported, confirmation, self.search.limits)

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
