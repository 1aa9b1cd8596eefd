"""The apply loop: plan, show the diff, do the least that gets there, prove it, or go back to what worked.

One `ft` at a time changes a deployment (a lock that ends with its holder), and one launch at a time takes memory of
a device. Whatever happens between the intent and the proof (a failed start, Ctrl-C, a kill) leaves either a proven
engine, or the previous one, or nothing; never something unknown.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.deploy import ending, record, runs, start, stop, studies
from freetoken.deploy.current import Running, find_running, make_declared, measure_reclaimable, read_current
from freetoken.deploy.diff import Current, make_diff
from freetoken.deploy.hashes import HashingAhead
from freetoken.deploy.launcher import Launcher, add_detail, uninterrupted
from freetoken.deploy.lock import Lock, find_lock_path, make_meter, require_same, write_after_proof
from freetoken.deploy.prepare import prepare_request
from freetoken.deploy.recover import StartFailure
from freetoken.deploy.stay import is_worth_a_restart, make_staying_request
from freetoken.deploy.tools import DEFAULT_TOOLS, Progress, Step, Tools, ignore_progress
from freetoken.deploy.values import ApplyResult, Diff, Proof
from freetoken.errors import DoesNotFitError, FtError, NotReadyError, UsageError
from freetoken.recipe.model import NAME_PATTERN
from freetoken.supervisor import life, register
from freetoken.supervisor.locks import LockHolder, read_holder
from freetoken.units import format_seconds

if TYPE_CHECKING:
    from freetoken.planner.plan import Plan, PlanRequest, Refusal
    from freetoken.recipe.load import LoadedRecipe


class RefusedError(DoesNotFitError):
    """The planner's no, with all of its reasons."""

    def __init__(self, refusal: Refusal) -> None:
        fatal = (finding.message for finding in refusal.findings if finding.is_fatal)
        super().__init__(refusal.message, details=tuple(one for one in fatal if one not in refusal.message))
        self.refusal = refusal


@dataclass(frozen=True)
class NotLive:
    """A live resize that was not had: why, and whether the engine declined it and goes on with what it had."""

    error: FtError | StartFailure
    is_declined: bool


class KeptError(FtError):
    """Whoever was asked would not have what runs ended. `not_live` = the resize before that; None = none was tried."""

    def __init__(self, name: str, not_live: NotLive | None) -> None:
        super().__init__(f"`{name}` was left as it is")
        self.not_live = not_live


@dataclass(frozen=True)
class Decision:
    """What was asked, the plan for it, and what it takes."""

    request: PlanRequest
    plan: Plan
    diff: Diff
    declared: dict[str, Any]


def apply_recipe(
    loaded: LoadedRecipe,
    *,
    name: str | None = None,
    is_dry_run: bool = False,
    is_forced: bool = False,
    is_waiting: bool = True,
    confirm: Callable[[str], bool] | None = None,
    progress: Progress = ignore_progress,
    tools: Tools = DEFAULT_TOOLS,
    locked: Lock | None = None,
) -> ApplyResult:
    """Makes `loaded` run under `name` (else the recipe's), or shows what that would take.

    With `locked` any difference from that lock raises BadFileError before a launch.
    `confirm` is asked before what runs is ended for a restart; without one it is not asked.
    Raises RefusedError where it does not fit, NotReadyError where it never became ready, FtError otherwise. Ctrl-C
    ends what was started and restores what was replaced.
    """
    if name is not None and not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"`{name}` is not a name: lower-case letters, digits, `.`, `_` and `-`, 80 at most")
    application = Application(loaded, name or loaded.recipe.name, is_forced, progress, tools, confirm, locked)
    if is_dry_run:
        return application.preview()
    return application.run(is_waiting=is_waiting)


class Application:
    """One `ft apply` of one recipe."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        name: str,
        is_forced: bool = False,
        progress: Progress = ignore_progress,
        tools: Tools = DEFAULT_TOOLS,
        confirm: Callable[[str], bool] | None = None,
        locked: Lock | None = None,
        is_pinned: bool = False,
    ) -> None:
        #: The planner answers with one given plan (a rollback): the declaration decides nothing, no lock is written.
        self.locked, self.is_pinned = locked, is_pinned
        self.loaded, self.recipe, self.name = loaded, loaded.recipe, name
        self.is_forced, self.progress, self.tools, self.confirm = is_forced, progress, tools, confirm
        self.adapter = tools.find_adapter(loaded.recipe.engine.name)
        self.launcher = Launcher(name, self.recipe, self.adapter, tools, progress, self.plan_for)
        self.say = self.launcher.say
        self._stop_before, self.launcher.is_stopped = register.read_stop(paths.state_dir(), name), self.is_stopped
        self._not_live: NotLive | None = None
        self.started_s = time.monotonic()

    def run(self, *, is_waiting: bool = True) -> ApplyResult:
        """Waits until nobody else changes the deployment and no study holds the device, then applies.

        Raises FtError where `is_waiting` is False and there is something to wait for, or where `ft stop` came.
        """
        lock = register.deployment_lock(paths.state_dir(), self.name)
        while True:
            if not lock.acquire(timeout_s=None if is_waiting else 0.0, on_wait=self.tell_waiting):
                holder = read_holder(lock.path)
                who = holder.describe() if holder else "another `ft`"
                raise FtError(f"`{self.name}` is being changed by {who}", hint="leave out `--no-wait` to wait for it")
            try:
                with lock:
                    return self.apply()
            except studies.StudyRunningError as found:
                if not is_waiting:
                    raise
                # Without the lock: before a study ends it gives back what ran under this name.
                self.say("wait", f"{found.message}; {found.hint}")
                studies.wait_for_study(found.device, self.is_stopped)

    def is_stopped(self) -> bool:
        """Whether `ft stop` was called for this name since this began."""
        return register.read_stop(paths.state_dir(), self.name) != self._stop_before

    # -- deciding ---------------------------------------------------------------------------------------------

    def preview(self) -> ApplyResult:
        """What `apply` would do; touches nothing."""
        running = find_running(self.name, is_repairing=False)
        decision = self.decide(running)
        spec = self.launcher.make_spec(decision.plan, must_exist=False)
        return self._result(decision, argv=spec.argv, env=dict(spec.env), kind="dry_run")

    def decide(self, running: Running | None) -> Decision:
        """The plan and the least action. A declaration that did not change keeps the plan that runs. RefusedError."""
        hardware = self.tools.probe(None)
        reclaimable = measure_reclaimable(running, hardware) if running else None
        request = prepare_request(self.loaded, tools=self.tools, reclaimable=reclaimable, hardware_now=hardware)
        declared = make_declared(request, self.recipe, is_forced=self.is_forced)
        current = read_current(running, self.tools) if running else None
        if current is not None and running is not None and running.declared == declared and not self.is_pinned:
            self._check_locked(current.plan)
            return Decision(
                request, current.plan, make_diff(current, current.plan, self.recipe, self.adapter), declared
            )
        plan = self.plan_for(request)
        self._check_locked(plan)
        if running is not None and current is None:
            diff = Diff(action="restart", reason="what runs left no plan that can be read")
        else:
            diff = make_diff(current, plan, self.recipe, self.adapter)
        if (
            current
            and diff.action == "restart"
            and not self.is_pinned
            and (stays := self._stay(request, current, plan))
        ):
            plan, diff = stays
        return Decision(request, plan, diff, declared)

    def _stay(self, request: PlanRequest, current: Current, free: Plan) -> tuple[Plan, Diff] | None:
        """A plan and its diff that need no restart; None where there is none, or where a restart is worth it."""
        staying = make_staying_request(request, current.plan, self.adapter)
        answer = self.tools.make_plan(staying, self.adapter, self.is_forced) if staying is not None else None
        if answer is None or answer.kind == "refusal" or answer.is_forced or is_worth_a_restart(free, answer):
            return None
        diff = make_diff(current, answer, self.recipe, self.adapter)
        return None if diff.action == "restart" else (answer, diff)

    def _check_locked(self, plan: Plan) -> None:
        if self.locked is not None:
            require_same(self.locked, self.recipe, plan, self.adapter, progress=self.progress)

    def plan_for(self, request: PlanRequest) -> Plan:
        """The plan for `request`. Raises RefusedError."""
        answer = self.tools.make_plan(request, self.adapter, self.is_forced)
        if answer.kind == "refusal":
            raise RefusedError(answer)
        return answer

    # -- acting -----------------------------------------------------------------------------------------------

    def apply(self) -> ApplyResult:
        """Plans and does the least that gets there. Holds the deployment's lock."""
        self.launcher.check_stopped("waiting for its turn")
        running = self._find_settled()
        self.say("plan", f"planning `{self.name}`")
        decision = self.decide(running)
        self._say_diff(decision.diff)
        if decision.diff.action != "nothing":
            studies.refuse_beside_study(_device(decision.plan))
        if running is not None and decision.diff.action == "nothing":
            if result := self._keep(running, decision):
                return result
            decision = replace(decision, diff=Diff(action="restart", reason="what runs could not be proven"))
        if running is not None and decision.diff.action == "resize":
            if result := self._resize(running, decision):
                return result
            decision = replace(decision, diff=decision.diff.model_copy(update={"action": "restart"}))
        return self._launch(running, decision)

    def _find_settled(self) -> Running | None:
        """What runs under the name; what an `ft` that is gone began is waited for, what is being stopped as well."""
        running = find_running(self.name)
        if running is None or running.life.condition in ("ready", "unproven"):
            return running
        if running.life.condition == "starting" and running.life.launch and running.plan and running.recipe:
            self.say("adopt", f"adopting run {running.life.record.run_id}, whose `ft apply` is gone")
            run = start.Run(running.life.record.folder, running.life.launch, running.plan, running.recipe)
            try:
                start.await_ready(run, self.progress)
            except StartFailure as failure:
                self.say("adopt", f"it did not come up: {failure}")
                ending.end_life(life.examine(running.life.record))
            return find_running(self.name)
        self.say("stop", f"ending run {running.life.record.run_id}: {running.life.words}")
        ending.end_life(running.life)
        return None

    def _keep(self, running: Running, decision: Decision) -> ApplyResult | None:
        """It runs as declared: nothing, or the proof that is still missing. None where that fails."""
        record_ = running.life.record
        if running.life.condition == "ready":
            if not find_lock_path(self.loaded.path, self.recipe.name).exists():
                self._write_lock(decision.plan)
            return self._result(decision, run_dir=record_.folder)
        self.say("prove", "proving what runs")
        run = self._as_run(running, decision)
        try:
            proof = self.launcher.prove(run)
        except (FtError, StartFailure) as error:
            self.say("prove", f"not proven: {error}")
            return None
        self.launcher.check_stopped("being proven")
        self._finish(run, proof, decision, "adopt", 0.0)
        return self._result(decision, run_dir=record_.folder, proof=proof)

    def _resize(self, running: Running, decision: Decision) -> ApplyResult | None:
        """A live resize and its proof; None where the engine refuses or fails it, which leaves a restart.

        Ctrl-C and a full disk give the size before back: what nobody has proven must not stay.
        """
        wanted = {change.field.removeprefix("settings."): change.after for change in decision.diff.changes}
        began_s = time.monotonic()
        self.say("resize", "resizing live")
        run = self._as_run(running, decision)
        is_declined = False
        try:
            try:
                with self.tools.connect(run.base_url, run.api_key) as client:
                    answer = client.rebuild(wanted.get("expert_slots"), wanted.get("kv_tokens"))
                is_declined = answer.is_declined
                if not answer.is_ok:
                    raise NotReadyError(f"the engine answered `{answer.status}`: {answer.error or 'no reason given'}")
                proof = self.launcher.prove(run)
            except (FtError, StartFailure) as error:
                self.launcher.check_stopped("being resized")
                self._not_live = NotLive(error, is_declined)
                self.say("resize", f"not possible live: {error}")
                self.launcher.corrections.append(f"live resize: {error}")
                return None
            self.launcher.check_stopped("being resized")
            with uninterrupted():
                self._rewrite(run, decision)
                elapsed = format_seconds(time.monotonic() - began_s)
                runs.record_event(run.run_dir, "resized", f"resized live in {elapsed}", **wanted)
        except BaseException:
            self.launcher.give_back_sizes(running, wanted)
            raise
        with uninterrupted():
            self._finish(run, proof, decision, "resize", 0.0)
        return self._result(decision, run_dir=run.run_dir, proof=proof)

    def _rewrite(self, run: start.Run, decision: Decision) -> None:
        """The run folder says what runs now: a restart by the keeper must come back with these sizes."""
        runs.keep_before(run.run_dir)
        spec = self.launcher.make_spec(decision.plan)
        launch = start.make_launch(
            self.name, self.recipe, decision.plan, spec, self.tools, run.run_id, decision.declared, decision.request
        )
        before = run.launch  # what its process found when it began
        launch = replace(
            launch, created_at=before.created_at, vram_available_bytes=before.vram_available_bytes,
            vram_others=before.vram_others,
        )  # fmt: skip
        runs.write_run(run.run_dir, self.recipe, decision.plan, launch)

    def _launch(self, running: Running | None, decision: Decision) -> ApplyResult:
        """Fetches what is missing, ends what is replaced, starts and proves; goes back where that fails."""
        self.launcher.check_stopped("being changed")
        if running is not None and self.confirm is not None:
            question = f"`{self.name}` must be restarted ({decision.diff.reason}); end what runs now?"
            if not self.confirm(question):
                if self._not_live is not None and not self._not_live.is_declined:
                    self.launcher.give_back_sizes(running, ("expert_slots", "kv_tokens"))
                raise KeptError(self.name, self._not_live)
        is_new_engine = self.tools.install(self.recipe.engine, self.adapter, self.progress)
        if decision.plan.model_path is None:
            self._fetch()
        if is_new_engine or decision.plan.model_path is None:
            decision = self._redecide(running)
        spec = self.launcher.make_spec(decision.plan)
        start.check_secrets(self.recipe, spec)
        with self._device(decision.plan) as has_waited:
            if has_waited:
                decision = self._redecide(running)
            if running is None or running.life.record.port != spec.port:
                start.check_ports(spec)
            self.launcher.check_stopped("being changed")
            studies.refuse_beside_study(_device(decision.plan))  # one may have begun meanwhile
            self.launcher.declared = decision.declared
            try:
                if running is not None:
                    self.say("stop", f"ending run {running.life.record.run_id}")
                    ending.end_life(running.life)
                with self._hashing(decision.plan):
                    run, proof, ready_s = self.launcher.start_until_proven(decision.request, decision.plan)
            except BaseException as error:
                self._go_back(running, error)
                raise
            proven = replace(decision, plan=run.plan, request=self.launcher.request or decision.request)
            self._finish(run, proof, proven, decision.diff.action, ready_s)
        return self._result(replace(decision, plan=run.plan), run_dir=run.run_dir, proof=proof, argv=run.launch.argv)

    def _go_back(self, previous: Running | None, error: BaseException) -> None:
        """Gives back what was replaced. What was not running before is not started now, only named.

        After `ft stop` nothing is to run, neither the new nor the old.
        """
        if self.is_stopped():
            if previous is not None:
                ending.end_life(life.examine(previous.life.record))
            stop.withdraw(self.name)
            return
        if previous is not None:
            # Ctrl-C may have come while it was being ended.
            ending.end_life(life.examine(previous.life.record))
            self.launcher.restore(previous, error)
            return
        declared = runs.read_declaration(self.name)
        if declared is None:
            return
        if not isinstance(error, FtError):  # Ctrl-C takes the declaration back as well
            runs.write_declaration(self.name, declared.run_id, is_wanted=False)
        elif declared.last_good_run:
            add_detail(error, f"the last run that worked is {declared.last_good_run}")

    def _finish(self, run: start.Run, proof: Proof, decision: Decision, action: str, ready_s: float) -> None:
        self.launcher.keep_proof(run, proof, ready_s)
        warning = record.record_success(
            self.name, action, run.run_dir, self.recipe, decision.plan, proof, decision.request,
            max(0.0, ready_s - proof.compile_s),
        )  # fmt: skip
        if warning:
            self.say("record", warning)
        self._write_lock(decision.plan)

    def _write_lock(self, plan: Plan) -> None:
        if (
            self.locked is None
            and not self.is_pinned
            and (warning := write_after_proof(self.loaded, plan, self.adapter, progress=self.progress))
        ):
            self.say("lock", warning)

    @contextlib.contextmanager
    def _hashing(self, plan: Plan) -> Iterator[None]:
        """What the lock will say of the model's files is read while the engine loads them."""
        if self.locked is not None or self.is_pinned or plan.model_path is None:
            yield
            return
        ahead = HashingAhead(Path(plan.model_path))
        ahead.start()
        try:
            yield
        except BaseException:
            ahead.abandon()
            raise
        ahead.finish(make_meter(self.progress))

    def _redecide(self, running: Running | None) -> Decision:
        fresh = self.decide(running)
        action = "restart" if running is not None else "launch"
        return replace(fresh, diff=fresh.diff.model_copy(update={"action": action}))

    def _fetch(self) -> None:
        ref = self.recipe.model
        self.say("fetch", f"fetching {ref.repo or ref.path}")

        def show(state: object) -> None:
            done, total = getattr(state, "done_bytes", 0), getattr(state, "total_bytes", 0)
            self.progress(Step("fetch", getattr(state, "message", "") or "downloading", done, total, is_update=True))

        self.tools.fetch(ref, show)

    # -- small parts ------------------------------------------------------------------------------------------

    def _as_run(self, running: Running, decision: Decision) -> start.Run:
        found = running.life.launch
        if found is None:
            raise FtError(f"{running.life.record.run_dir} has no launch that can be read")
        return start.Run(running.life.record.folder, found, decision.plan, self.recipe)

    @contextlib.contextmanager
    def _device(self, plan: Plan) -> Iterator[bool]:
        """Holds the device of `plan`: nobody else reads its free memory meanwhile. True where that took waiting."""
        lock = register.device_lock(_device(plan), purpose=f"ft apply of `{self.name}`")
        has_waited = not lock.try_acquire()
        if has_waited:
            lock.acquire(on_wait=self.tell_waiting)
        with lock:
            yield has_waited

    def tell_waiting(self, holder: LockHolder | None) -> None:
        """Says for whom this waits."""
        self.say("wait", f"waiting for {holder.describe() if holder else 'another `ft`'}")

    def _say_diff(self, diff: Diff) -> None:
        self.say("plan", f"{diff.action}: {diff.reason}")
        for change in diff.changes:
            self.say("plan", change.describe())

    def _result(self, decision: Decision, *, run_dir: Path | None = None, **facts: object) -> ApplyResult:
        plan = decision.plan
        host = f"[{plan.host}]" if ":" in plan.host else plan.host
        values = {
            "name": self.name,
            "diff": decision.diff,
            "plan": plan,
            "run_id": run_dir.name if run_dir else None,
            "run_dir": str(run_dir) if run_dir else None,
            "url": f"http://{host}:{plan.port}/v1",
            "model": plan.served_model_name or plan.model_name,
            "corrections": tuple(self.launcher.corrections),
            "duration_s": time.monotonic() - self.started_s,
            **facts,
        }
        return ApplyResult.model_validate(values)


def _device(plan: Plan) -> str:
    """The device that `plan` runs on, as locks call it."""
    return plan.settings.gpu or "cpu"
