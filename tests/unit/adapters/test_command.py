import shlex

import pytest

from freetoken.adapters.command import format_command, join_command, make_recipe_values, parse_command
from freetoken.adapters.plain_config import parse_config
from freetoken.checkpoint.cards import find_card
from freetoken.errors import UsageError
from freetoken.hardware.profiles import load_profile
from freetoken.recipe.load import make_recipe

UPSTREAM = (
    "ft serve --model nvidia/Qwen3.6-35B-A3B-NVFP4 --gpu 0 --attn triton --moe-strategy auto --memory-ratio 0.92 "
    "--max-running-requests 1 --max-prefill-length 2048 --moe-cache-size 512 --max-output-tokens 2048"
)
MODULE = (
    "python -m freetoken --model-path DIR --moe-strategy offload --moe-cache-size 256 --num-tokens 4096 "
    "--kv-reserve-tokens 8192 --max-prefill-length 8192 --max-running-requests 1 --moe-cpu-layers auto "
    "--attention-backend triton --host 127.0.0.1 --port 8000"
)
LLAMA = "llama-server -m qwen3.6-35b-a3b-q4_k_m.gguf -ngl 999 -c 4096 -t 8 --no-mmap"
VLLM = "vllm serve Qwen/Qwen3.6-35B-A3B --gpu-memory-utilization 0.85 --max-model-len 8192"

NO_CONTEXT = (
    "the command names no context: the workload is `chat-2k`, 2,048 tokens; name another such as `agent-8k`, since KV "
    "cache is planned for it"
)


def read(command):
    parsed = parse_command(command)
    return parsed, make_recipe(make_recipe_values(parsed), "command").recipe


def plan(recipe, profile, shape, **changes):
    """The planner's answer where the model has the shape of a card."""
    from freetoken.adapters import get_adapter
    from freetoken.planner.plan import PlanRequest
    from freetoken.planner.solve import make_plan

    found = find_card(shape).model_copy(update=changes)
    request = PlanRequest(recipe=recipe, hardware=load_profile(profile), shape=found, engine_version="0.2.1")
    return make_plan(request, get_adapter(recipe.engine.name))


def test_the_upstream_command_becomes_a_recipe_that_plans():
    parsed, recipe = read(UPSTREAM)
    assert parsed.unknown == ()
    assert make_recipe_values(parsed) == {
        "version": 1, "name": "qwen3.6-35b-a3b-nvfp4", "model": {"repo": "nvidia/Qwen3.6-35B-A3B-NVFP4"},
        "engine": {"name": "freetoken"}, "serve": {"max_output_tokens": 2048}, "workload": "chat-2k",
        "settings": {"gpu": 0, "attention": "triton", "strategy": "auto", "memory_ratio": 0.92,
                     "max_running_requests": 1, "prefill_chunk_tokens": 2048, "expert_slots": 512},
    }  # fmt: skip
    answer = plan(recipe, "rtx-4060-laptop-8gb", "qwen3.6-35b-a3b-nvfp4")
    assert (answer.kind, answer.settings.expert_slots) == ("plan", 512)


def test_slots_that_are_enough_for_the_overlap_need_no_note():
    assert read(UPSTREAM)[0].notes == (NO_CONTEXT,)
    assert "needs 512" in read(UPSTREAM.replace("--moe-cache-size 512", "--moe-cache-size 511"))[0].notes[1]


def test_where_tensors_lie_is_left_to_the_planner_and_said():
    parsed, recipe = read("llama-server -m x.gguf -c 8192 -ot '.ffn_.*_exps.=CPU' --override-tensor a=CUDA0")
    assert recipe.engine.extra_args == ()
    words = "where tensors lie is the planner's to decide (`settings.cpu_layers`)"
    assert [one for one in parsed.notes if "settings.cpu_layers" in one] == [
        f"`-ot`: {words}; .ffn_.*_exps.=CPU is left out", f"`--override-tensor`: {words}; a=CUDA0 is left out",
    ]  # fmt: skip


def test_the_module_command_plans_with_the_overlap_off_and_says_so():
    parsed, recipe = read(MODULE)
    assert parsed.unknown == ()
    assert parsed.notes == (
        "`--kv-reserve-tokens 8192` has no effect beside `--num-tokens 4096`; 4096 is taken",
        "256 slots: FreeToken 0.2.1 starts with fewer slots than two layers have experts only with "
        "`--disable-moe-prefill-overlap` (a layer of 256 experts needs 512); the plan turns the overlap off there",
    )
    assert (recipe.model.path, recipe.serve.port, recipe.workload.context_tokens) == ("DIR", 8000, 4096)
    answer = plan(recipe, "rtx-4060-laptop-8gb", "qwen3.6-35b-a3b-nvfp4")
    assert answer.kind == "plan"
    assert (answer.settings.expert_slots, answer.settings.prefill_overlap) == (256, False)


def test_the_llama_command_becomes_a_recipe_that_plans():
    parsed, recipe = read(LLAMA)
    assert parsed.unknown == ()
    assert parsed.notes == (
        "`-ngl 999`: every layer on the GPU, which is what a plan does but for the experts it moves",
    )
    assert recipe.model.path == "qwen3.6-35b-a3b-q4_k_m.gguf"
    assert (recipe.settings.kv_tokens, recipe.settings.cpu_threads) == (4096, 8)
    assert recipe.engine.extra_args == ("--no-mmap",)
    answer = plan(recipe, "rtx-4060-ti-16gb", "qwen3.6-35b-a3b-nvfp4", file_format="gguf")
    assert answer.kind == "plan"
    assert answer.settings.kv_tokens == 4096
    # With the checkpoint that is no GGUF, that is the reason of the no.
    refusal = plan(recipe, "rtx-4060-ti-16gb", "qwen3.6-35b-a3b-nvfp4")
    assert "engine `llamacpp` loads GGUF" in refusal.message


def test_the_vllm_command_is_refused_for_the_right_reason():
    from freetoken.adapters import get_adapter

    parsed, recipe = read(VLLM)
    assert parsed.unknown == ()
    assert (recipe.engine.name, recipe.settings.memory_ratio) == ("vllm", 0.85)
    assert recipe.workload.context_tokens == 8192
    with pytest.raises(UsageError, match="engine `vllm` cannot be driven by this version"):
        get_adapter(recipe.engine.name)


@pytest.mark.parametrize("command", [UPSTREAM, MODULE, LLAMA, VLLM])
def test_a_command_comes_back_as_an_equivalent_one(command):
    _, recipe = read(command)
    again = format_command(recipe)
    assert read(shlex.join(again))[1] == recipe


def test_the_command_that_comes_back_has_the_same_flags():
    flags = {word for word in UPSTREAM.split() if word.startswith("--")}
    assert {word for word in format_command(read(UPSTREAM)[1]) if word.startswith("--")} == flags - {"--moe-strategy"}
    assert shlex.join(format_command(read(VLLM)[1])) == VLLM
    assert set(format_command(read(LLAMA)[1])) == set(LLAMA.split())


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("ft serve --model a/b --warp-speed 9 --gpu 0", ("--warp-speed 9",)),
        ("llama-server -m x.gguf --teleport -c 4096", ("--teleport",)),
        ("vllm serve a/b --beam --max-model-len 8192 stray", ("--beam", "stray")),
        ("ft serve demo --expert-slots 16 --flux=2", ("--flux=2",)),
    ],
)
def test_unknown_flags_are_named_with_their_values(command, unknown):
    assert parse_command(command).unknown == unknown


def test_every_flag_of_the_upstream_parser_is_accounted_for():
    from freetoken.adapters.command_freetoken import FREETOKEN
    from freetoken.adapters.freetoken_flags import ADDED, ALWAYS

    assert (ALWAYS | ADDED.keys()) - FREETOKEN.flags.keys() - FREETOKEN.passed.keys() == {"--help"}


def test_variables_before_the_command_are_kept():
    parsed = parse_command("CUDA_VISIBLE_DEVICES=1 OMP_NUM_THREADS=4 ft serve --model a/b")
    assert (parsed.fields["settings.gpu"], parsed.fields["engine.env"]) == (1, {"OMP_NUM_THREADS": "4"})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("make coffee", "`make` starts no engine"), ("", "the command line is empty"),
        ("numactl -N 0 make", "`numactl` starts no engine"),
        ("llama-server -c 4096", "names no model"), ("llama-server -m", "`-m` needs a value"),
        ("llama-server -m x.gguf -c many", "`-c many` cannot be read: expected a whole number"),
        ("llama-server -m 'x", "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(command, words):
    with pytest.raises(UsageError, match=words):
        parse_command(command)


@pytest.mark.parametrize(
    "command",
    [
        "ft serve --model a/b --moe-cache-mem 3gb --embed-weights host --cache-type naive --moe-cpu-layers 9",
        "ft serve --model a/b --model-source modelscope --disable-moe-prefill-overlap --port 8000",
        "vllm serve a/b --revision abc123 --kv-cache-dtype fp8 --max-model-len 16K --no-enable-prefix-caching",
        "vllm serve a/b --kv-cache-dtype bfloat16 --dtype bfloat16 --max-model-len 8192",
        "llama-server -m x.gguf -ctk q8_0 -ctv q8_0 -fa --jinja -t 8 -np 2 -c 8192 --n-cpu-moe 30",
        "llama-server -hf org/name-GGUF:Q4_K_M -c 8192", "llama-server -hf org/name-GGUF -hff name-Q4_K_M.gguf",
        "ft serve demo --expert-slots 16 --no-prefix-cache --port 8088",
        "OMP_NUM_THREADS='4 5' ft serve --model 'a dir/my model' --gpu 1",
    ],
)  # fmt: skip
def test_variants_come_back_as_equivalent_commands(command):
    parsed, recipe = read(command)
    assert parsed.unknown == ()
    assert read(join_command(format_command(recipe)))[1] == recipe


def test_sizes_with_units_are_those_of_the_engine():
    assert read("ft serve --model a/b --moe-cache-mem 3gb")[1].settings.expert_slots.bytes == 3 << 30
    back = format_command(read("ft serve --model a/b --moe-cache-mem 1536m")[1])
    assert back[back.index("--moe-cache-mem") + 1] == "1536m"
    assert read("vllm serve a/b --max-model-len 16k")[1].workload.context_tokens == 16_000


def test_a_type_of_cache_that_no_recipe_has_is_told():
    parsed, recipe = read("llama-server -m x.gguf -ctk q4_0")
    assert parsed.notes == (
        NO_CONTEXT,
        "a KV cache of type `q4_0` is not something a recipe can say; the model's own type is taken",
    )
    assert recipe.settings.kv_dtype == "model"


SCRIPT = """#!/bin/bash
# don't start it twice
set -e
MODEL=/models/qwen.gguf
export OMP_NUM_THREADS=8 HF_TOKEN=hf_abcdefghijklmnop
cd /opt/llama; sleep 1
nohup numactl -N 0 taskset -c 0-7 ./llama-server -m ${MODEL} \\
   --ctx-size 32768 --alias 'q w' >> server.log 2>&1 &
tail -f server.log
"""


@pytest.mark.parametrize(("command", "engine", "model"), [
    ("docker run --gpus all -p 8000:8000 --ipc=host vllm/vllm-openai:latest --model a/b --max-model-len 8192",
     "vllm", "a/b"),
    ("sudo docker run --rm -v /models:/models ghcr.io/ggml-org/llama.cpp:server-cuda -m /models/x.gguf -c 8192",
     "llamacpp", "/models/x.gguf"),
])  # fmt: skip
def test_a_container_s_arguments_are_the_engine_s(command: str, engine: str, model: str):
    parsed, recipe = read(command)
    assert (recipe.engine.name, recipe.model.repo or recipe.model.path) == (engine, model)
    assert (recipe.workload.context_tokens, parsed.unknown) == (8192, ())
    (words,) = [one for one in parsed.notes if "runs no container" in one]
    assert words.startswith("left out, since `ft` runs no container: `run --")


def test_a_container_of_something_else_is_no_engine():
    with pytest.raises(UsageError, match="`docker` starts no engine"):
        read("docker run -it ubuntu:24.04 bash")


def test_a_whole_script_is_read():
    parsed, recipe = read(SCRIPT)
    assert (recipe.model.path, recipe.settings.kv_tokens) == ("/models/qwen.gguf", 32768)
    assert recipe.engine.env == {"OMP_NUM_THREADS": "8"}
    assert parsed.unknown == ("set -e", "cd /opt/llama", "sleep 1", "tail -f server.log")
    assert parsed.notes == (
        "`nohup` is left out: `ft` starts and keeps the engine itself",
        "`numactl -N 0` is left out: `ft` starts and keeps the engine itself",
        "`taskset -c 0-7` is left out: `ft` starts and keeps the engine itself",
        "`>> server.log 2>&1` is left out: `ft` keeps the engine's log itself (`ft logs`)",
        "`HF_TOKEN` is left out: a secret belongs into no file; set it where `ft` runs",
        "`--alias`: a plan names the model by its own name; q w is left out",
    )


def test_variables_that_a_recipe_says_otherwise_or_not_at_all_are_told():
    parsed = parse_command("CUDA_VISIBLE_DEVICES=1,2 ft serve --model $WHERE/x")
    assert parsed.fields["settings.gpu"] == 1
    assert parsed.notes == (
        "`CUDA_VISIBLE_DEVICES=1,2`: one GPU serves a recipe; 1 is taken",
        "`$WHERE/x` holds a variable of the shell, whose value is not known here: put it there",
        NO_CONTEXT,
    )


def test_a_key_on_the_command_line_reaches_no_file():
    parsed = parse_command("ft serve --model a/b --api-key hunter2")
    assert "hunter2" not in repr(parsed)


def test_a_plain_configuration_becomes_a_recipe():
    parsed = parse_config(
        {
            "model_path": "nvidia/Qwen3.6-35B-A3B-NVFP4", "device": "cuda:0", "quantization": {"weight_bits": 4},
            "kv_cache_bits": 16, "expert_offload": {"enabled": True, "strategy": "lru"},
            "gpu_memory_utilization": 0.9, "max_seq_len": 8192, "batch_size": 1, "magic": {"level": 9},
        }
    )  # fmt: skip
    assert parsed.unknown == ("magic.level",)
    assert parsed.notes == ("`quantization.weight_bits: 4` follows from the checkpoint: take one with 4-bit weights",)
    recipe = make_recipe(make_recipe_values(parsed), "x").recipe
    assert (recipe.engine.name, recipe.settings.strategy, recipe.settings.gpu) == ("freetoken", "offload", 0)
    assert (recipe.settings.memory_ratio, recipe.workload.context_tokens) == (0.9, 8192)
    assert plan(recipe, "rtx-4060-laptop-8gb", "qwen3.6-35b-a3b-nvfp4").kind == "plan"


def test_a_quantised_cache_is_allowed_by_name():
    recipe = make_recipe(make_recipe_values(parse_config({"model_path": "a/b", "kv_cache_bits": 8})), "x").recipe
    assert (recipe.settings.kv_dtype, recipe.allow_quality_changes) == ("fp8", ("kv_dtype",))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "no `model_path`"), ({"model_path": ["a"]}, "neither a folder nor a repository"),
        ({"model_path": "a/b", "device": "mps"}, "none that an engine runs on here"),
        ({"model_path": "a/b", "batch_size": 1.5}, "`batch_size: 1.5` is not a whole number"),
        ({"model_path": "a/b", "batch_size": 0}, "`batch_size: 0` is less than 1"),
        ({"model_path": "a/b", "max_seq_len": "many"}, "is not a whole number"),
        ({"model_path": "a/b", "gpu_memory_utilization": "lots"}, "is not a number"),
        ({"model_path": "a/b", "gpu_memory_utilization": 90}, "is not a share between 0 and 1"),
    ],
)  # fmt: skip
def test_a_configuration_that_means_nothing_is_said(values, words):
    with pytest.raises(UsageError, match=words):
        parse_config(values)


def test_short_forms_of_a_configuration_are_read():
    parsed = parse_config({"model_path": "a/b", "device": "cuda:0", "max_seq_len": "8k", "expert_offload": False})
    assert (parsed.unknown, parsed.fields["context"]) == ((), 8192)
    assert (parsed.fields["settings.strategy"], parsed.fields["settings.gpu"]) == ("fused", 0)
