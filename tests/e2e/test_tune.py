"""`ft tune` on the demo model with the native engine: found, confirmed, written; killed in mid-trial, it goes on.

Nothing here hangs on how fast the machine is: budgets are there to be large enough, trials end the searches.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from freetoken.recipe.load import load_recipe

REPO = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1700)]


class Lab:
    def __init__(self, folder):
        self.folder = folder
        self.recipe = folder / "demo.yaml"
        shutil.copy(REPO / "recipes" / "demo.yaml", self.recipe)
        self.env = {
            **os.environ, "FT_STATE": str(folder / "state"), "FT_RUNTIME_DIR": str(folder / "run"),
            "OMP_NUM_THREADS": "2",
        }  # fmt: skip

    def ft(self, *arguments, module=("freetoken",), timeout_s=1500):
        command = [sys.executable, "-m", *module, *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, cwd=self.folder)

    def trials(self, study):
        """What came of each trial that was finished, and in which start."""
        found = optuna.load_study(study_name=study, storage=f"sqlite:///{self.folder / 'state' / 'studies.db'}")
        return [(json.loads(one.user_attrs["outcome"])["kind"], one.user_attrs["start"])
                for one in found.trials if "outcome" in one.user_attrs]  # fmt: skip

    def start(self, *arguments):
        command = [sys.executable, "-m", "freetoken", *arguments]
        log = (self.folder / "tune.err").open("wb")
        return subprocess.Popen(command, env=self.env, stdout=subprocess.DEVNULL, stderr=log, cwd=self.folder)

    def said(self):
        return (self.folder / "tune.err").read_text(errors="replace")


@pytest.fixture
def lab(tmp_path):
    found = Lab(tmp_path)
    yield found
    found.ft("stop", "--all", timeout_s=120)


def wait_for(look, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.2)
    raise AssertionError("not in time")


def test_a_setting_is_found_confirmed_and_only_then_written_and_taken_up(lab):
    # Three minutes are enough on two idle cores; a machine that got through one trial in them is given twelve.
    for budget in ("3m", "12m"):
        done = lab.ft("tune", "demo.yaml", "--workload", "code-4k", "--budget", budget, "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        result = json.loads(done.stdout)
        if result["trials"] >= 2:
            break
    assert result["best_figures"]["decode_tps"] > 0
    assert result["trials"] >= 2
    rows = json.loads(lab.ft("results", "--json").stdout)
    plan = json.loads(lab.ft("plan", "demo.yaml", "--json").stdout)
    origin = plan["provenance"]["settings.prefill_chunk_tokens"]
    kinds = {one["kind"] for one in rows}
    assert "trial" in kinds
    # Whether the machine confirms a gain is its own affair; nothing is changed without one.
    if result["is_tuned"]:
        tuned = load_recipe(result["tuned_recipe"])
        assert tuned.path == lab.folder / "demo.tuned.yaml"
        assert tuned.recipe.settings.prefill_chunk_tokens == result["best"]["prefill_chunk_tokens"]
        assert "tuned" in kinds
        assert origin.startswith("tuned result")
    else:
        assert result["tuned_recipe"] is None
        assert "tuned" not in kinds
        assert not origin.startswith("tuned result")
    # The study's own deployment is nobody's to see or to roll back.
    assert json.loads(lab.ft("status", "--json").stdout)["deployments"] == []
    # What a trial measured comes back without the database.
    (lab.folder / "state" / "ft.db").unlink()
    lab.ft("results", "--rebuild")
    again = json.loads(lab.ft("results", "--json").stdout)
    assert sorted(one["measured_at"] for one in again) == sorted(one["measured_at"] for one in rows)


def test_killed_in_mid_trial_it_resumes_with_that_trial_lost_alone(lab):
    arguments = ("tune", "demo.yaml", "--workload", "code-4k", "--budget", "1h", "--repeats", "1", "--trials", "3")
    process = lab.start(*arguments)
    wait_for(lambda: "trial 1: " in lab.said() and "\n" in lab.said().split("trial 1: ")[1], 700)
    process.send_signal(signal.SIGKILL)
    process.wait()
    status = json.loads(lab.ft("tune", "--status", "--json").stdout)
    assert [(one["state"], one["is_alive"]) for one in status] == [("running", False)]
    done = lab.ft(*arguments, "--resume", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 trial(s) of a process that is gone" in done.stderr
    result = json.loads(done.stdout)
    assert result["trials"] == 3
    assert (result["tuned_recipe"] is not None) == result["is_tuned"]


def test_an_engine_that_ooms_answers_garbage_or_hangs_costs_one_trial(lab):
    starts = lab.folder / "starts"
    starts.mkdir()
    lab.env |= {"FT_HURT_STARTS": str(starts), "PYTHONPATH": str(REPO)}
    done = lab.ft(
        "tune", "demo.yaml", "--workload", "code-4k", "--budget", "1h", "--repeats", "1", "--trials", "4", "--json",
        module=("tests.fakes.native_hurt", "oom,garbage,hang"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    # In the third start the first measurement comes through, and the second is given up.
    assert lab.trials(result["study"]) == [("crash", 1), ("garbage", 2), ("ok", 3), ("hang", 3)]
    assert (result["trials"], result["starts"], result["crashes"]) == (4, 3, 3)
    assert result["best_figures"]["decode_tps"] > 0
    assert (result["tuned_recipe"] is not None) == result["is_tuned"]
    assert json.loads(lab.ft("status", "--json").stdout)["deployments"] == []
