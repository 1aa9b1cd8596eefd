"""The keeper: `python -m freetoken.supervisor.keeper RUN_FOLDER` owns one engine for as long as that lives.

It starts the engine of `launch.json` (or adopts one whose keeper died), watches `/health`, keeps the log under its
cap, restarts after a crash within a budget, and writes `keeper.json` and `events.jsonl`. It survives the terminal;
SIGTERM and SIGINT are the orderly stop. When it is killed itself the engine goes on.

Exit codes: 0 stopped as asked (or somebody else stopped the engine orderly), 1 failed, 3 another keeper is there.

Set aside: a pipe for the log (a dead keeper would kill its engine), pydantic (four times the memory), and a thread
per watch (one poll over a pidfd and a wake-up pipe does it, with no work while nothing happens).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from freetoken.supervisor.files import EventKind, EventLog, describe_os_error, format_now
from freetoken.supervisor.health import HealthLook, probe_health
from freetoken.supervisor.launch import (
    EVENTS_FILE,
    KEEPER_LOCK_FILE,
    REPORT_FILE,
    EndKind,
    KeeperState,
    Launch,
    describe_exit,
    make_base_environment,
    read_launch,
    read_state,
    write_state,
)
from freetoken.supervisor.locks import FileLock
from freetoken.supervisor.log_watch import LogWatch
from freetoken.supervisor.ports import UNSEEN, PortHolder, find_listener, find_port_holder, is_listening
from freetoken.supervisor.process import (
    RUN_MARKER,
    ProcessId,
    become_subreaper,
    end_run,
    find_marked,
    find_members,
    identify_self,
    is_alive,
    launch_process,
    open_pidfd,
    read_environment,
)
from freetoken.supervisor.wakeup import Stopped, Waker
from freetoken.supervisor.watch import RestartBudget
from freetoken.supervisor.watchdog import END_KINDS, Watchdog

STOPPED, FAILED, ALREADY_KEPT = 0, 1, 3
#: After `/health` says `error` an engine usually ends by itself; this long it may take.
ERROR_LINGER_S = 15.0
#: An engine of ours that is gone has an exit code; so long it is waited for.
_CODE_WAIT_S = 5.0
_STARTING_POLL_S, _FAST_POLL_S, _FAST_FOR_S = 1.0, 0.1, 10.0


class Keeper:
    """One run and its engine. `run()` returns the exit code."""

    def __init__(
        self,
        run_dir: Path,
        launch: Launch,
        *,
        may_adopt: bool = False,
        read_gpu: Callable[[], float | None] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.launch = launch
        self.may_adopt = may_adopt
        self.log = LogWatch(launch.log_path(run_dir), launch.policy)
        self.events = EventLog(run_dir / EVENTS_FILE)
        self.fallback_dir = Path(launch.runtime_dir) / "states" if launch.runtime_dir else None
        self.state = KeeperState(launch.run_id, keeper=identify_self(), started_at=format_now())
        self.budget = RestartBudget(launch.policy.max_restarts, launch.policy.window_s, launch.policy.backoff_s)
        self.watchdog = Watchdog(launch, run_dir, read_gpu=read_gpu)
        self.environment = make_base_environment()
        self._pidfd: int | None = None
        self._exit_code: int | None = None
        self._is_child = False
        self._waker = Waker()

    # -- the life of a run ------------------------------------------------------------------------------------

    def run(self) -> int:
        """Keeps the engine until it is stopped or has failed for good."""
        self._waker.install()
        become_subreaper()
        self._event("keeper_started", f"keeper {os.getpid()} of `{self.launch.name}`")
        try:
            code = self._keep()
        except Stopped:
            code = self._stop_orderly()
        except BaseException as error:
            self._end_engine()
            self._finish("failed", "crash", f"the keeper itself failed: {type(error).__name__}: {error}")
            raise
        self._event("keeper_ended", f"keeper {os.getpid()} ends with {code}", is_durable=True)
        return code

    def _keep(self) -> int:
        if not self._begin():
            return FAILED
        while True:
            kind, cause = self._watch_engine()
            self._end_engine()
            if kind == "":
                return self._finish("stopped", "", cause)
            # What was never proven is not restarted: whoever applies it corrects the plan, or gives up in words.
            if not self.is_proven:
                return self._finish("failed", kind, cause)
            if not self._restart(kind, cause):
                return FAILED

    def _begin(self) -> bool:
        if not self.may_adopt:
            return self._start()
        # An engine that was up and ended while nobody kept it has crashed, as far as anybody can tell.
        cause = "engine ended while no keeper watched it"
        if self._adopt():
            return True
        return self._restart("crash", cause) if self.is_proven else self._give_up("crash", cause)

    @property
    def is_proven(self) -> bool:
        """A generation and a full prefill chunk have succeeded with this launch."""
        return (self.run_dir / REPORT_FILE).exists()

    def _give_up(self, kind: EndKind, cause: str) -> bool:
        self._finish("failed", kind, cause)
        return False

    def _restart(self, kind: EndKind, cause: str) -> bool:
        """Starts the engine again if the budget allows; False where it does not or the start is impossible."""
        pause_s = self.budget.next_pause_s(time.monotonic())
        if pause_s is None:
            limit = f"{self.budget.max_restarts} restarts in {self.budget.window_s:g} s"
            return self._give_up("restart_cap", f"{cause}; not restarted again after {limit}")
        self._event("engine_restarting", f"restart {self.state.restarts + 1} in {pause_s:g} s: {cause}", reason=kind)
        told = f"{format_now()}: {cause}"
        self._save(state="starting", restarts=self.state.restarts + 1, cause=cause, ready_at=None, last_restart=told)
        self._waker.sleep(pause_s)
        if holder := self._await_ports():
            return self._give_up("foreign_port", f"{cause}; not started again: {holder.describe()}")
        # A live resize may have rewritten the launch since: the engine comes back as it last ran.
        self.launch = read_launch(self.run_dir) or self.launch
        return self._start()

    def _await_ports(self) -> PortHolder | None:
        """Waits until every port of the launch is free; who holds one when the time is over."""
        deadline = time.monotonic() + self.launch.policy.port_wait_s
        while True:
            ports = (self.launch.port, *self.launch.extra_ports)
            found = (find_port_holder(self.launch.host, port) for port in ports)
            holder = next((one for one in found if one), None)
            if holder is None or time.monotonic() >= deadline:
                return holder
            self._waker.sleep(0.2)

    def _finish(self, state: str, kind: EndKind, cause: str) -> int:
        is_stop = state == "stopped"
        self._save(
            state=state,
            kind=kind,
            cause=cause,
            exit_code=self._exit_code,
            ended_at=format_now(),
            engine=None,
            health={},
        )
        self._event("engine_stopped" if is_stop else "failed", cause, is_durable=True, exit_code=self._exit_code)
        return STOPPED if is_stop else FAILED

    def _stop_orderly(self) -> int:
        self._save(state="stopping", cause="stop requested")
        self._event("stop_requested", "asked to stop")
        signals = self._end_engine()
        how = f"ended by {', '.join(signals)}" if signals else "was gone already"
        return self._finish("stopped", "", f"stopped on request: engine {how}")

    # -- start and adoption -----------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Starts the engine; False (and the state says why) where that is impossible."""
        self._exit_code = None
        try:
            output = self.log.open(self.launch.run_id, self.launch.argv)
        except OSError as error:
            return self._give_up("log_full", f"engine not started: {describe_os_error(error, self.log.path)}")
        env = {**self.launch.make_environment(self.environment), RUN_MARKER: self.launch.run_id}
        try:
            child, engine = launch_process(
                self.launch.argv, env=env, cwd=self.launch.cwd or self.run_dir, output=output
            )
        except OSError as error:
            return self._give_up("spawn", f"`{self.launch.argv[0]}` cannot be started: {error.strerror or error}")
        finally:
            os.close(output)
        child.returncode = 0  # reaped by `_reap`, together with what the engine orphans
        self._take(engine, is_child=True)
        self._save(state="starting", engine=engine, is_adopted=False, health={}, exit_code=None, ended_at=None)
        self._event("engine_started", f"engine is process {engine.pid}", is_durable=True, engine=engine.to_dict())
        return True

    def _adopt(self) -> bool:
        """Takes over an engine that outlived its keeper; False where none lives."""
        before = read_state(self.run_dir, fallback_dir=self.fallback_dir)
        engine = before.engine if before and is_alive(before.engine) else None
        engine = engine or next(iter(find_marked(self.launch.run_id)), None)
        if engine is None:
            return False
        # A restart must get the same secrets; they are inherited, so they are read from where they were.
        self.environment = read_environment(engine.pid) or self.environment
        self._take(engine, is_child=False)
        restarts = before.restarts if before else 0
        ready_at = before.ready_at if before else None
        state = before.state if before and not before.is_final else "starting"
        told = before.last_restart if before else ""
        self._save(
            state=state, engine=engine, is_adopted=True, restarts=restarts, ready_at=ready_at, last_restart=told
        )  # fmt: skip
        self._event("engine_adopted", f"engine {engine.pid} adopted", is_durable=True, engine=engine.to_dict())
        return True

    def _take(self, engine: ProcessId, *, is_child: bool) -> None:
        self._is_child = is_child
        self._pidfd = open_pidfd(engine)
        self.watchdog.reset(is_restart=is_child and self.state.restarts > 0)
        self.state = replace(self.state, engine=engine)

    # -- watching ---------------------------------------------------------------------------------------------

    def _watch_engine(self) -> tuple[EndKind, str]:
        """Watches until the engine has ended or must be ended: (kind, cause); kind "" for an orderly end."""
        started_s = time.monotonic()
        error_since_s: float | None = None
        look = HealthLook("unreachable")
        while True:
            if self._wait_exit(self._pause_s(started_s)):
                return self._judge_exit(look)
            look = probe_health(self.launch.host, self.launch.port, self.launch.ready_path, timeout_s=2.0)
            now_s = time.monotonic()
            self._keep_log()
            if look.status == "ready" and self.state.state != "ready" and (verdict := self._become_ready()):
                return verdict
            if look.status == "error":
                error_since_s = error_since_s or now_s
                self._note_error(look)
            elif error_since_s is None or look.status != "unreachable":
                error_since_s = None
                if self.state.health.get("phase") != look.phase or self.state.health.get("status") != look.status:
                    self._save(health=look.to_dict())
            # A server that shuts down after an error may wait for clients that wait for it: deaf, not well again.
            if error_since_s is not None and now_s - error_since_s > ERROR_LINGER_S:
                return "crash", str(self.state.health.get("message") or "/health says `error`")
            if self.state.state == "starting" and now_s - started_s > self.launch.ready_timeout_s:
                return (
                    "not_ready",
                    f"not ready after {self.launch.ready_timeout_s:g} s (phase `{look.phase or 'none'}`)",
                )
            if verdict := self._look_deeper(now_s, look):
                return verdict

    def _pause_s(self, started_s: float) -> float:
        if self.state.state == "ready":
            return self.launch.policy.poll_s
        return _FAST_POLL_S if time.monotonic() - started_s < _FAST_FOR_S else _STARTING_POLL_S

    def _become_ready(self) -> tuple[EndKind, str] | None:
        members = find_members(self.launch.run_id, self.state.engine, reaper=os.getpid())
        if find_listener(self.launch.port, [one.pid for one in members]) is None and is_listening(self.launch.port):
            other = find_listener(self.launch.port)
            who = f"process {other}" if other else UNSEEN
            return "foreign_port", f"port {self.launch.port} is answered by {who}, not by this engine"
        self._save(state="ready", cause="", ready_at=format_now())
        self._event("engine_ready", f"engine answers on port {self.launch.port}")
        return None

    def _note_error(self, look: HealthLook) -> None:
        if self.state.health.get("status") != "error":
            self._save(health=look.to_dict(), cause=look.message)
            self._event("engine_unhealthy", look.message or "/health says `error`", is_durable=True)

    def _look_deeper(self, now_s: float, look: HealthLook) -> tuple[EndKind, str] | None:
        """Asks the watchdog; (kind, cause) where its policy is that the engine must be ended."""
        key = self.environment.get(self.launch.api_key_env) if self.launch.api_key_env else None
        is_up = self.state.state == "ready"
        alarms = self.watchdog.look(
            now_s, look, self.state.engine, is_up=is_up, is_proven=self.is_proven, api_key=key
        )  # fmt: skip
        for alarm in alarms:
            self._event(alarm.kind, alarm.words, is_durable=True, reaction=alarm.reaction)
        self._save_problems()
        ends = (alarm for alarm in alarms if alarm.reaction == "restart")
        return next(((END_KINDS[alarm.kind], alarm.words) for alarm in ends), None)

    def _judge_exit(self, look: HealthLook) -> tuple[EndKind, str]:
        """What an exit that nobody asked the keeper for means."""
        code = self._exit_code
        how = describe_exit(code, is_adopted=not self._is_child)
        self._event("engine_exited", f"engine ended with {how}", is_durable=True, exit_code=code)
        if problem := self.log.find_end_problem():
            return "log_full", f"engine ended with {how}; {problem}"
        said = self.state.health.get("message") if self.state.health.get("status") == "error" else ""
        if said:
            return "crash", f"engine ended with {how}: {said}"
        # A loading engine that exits with 0 has not been stopped by anybody: it gave up.
        if self.state.state == "ready" and code in (0, -signal.SIGTERM, -signal.SIGINT):
            return "", f"engine was stopped by somebody else ({how})"
        before = "" if self.state.state == "ready" else ", before it was ready"
        return "crash", f"engine ended with {how}{before}"

    # -- the log ----------------------------------------------------------------------------------------------

    def _keep_log(self) -> None:
        before = self.log.problem
        if self.log.keep():
            self._event("log_rotated", f"{self.log.path.name} was over {self.launch.policy.log_bytes} bytes")
        if self.log.problem and self.log.problem != before:
            self._event("log_full", self.log.problem)
        self._save_problems()

    def _save_problems(self) -> None:
        told = (self.log.problem, self.events.problem or "", *self.watchdog.problems.values())
        found = tuple(one for one in told if one)
        if found != self.state.problems:
            self._save(problems=found)

    # -- processes --------------------------------------------------------------------------------------------

    def _end_engine(self) -> tuple[str, ...]:
        """Ends what is left of the engine's tree, and reaps it."""
        ending = end_run(self.launch.run_id, self.state.engine, grace_s=self.launch.grace_s, reaper=os.getpid())
        self._reap()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        return ending.signals

    def _wait_exit(self, timeout_s: float) -> bool:
        """Waits for the engine's end or a signal, `timeout_s` at most; True when the engine is gone."""
        if is_alive(self.state.engine):
            self._waker.wait(timeout_s, *(() if self._pidfd is None else (self._pidfd,)))
        self._reap()
        if is_alive(self.state.engine):
            return False
        # What /proc no longer shows as running may be a moment away from being collected.
        deadline = time.monotonic() + _CODE_WAIT_S
        while self._is_child and self._exit_code is None and time.monotonic() < deadline:
            time.sleep(0.02)
            self._reap()
        return True

    def _reap(self) -> None:
        """Collects every child that ended: the engine, and orphans that were handed to this process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._is_child and self.state.engine and pid == self.state.engine.pid:
                self._exit_code = os.waitstatus_to_exitcode(status)

    # -- what is written --------------------------------------------------------------------------------------

    def _save(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        try:
            self.state = write_state(self.run_dir, self.state, fallback_dir=self.fallback_dir)
        except OSError as error:
            print(describe_os_error(error, self.run_dir), file=sys.stderr, flush=True)

    def _event(self, kind: EventKind, message: str, /, *, is_durable: bool = False, **data: object) -> None:
        self.events.append(kind, message, is_durable=is_durable, **data)


def main(argv: list[str] | None = None) -> int:
    """Keeps the run whose folder is given; `--adopt` takes over a living engine instead of starting one."""
    arguments = sys.argv[1:] if argv is None else argv
    run_dir = Path(next((one for one in arguments if not one.startswith("--")), ".")).absolute()
    launch = read_launch(run_dir)
    if launch is None:
        print(f"no launch to keep in {run_dir}", file=sys.stderr)
        return FAILED
    lock = FileLock(run_dir / KEEPER_LOCK_FILE, purpose=f"keeper of {launch.name}")
    if not lock.acquire(timeout_s=1.0):
        print(f"{run_dir} is kept already", file=sys.stderr)
        return ALREADY_KEPT
    before = read_state(run_dir, fallback_dir=Path(launch.runtime_dir) / "states" if launch.runtime_dir else None)
    if before is not None and before.is_final:
        print(f"{run_dir} has ended already: {before.cause}", file=sys.stderr)
        return FAILED
    os.chdir(run_dir)
    return Keeper(run_dir, launch, may_adopt="--adopt" in arguments).run()


if __name__ == "__main__":
    sys.exit(main())
