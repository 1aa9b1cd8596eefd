import pytest

from freetoken import paths
from freetoken.errors import BadFileError, UsageError
from freetoken.recipe.load import load_recipe, load_workload, make_model_recipe
from freetoken.recipe.model import Size


def refusal(target, **options):
    with pytest.raises((BadFileError, UsageError)) as caught:
        load_recipe(target, **options)
    assert caught.value.exit_code == 2
    return [caught.value.message, *caught.value.details]


def test_all_findings_of_a_file_are_told_at_once_with_line_key_and_what_was_expected(base, write):
    write("x", """
        version: 1
        name: y
        extends: base
        serve:
          port: 080800
        settings:
          kv_tokns: 8k
          kv_dtype: fp9
          memory_ratio: 1.5
          max_running_requests: lots
          expert_slots: 3 GX
          kv_tokens: many
        modell: 3
        good_enough: {ttft_p95: 8q, decode_tps: ">20"}
        hardware: {gpu: {vram: "<5GiB", bogus: 1}, cpu: {isa: avx2}}
        workload: agnt-8k
        kv_tokens: 3
        engine: {name: freetokn}
        description: [1]
        headroom: {}
        """)  # fmt: skip
    assert refusal("x") == [
        "recipes/x.yaml:16: no workload `agnt-8k`; did you mean `agent-8k`?",
        "recipes/x.yaml:2: `name` is `y`, expected `x` as the file is called",
        "recipes/x.yaml:5: `serve.port` is `080800`, expected at most 65534",
        "recipes/x.yaml:7: unknown key `settings.kv_tokns`; did you mean `settings.kv_tokens`?",
        "recipes/x.yaml:8: `settings.kv_dtype` is `fp9`, expected `model`, `bf16` or `fp8`",
        "recipes/x.yaml:9: `settings.memory_ratio` is `1.5`, expected at most 1 or `auto`",
        "recipes/x.yaml:10: `settings.max_running_requests` is `lots`, expected a whole number or `auto`",
        "recipes/x.yaml:11: `settings.expert_slots`: `3 GX` has the unknown unit `gx`, expected e.g. `6GiB` or `24 GB`",
        "recipes/x.yaml:12: `settings.kv_tokens`: `many` is not a token count, expected e.g. `8k` or `auto`",
        "recipes/x.yaml:13: unknown key `modell`; did you mean `model`?",
        "recipes/x.yaml:14: `good_enough.ttft_p95`: `8q` has the unknown unit `q`, "
        "expected e.g. `8s`, `250ms` or `45m`",
        "recipes/x.yaml:14: `good_enough.decode_tps`: `>20` is not a minimum, expected e.g. `>=20`",
        "recipes/x.yaml:15: unknown key `hardware.gpu.bogus`; known are `vram`, `compute_capability`, `driver`, `cuda`",
        "recipes/x.yaml:15: `hardware.gpu.vram`: `<5GiB` is not a minimum, expected e.g. `>=6GiB`",
        "recipes/x.yaml:15: `hardware.cpu.isa` is `avx2`, expected a list",
        "recipes/x.yaml:17: unknown key `kv_tokens`; did you mean `settings.kv_tokens`?",
        "recipes/x.yaml:18: `engine.name` is `freetokn`, expected `native`, `freetoken`, `llamacpp`, `vllm`, `sglang`, "
        "`ollama` or `ktransformers`",
        "recipes/x.yaml:19: `description` is a list, expected a text",
        "recipes/x.yaml:20: `headroom` is a mapping, expected `server`, `desktop` or `wsl` or e.g. `6GiB`",
        "recipes/x.yaml:8: `settings.kv_dtype` is `fp9`, which changes answers; "
        "list it: `allow_quality_changes: [kv_dtype]`",
    ]


def test_a_number_in_quotes_is_told_as_a_text_and_slots_in_words(write):
    write("x", 'version: "1"\nname: x\nmodel: {repo: a/b}\nworkload: chat-2k\nsettings: {expert_slots: -3}\n')
    assert refusal("x") == [
        'recipes/x.yaml:1: `version` is the text `"1"`, expected 1',
        "recipes/x.yaml:5: `settings.expert_slots` is `-3`, expected a count such as `512`, a size such as `3GiB`, or "
        "`auto`",
    ]


def test_what_is_missing_is_named(write):
    write("x", "name: x\nmodel: {}\n")
    assert refusal("x") == [
        "recipes/x.yaml:1: `workload` is missing; name one such as `agent-8k`",
        "recipes/x.yaml:2: `model` needs exactly one of `repo` and `path`",
    ]


def test_a_value_of_a_parent_is_blamed_on_the_parent(base, write):
    base.write_text(base.read_text().replace("kv_tokens: 8k", "kv_tokens: 8q"))
    write("x", "name: x\nextends: base\n")
    assert refusal("x") == [
        "recipes/base.yaml:6: `settings.kv_tokens`: `8q` has the unknown unit `q`, "
        "expected e.g. `8192` or `8k` or `auto`"
    ]


def test_values_come_from_command_line_recipe_parent_and_user_defaults_in_this_order(base, write, folder):
    write("mid", "name: mid\nextends: base\nsettings: {attention: triton}\nserve: {port: 2000}\n")
    write("x", "name: x\nextends: mid\nsettings: {kv_tokens: 16k, prefix_cache: on}\nworkload: {concurrency: 2}\n")
    write("state/local.yaml", "engines: {}\ndefaults:\n  headroom: desktop\n  serve: {port: 3000, host: 0.0.0.0}\n")
    loaded = load_recipe("x", sets=["settings.gpu=1", "settings.prefix_cache=off"])
    recipe, said = loaded.recipe, loaded.provenance
    assert (recipe.settings.kv_tokens, recipe.settings.attention, recipe.settings.prefix_cache) == (
        16384,
        "triton",
        False,
    )
    assert (recipe.settings.gpu, recipe.settings.expert_slots) == (1, Size(bytes=3 << 30))
    assert (recipe.serve.port, recipe.serve.host, recipe.headroom) == (2000, "0.0.0.0", "desktop")
    assert (recipe.workload.name, recipe.workload.concurrency, recipe.workload.turns) == ("agent-8k-changed", 2, 6)
    assert (recipe.name, recipe.engine.env) == ("x", {"OMP_NUM_THREADS": "1"})
    told = {
        "settings.gpu": "command line",
        "settings.prefix_cache": "command line",
        "settings.kv_tokens": "recipe recipes/x.yaml:3",
        "settings.attention": "parent mid",
        "settings.expert_slots": "parent base",
        "serve.port": "parent mid",
        "serve.host": "user defaults",
        "headroom": "user defaults",
        "workload.turns": "workload agent-8k",
        "workload.concurrency": "recipe recipes/x.yaml:4",
        "workload": "recipe recipes/x.yaml:4",
        "grow": "default",
        "settings.strategy": "default",
        "engine.env": "parent base",
        "name": "recipe recipes/x.yaml:1",
    }
    assert {key: said[key] for key in told} == told
    assert (loaded.path, loaded.base_dir) == (folder / "recipes/x.yaml", folder / "recipes")


def test_every_leaf_of_the_recipe_has_a_provenance(base):
    loaded = load_recipe("base", defaults={})
    assert {"model.repo", "hardware.gpu.vram", "tune.budget", "good_enough.ttft_p95", "extends"} <= set(
        loaded.provenance
    )


def test_a_repo_and_a_path_replace_one_another(base, write, folder):
    write("x", "name: x\nextends: base\nmodel: {path: ./weights}\n")
    model = load_recipe("x").recipe.model
    assert (model.repo, model.path, model.revision) == (None, "./weights", "main")
    back = load_recipe("x", sets=["model.repo=a/b"]).recipe.model
    assert (back.repo, back.path, back.revision) == ("a/b", None, "main")
    same = load_recipe("base", sets=["model.source=modelscope"]).recipe.model
    assert (same.repo, same.revision, same.source) == ("nvidia/Qwen3.6-35B-A3B-NVFP4", "abc", "modelscope")


def test_another_engine_drops_what_belonged_to_the_first(base):
    engine = load_recipe("base", sets=["engine.name=native"]).recipe.engine
    assert (engine.name, engine.version, engine.env, engine.extra_args) == ("native", "", {}, ())
    assert load_recipe("base", sets=["engine.name=freetoken"]).recipe.engine.version == ">=0.2.1,<0.3"


def test_a_tilde_takes_an_inherited_value_back_to_its_default(base, write):
    write("x", "name: x\nextends: base\nsettings: {kv_tokens: ~}\nengine: {version: }\n")
    loaded = load_recipe("x")
    assert (loaded.recipe.settings.kv_tokens, loaded.provenance["settings.kv_tokens"]) == ("auto", "default")
    assert loaded.recipe.engine.version == ""
    assert load_recipe("x", sets=["settings.expert_slots="]).recipe.settings.expert_slots == "auto"


def test_relative_paths_belong_to_the_file_that_names_them(write, folder):
    write("parents/p.yaml", "name: p\nmodel: {path: weights/m}\nworkload: w/own.yaml\n")
    write("parents/w/own.yaml", "name: own\nturns: 2\n")
    write("x", "name: x\nextends: ../parents/p.yaml\n")
    loaded = load_recipe("x")
    assert loaded.recipe.model.path == str(folder / "parents/weights/m")
    assert (loaded.recipe.workload.name, loaded.recipe.workload.turns) == ("own", 2)
    assert load_recipe("parents/p.yaml").recipe.model.path == "weights/m"
    assert load_recipe("x", sets=["model.path=here"]).recipe.model.path == str(folder / "here")
    assert load_recipe("x", sets=["model.path=demo"]).recipe.model.path == "demo"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x": "y", "y": "x"}, "recipes/y.yaml:2: `extends` goes in a circle: `x` -> `y` -> `x`"),
        ({"x": "y", "y": "z", "z": "y"}, "recipes/z.yaml:2: `extends` goes in a circle: `y` -> `z` -> `y`"),
        ({"x": "./x.yaml"}, "recipes/x.yaml:2: `extends` goes in a circle: `x` -> `x`"),
        ({"x": "x"}, "recipes/x.yaml:2: no recipe `x` to extend; did you mean `x`?"),
        ({"x": "bse", "base": "other"}, "recipes/x.yaml:2: no recipe `bse` to extend; did you mean `base`?"),
        ({"x": "./none.yaml"}, "recipes/x.yaml:2: `extends` names ./none.yaml, which does not exist"),
        ({"x": "[a]"}, "recipes/x.yaml:2: `extends` is a mapping, expected the name or path of a recipe"),
    ],
)  # fmt: skip
def test_parents_that_cannot_be_are_refused(write, files, message):
    for name, parent in files.items():
        write(name, f"name: {name}\nextends: {parent}\nmodel: {{repo: a/b}}\nworkload: chat-2k\n")
    assert refusal("x") == [message]


def test_a_chain_of_parents_has_an_end(write):
    for number in range(20):
        write(f"r{number}", f"name: r{number}\nextends: r{number + 1}\n")
    assert refusal("r0") == ["recipes/r15.yaml:2: more than 16 recipes extend one another"]


def test_a_recipe_may_extend_the_one_of_its_own_name_in_a_folder_searched_later(write):
    write("state/recipes/x.yaml", "name: x\nmodel: {repo: a/b}\nworkload: chat-2k\nserve: {port: 7}\n")
    write("x", "name: x\nextends: x\nsettings: {kv_tokens: 4k}\n")
    recipe = load_recipe("x").recipe
    assert (recipe.serve.port, recipe.settings.kv_tokens, recipe.model.repo) == (7, 4096, "a/b")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("settings.kv_tokn=8k", "--set settings.kv_tokn=8k: unknown key `settings.kv_tokn`; "
         "did you mean `settings.kv_tokens`?"),
        ("settings.gpu", "`--set settings.gpu` is not `KEY=VALUE`"),
        ("=3", "`--set =3` is not `KEY=VALUE`"),
        ("extends=base", "`--set extends` is not possible; `extends` belongs to a recipe's file"),
        ("name.x=1", "--set name.x=1: `name` is a mapping, expected a text"),
        ("workload=agnt-8k", "--set workload=agnt-8k: no workload `agnt-8k`; did you mean `agent-8k`?"),
        ("settings.fetch_ratio=0.5", "--set settings.fetch_ratio=0.5: `settings.fetch_ratio` belongs to the strategy "
         "`hybrid`, `settings.strategy` is `auto`"),
        ("workload.output_tokens=4k", "--set workload.output_tokens=4k: `context_tokens` is 8,192, but the last of 6 "
         "turns needs 31,232"),
    ],
)  # fmt: skip
def test_an_override_that_cannot_be_is_refused(base, sets, message):
    assert refusal("base", sets=[sets]) == [message]


def test_growing_is_refused_where_there_are_no_slots_to_grow(base):
    message = "grow=true: `grow: true` grows expert slots, which the strategy `fused` does not size"
    (refused,) = refusal("base", sets=["settings.strategy=fused", "grow=true"])
    assert refused.endswith(message)
    assert load_recipe("base", sets=["grow=true"]).recipe.grow


def test_a_set_value_is_typed_like_one_in_a_file(base):
    sets = ["engine.extra_args=[--a, 1]", "workload=chat-2k", "serve.port=08080", "description=4090",
            "settings.prefill_overlap=yes", "name=other"]  # fmt: skip
    recipe = load_recipe("base", sets=sets).recipe
    assert (recipe.engine.extra_args, recipe.workload.name, recipe.serve.port) == (("--a", "1"), "chat-2k", 8080)
    assert (recipe.description, recipe.settings.prefill_overlap, recipe.name) == ("4090", True, "other")


def test_texts_that_look_like_numbers_are_taken_as_written(write):
    write("4090", """
        name: 4090
        description: 1e3
        model: {repo: a/b, revision: 0123}
        hardware: {gpu: {compute_capability: 8.10, driver: ">=580"}, ram: {available: ">=24 GB"}}
        engine: {env: {A: 1, B: on, C: ~, D: 1.50}}
        workload: {turns: 1, prompt_tokens: 1e3}
        """)  # fmt: skip
    recipe = load_recipe("4090").recipe
    assert (recipe.name, recipe.description, recipe.model.revision) == ("4090", "1e3", "0123")
    assert (recipe.hardware.gpu.compute_capability, recipe.hardware.ram.available) == ("8.10", 24_000_000_000)
    assert recipe.engine.env == {"A": "1", "B": "on", "D": "1.50"}
    assert (recipe.workload.prompt_tokens, recipe.workload.name) == (1000, "inline")


def test_unknown_names_and_paths_are_told_with_the_nearest(base):
    assert refusal("bse") == ["no recipe `bse` in recipes/; did you mean `base`?"]
    assert refusal("recipes/none.yaml") == ["recipes/none.yaml does not exist"]
    assert refusal("recipes/") == ["recipes/ is a folder, not a recipe"]
    assert refusal("../etc/passwd")[0].startswith("../etc/passwd")


def test_a_file_called_recipe_may_hold_any_name(base, folder):
    target = folder / "runs" / "recipe.yaml"
    target.parent.mkdir()
    target.write_text(base.read_text())
    assert load_recipe(str(target)).recipe.name == "base"


def test_local_defaults_that_are_wrong_are_told_with_their_line(base, write):
    write("state/local.yaml", "defaults:\n  headrom: desktop\n")
    assert refusal("base") == ["state/local.yaml:2: unknown key `headrom`; did you mean `headroom`?"]
    write("state/local.yaml", "defaults: 3\n")
    assert refusal("base") == ["state/local.yaml:1: `defaults` is `3`, expected a mapping such as `headroom: desktop`"]


def test_a_bare_model_becomes_a_recipe(folder):
    loaded = make_model_recipe("nvidia/Qwen3.6-35B-A3B-NVFP4", sets=["engine.name=freetoken"])
    recipe = loaded.recipe
    assert (recipe.name, recipe.model.repo, recipe.engine.name) == (
        "qwen3.6-35b-a3b-nvfp4",
        "nvidia/Qwen3.6-35B-A3B-NVFP4",
        "freetoken",
    )
    assert (recipe.workload.name, loaded.provenance["model.repo"], loaded.path) == ("chat-2k", "command line", None)
    assert (loaded.provenance["workload.turns"], loaded.provenance["settings.kv_tokens"]) == ("default", "default")
    (folder / "My Model").mkdir()
    local = make_model_recipe("My Model").recipe
    assert (local.name, local.model.path, local.model.repo) == ("my-model", str(folder / "My Model"), None)
    with pytest.raises(BadFileError) as caught:
        make_model_recipe("what is this?")
    assert caught.value.message == (
        "model `what is this?`: `model.repo` is `what is this?`, "
        "expected `owner/name` of a hub repository, or the name of a model card"
    )


def test_workloads_are_found_here_then_in_the_state_folder_then_shipped(write):
    assert load_workload("agent-8k").context_tokens == 8192
    write("state/workloads/agent-8k.yaml", "name: agent-8k\nturns: 1\n")
    assert load_workload("agent-8k").turns == 1
    write("workloads/agent-8k.yaml", "name: agent-8k\nturns: 2\n")
    assert load_workload("agent-8k").turns == 2
    write("workloads/agent-8k.yaml", "name: agent-9k\nturns: 0\ntrns: 3\n")
    with pytest.raises(BadFileError) as caught:
        load_workload("agent-8k")
    assert [caught.value.message, *caught.value.details] == [
        "workloads/agent-8k.yaml:1: `name` is `agent-9k`, expected `agent-8k` as the file is called",
        "workloads/agent-8k.yaml:2: `turns` is `0`, expected at least 1",
        "workloads/agent-8k.yaml:3: unknown key `trns`; did you mean `turns`?",
    ]
    with pytest.raises(UsageError, match="no workload `agnt`; did you mean `agent-8k`"):
        load_workload("agnt")


@pytest.mark.parametrize(
    ("name", "context", "kv_tokens"),
    [("chat-2k", 2048, 2048), ("code-4k", 4096, 4096), ("agent-8k", 8192, 8192), ("agent-32k", 32768, 32768),
     ("long-64k", 65536, 65536), ("batch-8", 1536, 12288)],
)  # fmt: skip
def test_shipped_workloads_need_the_context_of_their_name(name, context, kv_tokens):
    workload = load_workload(name)
    assert (workload.name, workload.needed_context_tokens, workload.context_tokens, workload.kv_tokens) == (
        name, context, context, kv_tokens,
    )  # fmt: skip
    assert workload.description


def test_quality_changes_must_be_listed(base, write):
    write("x", "name: x\nextends: base\nsettings: {state_dtype: bfloat16}\n")
    assert refusal("x") == [
        "recipes/x.yaml:3: `settings.state_dtype` is `bfloat16`, which changes answers; "
        "list it: `allow_quality_changes: [state_dtype]`"
    ]
    write("y", "name: y\nextends: x\nallow_quality_changes: [state_dtype]\n")
    assert load_recipe("y").recipe.settings.state_dtype == "bfloat16"


def test_what_only_a_later_version_reads_is_noted(base):
    loaded = load_recipe("base", sets=["tune.budget=1h", "allow_quality_changes=[kv_dtype]"])
    assert loaded.notes == (
        "`allow_quality_changes` lists `kv_dtype`, which only `ft tune` would change; this version has no tuner",
        "`tune.budget` and `tune.trials` are for `ft tune`, which this version does not have",
    )


def test_the_sample_of_the_design_parses(write):
    write("qwen3.6-35b-a3b-6gb", """
        version: 1
        name: qwen3.6-35b-a3b-6gb
        description: Coding agent on a 6 GB laptop card
        hardware:
          gpu: {vram: ">=5.5GiB", compute_capability: ">=8.0", driver: ">=580", cuda: ">=13.0"}
          ram: {available: ">=24GiB"}
          disk: {free: ">=35GiB"}
          cpu: {isa: [avx2]}
        model:
          repo: nvidia/Qwen3.6-35B-A3B-NVFP4
          revision: main
          source: huggingface
        engine: {name: freetoken, version: ">=0.2.1,<0.3", env: {}, extra_args: []}
        serve: {host: 127.0.0.1, port: 1919, max_output_tokens: 2048, text_only: auto}
        workload: agent-8k
        settings:
          gpu: auto
          memory_ratio: auto
          expert_slots: auto
          kv_tokens: auto
          max_running_requests: auto
          strategy: auto
          fetch_ratio: auto
          attention: auto
          prefill_chunk_tokens: auto
          prefill_overlap: auto
          prefix_cache: auto
          embed_on_host: auto
          expert_load: auto
          cpu_layers: auto
          cpu_threads: auto
          kv_dtype: model
          state_dtype: model
        allow_quality_changes: []
        grow: false
        headroom: desktop
        good_enough: {ttft_p95: 8s, decode_tps: ">=20"}
        tune: {objective: turn_time, budget: 45m}
        """)  # fmt: skip
    loaded = load_recipe("qwen3.6-35b-a3b-6gb")
    recipe = loaded.recipe
    assert (recipe.hardware.gpu.vram, recipe.good_enough.decode_tps, recipe.tune.budget) == (
        5_905_580_032,
        20.0,
        2700.0,
    )
    assert loaded.notes == ()


def test_shipped_recipes_load_without_a_finding(folder):
    names = [path.stem for path in paths.shipped_dir("recipes").glob("*.yaml")]
    assert {name: load_recipe(name).recipe.name for name in names} == {name: name for name in names}
