"""`ft tune` as one call: prepare, lock the device, search, confirm, write the recipe and the rows, give back what ran.

Whatever happens in between (Ctrl-C, a failure, a kill followed by `--resume`), the best so far is kept and what ran
before the study runs again after it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.deploy import ending
from freetoken.deploy.apply import RefusedError, apply_recipe
from freetoken.deploy.current import find_running
from freetoken.deploy.engines import list_lacking
from freetoken.deploy.launcher import uninterrupted
from freetoken.deploy.prepare import prepare_request
from freetoken.deploy.tools import DEFAULT_TOOLS
from freetoken.errors import FtError, UsageError
from freetoken.supervisor import register
from freetoken.supervisor.locks import FileLock, read_holder
from freetoken.tuner.deploying import LEAST_HANG_S, LONGEST_MEASUREMENT_S, DeployLauncher, pick_port
from freetoken.tuner.facts import make_facts
from freetoken.tuner.finishing import SPARE, Finishing
from freetoken.tuner.keeping import keep_trial
from freetoken.tuner.method import Method
from freetoken.tuner.naming import find_fresh, find_resumable, find_shared, make_study_name
from freetoken.tuner.objectives import make_limits, pick_objectives
from freetoken.tuner.outcome import Options, TunePreview, TuneResult
from freetoken.tuner.pace import Pace
from freetoken.tuner.record import StudyResult, write_facts, write_result
from freetoken.tuner.seeds import Seeds, describe_seeds, fit_seeds, mark_study
from freetoken.tuner.site import PlannedSite
from freetoken.tuner.space import make_space
from freetoken.tuner.status import TuneStatus, read_status, write_status
from freetoken.tuner.storage import open_storage
from freetoken.tuner.study import Budget, Progress, Search
from freetoken.tuner.values import Observation
from freetoken.tuner.verdict import (
    choose_baseline,
    find_imported,
)
from freetoken.units import format_seconds

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from freetoken.planner.plan import PlanRequest
    from freetoken.recipe.load import LoadedRecipe

SHORT_BUDGET_S = 600.0


@dataclass
class Session:
    """One `ft tune` of one recipe."""

    loaded: LoadedRecipe
    options: Options = field(default_factory=Options)
    say: Callable[[str, str], None] = lambda phase, message: None
    on_progress: Callable[[Progress], None] = lambda progress: None
    #: Points of a shared bundle, in this machine's counts.
    find_seeds: Callable[[PlannedSite], Seeds] = lambda site: Seeds()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        recipe = self.loaded.recipe
        self.objectives = pick_objectives(self.options.objectives or (recipe.tune.objective,))
        self.limits = make_limits(recipe.good_enough)
        given_s = self.options.budget_s
        self.budget_s = recipe.tune.budget if given_s is None else given_s
        if not 0 < self.budget_s < math.inf:
            raise UsageError(f"a budget of {self.budget_s:g} s holds no trial", hint="`ft tune RECIPE --budget 45m`")
        self.warnings: list[str] = []
        self._starts: set[int] = set()
        #: The study's name in its storage, with the number of a repeated one.
        self.kept_as = ""
        self.began_s = self.clock()

    # -- preparing --------------------------------------------------------------------------------------------

    def prepare(self) -> PlannedSite:
        """The planner's view of the machine. Raises UsageError where nothing is free to be tuned."""
        running = find_running(self.loaded.recipe.name, is_repairing=False)
        request = prepare_request(self.loaded, reclaimable=_reclaimable(running))
        adapter = DEFAULT_TOOLS.find_adapter(self.loaded.recipe.engine.name)
        space = make_space(request, adapter, list_lacking(self.loaded.recipe.engine, adapter))
        if space is None:
            raise UsageError(
                f"`{self.loaded.recipe.name}` leaves nothing open: every setting that could matter has a value",
                hint="`--free` tunes all that the recipe fixes; or set what may be tuned to `auto`",
            )
        site = PlannedSite(request, adapter, space)
        # Trials have a port of their own.
        answer = DEFAULT_TOOLS.make_plan(request.model_copy(update={"taken_ports": ()}), adapter, False)
        if answer.kind == "refusal":
            raise RefusedError(answer)
        if site.device == "cpu" and any(one.name == "efficiency" for one in self.objectives):
            raise UsageError(
                "nothing on this device measures energy, so `efficiency` has no figure",
                hint="a GPU whose driver tells its power does; `--objective turn_time` needs none",
            )
        return site

    def preview(self) -> TunePreview:
        """What would be searched; starts nothing."""
        site = self.prepare()
        default = site.default_point()
        forecast = site.forecast(default)
        words = "the engine has no such setting here"
        if forecast is not None:
            words = f"{forecast.missing_bytes:,} bytes are missing" if forecast.missing_bytes else "fits by plan"
        seeds = self.find_seeds(site)
        can_resize = "live_resize" in site.adapter.capabilities
        tried = fit_seeds(Method(site, self.objectives, self.limits, can_resize=can_resize), seeds.points)
        return TunePreview(
            study=self.study_name(site.request),
            knobs=tuple(one.model_dump(mode="json", exclude_defaults=True) for one in site.space),
            default=default,
            default_words=words,
            planned=site.planned_point(),
            seeds=tuple(tried),
            seeds_words=describe_seeds(tried, seeds),
            device=site.device,
        )

    def study_name(self, request: PlanRequest) -> str:
        """The name that studies of this recipe, workload, machine and objective share."""
        return make_study_name(request, [one.name for one in self.objectives])

    def check_storage(self) -> None:
        """Opens the shared storage, where there is one. Raises UsageError where that fails."""
        if self.options.storage is not None:
            open_storage(self.options.storage, is_shared=True)

    # -- running ----------------------------------------------------------------------------------------------

    def run(self) -> TuneResult:
        """The whole of it. Raises RefusedError, UsageError, FtError; KeyboardInterrupt after giving back what ran."""
        site = self.prepare()
        self.study = self.study_name(site.request)
        with self._take_lock(site):
            return self._run_locked(site)

    def check_lock(self) -> None:
        """Raises FtError where another study is at work on the device; what `run` would say, without beginning."""
        self._take_lock(self.prepare()).release()

    def _take_lock(self, site: PlannedSite) -> FileLock:
        lock = register.study_lock(site.device, purpose=f"ft tune of `{self.loaded.recipe.name}`")
        if not lock.try_acquire():
            holder = read_holder(lock.path)
            who = holder.describe() if holder else "another `ft tune`"
            raise FtError(f"one study at a time: {who} is at work on this device", hint="`ft tune --status` shows it")
        return lock

    def _run_locked(self, site: PlannedSite) -> TuneResult:
        recipe = self.loaded.recipe
        earlier = read_status(self.study) if self.options.is_resuming else None
        name = f"{recipe.name[:70]}-tune"
        launcher = DeployLauncher(
            self.loaded, site, name, pick_port(), repeats=self._repeats(),
            seed=self.options.seed, log=lambda text: self.say("engine", text),
            deadline_s=min(LONGEST_MEASUREMENT_S, max(LEAST_HANG_S, self.budget_s)),
        )  # fmt: skip
        launcher.stop()  # what a killed tuner left behind
        used_s = earlier.used_s if earlier is not None else 0.0
        self.status = TuneStatus(
            study=self.study, recipe=recipe.name, workload=recipe.workload.name, objective=self.objectives[0].name,
            used_s=used_s, log=self.options.log,
            previous_run=earlier.previous_run if earlier else None,
            previous_name=earlier.previous_name if earlier else None,
        )  # fmt: skip
        self._keep_status(phase="begin")
        self.pace = Pace(launcher, self.clock)
        search = self._make_search(site, launcher, used_s)
        self.pace.keep_back = lambda: self._reserve_s(site, search)
        finishing = Finishing(
            self.loaded, site, search, launcher, self.pace, self.budget_s, self.options.soak_s, self.warnings,
            self.say, self.clock, self._left_s, self._worked_s,
        )  # fmt: skip
        with self._giving_back(launcher):
            end = search.run()
            result = finishing.finish(end)
        # What ran before may have failed to start again, and starting it took its time.
        result = result.model_copy(
            update={
                "duration_s": self._worked_s(),
                "warnings": (*self.warnings, *self._describe_overrun(finishing.soaked_s)),
            }
        )
        write_result(search.study, StudyResult.of(result))
        head = result.best_headline
        self._keep_status(
            state="done", message=end.reason, left_s=None, best_point=result.best, trials=result.trials,
            starts=result.starts,
            best_figure=head.figure if head is not None else None,
        )  # fmt: skip
        return result

    # -- time -------------------------------------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        return self.clock() - self.began_s

    def _worked_s(self) -> float:
        """Seconds that all processes of the study have worked on it."""
        return self.status.used_s + self._elapsed_s()

    def _left_s(self) -> float:
        """Seconds of the budget that are left, those counted that earlier processes of the study used up."""
        return self.budget_s - self.status.used_s - self._elapsed_s()

    def _restore_s(self) -> float:
        """Seconds that starting again what ran before takes; 0 where nothing ran."""
        return self.pace.start_s() if self.status.previous_run is not None else 0.0

    def _reserve_s(self, site: PlannedSite, search: Search) -> float:
        """Seconds of the budget that the search leaves: to confirm, and to start again what ran before."""
        is_all_live = self.pace.can_resize and all(one.cost == "live" for one in site.space)
        three_s = SPARE * self.pace.confirmation_s(shares_start=is_all_live, settings=3)
        if three_s <= self.budget_s / 2 and self._has_rival(search):
            return three_s + self._restore_s()
        return SPARE * self.pace.confirmation_s(shares_start=is_all_live) + self._restore_s()

    def _has_rival(self, search: Search) -> bool:
        """Whether an imported setting was measured that is neither the best nor the baseline."""
        history, canonical = search.history(), search.site.space.canonical
        imported, best = find_imported(history, self.objectives[0], self.limits), search.method.best(history)
        if imported is None or best is None:
            return False
        others = (best.point, choose_baseline(history)[0])
        return canonical(imported.point) not in [canonical(one) for one in others]

    def _describe_overrun(self, soaked_s: float) -> tuple[str, ...]:
        over_s = -self._left_s() - soaked_s
        if over_s < max(1.0, 0.01 * self.budget_s):
            return ()
        return (
            f"the budget of {format_seconds(self.budget_s)} was exceeded by {format_seconds(over_s)}: a start or a "
            "measurement that has begun is not cut short, and what ran before is started again in any case",
        )

    def _repeats(self) -> int:
        """Rounds of a measurement: two, or one where the budget would not hold many of them."""
        return self.options.repeats or (1 if self.budget_s < SHORT_BUDGET_S else 2)

    def _make_search(self, site: PlannedSite, launcher: DeployLauncher, used_s: float) -> Search:
        recipe = self.loaded.recipe
        paths.state_dir().mkdir(parents=True, exist_ok=True)
        is_shared = self.options.storage is not None
        storage = open_storage(self.options.storage or f"sqlite:///{paths.studies_path()}", is_shared=is_shared)
        left_s = max(0.0, self._left_s())
        name = self._choose_study(storage, is_shared=is_shared)
        budget = Budget(
            seconds=left_s, trials=self.options.trials or recipe.tune.trials, starts=self.options.starts,
        )  # fmt: skip
        seeds = Seeds() if self.options.is_resuming else self.find_seeds(site)
        search = Search(
            site, self.pace, self.objectives, self.limits, budget, storage, name, seed=self.options.seed,
            say=self._show, on_trial=lambda one: self._record(site, launcher, one), seeds=seeds.points,
            is_shared=is_shared, pacing=self.pace, clock=self.clock,
        )  # fmt: skip
        self.kept_as = search.name
        mark_study(search.study, site, recipe)
        write_facts(search.study, make_facts(self.loaded, site, self.objectives, self.limits, self.budget_s))
        if doubt := site.describe_doubt():
            self.say("rates", doubt)
        if search.seeded is not None:
            self.say("seeds", describe_seeds(search.seeded, seeds))
        return search

    def _choose_study(self, storage: BaseStorage, *, is_shared: bool) -> str:
        """The study to resume; in a shared storage the one that others are at work on; else a new one."""
        if self.options.is_resuming:
            return find_resumable(self.study, storage)
        if not is_shared:
            return find_fresh(self.study, storage)
        found, is_open = find_shared(self.study, storage)
        if is_open:
            self.say("join", f"study `{found}` of this storage, which has not ended yet")
        return found

    @contextlib.contextmanager
    def _giving_back(self, launcher: DeployLauncher) -> Iterator[None]:
        """Ends what runs under the recipe's name for the study, and starts it again after it, however that ends."""
        recipe = self.loaded.recipe
        running = find_running(recipe.name)
        if running is not None:
            self.status = self.status.model_copy(
                update={"previous_run": str(running.life.record.folder), "previous_name": recipe.name}
            )
        self._keep_status(phase="start")
        if running is not None:
            self.say("stop", f"ending `{recipe.name}` for the study; it is started again afterwards")
            ending.end_life(running.life)
        try:
            yield
        except BaseException as error:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self._keep_status(state=state, message=str(error))
            raise
        finally:
            with uninterrupted():
                launcher.stop()
            try:
                self._restore()
            except KeyboardInterrupt:
                self.say("restore", f"interrupted: `{recipe.name}` was not started again; `ft apply` does that")
                self.warnings.append(f"`{recipe.name}`, which ran before, was not started again: interrupted")

    def _restore(self) -> None:
        if self.status.previous_run is None:
            return
        from freetoken.deploy.runs import read_declaration, read_recipe

        declared = read_declaration(self.status.previous_name or "")
        if declared is not None and not declared.is_wanted:
            self.say("restore", f"`{declared.name}` was stopped meanwhile, and stays so")
            return
        folder = Path(self.status.previous_run)
        recipe = read_recipe(folder)
        if recipe is None:
            self.warnings.append(f"what ran before ({folder.name}) could not be read, so it was not started again")
            return
        self.say("restore", f"starting `{self.status.previous_name}` again")
        try:
            again = replace(self.loaded, recipe=recipe, provenance={}, path=None)
            apply_recipe(again, name=self.status.previous_name)
            self.status = self.status.model_copy(update={"previous_run": None, "previous_name": None})
        except FtError as error:
            self.warnings.append(f"`{self.status.previous_name}` could not be started again: {error.message}")

    # -- what is kept -----------------------------------------------------------------------------------------

    def _record(self, site: PlannedSite, launcher: DeployLauncher, one: Observation) -> None:
        """A row in the store for each trial that was measured; and where the study stands."""
        if one.measurement is not None:
            self._warn(keep_trial(site, self.kept_as, launcher.settings_now(), one.measurement, one.outcome.run_id))
        self._starts |= {one.start} - {0}
        # In a study of one's own starts are counted over all processes that worked on it; in a shared one they are not.
        starts = max(self.status.starts, one.start) if self.options.storage is None else len(self._starts)
        self._keep_status(trials=one.number + 1, starts=starts)

    def _warn(self, warning: str | None) -> None:
        if warning is not None and warning not in self.warnings:
            self.warnings.append(warning)

    def _show(self, progress: Progress) -> None:
        best = {"best_figure": progress.best_figure} if progress.best_figure is not None else {}
        self._keep_status(
            phase=progress.stage or progress.event, message=progress.message, left_s=progress.left_s, **best
        )
        self.on_progress(progress)

    def _keep_status(self, **changes: Any) -> None:
        before = self.status.used_s
        self.status = self.status.model_copy(update=changes)
        write_status(self.status.model_copy(update={"used_s": before + self._elapsed_s()}))


def _reclaimable(running: Any) -> Any:
    from freetoken.deploy.current import measure_reclaimable

    return measure_reclaimable(running, DEFAULT_TOOLS.probe(None)) if running is not None else None
