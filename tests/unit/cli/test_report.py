"""`ft report`: which study is meant, where the page goes, what is told of it."""

import os
import shutil
import threading

import pytest

from freetoken import paths
from freetoken.store import open_store
from freetoken.store.rows import LineContext, MeasuredLine
from freetoken.tuner.confirm import Confirmation
from freetoken.tuner.record import StudyResult, write_result
from freetoken.tuner.storage import open_storage
from freetoken.tuner.values import Outcome
from tests.fakes.studies import make_search
from tests.fakes.tuning import ScriptedLauncher

NAME = "demo-code-4k-turn_time-0123abcd"
GAIN = Confirmation(verdict="gain", objective="turn_time", gain=0.25, gain_low=0.2, gain_high=0.3)


class Launcher(ScriptedLauncher):
    """Measures under a run id, as the real one does."""

    def measure(self, *, is_unseen=False) -> Outcome:
        return super().measure(is_unseen=is_unseen).model_copy(update={"run_id": f"run-{self.starts}"})


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """A storage with two studies of `demo`, the second hardly begun; made once, since its tables take a second."""
    path = tmp_path_factory.mktemp("studies") / "studies.db"
    storage = open_storage(f"sqlite:///{path}")
    search = make_search(storage, NAME, launcher=Launcher(2), trials=8)
    end = search.run()
    write_result(search.study, StudyResult(
        reason=end.reason, finished_at="2031-05-04T10:15:00.000Z", best=end.best.point, confirmation=GAIN
    ))  # fmt: skip
    make_search(storage, f"{NAME}.2")
    return path


@pytest.fixture
def studies(ft, database):
    paths.state_dir().mkdir(parents=True)
    shutil.copy(database, paths.studies_path())
    return f"sqlite:///{paths.studies_path()}"


def test_a_named_study_is_written_beside_what_stands_here(ft, ft_json, studies, tmp_path):
    code, out, err = ft("report", NAME)
    page = tmp_path / f"{NAME}.html"
    assert code == 0
    assert out.startswith(f"{NAME}.html  4.")
    assert out.endswith(" MiB, 6 plots of 8 trials\n")
    assert err == "not drawn: lines: this state folder keeps no ledger of the best trial's run\n"
    assert f"Held against the baseline: {GAIN.describe()}." in page.read_text(encoding="utf-8")
    (tmp_path / "deep").mkdir()
    code, document = ft_json("report", NAME, "-o", "deep/r.html")
    assert (code, document["path"], document["trials"]) == (0, "deep/r.html", 8)
    assert (tmp_path / "deep" / "r.html").stat().st_size == document["bytes"]


def test_a_recipe_means_its_newest_study_and_that_is_said(ft, studies):
    code, out, err = ft("report", "demo")
    assert (code, out.split()[0]) == (0, f"{NAME}.2.html")
    assert err.startswith(f"study `{NAME}.2`, the newest of 2\n")
    assert "not drawn: front: there is no trial yet\n" in err


def test_the_ledger_of_the_best_trials_run_comes_from_the_store(ft_json, studies):
    with open_store() as store:
        for number in range(1, 5):
            line = MeasuredLine(ledger="vram", key="expert_slots", planned_bytes=4 << 30, measured_bytes=5 << 30)
            store.record_measured_lines(f"run-{number}", (line,), LineContext(engine="native"))
    _, document = ft_json("report", NAME)
    assert document["missing"] == {}
    assert document["drawn"]["lines"] == "Planned against measured memory, line by line"


def test_a_dash_writes_the_page_to_stdout(ft, studies, tmp_path):
    code, out, _ = ft("report", NAME, "-o", "-")
    assert (code, out[:15], out.rstrip()[-7:]) == (0, "<!doctype html>", "</html>")
    assert list(tmp_path.glob("*.html")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report",), f"error: which study? there are `{NAME}.2`, `{NAME}`"),
        (("report", "dmo"), "error: no study `dmo`; did you mean `demo`?"),
        (("report", NAME, "-o", "."), "error: . is a folder"),
        (
            ("report", NAME, "-o", "none/r.html"),
            "error: cannot write none/r.html: there is no folder none\nhint: mkdir",
        ),
        (("report", NAME, "--storage", "sqlite:///none.db"), "error: there is no file none.db"),
        (("report", NAME, "--storage", "rubbish"), "error: the storage `rubbish` cannot be opened: "),
    ],
)
def test_wrong_usage_is_told_with_exit_code_2(ft, studies, tmp_path, arguments, message):
    code, out, err = ft(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert list(tmp_path.glob("*.html")) == []


def test_where_nothing_was_tuned_nothing_is_made(ft, tmp_path):
    code, out, err = ft("report")
    assert (code, out) == (2, "")
    assert err.startswith("error: nothing was tuned here yet: there is no ")
    assert err.endswith("hint: `ft tune RECIPE`\n")
    assert list(tmp_path.iterdir()) == []


def test_a_page_goes_into_a_pipe_and_through_a_symlink(ft, ft_json, studies, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    code, document = ft_json("report", NAME, "-o", "pipe")
    reader.join(60)
    assert (code, document["bytes"], (tmp_path / "pipe").is_fifo()) == (0, len(found[0]), True)
    (tmp_path / "link.html").symlink_to("real.html")
    assert ft("report", NAME, "-o", "link.html")[0] == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_bytes() == found[0]


def test_the_shell_is_offered_studies_and_recipes(ft, monkeypatch):
    from freetoken.tuner.status import TuneStatus, write_status

    write_status(TuneStatus(study=NAME, recipe="demo", workload="code-4k", objective="turn_time"))
    monkeypatch.setenv("_FT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "ft report de")
    monkeypatch.setenv("COMP_CWORD", "2")
    code, out, _ = ft()
    assert (code, out.splitlines()) == (0, ["plain,demo", f"plain,{NAME}"])
