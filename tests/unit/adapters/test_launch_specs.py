"""Command lines: every setting of the plan is told to the engine, none is left to its own rules."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.adapters.native import NativeAdapter
from freetoken.errors import UsageError
from freetoken.planner.solve import make_plan
from tests.fakes.planner_cases import (
    SMALL_WORKLOAD,
    make_gpu,
    make_machine,
    make_recipe,
    make_request,
    make_tiny_shape,
)


def freetoken_plan(total=6, free=5.6, **recipe):
    request = make_request(
        make_recipe(**recipe), make_machine(make_gpu(total, free, uuid="GPU-1")), model_path="/models/qwen"
    )
    return make_plan(request, FreetokenAdapter())


def test_freetoken_is_started_by_its_own_interpreter_away_from_our_package():
    spec = FreetokenAdapter().make_launch_spec(freetoken_plan(), interpreter="/engines/freetoken/bin/python")
    assert spec.argv[:4] == ("/engines/freetoken/bin/python", "-m", "freetoken.cli", "serve")
    assert spec.unset_env == ("PYTHONPATH", "PYTHONHOME", "CUDA_VISIBLE_DEVICES")
    assert spec.cwd is None
    assert (spec.host, spec.port, spec.extra_ports) == ("127.0.0.1", 1919, (1920,))


def test_every_flag_of_the_plan_is_explicit():
    plan = freetoken_plan(settings={
        "expert_slots": 900, "prefill_chunk_tokens": 2048, "memory_ratio": 0.92, "embed_on_host": True,
        "expert_load": "serial", "cpu_threads": 7, "strategy": "offload", "prefill_overlap": False,
    })  # fmt: skip
    spec = FreetokenAdapter().make_launch_spec(plan, interpreter="py", extra_args=("--decode-log-interval", "10"))
    assert spec.argv[4:] == (
        "--model-path", "/models/qwen", "--host", "127.0.0.1", "--port", "1919",
        "--served-model-name", "Qwen3.6-35B-A3B-NVFP4", "--max-output-tokens", "2048", "--moe-strategy", "offload",
        "--num-tokens", "8192", "--kv-reserve-tokens", "8192", "--max-prefill-length", "2048",
        "--max-running-requests", "1", "--memory-ratio", "0.92", "--attention-backend", "triton",
        "--embed-weights", "host", "--cache-type", "radix", "--gpu", "GPU-1", "--moe-cache-size", "900",
        "--expert-load", "serial", "--moe-cpu-threads", "7", "--moe-collect-stats", "--disable-moe-prefill-overlap",
        "--text-model-only", "--decode-log-interval", "10",
    )  # fmt: skip


def test_a_narrower_state_travels_in_the_environment():
    plan = freetoken_plan(settings={"state_dtype": "bfloat16"}, allow_quality_changes=["state_dtype"])
    spec = FreetokenAdapter().make_launch_spec(plan, interpreter="py", engine_env={"LOG_LEVEL": "INFO"})
    assert spec.env == {"PYTHONUNBUFFERED": "1", "FREETOKEN_MAMBA_SSM_DTYPE": "bfloat16", "LOG_LEVEL": "INFO"}


def test_fused_has_no_slots_to_size():
    spec = FreetokenAdapter().make_launch_spec(freetoken_plan(24, 23.4), interpreter="py")
    assert "--moe-cache-size" not in spec.argv
    assert spec.argv[spec.argv.index("--moe-strategy") + 1] == "fused"


def test_a_key_is_named_and_never_written_down(monkeypatch):
    monkeypatch.setenv("FREETOKEN_API_KEY", "secret-value")
    for adapter, plan in ((FreetokenAdapter(), freetoken_plan()), (NativeAdapter(), native_plan())):
        spec = adapter.make_launch_spec(plan, interpreter="py", api_key_env="FREETOKEN_API_KEY")
        assert spec.secret_env == ("FREETOKEN_API_KEY",)
        assert "secret-value" not in spec.model_dump_json()


def test_without_an_environment_of_its_own_the_launch_is_refused_in_a_sentence():
    with pytest.raises(UsageError, match="its interpreter is not known") as caught:
        FreetokenAdapter().make_launch_spec(freetoken_plan())
    assert caught.value.hint == (
        "`ft engine install freetoken`, or name one in <state>/local.yaml: "
        "`engines: {freetoken: {python: /path/to/bin/python}}`"
    )


def test_without_a_checkpoint_nothing_is_launched():
    request = make_request(make_recipe(), make_machine(make_gpu(6, 5.6)))
    plan = make_plan(request, FreetokenAdapter())
    with pytest.raises(UsageError, match="is not on this machine yet"):
        FreetokenAdapter().make_launch_spec(plan, interpreter="py")
    with pytest.raises(UsageError, match="is not on this machine yet"):
        NativeAdapter().make_launch_spec(native_plan(model_path=None))


def native_plan(model_path="/models/tiny", **settings):
    recipe = make_recipe("native", workload=SMALL_WORKLOAD, settings=settings)
    return make_plan(
        make_request(recipe, make_machine(ram_gib=8), make_tiny_shape(), model_path=model_path), NativeAdapter()
    )


def test_native_is_this_package_under_this_interpreter():
    spec = NativeAdapter().make_launch_spec(native_plan(strategy="offload", expert_slots=64))
    assert spec.argv == (
        sys.executable, "-m", "freetoken", "serve", "/models/tiny", "--host", "127.0.0.1", "--port", "1919",
        "--device", "cpu", "--strategy", "offload", "--kv-tokens", "4096", "--max-running-requests", "1",
        "--prefill-chunk-tokens", "4096", "--max-output-tokens", "2048", "--served-model-name", "tiny",
        "--no-embed-on-host", "--experts-from", "disk", "--prefix-cache", "--expert-slots", "64", "--cpu-threads", "8",
    )  # fmt: skip
    assert spec.extra_ports == ()


def test_the_command_line_of_native_is_one_that_serve_understands():
    import click

    from freetoken.cli.serve import command

    for plan in (native_plan(), native_plan(strategy="offload", expert_slots=64), native_plan(strategy="cpu")):
        arguments = list(NativeAdapter().make_launch_spec(plan).argv[4:])
        parser = command.make_parser(click.Context(command))
        options, rest, _ = parser.parse_args(arguments)
        assert rest == []
        assert options["strategy"] == plan.settings.strategy


@pytest.mark.parametrize(("changes", "expected"), [
    ({"expert_slots": 1300}, ("expert_slots",)),
    ({"expert_slots": 400, "kv_tokens": 9000, "prefill_overlap": False, "expert_load": "serial"},
     ("expert_slots", "kv_tokens")),
    ({"memory_ratio": 0.85}, ()),
    ({"memory_ratio": 0.97}, None),
    ({"strategy": "hybrid"}, None),
    ({"prefill_chunk_tokens": 512}, None),
])  # fmt: skip
def test_what_can_be_turned_live_on_freetoken(changes, expected):
    old = freetoken_plan().settings
    assert FreetokenAdapter().live_changes(old, old.model_copy(update=changes)) == expected


@pytest.mark.parametrize("slots", [700, 1000, 1150])
def test_a_start_with_fewer_slots_than_fit_leaves_a_live_resize_the_room_that_the_plan_sees(slots):
    """The ratio of a start is what the engine holds every later resize to, whatever is free by then."""
    most = freetoken_plan().settings.expert_slots
    settings = freetoken_plan(settings={"expert_slots": slots}).settings
    request = make_request(make_recipe(), make_machine(make_gpu(6, 5.6, uuid="GPU-1")))
    grown = settings.model_copy(update={"expert_slots": min(most, slots * 5 // 4)})
    assert FreetokenAdapter().memory_model.admission(request, grown).is_admitted


def test_our_own_engine_imports_what_this_process_can(monkeypatch, tmp_path):
    def find_none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", find_none)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), "")))
    spec = NativeAdapter().make_launch_spec(native_plan())
    found = spec.env["PYTHONPATH"].split(os.pathsep)
    assert (Path(found[0]) / "freetoken" / "__init__.py").is_file()
    assert found[1:] == [str(tmp_path)]
