"""Our command lines, read by the upstream engine's own parsers: every flag of every plan, in every released version.

The wheels come from `make upstream`; their parsers run in a subprocess, with the modules they do not need stubbed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.adapters.freetoken_flags import list_flags
from freetoken.adapters.freetoken_memory import CHUNKS
from freetoken.planner.solve import budget_at, make_plan
from tests.fakes.planner_cases import (
    make_gpu,
    make_machine,
    make_qwen_shape,
    make_recipe,
    make_request,
    make_wsl_machine,
)

REPO = Path(__file__).resolve().parents[2]
PARSER = REPO / "tests" / "fakes" / "upstream_parser.py"
VERSIONS = ("0.1.2", "0.1.3", "0.2.0", "0.2.1")
#: The parser's name of a field that our settings know by another one; `moe_backend` is 0.1.2's name of the strategy.
STRATEGY = {"0.1.2": "moe_backend"}


def parse(version: str, arguments: list[tuple[str, ...]]) -> list[dict]:
    """What the parser of `version` makes of each command line; its flags come last."""
    wheel = REPO / ".upstream" / f"freetoken-{version}.whl"
    if not wheel.exists():
        pytest.skip(f"the wheel of freetoken {version} is not here: `make upstream` found no index that has it")
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PARSER), str(wheel)], input=json.dumps(arguments), text=True,
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@cache
def plans_of(version: str) -> tuple:
    """Plans over strategies, chunks, embedding places, batch sizes, state types, CPU layers and machines."""
    adapter, found = FreetokenAdapter(), []
    big, small = (
        make_machine(make_gpu(24, 23.4, uuid="GPU-1"), ram_gib=128),
        make_machine(make_gpu(12, 11.4), ram_gib=64),
    )
    narrow = {"allow_quality_changes": ["state_dtype"]}
    cases = [
        *((small, {"settings": {"strategy": one}}) for one in ("offload", "hybrid", "cpu")),
        (big, {"settings": {"strategy": "fused"}}),
        *((small, {"settings": {"prefill_chunk_tokens": one, "strategy": "offload"}}) for one in CHUNKS),
        *((small, {"settings": {"max_running_requests": one}}) for one in (1, 2, 4, 7)),
        *((small, {"settings": {"state_dtype": one}, **narrow}) for one in ("float32", "bfloat16", "float16")),
        *((small, {"settings": {"cpu_layers": one, "strategy": "offload"}}) for one in (1, 8, 40)),
        (small, {"settings": {"cpu_threads": 7, "strategy": "hybrid"}}),
        *((small, {"settings": {"prefill_overlap": one}}) for one in (True, False)),
        *((small, {"settings": {"prefix_cache": one}}) for one in (True, False)),
        *((small, {"settings": {"expert_load": one}}) for one in ("serial", "parallel")),
        *((small, {"settings": {"attention": one}}) for one in ("triton", "fi", "fa,fi")),
        *((small, {"settings": {"memory_ratio": 0.875}, "serve": {"text_only": one}}) for one in (True, False)),
        (make_wsl_machine(make_gpu(8, 7.4), ram_gib=24, ram_free_gib=23), {}),
    ]
    if version == "0.2.1":
        cases += [(small, {"settings": {"embed_on_host": one}}) for one in (True, False)]
    for machine, recipe in cases:
        request = make_request(make_recipe(**recipe), machine, engine_version=version, model_path="/models/qwen")
        plan = make_plan(request, adapter, force=True)
        assert plan.kind == "plan", (recipe, plan)
        found.append(plan)
    # Every candidate that the planner looks at could be the one it takes.
    request = make_request(make_recipe(), big, engine_version=version, model_path="/models/qwen")
    for candidate in adapter.memory_model.candidates(request):
        settings = budget_at(request, adapter.memory_model, candidate, 600).settings
        found.append(found[0].model_copy(update={"settings": settings}))
    return tuple(found)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_of_flags_is_the_parsers_own(version):
    (told,) = parse(version, [("--model", "x", "--dtype", "bfloat16")])[1:]
    assert set(told["flags"]) == list_flags(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_plan_is_understood_as_it_is_meant(version):
    plans, adapter = plans_of(version), FreetokenAdapter()
    lists = [adapter.make_launch_spec(plan, interpreter="python").argv[4:] for plan in plans]
    # The data type would be read from the checkpoint's config, which is not here.
    answers = parse(version, [(*arguments, "--dtype", "bfloat16") for arguments in lists])
    assert {answer.get("error") for answer in answers[:-1]} == {None}
    for plan, answer in zip(plans, answers[:-1], strict=True):
        assert read_back(answer["values"], version) == expected(plan, version)


def read_back(values: dict, version: str) -> dict:
    found = {
        "strategy": values[STRATEGY.get(version, "moe_strategy")], "slots": values["moe_cache_size"],
        "kv": values["num_token_override"], "reserve": values["kv_reserve_tokens"],
        "chunk": values["max_extend_tokens"], "requests": values["max_running_req"], "ratio": values["memory_ratio"],
        "attention": values["attention_backend"], "cache": values["cache_type"],
        "overlap": values["moe_prefill_overlap"], "load": values["expert_load"], "cpu_layers": values["moe_cpu_layers"],
        "threads": values["moe_cpu_threads"], "port": values["server_port"], "output": values["max_output_tokens"],
        "name": values["served_model_name"], "model": values["model_path"], "embed": values.get("embed_weights", "gpu"),
        "gpu": list(values.get("gpu", ())), "stats": values["moe_collect_stats"], "graphs": values["cuda_graph_max_bs"],
    }  # fmt: skip
    return {
        **found,
        "sizes": [values.get(key) for key in ("moe_cache_rate", "moe_cache_mem")] + [values["moe_cache_auto"]],
    }


def expected(plan, version: str) -> dict:
    s, has_slots = plan.settings, plan.settings.strategy in ("offload", "hybrid")
    # `cpu` sizes its own two layers; the parser then marks the sizing as automatic.
    is_auto = s.strategy == "cpu"
    return {
        "strategy": s.strategy, "slots": s.expert_slots if has_slots else 0, "kv": s.kv_tokens, "reserve": s.kv_tokens,
        "chunk": s.prefill_chunk_tokens, "requests": s.max_running_requests, "ratio": s.memory_ratio,
        "attention": s.attention, "cache": "naive" if s.prefix_cache is False else "radix",
        "overlap": not (has_slots and s.prefill_overlap is False), "load": s.expert_load or "auto",
        "cpu_layers": str(s.cpu_layers) if has_slots and s.cpu_layers else None, "threads": s.cpu_threads or 0,
        "port": 1919, "output": 2048, "name": "Qwen3.6-35B-A3B-NVFP4", "model": "/models/qwen",
        "embed": "host" if s.embed_on_host else "gpu", "gpu": [] if version == "0.1.2" else [s.gpu],
        "stats": version >= "0.2.0" and s.strategy != "fused", "graphs": None, "sizes": [None, None, is_auto],
    }  # fmt: skip


def test_the_oldest_version_is_told_its_gpu_by_the_environment():
    plan = plans_of("0.1.2")[0]
    spec = FreetokenAdapter().make_launch_spec(plan, interpreter="python")
    assert "--gpu" not in spec.argv
    assert spec.env["CUDA_VISIBLE_DEVICES"] == plan.settings.gpu
    newest = FreetokenAdapter().make_launch_spec(
        plan.model_copy(update={"engine_version": "0.2.1"}), interpreter="python"
    )
    assert "CUDA_VISIBLE_DEVICES" not in newest.env


@pytest.mark.parametrize(
    ("recipe", "version", "message"),
    [
        ({"settings": {"embed_on_host": True}}, "0.2.0",
         "`settings.embed_on_host` needs engine `freetoken` 0.2.1 or newer, this is 0.2.0"),
        ({"serve": {"api_key_env": "FREETOKEN_API_KEY"}}, "0.1.3",
         "`serve.api_key_env` needs engine `freetoken` 0.2.0 or newer, this is 0.1.3"),
        ({"engine": {"name": "freetoken", "extra_args": ["--moe-cache-scope=per-layer"]}}, "0.1.3",
         "`engine.extra_args` holds `--moe-cache-scope`, which engine `freetoken` 0.1.3 does not know: "
         "it came with 0.2.0"),
        ({"engine": {"name": "freetoken", "extra_args": ["--moe-slots", "3"]}}, "0.2.1",
         "`engine.extra_args` holds `--moe-slots`, which engine `freetoken` 0.2.1 does not know: no version has it"),
        ({}, "0.1.0", "engine `freetoken` 0.1.0 is older than 0.1.2"),
    ],
)  # fmt: skip
def test_what_the_installed_version_cannot_do_is_refused_before_the_start(recipe, version, message):
    request = make_request(make_recipe(**recipe), make_machine(make_gpu(12, 11.4)), engine_version=version)
    refused = make_plan(request, FreetokenAdapter())
    assert refused.kind == "refusal"
    assert message in [finding.message for finding in refused.findings if finding.is_fatal]


def test_an_older_engine_is_planned_with_its_embedding_on_the_gpu():
    machine = make_machine(make_gpu(6, 5.6), ram_gib=32)
    places = {
        version: {
            one.embed_on_host
            for one in FreetokenAdapter().memory_model.candidates(
                make_request(make_recipe(), machine, make_qwen_shape(), engine_version=version)
            )
        }
        for version in ("0.2.0", "0.2.1", None)
    }
    assert places == {"0.2.0": {False}, "0.2.1": {False, True}, None: {False, True}}
