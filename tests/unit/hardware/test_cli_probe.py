"""`ft probe` as it is typed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from freetoken.cli.probe import command, make_rows
from freetoken.hardware.model import Hardware
from freetoken.hardware.probe import probe_hardware
from freetoken.hardware.profiles import load_profile
from tests.fakes.machines import headless_server, wsl_machine


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), catch_exceptions=True)


def test_the_json_document_is_the_typed_value_itself() -> None:
    result = run("--json")
    assert result.exit_code == 0
    assert Hardware.model_validate(json.loads(result.stdout)).is_probed


def test_save_writes_a_profile_once_and_overwrites_it_only_when_told(tmp_path: Path) -> None:
    assert run("--save", "mine").exit_code == 0
    assert load_profile("mine").name == "mine"
    again = run("--save", "mine")
    assert str(again.exception) == f"{tmp_path / 'state' / 'profiles' / 'mine.yaml'} exists"
    assert run("--save", "mine", "--yes").exit_code == 0


def test_a_profile_is_shown_with_the_source_of_every_line() -> None:
    result = run("--profile", "rtx-3060-laptop-6gb")
    lines = [line.split("  ") for line in result.stdout.splitlines()]
    assert lines[0] == ["rtx-3060-laptop-6gb: Laptop, RTX 3060 6 GB (Ampere), 32 GB of DDR4"]
    assert {line[-1].strip() for line in lines[2:]} == {"vendor", "guessed"}


def test_profiles_are_listed_for_people_and_for_programs() -> None:
    assert "rtx-3060-laptop-6gb" in run("--list").stdout
    names = {one["name"] for one in json.loads(run("--list", "--json").stdout)}
    assert {"cpu-only", "h200-141gb"} <= names


def test_bandwidth_of_a_profile_cannot_be_measured() -> None:
    assert "measures this machine" in str(run("--bandwidth", "--profile", "cpu-only").exception)


def test_a_server_is_drawn_line_by_line(tmp_path: Path) -> None:
    reader, nvml = headless_server(tmp_path / "root")
    assert make_rows(probe_hardware(reader=reader, nvml_loader=lambda: nvml)) == [
        ("GPU 0", "NVIDIA GeForce RTX 3090, compute capability 8.6, 82 SMs", "measured"),
        ("  VRAM", "24.0 GiB, free 23.7 GiB", "measured"),
        ("  PCIe", "4.0 x16 now, up to 4.0 x16", "measured"),
        ("  power limit", "350 W", "measured"),
        ("GPU 1", "NVIDIA GeForce RTX 3090, compute capability 8.6, 82 SMs", "measured"),
        ("  VRAM", "24.0 GiB, free 23.7 GiB", "measured"),
        ("  PCIe", "3.0 x4 now, up to 3.0 x4", "measured"),
        ("  power limit", "280 W", "measured"),
        ("CPU", "INTEL XEON GOLD 6526Y, 32 cores, 64 threads", "measured"),
        ("  usable", "8 cores, cgroup quota 8 CPUs", "measured"),
        ("  ISA", "sse4_2 avx f16c fma avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 "
         "amx_bf16", "measured"),
        ("  NUMA", "2 nodes", "measured"),
        ("RAM", "256 GiB, available 50.0 GiB", "measured"),
        ("  cgroup limit", "64.0 GiB", "measured"),
        ("disk", "2.93 TiB free of 3.91 TiB, hdd, /data/hub", "measured"),
        ("VRAM, streaming read", "936 GB/s", "vendor"),
        ("system", "Debian GNU/Linux 12 (bookworm), kernel 6.8.0-60-generic, x86_64, in a container", "measured"),
        ("NVIDIA driver", "580.95.05 (CUDA 13.0)", "measured"),
        ("CUDA toolkit", "13.0.2, /usr/local/bin/nvcc", "measured"),
        ("g++, ninja", "/usr/bin/g++, /usr/bin/ninja", "measured"),
    ]  # fmt: skip


def test_wsl_lines_show_the_pin_cap_as_guessed_and_windows_own_free_memory(tmp_path: Path) -> None:
    reader, nvml = wsl_machine(tmp_path / "root")
    rows = make_rows(probe_hardware(reader=reader, nvml_loader=lambda: nvml))
    found = [row for row in rows if row[0] in ("  may be pinned", "  free in Windows", "  VRAM held by", "system")]
    assert found == [
        ("  VRAM held by", "program77.exe (77) unknown", "measured"),
        ("  may be pinned", "9.60 GiB", "guessed"),
        ("  free in Windows", "5.00 GiB", "measured"),
        ("system", "Ubuntu 24.04.2 LTS, kernel 6.6.87.2-microsoft-standard-WSL2, x86_64, WSL 2.6.1.0", "measured"),
    ]
