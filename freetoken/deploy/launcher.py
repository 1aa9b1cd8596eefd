"""From a plan to a proven engine: start, prove, correct and start again, or go back to what worked.

Whatever happens after the intent is on disk (a failed start, Ctrl-C), what was started here is ended here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.deploy import ending, record, runs, start
from freetoken.deploy.engines import choose_version, find_engine, require_engine
from freetoken.deploy.grow import grow_live, make_start_plan
from freetoken.deploy.prove import prove
from freetoken.deploy.recover import StartFailure, classify, correct
from freetoken.deploy.stay import make_staying_request
from freetoken.deploy.tools import Progress, Step, Tools
from freetoken.deploy.values import Proof
from freetoken.errors import DoesNotFitError, FtError, NotReadyError
from freetoken.supervisor import life, logs, register
from freetoken.supervisor.files import format_now, write_json
from freetoken.supervisor.launch import REPORT_FILE, Launch, read_state
from freetoken.supervisor.process import find_members, identify_self, read_resident

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter, Failure, LaunchSpec
    from freetoken.deploy.current import Running
    from freetoken.planner.plan import Plan, PlanRequest
    from freetoken.recipe.model import Recipe

#: After the engine stopped answering, its keeper sees the end within this time.
_VERDICT_S = 15.0
#: An engine that is busy is asked for so long to take the size before back.
_GIVE_BACK_S = 60.0
#: Doublings of a correction that changed nothing in the plan.
_MOST_PUSHES = 6


@dataclass
class Launcher:
    """Starts and proves engines for one deployment. `plan_for` plans a corrected request, raising DoesNotFitError."""

    name: str
    recipe: Recipe
    adapter: EngineAdapter
    tools: Tools
    progress: Progress
    plan_for: Callable[[PlanRequest], Plan]
    declared: dict[str, Any] = field(default_factory=dict)
    #: Whether `ft stop` was called since this began: then nothing is started, and nothing restored.
    is_stopped: Callable[[], bool] = lambda: False
    #: What failed starts taught, in words.
    corrections: list[str] = field(default_factory=list)
    #: What the last start was planned for: the request with what earlier attempts taught.
    request: PlanRequest | None = None

    # -- starting ---------------------------------------------------------------------------------------------

    def start_until_proven(self, request: PlanRequest, plan: Plan) -> tuple[start.Run, Proof, float]:
        """The proven run and the seconds it took; planned again where it failed for want of memory. NotReadyError."""
        for attempt in range(self.tools.max_retries + 1):
            began_s = time.monotonic()
            self.request = request
            run = self.make_run(plan, request)
            try:
                run, proof = self._start(run, request)
                return run, proof, time.monotonic() - began_s
            except NotReadyError as error:
                self._record_failure(run, request, error.message, None)
                raise
            except StartFailure as failure:
                found = classify(self.adapter, failure)
                self._record_failure(run, request, found.cause, failure.exit_code)
                if failure.kind == "stopped" or self.is_stopped():
                    raise FtError(f"`{self.name}` was stopped while it was starting") from None
                request, plan = self._correct(request, plan, found, run, attempt)
        raise AssertionError("the last attempt either returns or raises")

    def make_run(self, plan: Plan, request: PlanRequest) -> start.Run:
        """A run folder and the launch of `plan`, the answer to `request`; not yet written or started."""
        run_dir = runs.create_run_dir()
        spec = self.make_spec(plan)
        launch = start.make_launch(self.name, self.recipe, plan, spec, self.tools, run_dir.name, self.declared, request)
        return start.Run(run_dir, launch, plan, self.recipe)

    def _start(self, run: start.Run, request: PlanRequest | None = None) -> tuple[start.Run, Proof]:
        self.say("launch", f"starting `{run.plan.engine}` as run {run.run_id}")
        with ending_on_error(run):
            runs.write_declaration(self.name, run.run_id, is_wanted=True)
            run = start.launch_run(run)
            # After it was registered: a stop that came before did not see it, one that comes later ends it.
            self.check_stopped("starting")
            start.await_ready(run, self.progress)
            if run.plan.start_slots is not None:
                run = self._grow(run, request)
            self.say("prove", "proving it: one generation, one full prefill chunk, sizes read back")
            proof = self.prove(run)
            self.check_stopped("being proven")
            return run, proof

    def check_stopped(self, doing: str) -> None:
        """Raises FtError where `ft stop` was called meanwhile."""
        if self.is_stopped():
            raise FtError(f"`{self.name}` was stopped while it was {doing}")

    def _grow(self, run: start.Run, request: PlanRequest | None) -> start.Run:
        """The run at its full size. StartFailure where that fails and another start may help."""

        def replan(plan: Plan, failure: Failure) -> Plan:
            nonlocal request
            correction = correct(request, plan, failure, 0) if request is not None else None
            if correction is None:
                raise StartFailure("crash", failure.cause, log=failure.excerpt, run_dir=str(run.run_dir))
            request = correction.request
            staying = make_staying_request(correction.request, plan, self.adapter)
            fresh = self.plan_for(staying or correction.request)
            if self.adapter.live_changes(plan.settings, fresh.settings) is None:
                raise StartFailure("crash", failure.cause, log=failure.excerpt, run_dir=str(run.run_dir))
            self._note_correction(run, correction.words)
            return fresh.model_copy(update={"start_slots": plan.start_slots})

        with self.tools.connect(run.base_url, run.api_key) as client:
            plan = grow_live(client, run.plan, self.adapter, replan, self.say)
        if plan is not run.plan:
            runs.write_run(run.run_dir, run.recipe, plan, run.launch)
        runs.record_event(run.run_dir, "resized", "grown live to the plan", expert_slots=plan.settings.expert_slots)
        return replace(run, plan=plan)

    def _note_correction(self, run: start.Run, words: str) -> None:
        self.corrections.append(words)
        runs.record_event(run.run_dir, "corrected", words)
        self.say("correct", words)

    def _correct(
        self, request: PlanRequest, plan: Plan, found: Failure, run: start.Run, attempt: int
    ) -> tuple[PlanRequest, Plan]:
        """The next request and plan; NotReadyError where another start would fail in the same way."""
        machine = self.tools.probe(None)
        for pushes in range(_MOST_PUSHES if attempt < self.tools.max_retries else 0):
            correction = correct(request, plan, found, attempt, pushes=pushes, machine=machine)
            if correction is None:
                break
            if correction.is_loss:
                request = correction.request
            try:
                fresh = self.plan_for(correction.request)
            except DoesNotFitError as refused:
                error = self._make_error(found, run)
                error.details = (*error.details, f"allowing for that it does not fit: {refused.message}")
                error.hint = refused.hint or error.hint
                raise error from None
            # The same settings would fail in the same way: what was missing is less than what was left over.
            if fresh.settings != plan.settings:
                self._note_correction(run, correction.words)
                return correction.request, fresh
        raise self._make_error(found, run) from None

    def make_spec(self, plan: Plan, *, must_exist: bool = True) -> LaunchSpec:
        """The command line of `plan`; a model or an engine that is not here yet is shown by its name if allowed."""
        engine = self.recipe.engine
        home = require_engine(engine, self.adapter) if must_exist else find_engine(engine, self.adapter)
        if plan.model_path is None and not must_exist:
            plan = plan.model_copy(update={"model_path": f"<{self.recipe.model.repo or self.recipe.model.path}>"})
        python = str(home.interpreter) if home else None
        if home is None and (version := choose_version(engine, self.adapter)):
            python = str(paths.engines_dir() / f"{engine.name}-{version}" / "bin" / "python")
        return self.adapter.make_launch_spec(
            make_start_plan(plan),
            interpreter=python,
            engine_env={**(home.env if home else {}), **engine.env},
            extra_args=engine.extra_args,
            api_key_env=self.recipe.serve.api_key_env,
        )

    # -- proving ----------------------------------------------------------------------------------------------

    def prove(self, run: start.Run) -> Proof:
        """The proof. StartFailure with the log where the engine died of it, NotReadyError where sizes differ."""
        log = logs.read_text(run.launch.log_path(run.run_dir))
        context_tokens = self.recipe.workload.context_tokens
        try:
            with self.tools.connect(run.base_url, run.api_key) as client:
                proof = prove(
                    client, run.plan, self.adapter, context_tokens=context_tokens, log=log, seed=os.getpid(),
                    most_tokens=self.tools.most_proof_tokens,
                )  # fmt: skip
        except NotReadyError as error:
            runs.record_event(run.run_dir, "not_proven", str(error))
            raise
        except FtError as error:
            runs.record_event(run.run_dir, "not_proven", str(error))
            raise self._find_failure(run, error) from error
        found = life.examine(run.record)
        resident = read_resident(find_members(run.run_id, found.engine))
        return proof.model_copy(update={"ram_bytes": resident.total_bytes})

    def _find_failure(self, run: start.Run, error: FtError) -> StartFailure:
        """Why the engine did not answer: the keeper's verdict, which a broken connection is waited for."""
        # An answer with an HTTP code came from an engine that is alive, unless it has just said that it is not.
        is_answered = getattr(error, "status_code", None) is not None
        deadline = time.monotonic() + (2.0 if is_answered else _VERDICT_S)
        while time.monotonic() < deadline:
            state = read_state(run.run_dir, fallback_dir=register.states_dir())
            if state is not None and state.is_final:
                return start.make_failure(run, state)
            time.sleep(0.05)
        log = logs.read_text(run.launch.log_path(run.run_dir))
        return StartFailure("crash", f"the proof failed: {error}", log=log, run_dir=str(run.run_dir))

    def keep_proof(self, run: start.Run, proof: Proof, ready_s: float) -> None:
        """Writes `report.json`: from here on the run counts as proven, and its keeper restarts it after a crash."""
        report = {
            "proof": proof.model_dump(mode="json"), "ready_s": ready_s, "compile_s": proof.compile_s,
            "corrections": self.corrections,
        }  # fmt: skip
        try:
            write_json(run.run_dir / REPORT_FILE, report)
        except OSError as error:
            self.say("record", f"{run.run_dir / REPORT_FILE}: {os.strerror(error.errno or 0)}")
        register.update_record(run.run_id, proven_at=proof.proven_at)
        runs.write_declaration(self.name, run.run_id, is_wanted=True, is_proven=True)
        runs.record_event(run.run_dir, "proven", f"proven: {proof.ttft_s * 1000:.0f} ms to the first token")

    # -- going back -------------------------------------------------------------------------------------------

    def restore(self, previous: Running, error: BaseException) -> None:
        """Starts again what was replaced, and says in `error` how that went."""
        old = previous.life.launch
        if old is None or previous.plan is None or previous.recipe is None:
            return
        self.say("restore", f"restoring what ran before (run {old.run_id})")
        try:
            run = self._start_again(old, previous.plan, previous.recipe)
            words = f"what ran before was restored as run {run.run_id}"
        except (FtError, StartFailure) as failed:
            words = f"what ran before (run {old.run_id}) could not be restored: {failed}"
        add_detail(error, words)
        self.say("restore", words)

    def _start_again(self, old: Launch, plan: Plan, recipe: Recipe) -> start.Run:
        run_dir = runs.create_run_dir()
        launch = replace(old, run_id=run_dir.name, owner=identify_self(), created_at=format_now())
        mine = replace(self, recipe=recipe, declared=old.declared, corrections=[])
        run, proof = mine._start(start.Run(run_dir, launch, plan, recipe))
        mine.keep_proof(run, proof, 0.0)
        runs.record_event(run_dir, "restored", f"restored run {old.run_id}")
        return run

    def give_back_sizes(self, running: Running, changed: Iterable[str]) -> None:
        """Resizes `changed` live to what the run folder says, as far as the engine still does that."""
        record_, plan = running.life.record, running.plan
        if plan is None or self.is_stopped():
            return
        with uninterrupted():
            self.say("restore", "giving the size before back")
            sizes = {name: getattr(plan.settings, name) or None for name in changed}
            try:
                with self.tools.connect(record_.base_url, running.api_key) as client:
                    answer = client.rebuild(sizes.get("expert_slots"), sizes.get("kv_tokens"), timeout_s=_GIVE_BACK_S)
                failed = "" if answer.is_ok else f"the engine answered `{answer.status}`"
            except FtError as error:
                failed = error.message
            if failed:
                self.say("restore", f"the size before could not be given back: {failed}")

    # -- words ------------------------------------------------------------------------------------------------

    def say(self, phase: str, message: str) -> None:
        """One line of progress."""
        self.progress(Step(phase, message))

    def _record_failure(self, run: start.Run, request: PlanRequest, cause: str, exit_code: int | None) -> None:
        warning = record.record_failure(self.name, run.run_dir, run.plan, request, cause, exit_code)
        if warning:
            self.say("record", warning)

    def _make_error(self, found: Failure, run: start.Run) -> NotReadyError:
        log: Path = run.launch.log_path(run.run_dir)
        hint = found.hint or (f"`--set {found.field}=...`" if found.field else None)
        details = (f"log: {found.excerpt}",) if found.excerpt and found.excerpt not in found.cause else ()
        if hint is not None:
            details = (*details, f"full log in {log}")
        message = f"`{self.name}` never became ready: {found.cause}"
        return NotReadyError(message, hint=hint or f"full log in {log}", details=details)


def add_detail(error: BaseException, words: str) -> None:
    """Adds a finding to an error that will be shown."""
    if isinstance(error, FtError):
        error.details = (*error.details, words)


@contextlib.contextmanager
def ending_on_error(run: start.Run) -> Iterator[None]:
    """Ends the run where the block fails, Ctrl-C included; a second Ctrl-C waits until that is done."""
    try:
        yield
    except BaseException:
        with uninterrupted():
            ending.end_life(life.examine(run.record))
        raise


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Passes over Ctrl-C and SIGTERM inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
