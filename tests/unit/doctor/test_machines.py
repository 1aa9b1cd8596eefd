"""The whole diagnosis of four recorded machines: every check that is not skipped, word for word."""

from collections.abc import Callable
from pathlib import Path

import pytest

from freetoken.adapters.base import EngineNeeds
from freetoken.doctor.diagnose import make_diagnosis
from freetoken.doctor.facts import Facts
from freetoken.doctor.gather import gather_facts
from freetoken.doctor.model import Check, Diagnosis
from freetoken.hardware.probe import probe_hardware
from freetoken.hardware.reader import Reader
from freetoken.units import GIB
from tests.fakes.machines import FakeNvml, cpu_only, headless_server, linux_laptop, write_tree, wsl_machine

NEEDS = {
    "native": EngineNeeds(compute_capability="7.5"),
    "freetoken": EngineNeeds(
        compute_capability="8.0", driver="580", cuda_toolkit="13.0", tools=("nvcc", "g++", "ninja")
    ),
}
HERE = {"state_dir": "/state", "state_free_bytes": 90 * GIB}


def diagnose(machine: tuple[Reader, FakeNvml], **facts: object) -> Diagnosis:
    reader, nvml = machine
    hardware = probe_hardware(reader=reader, nvml_loader=lambda: nvml)
    gathered = gather_facts(hardware, reader=reader, is_here=False)
    return make_diagnosis(hardware, Facts.model_validate(gathered.model_dump() | HERE | facts), NEEDS)


def shown(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """(status, name, found, fix) of what is not skipped."""
    checks = [check for check in diagnosis.checks if check.status != "skip"]
    return [(one.status, one.name, one.found, *([one.fix] if one.fix else [])) for one in checks]


def test_a_laptop_on_battery_with_a_browser_on_the_card_and_swap_in_use(tmp_path: Path) -> None:
    diagnosis = diagnose(linux_laptop(tmp_path))
    assert shown(diagnosis) == [
        ("pass", "gpu", "NVIDIA GeForce RTX 4060 Laptop GPU"),
        ("pass", "driver", "driver 580.95.05, CUDA 13.0"),
        ("pass", "compute_capability", "NVIDIA GeForce RTX 4060 Laptop GPU has 8.9: runs native, freetoken"),
        ("pass", "cuda_toolkit", "CUDA 13.0.2, /usr/local/bin/nvcc"),
        ("pass", "compilers", "/usr/bin/g++, /usr/bin/ninja"),
        (
            "warn", "vram",
            "NVIDIA GeForce RTX 4060 Laptop GPU: 7.23 GiB of 8.00 GiB free; held by firefox (4242) 300 MiB",
            "close firefox, or let an integrated GPU drive the display",
        ),
        (
            "pass", "pcie",
            "NVIDIA GeForce RTX 4060 Laptop GPU: 1.0 x8 now, up to 4.0 x8 (about 12.4 GB/s); an idle link steps down, "
            "so look at it under load",
        ),
        ("warn", "power_source", "running on battery: GPU and CPU clocks are held down", "plug the charger in"),
        ("pass", "cpu", "13th Gen Intel Core i9-13900H, 14 of 14 cores usable"),
        ("pass", "ram", "22.0 GiB of 31.0 GiB available"),
        (
            "warn", "swap", "1.00 GiB of 8.00 GiB swap in use",
            "`sudo swapoff -a && sudo swapon -a` brings it back into RAM",
        ),
        ("warn", "tmpfs", "tmpfs holds 1.00 GiB of RAM", "delete what is not needed: `du -xhd1 /tmp /dev/shm /run`"),
        ("pass", "oom_daemons", "no early OOM daemon runs"),
        ("pass", "memlock", "a process may lock 8.00 MiB; CUDA's own pinning is not bound by that"),
        ("pass", "disk", "/home/ann/.cache/huggingface/hub: 200 GiB of 900 GiB free, nvme"),
        ("warn", "ft_on_path", "no `ft` on PATH", "activate the environment, or use `python -m freetoken`"),
        ("pass", "state", "/state, 90.0 GiB free"),
        ("pass", "database", "there is none yet"),
        ("pass", "deployments", "no stale record"),
    ]  # fmt: skip
    assert not diagnosis.has_failed


def test_wsl_with_an_old_version_no_toolkit_a_windows_drive_and_a_windows_that_is_full(tmp_path: Path) -> None:
    reader, nvml = wsl_machine(tmp_path, windows_free=3 * GIB)
    write_tree(tmp_path, {"/proc/1/comm": "init\n", "/mnt/c/Windows/System32/powercfg.exe": ""})
    diagnosis = diagnose((reader, nvml))
    assert shown(diagnosis) == [
        ("pass", "gpu", "NVIDIA GeForce RTX 3060"),
        ("pass", "driver", "driver 595.71, CUDA 13.0"),
        ("pass", "compute_capability", "NVIDIA GeForce RTX 3060 has 8.6: runs native, freetoken"),
        (
            "fail", "cuda_toolkit", "nvcc is not found; `freetoken` compiles kernels at its first start",
            "install the CUDA 13 toolkit (Ubuntu: `sudo apt install cuda-toolkit-13-0` from NVIDIA's repository) and "
            "put `/usr/local/cuda-13.0/bin` on PATH",
        ),
        ("fail", "compilers", "ninja not found on PATH", "`sudo apt install ninja-build`"),
        (
            "warn", "vram", "NVIDIA GeForce RTX 3060: 10.5 GiB of 12.0 GiB free; held by program77.exe (77)",
            "close program77.exe, or let an integrated GPU drive the display",
        ),
        ("pass", "pcie", "NVIDIA GeForce RTX 3060: 4.0 x16 now, up to 4.0 x16 (about 24.8 GB/s)"),
        ("pass", "power_limit", "NVIDIA GeForce RTX 3060: 170 W of 170 W"),
        ("pass", "power_source", "source unknown, Windows scheme balanced"),
        ("pass", "cpu", "12th Gen Intel Core i5-12600KF, 8 of 8 cores usable"),
        (
            "fail", "ram", "WSL shows 20.0 GiB available, but Windows has 3.00 GiB free",
            "close programs in Windows, and set `autoMemoryReclaim=gradual` under `[experimental]` in .wslconfig",
        ),
        ("pass", "swap", "0 B of 6.00 GiB swap in use"),
        ("pass", "tmpfs", "tmpfs holds 0 B of RAM"),
        ("pass", "oom_daemons", "no early OOM daemon runs"),
        (
            "warn", "memlock", "a process may lock 8.00 MiB: layers beyond WSL's pin limit cannot be locked",
            "add `* - memlock unlimited` to /etc/security/limits.conf and open a new session",
        ),
        (
            "warn", "disk",
            "/mnt/d/models/hub: 20.0 GiB of 900 GiB free, network: a Windows drive, ten times slower than WSL's own",
            "`export HF_HOME=~/hf`",
        ),
        ("fail", "wsl_version", "WSL 2.6.1.0 is older than 2.7.13", "`wsl.exe --update`, then `wsl.exe --shutdown`"),
        (
            "warn", "wsl_idle", "vmIdleTimeout is not set: WSL ends 60 s after its last window closes",
            "put `vmIdleTimeout=-1` under `[wsl2]` in %UserProfile%\\.wslconfig, then `wsl.exe --shutdown`",
        ),
        (
            "warn", "systemd", "systemd is off: a server cannot be kept across sessions",
            "put `systemd=true` under `[boot]` in /etc/wsl.conf, then `wsl.exe --shutdown`",
        ),
        ("warn", "ft_on_path", "no `ft` on PATH", "activate the environment, or use `python -m freetoken`"),
        ("pass", "state", "/state, 90.0 GiB free"),
        ("pass", "database", "there is none yet"),
        ("pass", "deployments", "no stale record"),
    ]  # fmt: skip
    assert diagnosis.has_failed


def test_a_server_whose_second_card_sits_in_a_slow_slot_under_a_power_cap(tmp_path: Path) -> None:
    found = [row for row in shown(diagnose(headless_server(tmp_path))) if row[0] != "pass"]
    assert found == [
        (
            "warn", "pcie", "NVIDIA GeForce RTX 3090: 3.0 x4 now, up to 3.0 x4 (about 3.08 GB/s)",
            "run on the other card: `--set settings.gpu=0`, or move this one to a faster slot",
        ),
        ("warn", "power_limit", "NVIDIA GeForce RTX 3090: 280 W of 350 W", "`sudo nvidia-smi -i 1 -pl 350`"),
        (
            "warn", "cpu", "INTEL XEON GOLD 6526Y, 8 of 32 cores usable (the cgroup's quota is 8 CPUs)",
            "raise the limit of the container, service or `taskset` that `ft` runs in",
        ),
        (
            "warn", "ram", "50.0 GiB of 256 GiB available; the cgroup's limit is 64.0 GiB",
            "end other programs (`ps aux --sort=-rss | head`), or raise the container's limit",
        ),
        (
            "warn", "disk",
            "/data/hub: 2.93 TiB of 3.91 TiB free, hdd: loading takes minutes, and experts cannot be read from it",
            "move the models: `export HF_HOME=/path/on/another/disk`",
        ),
        ("warn", "ft_on_path", "no `ft` on PATH", "activate the environment, or use `python -m freetoken`"),
    ]  # fmt: skip


def test_a_machine_without_a_gpu_is_not_blamed_for_it(tmp_path: Path) -> None:
    diagnosis = diagnose(cpu_only(tmp_path))
    assert not diagnosis.has_failed
    assert {check.name for check in diagnosis.checks if check.status == "skip"} == {
        "gpu", "driver", "compute_capability", "torch_cuda", "cuda_toolkit", "compilers", "vram", "pcie",
        "power_source", "ram_channels", "wsl", "systemd", "ports", "engines", "service",
    }  # fmt: skip


@pytest.mark.parametrize("machine", [linux_laptop, wsl_machine, headless_server, cpu_only])
def test_every_warning_and_failure_comes_with_a_fix_and_nothing_else_does(
    tmp_path: Path, machine: Callable[[Path], tuple[Reader, FakeNvml]]
) -> None:
    def has_right_fix(check: Check) -> bool:
        return (check.fix is not None) == (check.status in ("warn", "fail"))

    assert [check for check in diagnose(machine(tmp_path)).checks if not has_right_fix(check)] == []
