import json
import os
import signal
import subprocess
import sys

import click
import pytest

from freetoken import paths
from freetoken.cli import main as main_module
from freetoken.cli.main import main
from freetoken.errors import DoesNotFitError


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs `ft explode` with a body of the test's choice; code, stdout, stderr."""
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FT_DEBUG", raising=False)

    def call(body, *arguments):
        command = click.command("explode")(click.option("--json", "as_json", is_flag=True)(lambda as_json: body()))
        monkeypatch.setattr(main_module.LazyGroup, "get_command", lambda self, ctx, name: command)
        with pytest.raises(SystemExit) as caught:
            main(["explode", *arguments])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


def test_a_failure_is_told_with_all_findings_its_hint_and_its_code(run):
    def fail():
        raise DoesNotFitError("`m` needs 12.9 GiB", hint="`--set a=1`", details=("and this", "and that"))

    told = "error: `m` needs 12.9 GiB\n       and this\n       and that\nhint: `--set a=1`\n"
    assert run(fail) == (3, "", told)
    code, out, err = run(fail, "--json")
    error = {
        "message": "`m` needs 12.9 GiB",
        "hint": "`--set a=1`",
        "details": ["and this", "and that"],
        "exit_code": 3,
    }
    assert (code, json.loads(out), err) == (3, {"error": error}, told)


@pytest.mark.parametrize("error", [KeyboardInterrupt, click.Abort])
def test_an_interrupt_ends_with_130(run, error):
    def stop():
        raise error

    code, out, err = run(stop)
    # click ends the line that a `^C` stands on.
    assert (code, out, err.lstrip("\n")) == (130, "", "error: interrupted\n")


def test_the_number_that_a_command_returns_is_the_exit_code(run):
    assert [run(lambda value=value: value)[0] for value in (None, 0, 3, 6)] == [0, 0, 3, 6]


def test_a_bug_is_told_in_a_line_and_its_traceback_kept(run, monkeypatch):
    def crash():
        raise ZeroDivisionError("by zero")

    code, out, err = run(crash)
    log = paths.state_dir() / "errors.log"
    assert (code, out) == (1, "")
    assert err == (
        f"error: unexpected ZeroDivisionError: by zero\nhint: full traceback in {log}; this is a bug in `ft`\n"
    )
    assert "Traceback" in log.read_text()
    assert "ZeroDivisionError: by zero" in log.read_text()
    monkeypatch.setenv("FT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["explode"])


def test_a_bug_without_a_place_for_its_traceback_says_how_to_see_it(run, monkeypatch, tmp_path):
    (tmp_path / "state").write_text("a file")
    _, _, err = run(lambda: 1 / 0)
    assert err.endswith("hint: set FT_DEBUG=1 to see the traceback\n")


def test_the_state_option_moves_the_state_folder(run, monkeypatch, tmp_path):
    seen = []
    command = click.command("x")(lambda: seen.append(paths.state_dir()))
    monkeypatch.setattr(main_module.LazyGroup, "get_command", lambda self, ctx, name: command)
    with pytest.raises(SystemExit):
        main(["--state", str(tmp_path / "other"), "x"])
    paths.set_state_dir(None)
    assert seen == [tmp_path / "other"]


def test_ctrl_c_while_modules_load_leaves_no_traceback(tmp_path):
    (tmp_path / "click.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    done = subprocess.run(
        [sys.executable, "-m", "freetoken", "--help"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
