"""The keeper alone, with a fake engine: start, stop, crash, hang, a full disk, and its own death."""

from __future__ import annotations

import os
import platform
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from freetoken.supervisor import life
from freetoken.supervisor import process as processes
from freetoken.supervisor.files import read_events
from freetoken.supervisor.launch import KeeperPolicy
from freetoken.supervisor.process import find_members, is_alive
from tests.e2e.life import Lab, make_lab, wait_for  # noqa: F401


def test_sigterm_to_the_keeper_ends_the_whole_tree_and_is_an_orderly_stop(lab: Lab) -> None:
    run_dir = lab.write_launch("--children", "4")
    keeper = lab.start_keeper(run_dir)
    state = lab.wait_state(run_dir, "ready")
    assert len(find_members(run_dir.name, state.engine)) == 5
    keeper.terminate()
    assert keeper.wait(60) == 0
    ended = lab.wait_state(run_dir, "stopped")
    assert (ended.cause, ended.exit_code) == ("stopped on request: engine ended by SIGINT, SIGTERM", 0)
    assert find_members(run_dir.name, state.engine) == ()
    assert lab.event_kinds(run_dir) == [
        "keeper_started", "engine_started", "engine_ready", "stop_requested", "engine_stopped", "keeper_ended",
    ]  # fmt: skip


def test_an_engine_that_ignores_sigint_and_sigterm_is_killed(lab: Lab) -> None:
    run_dir = lab.write_launch("--ignore-sigint", "--ignore-sigterm", grace_s=0.2)
    keeper = lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    keeper.terminate()
    assert keeper.wait(60) == 0
    assert lab.wait_state(run_dir, "stopped").cause == "stopped on request: engine ended by SIGINT, SIGTERM, SIGKILL"


def test_a_killed_engine_is_restarted_within_the_cap_and_then_failed(lab: Lab) -> None:
    run_dir = lab.write_launch()
    keeper = lab.start_keeper(run_dir)
    for restarts in range(2):
        state = wait_for(lambda n=restarts: _ready_after(lab, run_dir, n))
        lab.kill(state.engine)
    last = wait_for(lambda: _ready_after(lab, run_dir, 2))
    lab.kill(last.engine)
    failed = lab.wait_state(run_dir, "failed")
    assert keeper.wait(60) == 1
    assert (failed.kind, failed.restarts, failed.exit_code) == ("restart_cap", 2, -9)
    assert failed.cause == "engine ended with SIGKILL (-9); not restarted again after 2 restarts in 60 s"


def test_a_crash_leaves_no_child_of_the_engine_behind_before_the_restart(lab: Lab) -> None:
    run_dir = lab.write_launch("--children", "2")
    keeper = lab.start_keeper(run_dir)
    state = lab.wait_state(run_dir, "ready")
    before = set(find_members(run_dir.name, state.engine))
    lab.kill(state.engine)
    again = wait_for(lambda: _ready_after(lab, run_dir, 1))
    assert not any(is_alive(one) for one in before)
    assert len(find_members(run_dir.name, again.engine)) == 3
    keeper.terminate()
    keeper.wait(60)


def test_an_engine_that_was_never_proven_is_not_restarted(lab: Lab) -> None:
    run_dir = lab.write_launch("--exit-at-start", "3", is_proven=False)
    assert lab.start_keeper(run_dir).wait(60) == 1
    failed = lab.wait_state(run_dir, "failed")
    expected = ("crash", "engine ended with code 3, before it was ready", 3, 0)
    assert (failed.kind, failed.cause, failed.exit_code, failed.restarts) == expected


#: Its first thread ends before the process does, as when the kernel takes back the memory of a large one.
SLOW_DEATH = """
import ctypes, os, signal, threading, time
def die():
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=die).start()
ctypes.CDLL(None).syscall({exit_thread}, 0)
"""


def test_an_engine_whose_first_thread_is_gone_already_is_waited_for_and_its_end_is_known(lab: Lab) -> None:
    exit_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
    argv = (sys.executable, "-c", SLOW_DEATH.format(exit_thread=exit_thread))
    run_dir = lab.write_launch(is_proven=False, argv=argv)
    assert lab.start_keeper(run_dir).wait(60) == 1
    failed = lab.wait_state(run_dir, "failed")
    assert (failed.cause, failed.exit_code) == ("engine ended with SIGKILL (-9), before it was ready", -9)


def test_sigterm_to_the_engine_from_outside_is_a_stop_and_not_a_crash(lab: Lab) -> None:
    run_dir = lab.write_launch()
    keeper = lab.start_keeper(run_dir)
    lab.kill(lab.wait_state(run_dir, "ready").engine, signal.SIGTERM)
    assert keeper.wait(60) == 0
    assert lab.wait_state(run_dir, "stopped").cause == "engine was stopped by somebody else (SIGTERM (-15))"


def test_an_engine_that_says_error_and_then_ends_itself_by_sigterm_has_crashed(lab: Lab) -> None:
    run_dir = lab.write_launch("--load-error", "AssertionError: cache budget too small", is_proven=False)
    assert lab.start_keeper(run_dir).wait(60) == 1
    failed = lab.wait_state(run_dir, "failed")
    assert failed.cause == "engine ended with SIGTERM (-15): AssertionError: cache budget too small"
    assert (failed.kind, failed.exit_code) == ("crash", -15)


def test_a_load_without_progress_cpu_and_io_is_a_hang(lab: Lab) -> None:
    run_dir = lab.write_launch("--silent-load", is_proven=False, stall_timeout_s=1.0)
    assert lab.start_keeper(run_dir).wait(60) == 1
    failed = lab.wait_state(run_dir, "failed")
    assert failed.kind == "hang"
    assert re.fullmatch(r"no progress, no CPU and no I/O for \d+ s \(/health loading\)", failed.cause)


def test_a_load_with_progress_may_take_longer_than_the_stall_time_out(lab: Lab) -> None:
    run_dir = lab.write_launch("--load-s", "2.0", is_proven=False, stall_timeout_s=0.8)
    keeper = lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    keeper.terminate()
    assert keeper.wait(60) == 0


def test_requests_that_never_get_on_are_a_hang_and_the_engine_comes_back(lab: Lab) -> None:
    run_dir = lab.write_launch("--stuck-requests", "--once", str(lab.folder / "once"), stall_timeout_s=1.0)
    keeper = lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    body = '{"prompt": "x", "max_tokens": 1}'
    url = f"http://127.0.0.1:{lab.port}/v1/completions"
    script = f"import urllib.request as u; u.urlopen(u.Request({url!r}, {body!r}.encode()))"
    client = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    again = wait_for(lambda: _ready_after(lab, run_dir, 1))
    assert again.cause == ""
    assert "engine_hung" in lab.event_kinds(run_dir)
    assert client.wait(60) != 0
    keeper.terminate()
    keeper.wait(60)


def test_a_log_target_without_space_fails_the_start_in_words(lab: Lab) -> None:
    run_dir = lab.write_launch(log="/dev/full")
    assert lab.start_keeper(run_dir).wait(60) == 1
    failed = lab.wait_state(run_dir, "failed")
    assert (failed.kind, failed.engine) == ("log_full", None)
    assert failed.cause == "engine not started: no space for /dev/full: No space left on device"


def test_a_file_size_limit_rotates_the_log_below_it_and_the_engine_lives(lab: Lab) -> None:
    limit = 64 << 10
    run_dir = lab.write_launch("--flood-bytes", "800", policy=KeeperPolicy(poll_s=0.05, log_bytes=1 << 20))
    keeper = _start_limited(run_dir, limit)
    lab.wait_state(run_dir, "ready")
    wait_for(lambda: lab.event_kinds(run_dir).count("log_rotated") >= 2)
    assert (run_dir / "engine.log").stat().st_size < limit
    assert lab.keeper_state(run_dir).restarts == 0  # type: ignore[union-attr]
    keeper.terminate()
    assert keeper.wait(60) == 0


def test_a_file_size_limit_that_the_log_reaches_is_named_as_the_cause(lab: Lab) -> None:
    run_dir = lab.write_launch("--flood-bytes", "2000000", "--load-s", "30", is_proven=False)
    assert _start_limited(run_dir, 48 << 10).wait(60) == 1
    failed = lab.wait_state(run_dir, "failed")
    expected = f"engine ended with code 74; no space for {run_dir}/engine.log"
    assert failed.kind == "log_full"
    assert failed.cause.startswith(expected)


def test_events_without_space_are_a_problem_in_the_state_and_no_end(lab: Lab) -> None:
    run_dir = lab.write_launch()
    (run_dir / "events.jsonl").symlink_to("/dev/full")
    keeper = lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    expected = (f"no space for {run_dir}/events.jsonl: No space left on device",)
    wait_for(lambda: lab.keeper_state(run_dir).problems == expected)  # type: ignore[union-attr]
    keeper.terminate()
    assert keeper.wait(60) == 0


def test_a_run_folder_that_cannot_be_written_moves_the_state_beside_the_register(lab: Lab) -> None:
    run_dir = lab.write_launch()
    # A folder in the way of the temporary name refuses the write whoever asks, root included.
    keeper = lab.start_keeper(run_dir)
    (run_dir / f".keeper.json.{keeper.pid}.tmp").mkdir()
    state = lab.wait_state(run_dir, "ready")
    assert state.engine is not None
    keeper.terminate()
    assert keeper.wait(60) == 0
    assert lab.wait_state(run_dir, "stopped").state == "stopped"


def test_a_killed_keeper_leaves_the_engine_running_and_the_next_look_adopts_it(lab: Lab) -> None:
    run_dir = lab.write_launch()
    keeper = lab.start_keeper(run_dir)
    state = lab.wait_state(run_dir, "ready")
    keeper.kill()
    keeper.wait(60)
    assert is_alive(state.engine)
    assert lab.life().condition == "unkept"
    (found,) = life.reconcile()
    assert found.engine == state.engine
    assert found.keeper is not None
    assert found.state is not None
    assert (found.state.is_adopted, found.state.state) == (True, "ready")
    lab.kill(found.engine)
    again = wait_for(lambda: _ready_after(lab, run_dir, 1))
    assert again.engine != state.engine
    lab.kill(found.keeper, signal.SIGTERM)
    lab.wait_state(run_dir, "stopped")


def test_an_adopter_restarts_the_engine_with_the_secrets_it_was_started_with(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_KEY", "sesame")
    run_dir = lab.write_launch("--api-key-env", "LAB_KEY", api_key_env="LAB_KEY", secret_env=("LAB_KEY",))
    keeper = lab.start_keeper(run_dir)
    state = lab.wait_state(run_dir, "ready")
    keeper.kill()
    keeper.wait(60)
    monkeypatch.delenv("LAB_KEY")
    (found,) = life.reconcile()
    lab.kill(state.engine)
    again = wait_for(lambda: _ready_after(lab, run_dir, 1))
    assert (processes.read_environment(again.engine.pid) or {})["LAB_KEY"] == "sesame"
    assert not any(b"sesame" in path.read_bytes() for path in run_dir.iterdir() if path.is_file())
    lab.kill(found.keeper, signal.SIGTERM)
    lab.wait_state(run_dir, "stopped")


def test_a_second_keeper_of_the_same_run_leaves_at_once(lab: Lab) -> None:
    run_dir = lab.write_launch()
    keeper = lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    assert lab.start_keeper(run_dir).wait(60) == 3
    keeper.terminate()
    assert keeper.wait(60) == 0


def test_a_keeper_survives_the_hangup_of_its_terminal(lab: Lab) -> None:
    run_dir = lab.write_launch()
    keeper = lab.start_keeper(run_dir)
    state = lab.wait_state(run_dir, "ready")
    assert os.getsid(keeper.pid) == keeper.pid
    assert os.getsid(state.engine.pid) == state.engine.pid  # type: ignore[union-attr]
    keeper.send_signal(signal.SIGHUP)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(60) == 0
    assert "stop_requested" in lab.event_kinds(run_dir)


def test_a_port_answered_by_a_stranger_is_not_taken_for_the_engine(lab: Lab) -> None:
    stranger = subprocess.Popen([*lab_engine(lab.port)])
    try:
        wait_for(lambda: processes.read_stat(stranger.pid) and _answers(lab.port))
        run_dir = lab.write_launch(is_proven=False, argv=(sys.executable, "-c", "import time; time.sleep(60)"))
        assert lab.start_keeper(run_dir).wait(60) == 1
        failed = lab.wait_state(run_dir, "failed")
        assert failed.kind == "foreign_port"
        assert failed.cause == f"port {lab.port} is answered by process {stranger.pid}, not by this engine"
    finally:
        stranger.kill()
        stranger.wait()


def test_a_keeper_is_small_and_idle(lab: Lab) -> None:
    run_dir = lab.write_launch()
    keeper = lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    status = Path(f"/proc/{keeper.pid}/status").read_text()
    anonymous_kib = int(status.split("RssAnon:")[1].split()[0])
    assert anonymous_kib < 14 << 10
    maps = Path(f"/proc/{keeper.pid}/maps").read_text()
    assert not any(name in maps for name in ("libtorch", "pydantic_core", "numpy"))
    keeper.terminate()
    assert keeper.wait(60) == 0


def test_a_program_that_does_not_exist_fails_in_words(lab: Lab) -> None:
    run_dir = lab.write_launch(argv=("/nowhere/engine",), is_proven=False)
    assert lab.start_keeper(run_dir).wait(60) == 1
    assert lab.wait_state(run_dir, "failed").cause == "`/nowhere/engine` cannot be started: No such file or directory"


def test_events_are_typed_lines_in_the_order_in_which_they_happened(lab: Lab) -> None:
    run_dir = lab.write_launch()
    keeper = lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    keeper.terminate()
    keeper.wait(60)
    events = list(read_events(run_dir / "events.jsonl"))
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert events[1].data["engine"]["pid"] > 0


def lab_engine(port: int) -> list[str]:
    from tests.fakes.fake_adapter import ENGINE

    return [sys.executable, str(ENGINE), "--port", str(port)]


def _answers(port: int) -> bool:
    from freetoken.supervisor.health import probe_health

    return probe_health("127.0.0.1", port).status == "ready"


def _ready_after(lab: Lab, run_dir: Path, restarts: int):  # type: ignore[no-untyped-def]
    state = lab.keeper_state(run_dir)
    return state if state and state.state == "ready" and state.restarts == restarts else None


def _start_limited(run_dir: Path, limit: int) -> subprocess.Popen[bytes]:
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    argv = [sys.executable, "-m", "freetoken.supervisor.keeper", str(run_dir)]
    return subprocess.Popen(argv, preexec_fn=limit_files, start_new_session=True, stderr=subprocess.DEVNULL)
