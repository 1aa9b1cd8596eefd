"""Limits of control groups: v1 and v2, nested, in and out of containers."""

from pathlib import Path

import pytest

from freetoken.hardware.cgroup import CgroupLimits, MemoryLimit, read_cgroup_limits
from freetoken.units import GIB, MIB
from tests.fakes.machines import make_reader

V2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = (
    "31 1 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 1 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def limits(root: Path, files: dict[str, str]) -> CgroupLimits:
    return read_cgroup_limits(make_reader(root, files))


def test_no_cgroup_at_all_limits_nothing(tmp_path: Path) -> None:
    assert limits(tmp_path, {}) == CgroupLimits(None, None)


def test_the_least_of_nested_v2_groups_counts_for_memory_and_for_time(tmp_path: Path) -> None:
    base = "/sys/fs/cgroup"
    found = limits(tmp_path, {
        "/proc/self/mountinfo": V2,
        "/proc/self/cgroup": "0::/a/b/c\n",
        f"{base}/a/memory.max": f"{8 * GIB}\n", f"{base}/a/memory.current": f"{7 * GIB}\n",
        f"{base}/a/b/memory.max": f"{4 * GIB}\n", f"{base}/a/b/memory.current": f"{1 * GIB}\n",
        f"{base}/a/b/c/memory.max": "max\n", f"{base}/a/b/c/memory.current": f"{1 * GIB}\n",
        f"{base}/a/cpu.max": "150000 100000\n", f"{base}/a/b/cpu.max": "max 100000\n",
        f"{base}/a/b/c/cpu.max": "400000 100000\n",
    })  # fmt: skip
    assert found == CgroupLimits(MemoryLimit(8 * GIB, 7 * GIB), 1.5)
    assert found.memory is not None
    assert found.memory.left_bytes == GIB


def test_inactive_file_pages_can_be_reclaimed_and_do_not_count_as_used(tmp_path: Path) -> None:
    found = limits(tmp_path, {
        "/proc/self/mountinfo": V2, "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": f"{4 * GIB}", "/sys/fs/cgroup/memory.current": f"{3 * GIB}",
        "/sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 5\n",
    })  # fmt: skip
    assert found.memory == MemoryLimit(4 * GIB, GIB)


def test_memory_high_throttles_and_so_counts_as_a_limit(tmp_path: Path) -> None:
    files = {"/proc/self/mountinfo": V2, "/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": f"{4 * GIB}"}
    files |= {"/sys/fs/cgroup/memory.high": f"{3 * GIB}", "/sys/fs/cgroup/memory.current": "0"}
    assert limits(tmp_path, files).memory == MemoryLimit(3 * GIB, 0)


def test_v1_limits_are_read_and_its_unlimited_number_is_none(tmp_path: Path) -> None:
    memory, cpu = "/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpu,cpuacct"
    found = limits(tmp_path, {
        "/proc/self/mountinfo": V1,
        "/proc/self/cgroup": "5:memory:/job/task\n4:cpu,cpuacct:/job\n",
        f"{memory}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{memory}/job/memory.limit_in_bytes": f"{2 * GIB}\n", f"{memory}/job/memory.usage_in_bytes": f"{512 * MIB}\n",
        f"{memory}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {256 * MIB}\n",
        f"{memory}/job/task/memory.limit_in_bytes": "9223372036854771712\n",
        f"{cpu}/job/cpu.cfs_quota_us": "250000\n", f"{cpu}/job/cpu.cfs_period_us": "100000\n",
        f"{cpu}/cpu.cfs_quota_us": "-1\n", f"{cpu}/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert found == CgroupLimits(MemoryLimit(2 * GIB, 256 * MIB), 2.5)


def test_a_container_that_sees_part_of_the_tree_reads_its_own_limit_at_the_mount(tmp_path: Path) -> None:
    found = limits(tmp_path, {
        "/proc/self/mountinfo": "30 1 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n",
        "/proc/self/cgroup": "0::/docker/abc\n",
        "/sys/fs/cgroup/memory.max": f"{GIB}", "/sys/fs/cgroup/memory.current": "0",
    })  # fmt: skip
    assert found.memory == MemoryLimit(GIB, 0)


def test_a_path_that_climbs_out_of_the_mount_is_not_followed(tmp_path: Path) -> None:
    files = {"/proc/self/mountinfo": V2, "/proc/self/cgroup": "0::/../../etc\n", "/sys/fs/cgroup/memory.max": f"{GIB}"}
    found = limits(tmp_path, files)
    assert found.memory == MemoryLimit(GIB, 0)


@pytest.mark.parametrize("text", ["", "garbage", "0::", "1:memory", "\0\0\0", "::::\n"])
def test_nonsense_in_proc_limits_nothing(tmp_path: Path, text: str) -> None:
    assert limits(tmp_path, {"/proc/self/mountinfo": V2 + V1, "/proc/self/cgroup": text}) == CgroupLimits(None, None)
