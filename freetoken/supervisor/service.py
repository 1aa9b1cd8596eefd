"""`python -m freetoken.supervisor.service --state FOLDER NAME`: what a systemd unit runs to keep a deployment.

Brings up what was applied last under NAME, unless it runs already, and follows its keeper. After a reboot every process
identity of the last boot is stale; `ft apply` closes those, finds the port free or says who has it, plans for the
memory that is free now and proves the engine. SIGTERM stops keeper and engine in order and leaves the declaration as it
is, so that the next boot starts it again; what was stopped by `ft stop` stays stopped.

Exit codes: 0 stopped as asked, 1 the engine failed for good (systemd may try again), others are those of `ft apply`.
Standard library only, since it lives as long as the deployment.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freetoken import paths
from freetoken.supervisor import life, register
from freetoken.supervisor.files import read_json
from freetoken.supervisor.gpu import GpuGauge
from freetoken.supervisor.launch import RECIPE_FILE, read_launch, read_state
from freetoken.supervisor.life import Life
from freetoken.supervisor.locks import FileLock
from freetoken.supervisor.process import (
    ProcessId,
    become_subreaper,
    end_run,
    identify,
    open_pidfd,
    send_signal,
    wait_gone,
)
from freetoken.supervisor.wakeup import Stopped, Waker

STOPPED, FAILED, BAD = 0, 1, 2
#: At boot the driver may come up later than this service.
GPU_WAIT_S = 180.0
#: After a keeper's end whoever ended it writes why within this time.
VERDICT_S = 5.0
_POLL_S = 5.0


@dataclass
class Service:
    """One deployment, brought up and followed. `run()` returns the exit code."""

    name: str
    apply_argv: Sequence[str] = (sys.executable, "-m", "freetoken")
    gpu_wait_s: float = GPU_WAIT_S
    waker: Waker = field(default_factory=Waker)

    def run(self) -> int:
        """Runs until the deployment is stopped or has failed."""
        self.waker.install()
        become_subreaper()
        try:
            code = self._bring_up()
            return self._follow() if code is None else code
        except Stopped:
            return self._stop()

    # -- bringing up ------------------------------------------------------------------------------------------

    def _bring_up(self) -> int | None:
        """None once it runs, else the exit code."""
        if self._find_living() is not None:
            say(f"`{self.name}` runs already")
            return None
        declared = self._read_declaration()
        if declared is None:
            say(f"nothing was ever applied as `{self.name}` in {paths.state_dir()}")
            return BAD
        if not declared.get("is_wanted"):
            say(f"`{self.name}` was stopped by `ft stop`; `ft apply` runs it again")
            return STOPPED
        # What was proven last, not what was tried last.
        run_dir = paths.runs_dir() / str(declared.get("last_good_run") or declared.get("run_id"))
        if not (run_dir / RECIPE_FILE).is_file():
            say(f"the run folder of `{self.name}` is gone: {run_dir}")
            return BAD
        self._await_gpu(run_dir)
        return self._apply(run_dir / RECIPE_FILE)

    def _await_gpu(self, run_dir: Path) -> None:
        launch = read_launch(run_dir)
        if launch is None or launch.gpu is None:
            return
        gauge, deadline = GpuGauge(launch.gpu), time.monotonic() + self.gpu_wait_s
        while not gauge.is_present():
            if time.monotonic() >= deadline:
                say(f"GPU {launch.gpu} has not come up within {self.gpu_wait_s:.0f} s; trying without it")
                return
            self.waker.sleep(1.0)

    def _apply(self, recipe: Path) -> int | None:
        argv = [*self.apply_argv, "--state", str(paths.state_dir()), "apply", str(recipe), "--name", self.name, "--yes"]
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        try:
            while child.poll() is None:
                self._wait(identify(child.pid), 1.0)
        except Stopped:
            child.send_signal(signal.SIGTERM)  # it ends what it has started
            child.wait()
            raise
        if child.returncode != 0:
            say(f"`{self.name}` could not be brought up (`ft apply` ended with {child.returncode})")
            return child.returncode if child.returncode > 0 else FAILED
        return None

    # -- following --------------------------------------------------------------------------------------------

    def _follow(self) -> int:
        """Waits while the deployment lives, whichever run of it that is."""
        ended_s: float | None = None
        while True:
            found = self._find_living()
            if found is not None:
                ended_s = None
                found = life.adopt(found) if found.condition == "unkept" else found
                self._wait(found.keeper, _POLL_S)
                _reap()
            elif self._is_being_changed():
                ended_s = None
                self.waker.sleep(0.5)
            else:
                now_s = time.monotonic()
                ended_s = ended_s or now_s
                code = self._judge(is_final=now_s - ended_s >= VERDICT_S)
                if code is not None:
                    return code
                self.waker.sleep(0.2)

    def _judge(self, *, is_final: bool) -> int | None:
        """The exit code after the deployment's end; None while whoever ended it may still say why."""
        declared = self._read_declaration()
        if declared is None or not declared.get("is_wanted"):
            say(f"`{self.name}` was stopped by `ft stop`")
            return STOPPED
        run_dir = paths.runs_dir() / str(declared.get("run_id"))
        state = read_state(run_dir, fallback_dir=register.states_dir())
        if state is not None and state.state == "failed":
            say(f"`{self.name}` failed: {state.cause}")
            return FAILED
        if not is_final:
            return None
        say(f"`{self.name}` ended: {state.cause if state and state.cause else 'nobody wrote why'}")
        return STOPPED if state is not None and state.state == "stopped" else FAILED

    def _stop(self) -> int:
        """Ends keeper and engine in order, the declaration untouched."""
        found = self._find_living()
        if found is None:
            return STOPPED
        say(f"stopping `{self.name}`")
        grace_s = found.launch.grace_s if found.launch else 10.0
        if found.keeper is not None:
            send_signal(found.keeper, signal.SIGTERM)
            wait_gone([found.keeper], 2 * grace_s + 15.0)
        end_run(found.record.run_id, found.engine, grace_s=grace_s)
        register.remove_record(found.record.run_id)
        return STOPPED

    # -- looking ----------------------------------------------------------------------------------------------

    def _find_living(self) -> Life | None:
        """The newest living run of this deployment."""
        here = paths.state_dir().resolve()
        ours = (
            life.examine(record)
            for record in register.read_records()
            if record.name == self.name and Path(record.state_dir).resolve() == here
        )
        return max((one for one in ours if one.is_living), key=lambda one: one.record.run_id, default=None)

    def _is_being_changed(self) -> bool:
        """Whether an `ft` holds the deployment's lock: it is replacing what ran."""
        path = register.deployment_lock(paths.state_dir(), self.name).path
        lock = FileLock(path, is_named=False)
        if not lock.try_acquire():
            return True
        lock.release()
        return False

    def _read_declaration(self) -> dict[str, Any] | None:
        return read_json(paths.state_dir() / "deployments" / f"{self.name}.json")

    def _wait(self, process: ProcessId | None, timeout_s: float) -> None:
        fd = open_pidfd(process) if process is not None else None
        try:
            self.waker.wait(timeout_s if fd is not None else 0.2, *([fd] if fd is not None else []))
        finally:
            if fd is not None:
                os.close(fd)


def _reap() -> None:
    """Collects keepers that were handed to this process."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def say(text: str) -> None:
    """A line for the journal."""
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Keeps the deployment that is named."""
    parser = argparse.ArgumentParser(prog="python -m freetoken.supervisor.service")
    parser.add_argument("--state", required=True)
    parser.add_argument("name")
    options = parser.parse_args(argv)
    paths.set_state_dir(options.state)
    return Service(options.name).run()


if __name__ == "__main__":
    sys.exit(main())
