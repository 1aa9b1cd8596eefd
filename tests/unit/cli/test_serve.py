"""What `ft serve` refuses before it imports anything heavy, in words and with exit code 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetoken import paths
from freetoken.cli.main import main
from freetoken.cli.serve import calm_threads
from freetoken.cli.serve_defaults import _make_error as make_error
from freetoken.cli.serve_defaults import fill_settings
from freetoken.hardware.profiles import load_profile
from freetoken.planner.plan import Refusal, Repair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    return tmp_path / "tiny"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    return int(caught.value.code or 0)


def test_a_folder_that_is_not_there_or_holds_no_model_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path / "nowhere")) == 2
    assert capsys.readouterr().err == (
        f"error: no model folder {tmp_path / 'nowhere'}\n"
        "hint: `ft serve demo`, or `ft model fetch REPO` for a model of a hub\n"
    )
    assert run(str(tmp_path)) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} has no config.json, so it is no model folder\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_an_open_address_needs_a_key(folder: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(folder), "--host", host) == 2
    assert capsys.readouterr().err == (
        f"error: {host} can be reached from other machines, and no API key is set\n"
        "hint: `--api-key-env VAR` with the key in VAR, or `--host 127.0.0.1`\n"
    )


@pytest.mark.parametrize("value", [None, ""])
def test_a_key_variable_that_is_not_set_is_told(
    folder: Path, value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    assert run(str(folder), "--api-key-env", "MY_KEY") == 2
    assert capsys.readouterr().err == (
        "error: `--api-key-env MY_KEY`: that environment variable is not set\nhint: export MY_KEY=...\n"
    )


@pytest.mark.parametrize(("arguments", "wanted"), [((), "auto"), (("--decode-graphs", "eager"), "eager")])
def test_decode_graphs_are_the_engines_setting(
    arguments: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def serve(*given: Any) -> None:
        given[1].close()
        started.append(given[2])

    monkeypatch.setattr("freetoken.cli.serve._serve", serve)
    monkeypatch.setattr("freetoken.cli.serve.calm_threads", lambda: None)
    everything = (
        "--port", "0", "--device", "cpu", "--strategy", "fused", "--kv-tokens", "64", "--max-running-requests", "1",
        "--prefill-chunk-tokens", "64", "--no-embed-on-host", "--experts-from", "auto",
    )  # fmt: skip
    assert run("demo", *everything, *arguments) == 0
    assert started[0].decode_graphs == wanted


@pytest.mark.parametrize("arguments", [
    ("--kv-tokens", "eight"), ("--strategy", "hybrid"), ("--max-running-requests", "0"),
    ("--port", "70000"), ("--prefill-chunk-tokens", "0"), ("--decode-graphs", "sometimes"),
])  # fmt: skip
def test_values_that_cannot_be_are_refused(
    folder: Path, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(folder), *arguments) == 2
    assert arguments[0].replace("-", "_").strip("_") in capsys.readouterr().err.replace("-", "_")


def test_a_busy_port_costs_no_heavy_import(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = (
            "import sys\nfrom freetoken.cli.main import main\n"
            f"try: main(['serve', {str(folder)!r}, '--port', '{port}'])\n"
            "except SystemExit as end:\n"
            "    print(end.code, sorted({'torch', 'transformers', 'fastapi'} & sys.modules.keys()))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.stdout.strip(), found.stderr.splitlines()[0]) == (
        "1 []",
        f"error: port {port} on 127.0.0.1 is already in use",
    )


GIVEN: dict[str, Any] = dict.fromkeys((
    "device", "gpu", "strategy", "expert_slots", "kv_tokens", "max_running_requests", "prefill_chunk_tokens",
    "cpu_threads", "embed_on_host", "experts_from",
))  # fmt: skip


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.hardware.probe.probe_hardware", lambda _: load_profile("cpu-only-16gb"))


def test_what_is_left_out_is_planned_and_what_is_given_is_obeyed(
    no_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = paths.package_data("demo-moe")
    assert fill_settings(folder, GIVEN) == {
        "device": "cpu", "strategy": "fused", "expert_slots": 0, "kv_tokens": 8192, "max_running_requests": 1,
        "prefill_chunk_tokens": 4096, "cpu_threads": 12, "embed_on_host": False, "experts_from": "ram",
    }  # fmt: skip
    assert capsys.readouterr().err.startswith("planned: cpu, fused, KV 8,192 tokens, ")
    some = GIVEN | {"expert_slots": 40, "kv_tokens": 3000, "cpu_threads": 0, "prefill_chunk_tokens": 64}
    assert fill_settings(folder, some) == {
        "device": "cpu", "strategy": "offload", "expert_slots": 40, "kv_tokens": 3000, "max_running_requests": 1,
        "prefill_chunk_tokens": 64, "cpu_threads": 0, "embed_on_host": False, "experts_from": "disk",
    }  # fmt: skip
    few = fill_settings(folder, GIVEN | {"expert_slots": 0, "strategy": "offload"})
    assert (few["strategy"], few["expert_slots"]) == ("offload", 0)


def test_a_gpu_is_taken_where_there_is_one_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.hardware.probe.probe_hardware", lambda _: load_profile("rtx-3060-laptop-6gb"))
    folder = paths.package_data("demo-moe")
    planned = fill_settings(folder, GIVEN)
    assert (planned["device"], planned["strategy"], planned["gpu"] is not None) == ("cuda", "fused", True)
    assert "gpu" not in fill_settings(folder, GIVEN | {"device": "cpu"})


def test_with_every_flag_given_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.cli.serve_defaults._plan", lambda *_: pytest.fail("planned"))
    given = {
        "device": "cpu", "strategy": "cpu", "kv_tokens": 64, "max_running_requests": 1, "prefill_chunk_tokens": 64,
        "embed_on_host": False, "experts_from": "auto",
    }  # fmt: skip
    assert fill_settings(Path("nowhere"), GIVEN | given) == given


def test_what_does_not_fit_is_refused_with_flags_to_type(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--port", "0", "--kv-tokens", "100m") == 3
    error, *_, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: `demo-moe` needs 201 GiB of RAM at its peak (prefill), ")
    assert hint.startswith("hint: `--kv-tokens 8192`")


def test_advice_names_flags_of_serve_and_never_auto(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--port", "0", "--kv-tokens", "1", "--expert-slots", "99999") == 3
    told = capsys.readouterr().err
    assert "instead: `--kv-tokens 2`" in told
    assert "no `--expert-slots --kv-tokens`" in told
    assert "--set" not in told
    assert " auto`" not in told


@pytest.mark.parametrize(("given", "expected"), [
    ({}, ("PASSIVE", "30000")), ({"GOMP_SPINCOUNT": "7"}, ("PASSIVE", "7")),
    ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
])  # fmt: skip
def test_threads_spin_a_moment_and_sleep_unless_the_user_says_otherwise(
    given: dict[str, str], expected: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "gone afterwards")  # so that what the call sets is taken back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    calm_threads()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == expected


@pytest.mark.parametrize(("sets", "expected"), [
    ({"settings.kv_tokens": "8192", "settings.embed_on_host": "true"}, "`--kv-tokens 8192 --embed-on-host`"),
    ({"settings.embed_on_host": "false", "settings.gpu": "auto"}, "`--no-embed-on-host` and no `--gpu`"),
])  # fmt: skip
def test_a_repair_is_shown_as_flags_that_serve_takes(sets: dict[str, str], expected: str) -> None:
    repair = Repair(description="fits", sets=sets)
    other = Repair(description="fits too", sets={"headroom": "server"})
    refusal = Refusal(recipe_name="m", engine="native", model_name="m", message="no", repairs=(repair, other))
    assert make_error(refusal).hint == f"{expected} (fits)"
