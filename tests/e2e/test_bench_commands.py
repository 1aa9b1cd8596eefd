"""`ft bench run` and `ft workload` as commands, against an engine process of known speed."""

import json

import pytest

from freetoken.cli.bench_run import command as bench_run
from freetoken.deploy.measure import Target, measure_target
from freetoken.recipe.model import Recipe
from freetoken.store import open_store
from tests.fakes.precise import run_precise_engine
from tests.unit.cli.conftest import ft, ft_json  # noqa: F401  (fixtures)

WORKLOAD = "name: w\nturns: 2\nprompt_tokens: 60\noutput_tokens: 12\n"


@pytest.fixture(scope="module")
def engine():
    with run_precise_engine("--ttft-s", 0.02, "--itl-s", 0.002, "--counts") as url:
        yield url


def test_a_run_is_shown_and_kept_for_results(ft, ft_json, engine, tmp_path):  # noqa: F811
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    code, out, err = ft("bench", "run", "--base-url", engine, "--workload", "w.yaml", "--repeats", "2")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == f"w on {engine}, 2 repeats"
    assert [line.split("  ")[0] for line in lines[2:5]] == ["turn time", "turn time p95", "TTFT"]
    assert "4 requests" in out
    assert "w: repeat 2 of 2" in err
    _, rows = ft_json("results")
    assert [(one["workload"], one["kind"], one["invalid_because"]) for one in rows] == [("w", "bench", "")]
    assert {"decode_tps", "decode_tps_low", "decode_tps_high", "turn_time_s", "ttft_p95_ms"} <= set(rows[0]["metrics"])


def test_json_is_one_document_with_intervals_and_requests(ft_json, engine, tmp_path):  # noqa: F811
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    code, document = ft_json("bench", "run", "--base-url", engine, "--workload", "w.yaml", "--repeats", "1")
    assert code == 0
    result = document["result"]
    assert set(result["metrics"]["decode_tps"]) == {"mean", "low", "high", "n"}
    assert (len(result["requests"]), result["is_valid"], document["checks"]) == (2, True, [])


def test_without_a_workload_or_an_engine_it_says_what_to_type(ft, engine):  # noqa: F811
    code, _, err = ft("bench", "run", "--base-url", engine)
    assert (code, err.splitlines()[1]) == (2, "hint: `--workload code-4k`; `ft workload list`")
    code, _, err = ft("bench", "run")
    assert (code, err.splitlines()[0]) == (2, "error: no deployment runs")
    code, _, err = ft("bench", "run", "--base-url", "127.0.0.1:9", "--workload", "code-4k")
    assert (code, "cannot be reached" in err) == (1, True)


def test_targets_of_the_recipe_are_checked_and_strict_exits_with_5(ft, engine, tmp_path, monkeypatch):  # noqa: F811
    workload = {"name": "w", "prompt_tokens": 60, "output_tokens": 12}
    recipe = Recipe.model_validate({
        "name": "r", "model": {"path": "demo"}, "workload": workload,
        "good_enough": {"ttft_p95": "10s", "decode_tps": ">=1000000"},
    })  # fmt: skip
    target = Target("r", engine, recipe=recipe)
    monkeypatch.setattr("freetoken.cli.bench_run._find_target", lambda *_: target)
    code, out, err = ft("bench", "run", "--repeats", "1", "--strict")
    assert code == 5
    assert "met: `ttft_p95` is" in out
    assert "error: `r` misses 1 of 2 targets" in err
    assert "at least 1e+06 tok/s wanted" in err
    assert ft("bench", "run", "--repeats", "1")[0] == 0


def test_a_result_is_kept_in_the_run_folder_from_which_the_store_is_made_anew(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("FT_STATE", str(tmp_path))
    folder = tmp_path / "runs" / "20310504-093000-125-3fa9c2"
    folder.mkdir(parents=True)
    recipe = Recipe.model_validate(
        {"name": "r", "model": {"path": "demo"}, "workload": {"name": "w", "output_tokens": 8}}
    )
    report = measure_target(Target("r", engine, run_dir=folder, recipe=recipe), recipe.workload, repeats=1)
    assert report.warning == ""
    kept = json.loads((folder / "results.jsonl").read_text())
    with open_store() as store:
        (row,) = store.list_results()
    assert row.model_dump(mode="json", exclude={"id"}) == {key: one for key, one in kept.items() if key != "id"}


def test_workloads_are_listed_and_shown_with_a_prompt_of_real_text(ft, ft_json):  # noqa: F811
    _, entries = ft_json("workload", "list")
    assert [one["name"] for one in entries] == ["agent-32k", "agent-8k", "batch-8", "chat-2k", "code-4k", "long-64k"]
    assert ft("workload", "list")[1].splitlines()[0].split()[:3] == ["workload", "turns", "prefix"]
    _, shown = ft_json("workload", "show", "batch-8")
    assert (shown["kv_tokens"], shown["largest_prompt_tokens"]) == (8 * 1536, 1024)
    assert len(shown["sample"]) > 500
    assert "context_tokens         1536" in ft("workload", "show", "batch-8")[1]


def test_an_import_makes_a_workload_that_replays(ft, ft_json, engine, tmp_path):  # noqa: F811
    secret = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"
    line = {"messages": [{"role": "user", "content": f"one {secret}"}, {"role": "assistant", "content": "1"},
                         {"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}]}  # fmt: skip
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\nbroken\n")
    code, document = ft_json("workload", "record", "--import", "log.jsonl", "--out", "mine.jsonl")
    assert (code, document["requests"], document["left_out"]) == (0, 2, ["log.jsonl:2: no JSON object"])
    assert secret not in (tmp_path / "mine.jsonl").read_text()
    code, document = ft_json("bench", "run", "--base-url", engine, "--workload", "mine.yaml", "--repeats", "1")
    assert code == 0
    assert [one["turn"] for one in document["result"]["requests"]] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "x.jsonl"), "error: give either `--listen PORT` or `--import FILE`"),
        (("--import", "no.jsonl", "--out", "x.json"), "error: `--out x.json` should end in `.jsonl`"),
        (("--import", "no.jsonl", "--out", "x.jsonl"), "error: no.jsonl cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_of_record_is_told(ft, arguments, words):  # noqa: F811
    code, _, err = ft("workload", "record", *arguments)
    assert (code, err.splitlines()[0].startswith(words)) == (2, True)


def test_the_command_is_the_one_that_the_group_finds():
    from freetoken.cli.bench import command

    assert command.get_command(None, "run") is bench_run
