"""What comes in between an apply: Ctrl-C in a live resize, `ft stop` in any phase, a study on the device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from freetoken import paths
from freetoken.adapters.control import ControlClient
from freetoken.deploy import ending, stop
from freetoken.deploy.tools import Step
from freetoken.errors import FtError
from freetoken.recipe.load import load_recipe
from freetoken.supervisor import register
from freetoken.supervisor.files import read_events
from freetoken.tuner.session import Session
from freetoken.tuner.status import TuneStatus
from tests.e2e.life import REPO, Lab, make_lab, stop_all, wait_for  # noqa: F401
from tests.fakes.fake_adapter import make_tools

HOLD = (
    "import sys; from freetoken.supervisor import register; "
    "lock = register.study_lock('cpu', purpose='ft tune of `other`'); assert lock.try_acquire(); "
    "print('held', flush=True); sys.stdin.read()"
)


def make_client_after(act: Callable[[], None]) -> Any:
    """Ways to connect whose first live resize is followed by `act`, before its answer is looked at."""
    done: list[bool] = []

    class Client(ControlClient):
        def rebuild(self, *args: Any, **options: Any) -> Any:
            answer = super().rebuild(*args, **options)
            if not done:
                done.append(True)
                act()
            return answer

    return lambda url, key: Client(url, key, timeout_s=5.0)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_a_live_resize_gives_the_size_before_back(lab: Lab) -> None:
    lab.apply()
    engine = lab.life().engine
    with pytest.raises(KeyboardInterrupt):
        lab.apply(expert_slots=24, tools=make_tools(connect=make_client_after(press_ctrl_c)))
    view = lab.view()
    assert (view.condition, view.drift, lab.life().engine) == ("ready", (), engine)
    assert [step.message for step in lab.steps if step.phase == "restore"] == ["giving the size before back"]
    assert lab.apply().diff.action == "nothing"
    again = lab.apply(expert_slots=24)
    assert again.diff.action == "resize"
    stop_all()


def test_a_size_that_was_never_proven_is_proven_and_recorded_by_the_next_apply(lab: Lab) -> None:
    lab.apply()
    with make_tools().connect(f"http://127.0.0.1:{lab.port}", None) as client:
        client.rebuild(expert_slots=24)  # as an `ft` leaves it that was killed after the resize
    assert lab.view().drift == ("`expert_slots` is 24, planned 16",)
    result = lab.apply(expert_slots=24)
    assert [change.describe() for change in result.diff.changes] == ["settings.expert_slots: 16 -> 24 (live)"]
    assert result.proof is not None
    assert lab.view().is_wrong is False
    events = [event.data for event in read_events(lab.run_dirs()[-1] / "events.jsonl") if event.kind == "resized"]
    assert events == [{"expert_slots": 24}]
    assert lab.apply(expert_slots=24).diff.action == "nothing"
    stop_all()


@pytest.mark.parametrize(
    ("phase", "change"),
    [("resize", {"expert_slots": 24}), *((phase, {"strategy": "cpu"}) for phase in ("stop", "launch", "prove"))],
)
def test_a_stop_in_a_resize_or_a_restart_is_not_undone(lab: Lab, phase: str, change: dict[str, Any]) -> None:
    lab.apply()
    ended: list[str] = []

    def stop_it(step: Step) -> None:
        if step.phase == phase and not ended:
            ended.extend(one.how for one in stop.stop("lab"))

    with pytest.raises(FtError, match="`lab` was stopped while it was ") as stopped:
        lab.apply(**change, on_step=stop_it)
    assert stopped.value.exit_code == 1
    assert register.read_records() == ()
    view = lab.view()
    assert (view.condition, view.is_wrong) == ("stopped", False)
    assert not [step for step in lab.steps if step.phase == "restore"]


def test_ft_stop_waits_for_the_apply_that_it_ends(lab: Lab) -> None:
    assert lab.ft("apply", str(lab.write_recipe())).returncode == 0
    changing = lab.start_ft("apply", str(lab.write_recipe(strategy="cpu", engine="--load-s, '60'")), "--yes")
    wait_for(lambda: len(lab.run_dirs()) == 2 and any(lab.life().engine for _ in register.read_records()))
    stopped = lab.ft("stop", "lab")
    assert stopped.returncode == 0, stopped.stderr
    _, errors = changing.communicate(timeout=150)
    assert (changing.returncode, "error: `lab` was stopped while it was starting" in errors) == (1, True), errors
    assert register.read_records() == ()


def test_a_stop_before_anything_runs_ends_the_apply_that_would_launch(lab: Lab) -> None:
    stopping: list[subprocess.Popen[str]] = []

    def stop_it(step: Step) -> None:
        if step.phase == "plan" and not stopping:
            stopping.append(lab.start_ft("stop", "lab"))
            wait_for(lambda: register.read_stop(paths.state_dir(), "lab"))

    with pytest.raises(FtError, match="`lab` was stopped while it was being changed"):
        lab.apply(on_step=stop_it)
    output, errors = stopping[0].communicate(timeout=150)
    assert (stopping[0].returncode, output) == (0, "lab: it was being brought up, and is not any more\n"), errors
    assert register.read_records() == ()


def test_stop_all_takes_back_what_is_declared_and_does_not_run(lab: Lab) -> None:
    failed = lab.ft("apply", str(lab.write_recipe(engine="--exit-at-start, '3'")))
    assert failed.returncode == 4
    assert lab.ft("status").returncode == 6
    dry = lab.ft("stop", "--all", "--dry-run")
    assert dry.stdout.startswith("lab: not running, run ")
    stopped = lab.ft("stop", "--all")
    assert (stopped.returncode, stopped.stdout) == (0, "lab: did not run; no longer declared\n")
    assert lab.ft("status").returncode == 0
    assert lab.ft("stop", "--all").stdout == "nothing runs here\n"


def test_an_apply_keeps_out_of_the_way_of_a_study(lab: Lab) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as study:  # fmt: skip
        assert study.stdin is not None
        assert study.stdout is not None
        assert study.stdout.readline() == "held\n"
        refused = lab.ft("apply", str(lab.write_recipe()), "--no-wait")
        words = (
            f"ft tune of `other` (process {study.pid}) is measuring on `cpu`, where nothing else may start meanwhile"
        )
        assert (refused.returncode, f"error: {words}" in refused.stderr) == (1, True), refused.stderr
        assert f"`kill {study.pid}`" in refused.stderr
        assert register.read_records() == ()
        assert f"study on cpu: ft tune of `other` (process {study.pid})" in lab.ft("status").stdout

        def end_study(step: Step) -> None:
            if step.phase == "wait":
                # What the study gives back before it ends needs the lock of the same name.
                lock = register.deployment_lock(paths.state_dir(), "lab")
                assert lock.try_acquire()
                lock.release()
                study.stdin.close()  # type: ignore[union-attr]

        assert lab.apply(on_step=end_study).diff.action == "launch"
    assert [step.message.startswith("ft tune of `other`") for step in lab.steps if step.phase == "wait"] == [True]
    assert "study" not in lab.ft("status").stdout
    stop_all()


def test_an_apply_that_waits_for_a_study_is_ended_by_a_stop(lab: Lab) -> None:
    lock = register.study_lock("cpu", purpose="ft tune of `other`")
    assert lock.try_acquire()
    waiting = lab.start_ft("apply", str(lab.write_recipe()))
    assert waiting.stderr is not None
    assert any("wait: ft tune of `other`" in line for line in iter(waiting.stderr.readline, ""))
    # The apply of this very process is no stranger to the study.
    assert lab.apply(name="trial").diff.action == "launch"
    register.request_stop(paths.state_dir(), "lab")
    _, errors = waiting.communicate(timeout=150)
    assert (waiting.returncode, errors.splitlines()[-1]) == (
        1, "error: `lab` was stopped while it was waiting for its turn"
    )  # fmt: skip
    lock.release()
    stop_all()


def test_progress_that_nobody_can_read_ends_no_apply(lab: Lab) -> None:
    assert run_unread(lab, "apply", str(lab.write_recipe())) == 0
    assert lab.view().condition == "ready"
    # As in `2>&1 | head -1`: the reader leaves after the first line, while the old engine still runs.
    changing = subprocess.Popen(
        lab.command("apply", str(lab.write_recipe(strategy="cpu")), "--yes"),
        cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert changing.stdout is not None
    assert b"planning `lab`" in changing.stdout.readline()
    changing.stdout.close()
    assert changing.wait(timeout=150) == 1  # the result could not be printed; the work is done
    view = lab.view()
    assert (view.condition, view.is_wrong) == ("ready", False)
    assert {row.field: row.measured for row in view.rows}["strategy"] == "cpu"
    assert run_unread(lab, "apply", str(lab.write_recipe(expert_slots=200))) == 3
    assert run_unread(lab, "stop", "lab") == 0
    assert register.read_records() == ()


def run_unread(lab: Lab, *arguments: str) -> int:
    """The exit code of `ft` whose stderr takes nothing."""
    with open("/dev/full", "wb") as full:
        return subprocess.run(
            lab.command(*arguments), cwd=REPO, stdout=subprocess.DEVNULL, stderr=full, timeout=150
        ).returncode


def test_what_is_stopped_during_a_study_is_not_started_again_after_it(lab: Lab) -> None:
    lab.apply()
    session = Session(load_recipe(str(lab.write_recipe())), say=lambda phase, message: said.append(message))
    said: list[str] = []
    session.status = TuneStatus(
        study="s", recipe="lab", workload="w", objective="turn_time", previous_run=str(lab.run_dirs()[-1]),
        previous_name="lab",
    )  # fmt: skip
    ending.end_life(lab.life())  # as the study does before its first trial
    assert lab.ft("stop", "lab").stdout == "lab: did not run; no longer declared\n"
    session._restore()
    assert (said, session.warnings) == (["`lab` was stopped meanwhile, and stays so"], [])
    assert register.read_records() == ()
