"""Whole trees of processes: what left the session or lost its environment is found and ended, strangers are not."""

from __future__ import annotations

import os
import subprocess
import sys

from freetoken.supervisor.process import (
    RUN_MARKER,
    ProcessId,
    end_run,
    find_members,
    identify,
    is_alive,
    launch_process,
    wait_gone,
)
from tests.e2e.life import Lab, make_lab, wait_for  # noqa: F401

SLEEP = "import time; time.sleep(600)"
#: A leader with a plain child, one that left the session, and one that left it without any environment.
TREE = f"""
import subprocess, sys, time
plain = [sys.executable, "-c", {SLEEP!r}]
subprocess.Popen(plain)
subprocess.Popen(plain, start_new_session=True)
subprocess.Popen(plain, start_new_session=True, env={{}})
time.sleep(600)
"""


def test_everything_below_a_leader_is_found_and_ended_and_a_stranger_lives(lab: Lab) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    env = {**os.environ, RUN_MARKER: "run-1"}
    output = os.open(lab.folder / "log", os.O_WRONLY | os.O_CREAT)
    child, leader = launch_process([sys.executable, "-c", TREE], env=env, cwd=lab.folder, output=output)
    members = wait_for(lambda: _when(find_members("run-1", leader), 4))
    assert find_members("run-2", None) == ()
    ending = end_run("run-1", leader, grace_s=1.0)
    child.wait(60)
    assert not any(is_alive(one) for one in members)
    assert ending.left == ()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_keeper_ends_even_what_has_neither_session_nor_environment_nor_parent(lab: Lab) -> None:
    child = f"[sys.executable, '-c', {SLEEP!r}], start_new_session=True, env={{}}"
    gone_parent = f"import subprocess, sys; subprocess.Popen({child})"
    script = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {gone_parent!r}]); time.sleep(600)"
    run_dir = lab.write_launch(argv=(sys.executable, "-c", script))
    keeper = lab.start_keeper(run_dir)
    members = wait_for(lambda: _when(find_members(run_dir.name, None, reaper=keeper.pid), 2))
    keeper.terminate()
    assert keeper.wait(60) == 0
    assert not any(is_alive(one) for one in members)


def test_a_process_that_ended_is_no_member_and_waits_are_over_at_once(lab: Lab) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = identify(child.pid)
    assert identity is not None
    assert wait_gone([identity], 10)
    assert not is_alive(identity)  # a zombie holds nothing
    child.wait()


def _when(found: tuple[ProcessId, ...], count: int) -> tuple[ProcessId, ...] | None:
    return found if len(found) == count else None
