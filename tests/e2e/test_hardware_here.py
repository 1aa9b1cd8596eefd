"""Probe, doctor and measurements on this very machine; nothing here says how fast it should be."""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from freetoken.cli.main import main
from freetoken.errors import UsageError
from freetoken.hardware.bandwidth import find_device, measure_bandwidth
from freetoken.hardware.disk_speed import BLOCK_BYTES, measure_disk
from freetoken.hardware.pin import probe_pinnable
from freetoken.hardware.probe import probe_hardware
from freetoken.hardware.reader import run_program
from freetoken.units import GIB, MIB


def test_this_machine_is_probed_in_under_150_ms_where_there_is_no_gpu() -> None:
    def once() -> float:
        start = time.perf_counter()
        hardware = probe_hardware()
        elapsed = time.perf_counter() - start
        if hardware.gpus:
            pytest.skip("this machine has a GPU, whose driver takes its own time")
        return elapsed

    assert min(once() for _ in range(5)) < 0.150


def test_probing_imports_neither_torch_nor_pynvml_without_a_driver() -> None:
    code = (
        "import sys; from freetoken.hardware.probe import probe_hardware; h = probe_hardware();"
        "print(h.gpus == () and sorted({'torch', 'pynvml', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "False")  # False: a GPU is here, and then pynvml is needed


def test_a_program_that_is_missing_fails_or_hangs_answers_nothing() -> None:
    assert run_program(("/nonexistent/program",), 1.0) is None
    assert run_program((sys.executable, "-c", "raise SystemExit(3)"), 10.0) is None
    assert run_program((sys.executable, "-c", "import time; time.sleep(30)"), 0.2) is None
    assert run_program((sys.executable, "-c", "print('yes')"), 10.0) == b"yes\n"


def test_host_memory_is_measured_in_bounded_time_and_torchs_threads_are_put_back() -> None:
    before, start = torch.get_num_threads(), time.monotonic()
    rates = measure_bandwidth("cpu", 1 * MIB, threads=1, seconds_each=0.02)
    assert time.monotonic() - start < 30
    assert torch.get_num_threads() == before
    assert rates.sources == {"dram_bytes_per_s": "measured", "cpu_experts_bytes_per_s": "guessed"}
    assert rates.dram_bytes_per_s is not None
    assert 1e8 < rates.dram_bytes_per_s < 2e12
    assert (rates.piece_bytes, rates.threads, rates.h2d_bytes_per_s) == (MIB, 1, None)
    assert rates.measured_at is not None
    assert rates.measured_at.endswith("+00:00")


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "GPU-does-not-exist", "mps"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="device"):
        find_device(device)


def test_the_automatic_device_is_one_that_torch_has() -> None:
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert find_device("cpu") == torch.device("cpu")


def test_a_disk_is_read_through_a_temporary_file_that_is_removed(tmp_path: Path) -> None:
    rate = measure_disk(tmp_path / "not" / "yet", file_bytes=4 * BLOCK_BYTES)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []


def test_the_largest_model_file_is_read_where_there_is_one_and_nothing_is_written(tmp_path: Path) -> None:
    model = tmp_path / "models" / "a.safetensors"
    model.parent.mkdir()
    with model.open("wb") as file:
        file.truncate(80 * MIB)
    tmp_path.chmod(0o500)
    try:
        assert measure_disk(tmp_path, most_s=0.5) is not None
        assert [path.name for path in model.parent.iterdir()] == ["a.safetensors"]
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_cannot_hold_the_test_file_has_no_rate(tmp_path: Path) -> None:
    assert measure_disk(tmp_path, file_bytes=1 << 62) is None


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    return int(caught.value.code or 0), capsys.readouterr().out


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["ft"])
    return tmp_path / "state"


def test_the_json_document_holds_every_check_with_its_fix(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, "--json")
    names = [check["name"] for check in json.loads(out)["checks"]]
    assert {"gpu", "ram", "disk", "ports", "state", "database", "deployments", "engines"} <= set(names)
    assert not state.exists()  # looking leaves no trace


def test_a_newer_database_fails_the_doctor_with_exit_code_1_and_shows_the_fix(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state.mkdir()
    with sqlite3.connect(state / "ft.db") as connection:
        connection.execute("create table x (y)")
        connection.execute("pragma user_version = 9999")
    code, out = run(capsys)
    assert code == 1
    lines = [line.strip() for line in out.splitlines()]
    failure = next(index for index, line in enumerate(lines) if line.startswith("fail  database"))
    assert "9999" in lines[failure]
    assert lines[failure + 1].startswith("fix: use the newer `ft`")


def test_without_a_driver_library_the_pin_limit_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert probe_pinnable(8 * GIB) is None
    program.write_text("#!/bin/sh\necho 1073741824\n")
    assert probe_pinnable(8 * GIB) == GIB
