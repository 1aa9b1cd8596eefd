"""Facts read from recorded machines, and from this one."""

from pathlib import Path
from typing import Any

import pytest

from freetoken.doctor.facts import FoundFt, Power, WslSettings
from freetoken.doctor.gather import (
    find_ft,
    gather_facts,
    read_needs,
    read_oom_daemons,
    read_power,
    read_systemd,
    read_wsl_settings,
)
from freetoken.hardware.pin import STEP_BYTES, pin_in_steps
from freetoken.hardware.probe import probe_hardware
from freetoken.units import GIB
from tests.fakes.machines import linux_laptop, make_reader, wsl_machine

SUPPLY = "/sys/class/power_supply"


def supplies(*items: tuple[str, dict[str, str]]) -> dict[str, str]:
    return {f"{SUPPLY}/{name}/{key}": f"{value}\n" for name, values in items for key, value in values.items()}


MAINS_ON = ("AC", {"type": "Mains", "online": "1"})
MAINS_OFF = ("AC", {"type": "Mains", "online": "0"})
CHARGING = ("BAT0", {"type": "Battery", "status": "Charging"})
DRAINING = ("BAT0", {"type": "Battery", "status": "Discharging"})
MOUSE = ("hidpp0", {"type": "Battery", "status": "Discharging", "scope": "Device"})


@pytest.mark.parametrize(
    ("items", "on_battery"),
    [((), None), ((MAINS_ON,), False), ((MAINS_ON, CHARGING), False), ((MAINS_OFF, DRAINING), True),
     ((DRAINING,), True), ((MAINS_ON, DRAINING), False), ((MOUSE,), None), ((MAINS_ON, MOUSE), False)],
)  # fmt: skip
def test_battery_means_that_its_own_battery_drains_without_mains(
    tmp_path: Path, items: tuple[tuple[str, dict[str, str]], ...], on_battery: bool | None
) -> None:
    assert read_power(make_reader(tmp_path, supplies(*items))) == Power(on_battery=on_battery)


@pytest.mark.parametrize(
    ("output", "scheme"),
    [
        (b"Power Scheme GUID: a1841308-3541-4fab-bc81-f71556f20b4a  (Power saver)\r\n", "saver"),
        (
            "GUID des Energieschemas: 381b4222-f694-41f0-9685-ff5bb260df2e  (Ausbalanciert)\r\n".encode("cp1252"),
            "balanced",
        ),
        (b"Power Scheme GUID: 12345678-aaaa-bbbb-cccc-123456789012  (Vendor)\r\n", "other"),
        (b"", None),
    ],
)
def test_windows_power_scheme_is_known_by_its_guid_in_any_language(
    tmp_path: Path, output: bytes, scheme: str | None
) -> None:
    files = {"/mnt/c/Windows/System32/powercfg.exe": ""}
    reader = make_reader(tmp_path, files, programs={"powercfg.exe /getactivescheme": output})
    assert read_power(reader, is_wsl=True).windows_scheme == scheme


@pytest.mark.parametrize(
    ("files", "expected"),
    [({"/run/systemd/system": "[dir]"}, True), ({"/proc/1/comm": "systemd\n"}, True),
     ({"/proc/1/comm": "init\n"}, False), ({}, None)],
)  # fmt: skip
def test_systemd_is_known_by_its_folder_or_the_first_process(
    tmp_path: Path, files: dict[str, str], expected: bool | None
) -> None:
    assert read_systemd(make_reader(tmp_path, files)) is expected


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            "\ufeff[wsl2]\r\nmemory=24GB\r\nvmIdleTimeout = -1\r\n[experimental]\r\nautoMemoryReclaim=gradual\r\n",
            {"vm_idle_timeout_ms": -1, "memory": "24GB", "auto_memory_reclaim": "gradual"},
        ),
        ("[wsl2]\nvmIdleTimeout=soon\n", {}),
        ("no section\n", {}),
    ],
)
def test_wslconfig_is_read_for_whichever_windows_user_has_one(
    tmp_path: Path, text: str, settings: dict[str, Any]
) -> None:
    files = {"/mnt/c/Users/Public": "[dir]", "/mnt/c/Users/ann/.wslconfig": text}
    found = read_wsl_settings(make_reader(tmp_path, files))
    assert found == WslSettings(path="/mnt/c/Users/ann/.wslconfig", **settings)


def test_early_oom_daemons_are_found_among_the_processes(tmp_path: Path) -> None:
    files = {"/proc/1/comm": "systemd\n", "/proc/77/comm": "earlyoom\n", "/proc/meminfo": "", "/proc/78/comm": "bash\n"}
    assert read_oom_daemons(make_reader(tmp_path, files)) == ("earlyoom",)


def test_every_ft_on_path_is_found_in_order_and_the_upstream_one_known_by_its_environment(tmp_path: Path) -> None:
    files = {
        "/opt/up/bin/ft": "#!/opt/up/bin/python3\n",
        "/opt/up/lib/python3.12/site-packages/freetoken-0.2.1.dist-info/METADATA": "",
        "/usr/local/bin/ft": "-> /usr/local/bin/other",
        "/usr/bin/ft": "#!/bin/sh\n",
        "/venv/bin/ft": "#!/venv/bin/python\n",
        "/venv/lib/python3.12/site-packages/freetoken_deploy-0.1.0.dist-info/METADATA": "",
    }
    environ = {"PATH": "/opt/up/bin:relative:/venv/bin:/usr/local/bin:/usr/bin:/venv/bin"}
    assert find_ft(make_reader(tmp_path, files, environ=environ), Path("/venv/bin")) == (
        FoundFt(path="/opt/up/bin/ft", is_ours=False, is_upstream=True),
        FoundFt(path="/venv/bin/ft", is_ours=True, is_upstream=False),
        FoundFt(path="/usr/bin/ft", is_ours=False, is_upstream=False),
    )


def test_recorded_machines_give_their_facts_without_asking_this_one(tmp_path: Path) -> None:
    reader, nvml = wsl_machine(tmp_path / "wsl")
    hardware = probe_hardware(reader=reader, nvml_loader=lambda: nvml)
    facts = gather_facts(hardware, reader=reader, is_here=False)
    assert (facts.ports, facts.engines, facts.state_dir, facts.wsl) == ((), {}, "", WslSettings())
    reader, nvml = linux_laptop(tmp_path / "laptop")
    hardware = probe_hardware(reader=reader, nvml_loader=lambda: nvml)
    assert gather_facts(hardware, reader=reader, is_here=False).power == Power(on_battery=True)


def test_engines_declare_what_they_need() -> None:
    needs = read_needs()
    assert (needs["native"].compute_capability, needs["freetoken"].compute_capability) == ("7.5", "8.0")
    assert needs["freetoken"].tools == ("nvcc", "g++", "ninja")


class FakeCuda:
    """A driver library that pins so much and no more; `codes` are what its calls answer before that."""

    def __init__(self, most: int, codes: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.left, (self.init, self.device, self.context) = most, codes

    def cuInit(self, *_: Any) -> int:
        return self.init

    def cuDeviceGet(self, *_: Any) -> int:
        return self.device

    def cuCtxCreate_v2(self, *_: Any) -> int:
        return self.context

    def cuMemHostAlloc(self, _pointer: Any, size: Any, _flags: int) -> int:
        if size.value > self.left:
            return 2
        self.left -= size.value
        return 0


@pytest.mark.parametrize(
    ("cap", "most", "pinned"), [(GIB, 8 * GIB, GIB), (8 * GIB, GIB, GIB), (100, GIB, 0), (GIB, 0, 0)]
)
def test_pinning_stops_at_the_drivers_refusal_or_at_what_may_be_taken(cap: int, most: int, pinned: int) -> None:
    assert pin_in_steps(FakeCuda(cap), most) == pinned
    assert pinned % STEP_BYTES == 0


@pytest.mark.parametrize("codes", [(3, 0, 0), (0, 100, 0), (0, 0, 2)])
def test_a_driver_without_a_device_cannot_be_tried(codes: tuple[int, int, int]) -> None:
    with pytest.raises(OSError, match="the CUDA driver answered"):
        pin_in_steps(FakeCuda(GIB, codes), GIB)
