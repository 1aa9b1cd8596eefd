import json
from pathlib import Path

import pytest

from freetoken.errors import BadFileError
from freetoken.store import open_store, read_store
from freetoken.store.rebuild import RebuildReport, StudyFact, append_facts, append_study_fact, rebuild_from_runs
from freetoken.store.rows import DeploymentRow, EventRow, LineContext, MeasuredLine, ResultRow, RunFacts, RunRow

PLAN = {"kind": "plan", "recipe_name": "demo", "engine": "native", "engine_version": "0.1.0", "model_name": "demo-moe"}
EVENT = {"at": "2031-01-01T00:00:00.000Z", "kind": "proven", "message": "ok", "data": {"ttft_s": 0.5}}


def make_folder(runs, name, *, state="stopped"):
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text(json.dumps({"name": "demo", "created_at": "2031-01-01T00:00:00Z"}))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "keeper.json").write_text(
        json.dumps({"state": state, "exit_code": 0, "ended_at": "2031-01-01T01:00:00Z"})
    )
    (folder / "events.jsonl").write_text(json.dumps(EVENT) + "\n" + '{"at": "2031-01-01T00:00:01.000Z", "ki')
    return folder


def make_facts(hardware, name):
    run = RunRow(id=name, deployment="demo", engine="native", model_name="demo-moe", ready_s=2.0, plan=PLAN)
    line = MeasuredLine(ledger="ram", key="kv_cache", planned_bytes=100, measured_bytes=110)
    return RunFacts(
        fingerprint="f00d", hardware=hardware, run=run, lines=(line,), context=LineContext(engine="native"),
        deployment=DeploymentRow(name="demo", run_id=name, engine="native", model_name="demo-moe", recipe={}),
        results=(ResultRow(recipe_name="demo", workload="chat-2k", engine="native", model_name="m", kind="proof"),),
    )  # fmt: skip


def test_the_database_is_made_anew_from_the_run_folders(tmp_path, path, hardware):
    runs = tmp_path / "runs"
    proven = make_folder(runs, "1-proven")
    facts = make_facts(hardware, "1-proven")
    append_facts(proven, facts)
    append_facts(proven, facts.model_copy(update={"deployment": None, "results": ()}))
    make_folder(runs, "2-bare", state="failed")
    (runs / "3-empty").mkdir()
    path.parent.mkdir()
    path.write_bytes(b"rubbish" * 100)

    report = rebuild_from_runs(runs, path)

    skipped = ("3-empty: no `launch.json` or `plan.json` that can be read",)
    assert report == RebuildReport(runs=2, events=2, results=1, set_aside=report.set_aside, skipped=skipped)
    assert Path(report.set_aside).read_bytes() == b"rubbish" * 100
    with read_store(path) as store:
        rows = {run.id: (run.outcome, run.ready_s, run.ended_at) for run in store.list_runs()}
        assert rows == {
            "1-proven": ("stopped", 2.0, "2031-01-01T01:00:00Z"),
            "2-bare": ("failed", None, "2031-01-01T01:00:00Z"),
        }
        event = EventRow(run_id="2-bare", **EVENT)
        assert [one.model_copy(update={"id": None}) for one in store.list_events("2-bare")] == [event]
        assert [one.recipe_name for one in store.list_results()] == ["demo"]
        assert store.list_machines()[0].hardware == hardware
        assert store.list_measured_lines("1-proven")[0].measured_bytes == 110
    assert sorted(one.name for one in path.parent.iterdir() if one.name.startswith(".")) == []


def test_a_good_database_is_set_aside_with_its_rows(tmp_path, path):
    with open_store(path) as store:
        store.record_event(EventRow(run_id="r1", kind="old"))
    report = rebuild_from_runs(tmp_path / "none", path)
    with open_store(path) as store:
        assert store.list_events("r1") == ()
    with open_store(Path(report.set_aside)) as old:
        assert [one.kind for one in old.list_events("r1")] == ["old"]


def test_rebuilding_where_nothing_is_makes_an_empty_database(tmp_path, path):
    assert rebuild_from_runs(tmp_path / "none", path) == RebuildReport(runs=0, events=0, results=0)
    assert path.is_file()


def test_a_newer_database_is_not_rebuilt_over(tmp_path, path):
    store = open_store(path)
    store.connection.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(BadFileError, match="has version 99"):
        rebuild_from_runs(tmp_path / "none", path)
    assert not list(path.parent.glob("*.old"))


def make_trial(kind="trial", **changes):
    facts = {"recipe_name": "demo", "workload": "code-4k", "engine": "native", "model_name": "m", "kind": kind}
    return ResultRow(**(facts | changes))


def test_rows_of_studies_come_back_from_their_files_and_half_a_line_is_named(tmp_path, path, hardware):
    rows = [make_trial(run_id="1-trial"), make_trial("tuned", metrics={"gain_ratio": 0.2})]
    for row in rows:
        append_study_fact(
            tmp_path / "tune", "demo-code-4k-aa", StudyFact(fingerprint="f", hardware=hardware, result=row)
        )
    with (tmp_path / "tune" / "demo-code-4k-aa.results.jsonl").open("a") as stream:
        stream.write('{"fingerprint": "f", "ha')
    report = rebuild_from_runs(tmp_path / "none", path, tmp_path / "tune")
    assert (report.results, report.skipped) == (2, ("demo-code-4k-aa.results.jsonl: 1 line that cannot be read",))
    with read_store(path) as store:
        found = [one.model_copy(update={"id": None, "machine_id": None}) for one in store.list_results()]
        assert found == rows[::-1]
        assert store.read_tuned("f", engine="native", model_name="m", workload="code-4k").kind == "tuned"


def test_rows_of_studies_that_stand_in_no_file_are_not_lost_without_a_word(tmp_path, path):
    with open_store(path) as store:
        for row in (make_trial(), make_trial(), make_trial("bench")):
            store.record_result(row)
    report = rebuild_from_runs(tmp_path / "none", path, tmp_path / "tune")
    assert report.skipped == ("2 rows of `ft tune` that no file keeps; the old database has them",)
