"""The commands themselves, as processes: words and exit codes, kill -9 in the middle, eight at once."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from freetoken.store import open_store
from freetoken.supervisor import register
from freetoken.supervisor.process import is_alive
from tests.e2e.life import Lab, find_free_port, make_lab, stop_all, wait_for  # noqa: F401


def test_apply_status_logs_and_stop_say_what_they_did(lab: Lab) -> None:
    recipe = str(lab.write_recipe())
    applied = lab.ft("apply", recipe, "--json")
    assert applied.returncode == 0, applied.stderr
    result = json.loads(applied.stdout)
    assert (result["name"], result["diff"]["action"], result["proof"]["expert_slots"]) == ("lab", "launch", 16)
    phases = [json.loads(line)["phase"] for line in applied.stderr.splitlines()]
    assert [phase for phase in dict.fromkeys(phases) if phase != "load"] == ["plan", "launch", "prove"]
    status = lab.ft("status")
    assert status.returncode == 0
    assert status.stdout.splitlines()[0] == "lab: ready"
    logs = lab.ft("logs", "-n", "1")
    assert logs.stdout == "fake engine: offload, 16 slots\n"
    dry = lab.ft("stop", "--dry-run")
    assert len([line for line in dry.stdout.splitlines() if "would end process" in line]) == 2
    assert lab.life().condition == "ready"
    stopped = lab.ft("stop", "lab")
    assert (stopped.returncode, stopped.stdout) == (0, "lab: stopped on request: engine ended by SIGINT\n")
    again = lab.ft("stop", "lab")
    assert (again.returncode, again.stdout) == (0, "`lab` does not run\n")
    after = lab.ft("status")
    assert after.returncode == 0
    assert after.stdout.splitlines()[0] == "lab: stopped: on request: engine ended by SIGINT"


def test_status_is_6_when_what_was_declared_does_not_run(lab: Lab) -> None:
    lab.apply()
    life = lab.life()
    lab.kill(life.keeper)
    lab.kill(life.engine)
    wait_for(lambda: not is_alive(life.engine))
    status = lab.ft("status")
    assert status.returncode == 6
    assert status.stdout.splitlines()[0] == "lab: not running: keeper and engine are both gone, killed from outside"
    assert lab.ft("status", "nobody").returncode == 2


def test_refusal_failed_start_and_full_log_have_their_codes_and_words(lab: Lab) -> None:
    refused = lab.ft("apply", str(lab.write_recipe(expert_slots=200)))
    assert (refused.returncode, refused.stderr.splitlines()[-1]) == (3, "error: `lab` needs 200 slots, 100 fit")
    failed = lab.ft("apply", str(lab.write_recipe(engine="--exit-at-start, '3'")))
    assert failed.returncode == 4
    assert "error: `lab` never became ready: engine ended with code 3, before it was ready" in failed.stderr
    full = lab.ft("apply", str(lab.write_recipe()), env={"FT_FAKE_LOG": "/dev/full"})
    assert full.returncode == 4
    words = "engine not started: no space for /dev/full: No space left on device"
    assert f"error: `lab` never became ready: {words}" in full.stderr
    status = lab.ft("status")
    assert (status.returncode, status.stdout.splitlines()[0]) == (6, f"lab: not running: {words}")


@pytest.mark.parametrize("phase", ["launch", "load", "prove"])
def test_ft_killed_in_mid_apply_leaves_what_the_next_apply_adopts_or_ends(lab: Lab, phase: str) -> None:
    recipe = str(lab.write_recipe(engine="--load-s, '1.0'"))
    killed = lab.ft("apply", recipe, env={"FT_FAKE_KILL_AT": phase})
    assert killed.returncode == -signal.SIGKILL
    before = register.read_records()
    if phase != "launch":  # at `launch` nothing was registered yet, so nothing can have been started
        status = lab.ft("status")
        assert status.returncode == 6
        assert status.stdout.startswith("lab: starting (unproven)")
        assert "the `ft` that launched it is gone" in status.stdout
    applied = lab.ft("apply", recipe, "--json")
    assert applied.returncode == 0, applied.stderr
    result = json.loads(applied.stdout)
    assert result["proof"] is not None
    if phase != "launch":
        assert (result["diff"]["action"], result["run_id"]) == ("nothing", before[0].run_id)
    assert lab.life().condition == "ready"
    stop_all()


def test_ft_stop_ends_what_a_killed_apply_left(lab: Lab) -> None:
    killed = lab.ft("apply", str(lab.write_recipe(engine="--load-s, '30'")), env={"FT_FAKE_KILL_AT": "load"})
    assert killed.returncode == -signal.SIGKILL
    stopped = lab.ft("stop")
    assert (stopped.returncode, stopped.stdout[:30]) == (0, "lab: stopped on request: engine"[:30])
    assert register.read_records() == ()


def test_sigterm_and_ctrl_c_end_what_was_started_with_130(lab: Lab) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process = lab.start_ft("apply", str(lab.write_recipe(engine="--load-s, '30'")))
        wait_for(lambda: any(lab.life().engine for _ in register.read_records()))
        process.send_signal(number)
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 130, errors
        assert register.read_records() == ()


def test_eight_applies_of_one_recipe_at_once_launch_one_engine(lab: Lab) -> None:
    recipe = str(lab.write_recipe())
    processes = [lab.start_ft("apply", recipe, "--json") for _ in range(8)]
    results = [_finish(process) for process in processes]
    assert sorted(result["diff"]["action"] for result in results) == ["launch", *["nothing"] * 7]
    assert len({result["run_id"] for result in results}) == 1
    assert len(lab.run_dirs()) == 1
    stop_all()


def test_eight_commands_of_all_kinds_at_once_neither_fail_nor_lose_anything(lab: Lab) -> None:
    recipes = [str(lab.write_recipe(f"lab{index}", port=find_free_port())) for index in range(4)]
    applies = [lab.start_ft("apply", recipe, "--json") for recipe in recipes]
    looks = [lab.start_ft("status", "--json") for _ in range(4)]
    assert [_finish(process)["diff"]["action"] for process in applies] == ["launch"] * 4
    for process in looks:
        output, errors = process.communicate(timeout=150)
        assert process.returncode in (0, 6), errors
        json.loads(output)
    with open_store() as store:
        assert sorted(run.deployment for run in store.list_runs()) == ["lab0", "lab1", "lab2", "lab3"]
    assert sorted(record.name for record in register.read_records()) == ["lab0", "lab1", "lab2", "lab3"]
    assert lab.ft("status").returncode == 0
    stopped = lab.ft("stop", "--all", "--json")
    assert [one["is_port_free"] for one in json.loads(stopped.stdout)] == [True] * 4


def test_no_wait_says_who_is_changing_the_deployment(lab: Lab) -> None:
    recipe = str(lab.write_recipe(engine="--load-s, '3'"))
    first = lab.start_ft("apply", recipe, "--json")
    wait_for(register.read_records)
    second = lab.ft("apply", recipe, "--no-wait")
    assert second.returncode == 1
    assert f"(process {first.pid})" in second.stderr
    _finish(first)
    stop_all()


def _finish(process: subprocess.Popen[str]):  # type: ignore[no-untyped-def]
    output, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return json.loads(output)
