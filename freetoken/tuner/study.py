"""The study: asks the method for a point, has it launched and measured, and keeps what came of it.

A trial can die in any way: what an engine does is an outcome, what the process itself does (a kill, a power cut)
leaves a trial RUNNING, which the next process fails and enqueues again. One start may hold several trials, since live
knobs are turned inside it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from freetoken.tuner import history as trials
from freetoken.tuner import sharing
from freetoken.tuner.launching import Launcher
from freetoken.tuner.method import Method, distinct_starts
from freetoken.tuner.objectives import Limit, Objective, missed_limits, pareto_front
from freetoken.tuner.sampler import ModelSampler
from freetoken.tuner.seeds import fit_seeds
from freetoken.tuner.site import Site
from freetoken.tuner.stop import should_stop
from freetoken.tuner.storage import describe_failure, fail_and_requeue, fail_trial, open_study, recover_stale
from freetoken.tuner.values import Observation, Outcome, Point
from freetoken.units import format_seconds

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import Trial

#: A trial that fails for the machine's sake (another process took the GPU) is enqueued again this often.
RETRIES = 1
#: So many starts without one that worked mean that something else than settings is wrong.
HOPELESS_STARTS = 5
#: So many refusals in a row mean that memory goes away faster than the search learns of it.
HOPELESS_REFUSALS = 10


class Budget(NamedTuple):
    """What a search may take; None = no limit."""

    seconds: float | None = None
    trials: int | None = None
    starts: int | None = None


class Pacing(Protocol):
    """What is known of how long things take; 0 where nothing is."""

    def step_s(self, *, is_live: bool) -> float:
        """Seconds of one more trial, in the start that runs or in a new one."""
        ...

    def reserve_s(self) -> float:
        """Seconds of what follows the search, within the same budget."""
        ...


class Progress(NamedTuple):
    """What a caller shows: what is tried and why, the best so far, the time left."""

    event: str  # `trial`, `done`, `stop`, `resume`
    message: str
    number: int = 0
    stage: str = ""
    point: Point = {}
    best_figure: float | None = None
    left_s: float | None = None
    start: int = 0


@dataclass
class SearchEnd:
    """How a search ended."""

    observations: list[Observation]
    best: Observation | None
    front: tuple[Observation, ...]
    reason: str
    starts: int = 0
    misses: tuple[str, ...] = ()


@dataclass
class Search:
    """One search over a site with a launcher, recorded in an Optuna study."""

    site: Site
    launcher: Launcher
    objectives: Sequence[Objective]
    limits: Sequence[Limit] = ()
    budget: Budget = field(default_factory=lambda: Budget())
    storage: BaseStorage | str | None = None
    name: str = "search"
    seed: int | None = None
    say: Callable[[Progress], None] = lambda progress: None
    clock: Callable[[], float] = time.monotonic
    #: What ends a search before its budget; None leaves that to the budget alone.
    stop_rule: Callable[..., str | None] | None = should_stop
    #: Other machines, equal to this one, may be at work on the study at the same time.
    is_shared: bool = False
    #: Points that somebody found on another machine: a new study tries the first that can run here before all else.
    seeds: Sequence[Point] = ()
    #: Without it the search takes the whole of its seconds.
    pacing: Pacing | None = None
    #: Told after every trial, e.g. to keep rows in the store.
    on_trial: Callable[[Observation], None] = lambda observation: None
    _running_key: tuple[object, ...] | None = field(default=None, init=False)
    _running_start: int = field(default=0, init=False)
    #: Settings that were refused in a row, by this process.
    _refusals: int = field(default=0, init=False)
    #: What of `seeds` this study was begun with; None where it was under way already.
    seeded: list[Point] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.method = Method(self.site, self.objectives, self.limits, can_resize=self.launcher.can_resize)
        self.sampler = (sharing.SharingSampler if self.is_shared else ModelSampler)(self.method, seed=self.seed)
        self.study = open_study(self.name, self.storage, self.objectives, self.sampler)
        self.began_s = self.clock()
        if self.seeds and not self.study.get_trials(deepcopy=False):
            self._enqueue_seeds()

    # -- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> SearchEnd:
        """Tries points until a budget or the stopping rule ends it. Ctrl-C keeps what is known and passes on."""
        try:
            reason = self._run()
        except Exception as error:
            if (told := describe_failure(error)) is not None:
                raise told from error
            raise
        best = self._best()
        self.say(Progress("stop", reason, best_figure=best, left_s=self.left_s()))
        return self.end(reason)

    def _run(self) -> str:
        requeued = recover_stale(self.study, is_shared=self.is_shared)
        if requeued:
            self.say(Progress("resume", f"{requeued} trial(s) of a process that is gone will be tried again"))
        while (reason := self._why_stop()) is None:
            self.step()
        return reason

    def history(self) -> list[Observation]:
        """All that was tried so far."""
        return self.sampler.read(self.study)

    def end(self, reason: str) -> SearchEnd:
        """What is known now."""
        history = self.sampler.read(self.study)
        best = self.method.best(history)
        misses = missed_limits(best.measurement, self.limits) if best is not None and best.measurement else ()
        merged = trials.merge_repeats(history, self.site.space.canonical)
        noise = max(self.method.said_noise(history, one) for one in self.objectives)
        front = pareto_front(merged, self.objectives, self.limits, noise=noise)
        return SearchEnd(history, best, front, reason, distinct_starts(history), misses)

    def left_s(self) -> float | None:
        """Seconds of the budget that are left."""
        if self.budget.seconds is None:
            return None
        return max(0.0, self.budget.seconds - (self.clock() - self.began_s))

    def step(self) -> Observation:
        """One trial, from the question to the told answer."""
        trial = self._ask()
        point = dict(trial.params)
        # What the sampler wrote stands in the storage; the trial at hand was made before.
        said = self.study._storage.get_trial(trial._trial_id).user_attrs
        stage, reason = str(said.get(trials.STAGE, "search")), str(said.get(trials.REASON, ""))
        start = self._start_for(point, trial.number)
        trials.mark(
            trial, stage=stage, reason=reason, start=start, predicted_cost=said.get(trials.PREDICTED),
            planned=self._planned(point), owner=sharing.make_owner(),
        )  # fmt: skip
        shown = self.site.space.relevant(point)
        self.say(Progress("trial", reason, trial.number, stage, shown, self._best(), self.left_s(), start))
        began_s = self.clock()
        try:
            with sharing.beating(self.study._storage, trial._trial_id):
                outcome = self.evaluate(point, start)
        except BaseException:
            self._abandon(trial)
            raise
        return self._keep(trial, outcome.model_copy(update={"duration_s": self.clock() - began_s}))

    def evaluate(self, point: Point, start: int) -> Outcome:
        """Refused by the planner, or started (resized where that is enough) and measured."""
        if (refused := self._refusal(point)) is not None:
            return refused
        key = self._key(point)
        if key == self._running_key:
            outcome = self.launcher.resize(point)
            if outcome.kind == "refused":  # before anything was done: what runs goes on
                self.method.note_refusal(point, outcome, is_live=True)
                return outcome
        else:
            self._running_key, self._running_start = None, 0
            outcome = self.launcher.start(point)
            if outcome.kind == "refused":
                self.method.note_refusal(point, outcome, is_live=False)
        if outcome.kind == "ok":
            self._running_key, self._running_start = key, start
            outcome = self.launcher.measure()
        if outcome.kind not in ("ok", "invalid"):
            self._running_key, self._running_start = None, 0
            self.launcher.stop()
        return outcome

    def _enqueue_seeds(self) -> None:
        words = {trials.STAGE: "seed", trials.REASON: "found on another machine"}
        self.seeded = fit_seeds(self.method, self.seeds)
        for point in self.seeded:
            self.study.enqueue_trial(point, user_attrs=words)

    def _ask(self) -> Trial:
        """A new trial; in a shared study one that costs no start of what another process has in hand."""
        for attempt in range(sharing.MOST_YIELDS + 1):
            self.sampler.running_start = self._running_start
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optuna beats only for its own loop; `sharing` beats for this one
                trial = self.study.ask(self.site.space.distributions())
            is_live = self._key(dict(trial.params)) == self._running_key
            if not self.is_shared or is_live or attempt == sharing.MOST_YIELDS or self._is_enqueued(trial):
                break
            rival = sharing.find_rival(self.study, trial.number, self.method)
            if rival is None:
                break
            trial.set_user_attr(trials.REASON, f"gave way to trial {rival} of another machine")
            fail_trial(self.study, trial._trial_id)
        return trial

    def _is_enqueued(self, trial: Trial) -> bool:
        return "fixed_params" in self.study._storage.get_trial(trial._trial_id).system_attrs

    # -- parts ------------------------------------------------------------------------------------------------

    def _refusal(self, point: Point) -> Outcome | None:
        """The planner's no, which costs no launch. Of its own default the engine's own rule alone decides."""
        if (own := self.site.own_verdict(point)) is not None:
            if not own.missing_bytes:
                return None
            return Outcome(kind="refused", violation_bytes=own.missing_bytes, words=own.words)
        forecast = self.site.forecast(point)
        if forecast is None:
            return Outcome(kind="refused", violation_bytes=1, words="the engine has no such setting here")
        slots = self.method.slots_of(point, forecast)
        missing = max(forecast.missing_bytes, forecast.peak_at(slots) - forecast.limit_bytes)
        if missing <= 0:
            return None
        return Outcome(kind="refused", violation_bytes=max(1, missing), words=f"{missing:,} bytes are missing by plan")

    def _key(self, point: Point) -> tuple[object, ...]:
        return self.site.space.start_key(self.site.space.canonical(point))

    def _planned(self, point: Point) -> trials.Planned | None:
        forecast = self.site.forecast(point)
        if forecast is None:
            return None
        slots = self.method.slots_of(point, forecast)
        return trials.Planned(forecast.peak_at(slots), forecast.limit_bytes, slots, forecast.settings.strategy)

    def _start_for(self, point: Point, number: int) -> int:
        """The start a point belongs to: the running one, a new one, or 0 for what is refused.

        Starts are counted, but in a shared study: two machines would count to the same number, so that of the trial
        is taken.
        """
        if self._refusal(point) is not None:
            return 0
        if self._running_start and self._key(point) == self._running_key:
            return self._running_start
        if self.is_shared:
            return number + 1
        used = [one.user_attrs.get(trials.START, 0) for one in self.study.get_trials(deepcopy=False)]
        return max(used, default=0) + 1

    def _keep(self, trial: Trial, outcome: Outcome) -> Observation:
        try:
            if outcome.kind == "refused":
                # Also by whoever launches, who plans anew: no engine was started for it.
                trial.set_user_attr(trials.START, 0)
            trials.tell(self.study, trial, outcome, self.objectives, self.limits)
        except RuntimeError:
            if not self.study.get_trials(deepcopy=False)[trial.number].state.is_finished():
                raise
            # Another machine heard nothing of this one for so long that it gave the trial up.
            self.say(Progress("lost", "another machine gave this trial up; its figures do not count", trial.number))
            return Observation(number=trial.number, point=dict(trial.params), outcome=Outcome(kind="stopped"))
        found = trials.read_trial(self.study.get_trials(deepcopy=False)[trial.number])
        assert found is not None
        self._refusals = self._refusals + 1 if outcome.kind == "refused" else 0
        retries = trial.user_attrs.get("retries", 0)
        if outcome.kind == "invalid" and retries < RETRIES:
            attributes = {trials.STAGE: found.stage, "retries": retries + 1, "retry_of": trial.number}
            self.study.enqueue_trial(found.point, user_attrs=attributes)
        self.on_trial(found)
        words, shown = _describe(outcome, self.objectives), self.site.space.relevant(found.point)
        self.say(Progress("done", words, trial.number, found.stage, shown, self._best(), self.left_s(), found.start))
        return found

    def _abandon(self, trial: Trial) -> None:
        """Interrupted: the trial is failed and enqueued for whoever resumes."""
        self._running_key, self._running_start = None, 0
        fail_and_requeue(self.study, trial.number)

    def _best(self) -> float | None:
        cost = self.method.best_cost(self.sampler.read(self.study))
        return self.objectives[0].to_cost(cost) if cost is not None else None

    def _why_stop(self) -> str | None:
        history = self.sampler.read(self.study)
        budget = self.budget
        if (late := self._why_late(is_live=True)) is not None:
            return late
        if budget.trials is not None and len(history) >= budget.trials:
            return "1 trial was made" if budget.trials == 1 else f"{budget.trials} trials were made"
        if distinct_starts(history) >= HOPELESS_STARTS and not any(one.outcome.is_ok for one in history):
            return f"none of {distinct_starts(history)} starts worked"
        if self._refusals >= HOPELESS_REFUSALS:
            return self._describe_refusals(history)
        measured = [one.measurement for one in history if one.measurement is not None]
        if measured and all(self.objectives[0].read(one) is None for one in measured):
            return f"nothing here measures `{self.objectives[0].name}`"
        if any(one.state.name == "WAITING" for one in self.study.get_trials(deepcopy=False)):
            return self._why_late(is_live=False)
        self.sampler.running_start = self._running_start
        proposal = self.sampler.peek(self.study)
        if self._refusals and proposal.point is None and not proposal.gain:
            return self._describe_refusals(history)
        if not proposal.is_live and budget.starts is not None and distinct_starts(history) >= budget.starts:
            return "1 start was made" if budget.starts == 1 else f"{budget.starts} starts were made"
        if not proposal.is_live and (late := self._why_late(is_live=False)) is not None:
            return late
        if self.stop_rule is None or proposal.is_live:
            return None
        # Not by what a few repeats show: one slow measurement would end a search that has hardly begun.
        noise_ratio = self.method.said_noise(history)
        return self.stop_rule(proposal.gain, noise_ratio, history, self.objectives[0], self.limits)

    def _describe_refusals(self, history: Sequence[Observation]) -> str:
        what = "last setting was" if self._refusals == 1 else f"last {self._refusals} settings were"
        return f"the {what} refused: {history[-1].outcome.words}"

    def _why_late(self, *, is_live: bool) -> str | None:
        """Why the time does not hold another trial with all that must follow the search; None where it does."""
        left_s = self.left_s()
        if left_s is None:
            return None
        needed_s = self.pacing.step_s(is_live=is_live) + self.pacing.reserve_s() if self.pacing is not None else 0.0
        if left_s > needed_s:
            return None
        if left_s <= 0:
            return "the time is used up"
        return (
            f"the time is used up: {format_seconds(left_s)} are left, another setting and its confirmation take about "
            f"{format_seconds(needed_s)}"
        )


def _describe(outcome: Outcome, objectives: Sequence[Objective]) -> str:
    if outcome.measurement is None:
        return f"{outcome.kind}: {outcome.words}" if outcome.words else outcome.kind
    figures = [(one, one.read(outcome.measurement)) for one in objectives]
    told = [f"{one.name} {figure:.4g} {one.unit}" for one, figure in figures if figure is not None]
    return ", ".join(told) or f"measured, but nothing tells `{objectives[0].name}`"
