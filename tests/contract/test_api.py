"""The Python API: it costs nothing to import, and gives back what the commands show."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from freetoken import api
from freetoken.hardware.model import Hardware

DEMO = Path(api.__file__).parent / "data" / "demo-moe"
CARD = "nvidia/Qwen3.6-35B-A3B-NVFP4"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state"


def test_it_is_imported_without_anything_heavy() -> None:
    code = (
        "import sys; from freetoken import api; "
        "print(sorted({'torch', 'transformers', 'optuna', 'pydantic', 'click', 'yaml'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_everything_public_is_listed_and_says_what_it_does() -> None:
    public = {name for name, value in vars(api).items() if inspect.isfunction(value) and not name.startswith("_")}
    errors = {"DoesNotFitError", "FtError", "NotReadyError", "TargetMissedError", "UsageError"}
    assert set(api.__all__) == public | errors
    assert all(getattr(api, name).__doc__ for name in public)


def test_a_plan_is_what_the_command_prints() -> None:
    sets = ("settings.kv_tokens=16k",)
    plan = api.plan("qwen3.6-35b-a3b-6gb", machine="rtx-3060-laptop-6gb", sets=sets)
    assert plan.kind == "plan"
    assert plan.settings.kv_tokens == 16384
    done = subprocess.run(
        [sys.executable, "-m", "freetoken", "plan", "qwen3.6-35b-a3b-6gb", "--profile", "rtx-3060-laptop-6gb", "--json",
         "--set", *sets], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout) == json.loads(plan.model_dump_json())


def test_a_no_is_a_value_and_a_mistake_an_error() -> None:
    refusal = api.plan(CARD, machine=api.machine(gpu="GTX 1650", ram="16GiB"), sets=("engine.name=freetoken",))
    assert (refusal.kind, refusal.findings[0].check) == ("refusal", "gpu_generation")
    with pytest.raises(api.UsageError, match="rtx-3060-laptp-6gb"):
        api.plan(CARD, machine="rtx-3060-laptp-6gb")
    with pytest.raises(api.UsageError, match="a profile is a whole machine"):
        api.machine("rtx-3060-laptop-6gb", ram="8GiB")
    loaded = api.load("demo")
    with pytest.raises(api.UsageError, match="give them to `load`"):
        api.plan(loaded, sets=("settings.kv_tokens=1k",))
    with pytest.raises(api.FtError) as told:
        api.apply("demo", sets=("settings.kv_tokn=1k",), dry_run=True)
    assert (told.value.exit_code, "did you mean `settings.kv_tokens`" in told.value.message) == (2, True)


def test_machines_models_and_nothing_measured_yet() -> None:
    assert isinstance(api.probe(), Hardware)
    found = api.suggest(machine=api.machine(gpu="RTX 4090", ram="64GiB")).suggestions
    assert len(found) > 3
    assert all(one.decode_tps >= 8 for one in found)
    assert (api.results(), api.status().deployments, api.stop(everything=True)) == ((), (), ())
    with pytest.raises(api.UsageError, match="no deployment `lab` runs"):
        api.connect("lab")


def test_a_bundle_goes_out_and_comes_in(tmp_path: Path) -> None:
    digest = api.export_bundle("demo", tmp_path / "demo.ftbundle")
    assert len(digest) == 64
    received = api.import_bundle(tmp_path / "demo.ftbundle", name="theirs")
    assert received.answer.kind == "plan"
    assert received.path is not None
    assert api.load(received.path).recipe.name == "theirs"


def test_the_engine_in_this_process_generates_token_ids() -> None:
    from freetoken.engine.request import GenerationRequest

    engine = api.open_engine(DEMO, expert_slots=40, kv_tokens=256)
    try:
        handle = engine.submit(GenerationRequest(prompt_ids=(5, 6, 7), max_tokens=4, ignore_eos=True))
        assert len(list(handle)) == 4
        assert engine.stats().hits.lookups > 0
    finally:
        engine.close()
