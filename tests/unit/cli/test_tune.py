import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from freetoken.cli import tune
from freetoken.recipe.load import load_recipe
from freetoken.tuner.confirm import judge
from freetoken.tuner.objectives import OBJECTIVES
from freetoken.tuner.outcome import TuneResult
from freetoken.tuner.session import Session
from freetoken.tuner.status import TuneStatus, write_status
from freetoken.tuner.values import Measurement


@pytest.mark.parametrize("budget", ["0", "0s", "nan", "-5"])
def test_a_budget_that_is_no_time_is_refused_with_an_example(ft, budget):
    code, out, err = ft("tune", "demo", "--budget", budget)
    assert (code, out) == (2, "")
    assert "45m" in err


def test_the_help_says_what_the_budget_counts(ft):
    _, out, _ = ft("tune", "--help")
    assert "search, confirmation and starting again what ran" in " ".join(out.split())


def test_a_second_study_in_the_background_is_refused_in_the_foreground(ft, monkeypatch):
    child = Child("")
    monkeypatch.setattr(tune, "subprocess", child)
    session = Session(load_recipe("demo"))
    with session._take_lock(session.prepare()):
        code, out, err = ft("tune", "demo", "--detach")
    assert (code, out) == (1, "")
    assert "one study at a time: ft tune of `demo`" in err
    assert child.process is None


class Child:
    """`subprocess` in which a `Popen` runs what a test says, with the log's path as its argument."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, program):
        self.program, self.process = program, None

    def Popen(self, command, **options):
        assert command[-2] == "--detached-log"
        self.process = subprocess.Popen([sys.executable, "-c", self.program, command[-1]], **options)
        return self.process


def test_a_study_that_fails_to_begin_ends_the_command_as_it_ends_itself(ft, monkeypatch):
    child = Child("import sys; sys.exit('error: one study at a time')")
    monkeypatch.setattr(tune, "subprocess", child)
    code, out, err = ft("tune", "demo", "--detach")
    assert (code, out) == (1, "")
    assert "error: one study at a time" in err


def test_a_study_in_the_background_is_one_json_document(ft_json, monkeypatch):
    child = Child("import time; time.sleep(60)")
    monkeypatch.setattr(tune, "subprocess", child)

    def begin(seconds):
        # What the study writes first of all, and where its log is.
        (log,) = tune.Path("state/tune").absolute().glob("*.log")
        write_status(TuneStatus(study="s", recipe="demo", workload="w", objective="turn_time", log=str(log)))

    monkeypatch.setattr(tune, "time", SimpleNamespace(sleep=begin, monotonic=time.monotonic, strftime=time.strftime))
    code, document = ft_json("tune", "demo", "--detach")
    child.process.kill()
    child.process.wait()
    assert code == 0
    (log,) = tune.Path("state/tune").absolute().glob("*.log")
    assert document == {"kind": "detached", "process": child.process.pid, "log": str(log), "has_begun": True}


def test_a_result_shows_both_comparisons_and_only_the_knobs_that_matter(capsys):
    def block(turn_time_s):
        return Measurement(decode_tps=200, ttft_s=0.5, turn_time_s=turn_time_s, noise_ratio=0.002)

    slow, fast, given = ([block(one), block(one)] for one in (2.5, 1.7, 2.0))
    turn_time = OBJECTIVES["turn_time"]
    versus = judge(given, fast, turn_time)
    result = TuneResult(
        study="s", recipe="r", workload="w", objectives=("turn_time",), reason="3 starts were made", trials=5, starts=3,
        crashes=0, duration_s=600.0, best={"strategy": "offload", "expert_slots": 900},
        baseline={"strategy": "hybrid", "expert_slots": 400, "cpu_threads": 8}, baseline_words="the default",
        confirmation=judge(slow, fast, turn_time).model_copy(update={"imported": versus}),
    )  # fmt: skip
    tune._render(result, Console(width=120, file=sys.stdout))
    out = capsys.readouterr().out
    assert "proof      confirmed on unseen prompts: +47.1%" in out
    assert f"imported   against the best imported setting: {versus.describe_interval()}" in out
    rows = [line.split() for line in out.splitlines()]
    # What the other strategy alone has stands on the baseline's side.
    assert ["cpu_threads", "8"] in rows
    assert ["expert_slots", "400", "900"] in rows
