"""`ft plan`, `recipe`, `schema`, `results`, `engine`, `completion`: what they print, and that they touch nothing."""

import pytest

from freetoken import __version__, paths
from freetoken.planner.plan import Plan, Refusal
from freetoken.store import open_store
from freetoken.store.rows import ResultRow

MODEL = "nvidia/Qwen3.6-35B-A3B-NVFP4"
RECIPE = """\
name: mine
description: a test
model: {repo: nvidia/Qwen3.6-35B-A3B-NVFP4}
engine: {name: freetoken}
workload: agent-8k
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipes" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(RECIPE)
    return path


def test_plan_of_a_recipe_by_name_and_by_path_is_the_same_plan(ft_json, recipe):
    by_name = ft_json("plan", "mine", "--profile", "rtx-3060-12gb")
    by_path = ft_json("plan", "recipes/mine.yaml", "--profile", "rtx-3060-12gb")
    assert by_name == by_path
    code, document = by_name
    plan = Plan.model_validate(document)
    assert (code, plan.recipe_name, plan.hardware_name, plan.settings.kv_tokens) == (0, "mine", "rtx-3060-12gb", 8192)


def test_plan_of_a_bare_model_takes_engine_workload_and_sets_from_the_command_line(ft_json):
    options = ("--engine", "freetoken", "--workload", "code-4k", "--set", "settings.embed_on_host=true")
    code, document = ft_json("plan", MODEL, "--profile", "rtx-3060-12gb", *options)
    plan = Plan.model_validate(document)
    assert (code, plan.engine, plan.settings.kv_tokens, plan.settings.embed_on_host) == (0, "freetoken", 4096, True)
    assert plan.provenance["settings.embed_on_host"] == "command line"


def test_a_card_s_short_name_is_a_model_too(ft_json):
    code, document = ft_json("plan", "qwen3.6-35b-a3b-nvfp4", "--engine", "freetoken", "--profile", "rtx-3060-12gb")
    assert (code, Plan.model_validate(document).model_name) == (0, MODEL)


def test_a_plan_that_does_not_fit_is_a_refusal_with_exit_code_3(ft, ft_json):
    arguments = ("plan", MODEL, "--engine", "freetoken", "--profile", "gtx-1650-4gb")
    code, document = ft_json(*arguments)
    refusal = Refusal.model_validate(document)
    assert (code, refusal.kind, refusal.findings[0].check) == (3, "refusal", "gpu_generation")
    code, out, err = ft(*arguments)
    assert (code, err.splitlines()[0]) == (3, f"error: {refusal.message}")
    assert "does not fit; the least that was tried:" in out
    assert err.splitlines()[-1].startswith("hint: ")


def test_force_plans_what_was_refused_and_marks_it(ft_json):
    arguments = ("plan", MODEL, "--engine", "freetoken", "--profile", "gtx-1650-4gb", "--force")
    code, document = ft_json(*arguments)
    assert (code, Plan.model_validate(document).is_forced) == (0, True)


def test_plan_writes_nothing(ft, recipe, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert ft("plan", "mine", "--profile", "rtx-3060-12gb")[0] == 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mne", "no recipe, model card or folder `mne`; did you mean `mine`?"),
        ("qwen3.6-35b-a3b-nvfp5", "no recipe, model card or folder `qwen3.6-35b-a3b-nvfp5`; did you mean"),
        ("none.yaml", "none.yaml does not exist"),
        ("recipes", "recipes is a folder without a `config.json`, so no model"),
        ("notes.txt", "notes.txt is neither a recipe (`.yaml`) nor the folder of a model"),
    ],
)
def test_what_is_neither_recipe_nor_model_is_told(ft, recipe, tmp_path, target, message):
    (tmp_path / "notes.txt").write_text("")
    code, out, err = ft("plan", target)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


def test_an_unknown_engine_profile_or_key_is_told(ft, recipe):
    told = [ft("plan", "mine", *options) for options in (
        ("--engine", "vllm"), ("--engine", "nativ"), ("--profile", "rtx-3060-12g"), ("--set", "settings.kv_tokn=8k"),
    )]  # fmt: skip
    assert [code for code, _, _ in told] == [2, 2, 2, 2]
    firsts = [err.splitlines()[0] for _, _, err in told]
    assert firsts[0] == "error: engine `vllm` cannot be driven by this version"
    assert firsts[1].startswith("error: --set engine.name=nativ: `engine.name` is `nativ`, expected `native`,")
    assert firsts[2] == "error: no profile `rtx-3060-12g`; did you mean `rtx-3060-12gb`?"
    assert firsts[3].endswith("unknown key `settings.kv_tokn`; did you mean `settings.kv_tokens`?")


def test_what_has_no_effect_yet_is_noted_on_stderr(ft, recipe):
    _, out, err = ft("plan", "mine", "--profile", "rtx-3060-12gb", "--set", "tune.budget=1h")
    note = "note: `tune.budget` and `tune.trials` are for `ft tune`, which this version does not have\n"
    assert err == note
    assert note not in out


def test_recipes_are_listed_with_what_is_wrong_with_them(ft, ft_json, recipe, tmp_path):
    (tmp_path / "recipes" / "bad.yaml").write_text("name: bad\nbogus: 1\n")
    _, entries = ft_json("recipe", "list")
    mine = next(one for one in entries if one["name"] == "mine")
    bad = next(one for one in entries if one["name"] == "bad")
    assert mine == {"name": "mine", "path": "recipes/mine.yaml", "engine": "freetoken", "workload": "agent-8k",
                    "description": "a test", "problem": ""}  # fmt: skip
    assert bad["problem"].startswith("not usable: recipes/bad.yaml:1: `model` is missing")
    assert {"mine", "bad", "demo"} <= {one["name"] for one in entries}
    code, out, _ = ft("recipe", "list")
    assert code == 0
    assert "mine" in out


def test_a_shown_recipe_loads_as_itself(ft, recipe, tmp_path):
    code, out, _ = ft("recipe", "show", "mine", "--set", "settings.kv_tokens=16k")
    assert code == 0
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "mine.yaml").write_text(out)
    assert ft("recipe", "show", "again/mine.yaml")[1] == out
    assert "  kv_tokens: 16384\n" in out


def test_provenance_is_shown_for_each_value(ft, ft_json, recipe):
    _, out, _ = ft("recipe", "show", "mine", "--set", "serve.port=2000", "--provenance")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert rows["model.repo"] == [MODEL, "recipe recipes/mine.yaml:3"]
    assert rows["serve.port"] == ["2000", "command line"]
    assert rows["workload.turns"] == ["6", "workload agent-8k"]
    assert rows["serve.host"] == ["127.0.0.1", "default"]
    _, document = ft_json("recipe", "show", "mine", "--set", "serve.port=2000")
    assert document["provenance"]["serve.port"] == "command line"
    assert document["recipe"]["serve"]["port"] == 2000


@pytest.mark.parametrize("kind", ["recipe", "profile", "workload", "plan"])
def test_schemas_are_json_schemas(ft, ft_json, kind):
    code, document = ft_json("schema", kind)
    assert (code, document["$schema"]) == (0, "https://json-schema.org/draft/2020-12/schema")
    assert "properties" in document or "anyOf" in document
    assert ft("schema", kind)[1] == ft("schema", kind, "--json")[1]


def test_results_are_listed_newest_first_with_units_in_the_heading(ft, ft_json):
    assert ft("results") == (0, "nothing has been measured here yet\n", "")
    assert ft_json("results") == (0, [])
    facts = {"recipe_name": "demo", "engine": "native", "engine_version": "0.1.0", "model_name": "m"}
    with open_store(paths.database_path()) as store:
        store.record_result(ResultRow(workload="chat-2k", measured_at="2031-01-01T10:00:00+00:00",
                                      metrics={"decode_tps": 21.456, "ttft_ms": 1234.5}, **facts))  # fmt: skip
        store.record_result(ResultRow(workload="code-4k", measured_at="2031-01-02T10:00:00+00:00", kind="proof",
                                      metrics={"decode_tps": 9.876}, invalid_because="throttled", **facts))  # fmt: skip
    code, out, err = ft("results")
    assert (code, err) == (0, "")
    assert (
        out
        == """\
measured          recipe  workload  engine        kind   decode tok/s  TTFT ms
2031-01-02 10:00  demo    code-4k   native 0.1.0  proof          9.88           not comparable: throttled
2031-01-01 10:00  demo    chat-2k   native 0.1.0  bench          21.5    1,230
"""
    )
    assert [one["workload"] for one in ft_json("results", "--workload", "chat-2k")[1]] == ["chat-2k"]
    assert len(ft_json("results", "--limit", "1")[1]) == 1


def test_engines_are_listed_with_their_state_here(ft_json):
    _, entries = ft_json("engine", "list")
    told = {one["name"]: (one["state"], one["version"]) for one in entries}
    assert told["native"] == ("embedded", __version__)
    assert told["freetoken"] == ("not installed", None)
    assert told["vllm"] == ("not driven yet", None)


def test_an_engine_named_in_the_machine_local_file_is_installed(ft_json):
    paths.state_dir().mkdir()
    paths.local_file().write_text("engines: {freetoken: {python: /opt/ft/bin/python, version: 0.2.1}}\n")
    _, entries = ft_json("engine", "list")
    entry = next(one for one in entries if one["name"] == "freetoken")
    assert (entry["state"], entry["version"], entry["interpreter"]) == ("installed", "0.2.1", "/opt/ft/bin/python")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_and_where_it_belongs(ft, shell):
    code, out, err = ft("completion", shell)
    assert code == 0
    assert "_FT_COMPLETE" in out
    assert err.startswith(f"hint: `ft completion {shell} > ~/")
