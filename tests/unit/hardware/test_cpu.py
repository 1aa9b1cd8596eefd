"""Cores, limits and instruction sets of recorded CPUs."""

from pathlib import Path

import pytest

from freetoken.hardware.cgroup import CgroupLimits
from freetoken.hardware.cpu import read_cache_bytes, read_cpu
from freetoken.hardware.model import Cpu
from freetoken.hardware.reader import parse_cpu_list
from freetoken.units import MIB
from tests.fakes.machines import AVX2, AVX512, cpuinfo, make_reader, topology

ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd asimddp sve sve2 i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""


def test_threads_of_one_core_count_as_one_physical_core(tmp_path: Path) -> None:
    files = {"/proc/cpuinfo": cpuinfo("AMD Ryzen 9 5900HX", 16, AVX2), **topology([(0, 2)] * 8)}
    assert read_cpu(make_reader(tmp_path, files)) == Cpu(
        model="AMD Ryzen 9 5900HX", physical_cores=8, logical_cores=16, usable_cores=8,
        isa=("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni"),
    )  # fmt: skip


def test_a_hybrid_cpu_tells_performance_from_efficiency_cores(tmp_path: Path) -> None:
    files = {
        "/sys/devices/cpu_core/cpus": "0-11",
        "/sys/devices/cpu_atom/cpus": "12-19",
        **topology([(0, 2)] * 6 + [(0, 1)] * 8),
    }
    cpu = read_cpu(make_reader(tmp_path, files))
    assert (cpu.physical_cores, cpu.logical_cores, cpu.performance_cores, cpu.efficiency_cores) == (14, 20, 6, 8)


def test_arm_big_and_little_cores_are_told_apart_by_capacity(tmp_path: Path) -> None:
    capacity = {f"/sys/devices/system/cpu/cpu{n}/cpu_capacity": str(1024 if n >= 4 else 446) for n in range(6)}
    cpu = read_cpu(make_reader(tmp_path, {"/proc/cpuinfo": ARM, **topology([(0, 1)] * 6), **capacity}, arch="aarch64"))
    assert (cpu.performance_cores, cpu.efficiency_cores) == (2, 4)
    assert cpu.model == "Neoverse V2"
    assert cpu.isa == ("neon", "dotprod", "i8mm", "bf16", "sve", "sve2")


def test_affinity_to_two_threads_of_one_core_leaves_one_usable_core(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, topology([(0, 2)] * 4), affinity=frozenset({2, 3}))
    cpu = read_cpu(reader)
    assert (cpu.usable_cores, cpu.affinity_cpus, cpu.physical_cores) == (1, 2, 4)


@pytest.mark.parametrize(("quota", "usable"), [(0.5, 1), (1.0, 1), (2.9, 2), (64.0, 4)])
def test_a_quota_leaves_its_whole_cpus_and_at_least_one(tmp_path: Path, quota: float, usable: int) -> None:
    cpu = read_cpu(make_reader(tmp_path, topology([(0, 1)] * 4)), CgroupLimits(quota_cpus=quota))
    assert (cpu.usable_cores, cpu.quota_cpus) == (usable, quota)


def test_core_ids_that_repeat_across_packages_are_different_cores(tmp_path: Path) -> None:
    files = topology([(0, 2), (1, 2)])
    for cpu in range(4):
        files[f"/sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = "0\n"
    assert read_cpu(make_reader(tmp_path, files)).physical_cores == 2


def test_without_sysfs_the_cores_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpu = read_cpu(make_reader(tmp_path, {"/proc/cpuinfo": cpuinfo("Old CPU", 8, AVX512)}))
    assert (cpu.physical_cores, cpu.logical_cores) == (4, 8)
    assert {"avx512f", "avx512_vnni", "amx_int8"} <= set(cpu.isa)


def test_an_offline_cpu_is_no_cpu(tmp_path: Path) -> None:
    files = topology([(0, 1)] * 4) | {"/sys/devices/system/cpu/online": "0-1\n"}
    assert read_cpu(make_reader(tmp_path, files)).logical_cores == 2


def test_last_level_caches_that_cores_share_count_once(tmp_path: Path) -> None:
    base = "/sys/devices/system/cpu"
    files = {}
    for cpu in range(4):
        files[f"{base}/cpu{cpu}/cache/index2/size"] = "1024K\n"
        files[f"{base}/cpu{cpu}/cache/index3/size"] = "32768K\n"
        files[f"{base}/cpu{cpu}/cache/index3/shared_cpu_list"] = "0-1\n" if cpu < 2 else "2-3\n"
    assert read_cache_bytes(make_reader(tmp_path / "two", files)) == 64 * MIB
    assert read_cache_bytes(make_reader(tmp_path / "none", {})) == 0


def test_a_machine_that_hides_everything_has_one_core(tmp_path: Path) -> None:
    assert read_cpu(make_reader(tmp_path, {})) == Cpu()


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("5\n", {5}), ("x,1-,2", {1, 2}), ("7-5", set())]
)
def test_cpu_lists_are_parsed_and_nonsense_in_them_is_left_out(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == frozenset(cpus)
