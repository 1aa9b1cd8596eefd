"""Records, identities, locks and the files under them, in a runtime folder of the test's own."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from freetoken.errors import FtError
from freetoken.supervisor import life, register
from freetoken.supervisor.files import EventLog, read_events, read_json, write_json
from freetoken.supervisor.launch import (
    KeeperPolicy,
    KeeperState,
    Launch,
    read_launch,
    read_state,
    write_launch,
    write_state,
)
from freetoken.supervisor.locks import FileLock, read_holder
from freetoken.supervisor.process import ProcessId, identify_self, is_alive, send_signal

LAUNCH = Launch(run_id="r1", name="demo", engine="native", argv=("engine", "--port", "1919"), port=1919)
GONE = ProcessId("another-boot", 1, 1)


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "r1").mkdir()


def test_a_record_comes_back_as_it_was_written_and_goes(tmp_path: Path) -> None:
    record = replace(register.make_record(LAUNCH, tmp_path / "r1"), keeper=identify_self(), extra_ports=(1920,))
    register.write_record(record)
    assert register.read_records() == (record,)
    register.update_record("r1", proven_at="now")
    assert register.read_record("r1") == replace(record, proven_at="now")
    register.remove_record("r1")
    register.update_record("r1", proven_at="later")
    assert register.read_records() == ()


def test_the_runtime_folder_is_private_even_where_it_was_not(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir(mode=0o755)
    assert stat.S_IMODE(os.stat(register.open_runtime_dir()).st_mode) == 0o700


def test_a_runtime_folder_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register.open_runtime_dir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(FtError, match="belongs to user"):
        register.open_runtime_dir()


def test_a_record_that_is_not_one_is_passed_over(tmp_path: Path) -> None:
    register.write_record(register.make_record(LAUNCH, tmp_path / "r1"))
    (tmp_path / "runtime" / "deployments" / "broken.json").write_text('{"name": ')
    (tmp_path / "runtime" / "deployments" / "older.json").write_text("{}")
    assert [record.run_id for record in register.read_records()] == ["r1"]


def test_launch_and_state_round_trip_and_ignore_keys_of_a_newer_version(tmp_path: Path) -> None:
    launch = replace(LAUNCH, extra_ports=(1920,), owner=identify_self(), policy=KeeperPolicy(max_restarts=7))
    write_launch(tmp_path, launch)
    assert read_launch(tmp_path) == launch
    write_json(tmp_path / "launch.json", {**launch.to_dict(), "from_the_future": 1})
    assert read_launch(tmp_path) == launch
    state = write_state(tmp_path, KeeperState("r1", keeper=identify_self(), problems=("full",)))
    assert read_state(tmp_path) == state


def test_the_newest_of_two_states_counts(tmp_path: Path) -> None:
    run_dir, fallback = tmp_path / "r1", tmp_path / "states"
    write_state(run_dir, KeeperState("r1", state="ready"))
    fallback.mkdir()
    newer = read_json(run_dir / "keeper.json")
    write_json(fallback / "r1.json", {**(newer or {}), "state": "failed", "updated_at": "9999"})
    assert read_state(run_dir, fallback_dir=fallback).state == "failed"  # type: ignore[union-attr]


def test_the_environment_of_an_engine_drops_adds_and_never_inherits_a_run_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from freetoken.supervisor.launch import make_base_environment

    monkeypatch.setenv("FT_RUN_ID", "outer")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    env = replace(LAUNCH, env={"A": "1"}, unset_env=("PYTHONPATH",)).make_environment(make_base_environment())
    assert (env["A"], "PYTHONPATH" in env, "FT_RUN_ID" in env) == ("1", False, False)


def test_a_lock_names_its_holder_and_is_free_after_it(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    with FileLock(path, "ft apply demo"):
        assert not FileLock(path).try_acquire()
        holder = read_holder(path)
        assert holder is not None
        assert holder.describe() == f"ft apply demo (process {os.getpid()})"
        waited: list[object] = []
        assert FileLock(path).acquire(timeout_s=0.0, on_wait=waited.append) is False
        assert waited == [holder]
    assert FileLock(path).try_acquire()


def test_a_lock_without_a_name_leaves_the_last_holder_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    path.write_text("{}")
    with FileLock(path, is_named=False):
        assert path.read_text() == "{}"


def test_identities_of_another_boot_and_of_a_reused_pid_are_dead_and_get_no_signal() -> None:
    own = identify_self()
    assert is_alive(own)
    for stranger in (replace(own, boot_id="another-boot"), replace(own, start_ticks=own.start_ticks - 1)):
        assert not is_alive(stranger)
        assert send_signal(stranger, 9) is False
    assert not is_alive(None)


def test_events_are_appended_typed_and_a_cut_line_is_passed_over(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert log.append("engine_started", "engine is process 7", pid=7)
    with open(log.path, "a") as file:
        file.write('{"at": "cut')
    assert [(event.kind, event.message, event.data) for event in read_events(log.path)] == [
        ("engine_started", "engine is process 7", {"pid": 7})
    ]


def test_an_event_that_a_full_disk_refuses_is_a_problem_and_no_exception() -> None:
    log = EventLog(Path("/dev/full"))
    assert log.append("failed", "x") is False
    assert log.problem == "no space for /dev/full: No space left on device"


@pytest.mark.parametrize(
    ("state", "launch", "condition", "words"),
    [
        (None, LAUNCH, "dead", "the `ft` that wanted to launch it is gone; nothing was started"),
        (
            None,
            replace(LAUNCH, owner=identify_self()),
            "launching",
            f"`ft apply` (process {os.getpid()}) is bringing it up",
        ),
        (KeeperState("r1", "ready", GONE, GONE), LAUNCH, "dead", "the machine was restarted since; nothing of it runs"),
        (KeeperState("r1", "failed", GONE, cause="boom"), LAUNCH, "failed", "boom"),
        (KeeperState("r1", "stopped", GONE, cause="asked"), LAUNCH, "stopped", "asked"),
    ],
    ids=["ft gone", "ft at work", "machine restarted", "failed", "stopped"],
)
def test_a_run_without_processes_is_judged_in_words(
    tmp_path: Path, state: KeeperState | None, launch: Launch, condition: str, words: str
) -> None:
    run_dir = tmp_path / "r1"
    write_launch(run_dir, launch)
    if state is not None:
        write_state(run_dir, state)
    found = life.examine(register.make_record(launch, run_dir))
    assert (found.condition, found.words) == (condition, words)


def test_closing_a_dead_run_writes_its_end_and_takes_it_out_of_the_register(tmp_path: Path) -> None:
    run_dir = tmp_path / "r1"
    write_launch(run_dir, LAUNCH)
    register.write_record(register.make_record(LAUNCH, run_dir))
    (closed,) = life.reconcile()
    assert closed.condition == "dead"
    assert register.read_records() == ()
    state = read_state(run_dir)
    assert state is not None
    assert (state.state, state.kind, state.cause) == ("failed", "abandoned", closed.words)
    assert [event.kind for event in read_events(run_dir / "events.jsonl")] == ["abandoned"]


def test_a_run_whose_folder_was_deleted_is_cleaned(tmp_path: Path) -> None:
    register.write_record(register.make_record(LAUNCH, tmp_path / "gone"))
    life.reconcile()
    assert register.read_records() == ()
