"""Each check at its borders."""

from typing import Any

import pytest

from freetoken.adapters.base import EngineNeeds
from freetoken.doctor import gpu_checks, host_checks, place_checks, wsl_checks
from freetoken.doctor.facts import Facts, FoundFt, PortState, Power, StaleDeployment, WslSettings
from freetoken.hardware.model import Bandwidth, Cpu, Disk, Gpu, GpuHolder, Hardware, Os, PcieLink, Ram, Software
from freetoken.units import GIB, MIB

FREETOKEN = EngineNeeds(compute_capability="8.0", driver="580", cuda_toolkit="13.0", tools=("nvcc", "g++", "ninja"))
NEEDS = {"native": EngineNeeds(compute_capability="7.5"), "freetoken": FREETOKEN}
GPU = Gpu(
    name="RTX 3060", compute_capability="8.6", vram_total_bytes=12 * GIB, vram_free_bytes=11 * GIB + 512 * MIB,
    pcie=PcieLink(generation=4, width=16, max_generation=4, max_width=16, card_generation=4),
)  # fmt: skip
MACHINE = Hardware(
    gpus=(GPU,), cpu=Cpu(model="X", physical_cores=8, usable_cores=8, isa=("avx2",)),
    ram=Ram(total_bytes=32 * GIB, available_bytes=28 * GIB), disk=Disk(free_bytes=500 * GIB, kind="nvme"),
    software=Software(driver="580.95", cuda_driver="13.0", cuda_toolkit="13.0.2", nvcc="/n", gxx="/g", ninja="/j"),
)  # fmt: skip


def machine(**changes: Any) -> Hardware:
    return MACHINE.model_copy(update=changes)


def software(**changes: Any) -> Hardware:
    return machine(software=MACHINE.software.model_copy(update=changes))


def ram(**changes: Any) -> Hardware:
    return machine(ram=MACHINE.ram.model_copy(update=changes))


def gpu(**changes: Any) -> Gpu:
    return GPU.model_copy(update=changes)


AMD = Gpu(name="RX 9070 XT", vendor="amd", vram_total_bytes=GIB, vram_free_bytes=GIB)


@pytest.mark.parametrize(
    ("hardware", "status"),
    [
        (MACHINE, "pass"),
        (machine(gpus=()), "skip"),
        (machine(gpus=(AMD,)), "warn"),
        (machine(gpus=(), notes=("an NVIDIA driver is here, but `nvidia-smi` fails",)), "fail"),
        (machine(gpus=(), notes=("CUDA_VISIBLE_DEVICES= leaves 0 of 1 NVIDIA GPUs to this process",)), "fail"),
        (machine(notes=("CUDA_VISIBLE_DEVICES=0 leaves 1 of 2 NVIDIA GPUs to this process",)), "warn"),
    ],
)
def test_presence_of_a_gpu(hardware: Hardware, status: str) -> None:
    assert gpu_checks.check_presence(hardware).status == status


@pytest.mark.parametrize(
    ("driver", "status"),
    [("579.99", "fail"), ("580", "pass"), ("580.65.06", "pass"), ("610.57.04", "pass"), (None, "fail")],
)
def test_the_driver_is_held_against_580(driver: str | None, status: str) -> None:
    assert gpu_checks.check_driver(software(driver=driver)).status == status


def test_under_wsl_the_driver_is_windows_own() -> None:
    check = gpu_checks.check_driver(software(driver="566.36").model_copy(update={"os": Os(is_wsl=True)}))
    assert check.fix is not None
    assert "Windows driver" in check.fix


@pytest.mark.parametrize(
    ("capability", "status", "found"),
    [
        ("8.6", "pass", "RTX 3060 has 8.6: runs native, freetoken"),
        ("12.0", "pass", "RTX 3060 has 12.0: runs native, freetoken"),
        ("7.5", "warn", "RTX 3060 has 7.5: runs native; not freetoken from 8.0"),
        ("6.1", "warn", "RTX 3060 has 6.1: runs no engine; not native from 7.5, freetoken from 8.0"),
        (None, "warn", "RTX 3060 has an unknown one: runs no engine; not native from 7.5, freetoken from 8.0"),
    ],
)
def test_compute_capability_is_told_engine_by_engine(capability: str | None, status: str, found: str) -> None:
    check = gpu_checks.check_capability([gpu(compute_capability=capability)], NEEDS)
    assert (check.status, check.found) == (status, found)


@pytest.mark.parametrize(
    ("torch", "torch_cuda", "cuda_driver", "status"),
    [(None, None, "13.0", "skip"), ("2.13.0+cpu", None, "13.0", "warn"), ("2.14.0", "13.0", "12.8", "fail"),
     ("2.14.0", "13.0", "13.2", "pass"), ("2.9.0", "12.8", "13.0", "pass"), ("2.14.0", "13.0", None, "pass")],
)  # fmt: skip
def test_torch_is_held_against_the_driver(
    torch: str | None, torch_cuda: str | None, cuda_driver: str | None, status: str
) -> None:
    check = gpu_checks.check_torch(software(torch=torch, torch_cuda=torch_cuda, cuda_driver=cuda_driver))
    assert check.status == status


@pytest.mark.parametrize(
    ("changes", "status"),
    [({}, "pass"), ({"nvcc": None}, "fail"), ({"cuda_toolkit": None}, "warn"), ({"cuda_toolkit": "12.8"}, "fail"),
     ({"torch_cuda": "12.8"}, "warn"), ({"torch_cuda": "13.1"}, "pass")],
)  # fmt: skip
def test_the_toolkit_is_held_against_engines_and_torch(changes: dict[str, Any], status: str) -> None:
    assert gpu_checks.check_toolkit(software(**changes), {"freetoken": FREETOKEN}).status == status


def test_no_compiler_is_asked_for_where_no_engine_for_the_card_compiles() -> None:
    nothing = {"native": NEEDS["native"]}
    checks = (
        gpu_checks.check_toolkit(software(nvcc=None), nothing),
        gpu_checks.check_compilers(software(gxx=None), nothing),
    )
    assert [check.status for check in checks] == ["skip", "skip"]


def test_every_missing_compiler_is_in_the_fix() -> None:
    check = gpu_checks.check_compilers(software(gxx=None, ninja=None), {"freetoken": FREETOKEN})
    assert (check.status, check.found, check.fix) == (
        "fail", "g++ and ninja not found on PATH", "`sudo apt install g++ ninja-build`",
    )  # fmt: skip


@pytest.mark.parametrize(("free", "status"), [(12 * GIB, "pass"), (12 * GIB - 700 * MIB, "pass"), (11 * GIB, "warn")])
def test_vram_that_others_hold_is_named_above_a_share_of_the_card(free: int, status: str) -> None:
    holders = (GpuHolder(pid=7, name="firefox", used_bytes=GIB),)
    check = gpu_checks.check_vram(gpu(vram_free_bytes=free, holders=holders))
    assert check.status == status
    assert "firefox (7) 1.00 GiB" in check.found


@pytest.mark.parametrize(
    ("link", "status", "words"),
    [
        ({"generation": 1, "width": 16, "max_generation": 4, "max_width": 16}, "pass", "an idle link steps down"),
        ({"generation": 4, "width": 4, "max_generation": 4, "max_width": 16}, "warn", "12 lanes are not used"),
        (
            {"generation": 3, "width": 16, "max_generation": 3, "max_width": 16, "card_generation": 4},
            "warn",
            "could do 4.0",
        ),
        ({}, "skip", "does not tell"),
    ],
)
def test_the_link_now_is_held_against_what_is_possible(link: dict[str, int], status: str, words: str) -> None:
    found = gpu(pcie=PcieLink(**link))
    check = gpu_checks.check_link(found, machine(gpus=(found,)), [found])
    assert check.status == status
    assert words in check.found


@pytest.mark.parametrize(
    ("rate", "source", "status"), [(6.2e9, "measured", "warn"), (24e9, "measured", "pass"), (6.2e9, "guessed", "pass")]
)
def test_a_measured_rate_far_below_the_link_is_a_warning_and_a_guessed_one_is_not(
    rate: float, source: Any, status: str
) -> None:
    hardware = machine(bandwidth=Bandwidth(h2d_bytes_per_s=rate, sources={"h2d_bytes_per_s": source}))
    assert gpu_checks.check_link(GPU, hardware, [GPU]).status == status


@pytest.mark.parametrize(
    ("limit", "default", "status"),
    [(170.0, 170.0, "pass"), (155.0, 170.0, "pass"), (120.0, 170.0, "warn"), (None, 170.0, "skip")],
)
def test_a_card_held_below_nine_tenths_of_its_power_is_capped(limit: float | None, default: float, status: str) -> None:
    assert gpu_checks.check_power_limit(gpu(power_limit_w=limit, power_default_w=default)).status == status


@pytest.mark.parametrize(
    ("power", "status"),
    [(Power(), "skip"), (Power(on_battery=True), "warn"), (Power(on_battery=False), "pass"),
     (Power(platform_profile="low-power"), "warn"), (Power(windows_scheme="saver"), "warn"),
     (Power(on_battery=False, platform_profile="balanced", windows_scheme="performance"), "pass")],
)  # fmt: skip
def test_battery_and_saving_profiles_are_warnings(power: Power, status: str) -> None:
    assert gpu_checks.check_power_source(MACHINE, Facts(power=power)).status == status


@pytest.mark.parametrize(
    ("changes", "status"),
    [({}, "pass"), ({"available_bytes": 16 * GIB}, "pass"), ({"available_bytes": 16 * GIB - 1}, "warn"),
     ({"available_bytes": 4 * GIB - 1}, "fail"), ({"windows_available_bytes": 10 * GIB}, "warn"),
     ({"windows_available_bytes": 3 * GIB}, "fail"), ({"windows_available_bytes": 30 * GIB}, "pass")],
)  # fmt: skip
def test_ram_is_what_is_really_available(changes: dict[str, Any], status: str) -> None:
    assert host_checks.check_ram(ram(**changes)).status == status


@pytest.mark.parametrize(
    ("rate", "source", "threads", "status"),
    [(18e9, "measured", 8, "warn"), (38e9, "measured", 8, "pass"), (18e9, "measured", 2, "skip"),
     (18e9, "guessed", 8, "skip"),
     (None, "measured", 8, "skip")],
)  # fmt: skip
def test_one_memory_channel_is_guessed_from_a_measured_rate_only(
    rate: float | None, source: Any, threads: int, status: str
) -> None:
    sources = {"dram_bytes_per_s": source} if rate else {}
    bandwidth = Bandwidth(dram_bytes_per_s=rate, sources=sources, threads=threads)
    assert host_checks.check_channels(machine(bandwidth=bandwidth)).status == status


@pytest.mark.parametrize(
    ("total", "used", "available", "status", "fix"),
    [(0, 0, 28, "pass", None), (8, 0, 28, "pass", None),
     (8, 2, 28, "warn", "`sudo swapoff -a && sudo swapon -a` brings it back into RAM"),
     (8, 2, 2, "warn", "end other programs first")],
)  # fmt: skip
def test_swap_is_only_emptied_where_ram_has_room(
    total: int, used: int, available: int, status: str, fix: str | None
) -> None:
    check = host_checks.check_swap(
        ram(swap_total_bytes=total * GIB, swap_used_bytes=used * GIB, available_bytes=available * GIB)
    )
    assert (check.status, check.fix) == (status, fix)


@pytest.mark.parametrize(
    ("disk", "status"),
    [(Disk(free_bytes=500 * GIB, kind="nvme"), "pass"), (Disk(free_bytes=30 * GIB, kind="nvme"), "warn"),
     (Disk(free_bytes=4 * GIB, kind="nvme"), "fail"), (Disk(free_bytes=500 * GIB, kind="hdd"), "warn"),
     (Disk(free_bytes=500 * GIB, kind="network", filesystem="9p"), "warn"),
     (Disk(free_bytes=500 * GIB, kind="network", filesystem="nfs4"), "warn")],
)  # fmt: skip
def test_a_full_or_slow_models_disk_is_told(disk: Disk, status: str) -> None:
    assert host_checks.check_disk(machine(disk=disk)).status == status


def test_tmpfs_daemons_and_isa() -> None:
    assert host_checks.check_tmpfs(ram(tmpfs_used_bytes=GIB)).status == "warn"
    assert host_checks.check_tmpfs(ram(tmpfs_used_bytes=GIB - 1)).status == "pass"
    assert (
        host_checks.check_oom_daemons(Facts(oom_daemons=("earlyoom",))).found
        == "earlyoom may end a load before RAM is full"
    )
    assert host_checks.check_isa(machine(cpu=Cpu(isa=("avx",)))).status == "warn"
    assert host_checks.check_isa(machine(cpu=Cpu(isa=("neon",)))).status == "pass"


@pytest.mark.parametrize(
    ("is_wsl", "limit", "status"),
    [(False, 64 * 1024, "pass"), (True, 64 * 1024, "warn"), (True, 16 * GIB, "pass"), (True, None, "pass")],
)
def test_memlock_matters_where_pinning_is_capped(is_wsl: bool, limit: int | None, status: str) -> None:
    hardware = ram(memlock_bytes=limit).model_copy(update={"os": Os(is_wsl=is_wsl)})
    assert host_checks.check_memlock(hardware).status == status


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.7.13.0", "pass"), ("2.7.12.9", "fail"), ("2.10.0", "pass"), (None, "warn"), ("x", "pass")],
)
def test_wsl_is_held_against_2_7_13(version: str | None, status: str) -> None:
    assert wsl_checks.check_version(machine(os=Os(is_wsl=True, wsl_version=version))).status == status


@pytest.mark.parametrize(("timeout", "status"), [(None, "warn"), (60000, "warn"), (-1, "pass"), (10**9, "pass")])
def test_wsl_must_not_end_with_its_last_window(timeout: int | None, status: str) -> None:
    assert wsl_checks.check_idle_timeout(Facts(wsl=WslSettings(vm_idle_timeout_ms=timeout))).status == status


@pytest.mark.parametrize(("probed", "status"), [(None, "skip"), (GIB, "fail"), (6 * GIB, "warn"), (20 * GIB, "pass")])
def test_the_pin_limit_is_told_where_it_was_tried(probed: int | None, status: str) -> None:
    check = wsl_checks.check_pin_limit(ram(pinnable_bytes=12 * GIB), Facts(pinnable_probed_bytes=probed))
    assert check.status == status


def test_elsewhere_than_in_wsl_there_is_one_skipped_check() -> None:
    assert [check.name for check in wsl_checks.check_wsl(MACHINE, Facts())] == ["wsl"]


@pytest.mark.parametrize(
    ("hardware", "has_systemd", "status"),
    [(MACHINE, True, "pass"), (MACHINE, False, "warn"), (MACHINE, None, "skip"),
     (machine(os=Os(is_container=True)), False, "skip"), (machine(os=Os(is_wsl=True)), False, "warn")],
)  # fmt: skip
def test_systemd(hardware: Hardware, has_systemd: bool | None, status: str) -> None:
    assert place_checks.check_systemd(hardware, Facts(has_systemd=has_systemd)).status == status


def test_a_taken_port_is_told_with_its_holder_and_another_port_offered() -> None:
    taken = PortState(port=1920, holder="port 1920 is taken by `python3` (process 42)")
    check = place_checks.check_ports(Facts(ports=(PortState(port=1919), taken)))
    assert (check.status, check.found, check.fix) == (
        "warn", "port 1920 is taken by `python3` (process 42)", "`--set serve.port=1929`, or end that program",
    )  # fmt: skip


OURS = FoundFt(path="/venv/bin/ft", is_ours=True, is_upstream=False)
UPSTREAM = FoundFt(path="/usr/local/bin/ft", is_ours=False, is_upstream=True)
OTHER = FoundFt(path="/usr/bin/ft", is_ours=False, is_upstream=False)


@pytest.mark.parametrize(
    ("found", "overwritten", "status", "words"),
    [
        ((OURS,), False, "pass", "/venv/bin/ft"),
        ((OURS, UPSTREAM), False, "pass", "/venv/bin/ft; the upstream one comes after it: /usr/local/bin/ft"),
        ((UPSTREAM, OURS), False, "warn", "`ft` on PATH is the upstream engine's: /usr/local/bin/ft"),
        ((OTHER,), False, "warn", "`ft` on PATH is another program's: /usr/bin/ft"),
        ((), False, "warn", "no `ft` on PATH"),
        (
            (OURS,), True, "fail",
            "the upstream package `freetoken` is installed in this environment and overwrites ours of the same name",
        ),
    ],
)  # fmt: skip
def test_an_ft_that_is_not_ours_is_told(found: tuple[FoundFt, ...], overwritten: bool, status: str, words: str) -> None:
    check = place_checks.check_path(Facts(ft_on_path=found, upstream_in_our_environment=overwritten))
    assert (check.status, check.found) == (status, words)


def test_the_fix_names_the_folder_of_our_ft_where_it_comes_later() -> None:
    check = place_checks.check_path(Facts(ft_on_path=(UPSTREAM, OURS)))
    assert check.fix == "put /venv/bin first on PATH, or use `python -m freetoken`"


@pytest.mark.parametrize(
    ("facts", "status"),
    [(Facts(state_dir="/s", state_free_bytes=9 * GIB), "pass"),
     (Facts(state_dir="/s", state_free_bytes=GIB - 1), "warn"),
     (Facts(state_dir="/s", state_problem="cannot be written"), "fail")],
)  # fmt: skip
def test_state_folder(facts: Facts, status: str) -> None:
    assert place_checks.check_state(facts).status == status


def test_database_deployments_and_engines() -> None:
    newer = Facts(database_problem="ft.db has version 9", database_fix="use the newer `ft`")
    assert place_checks.check_database(newer).model_dump() == {
        "name": "database", "status": "fail", "found": "ft.db has version 9", "fix": "use the newer `ft`",
    }  # fmt: skip
    assert place_checks.check_database(Facts(database_version=3)).status == "pass"
    stale = Facts(stale=(StaleDeployment(name="demo", words="engine gone"),))
    assert place_checks.check_deployments(stale).found == "`demo`: engine gone"
    engines = place_checks.check_engines(Facts(engines={"native": "0.1", "freetoken": None}))
    assert engines.found == "native 0.1, freetoken not installed"
