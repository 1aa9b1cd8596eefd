"""Host memory: available, limits, swap, tmpfs; and what only Windows knows."""

from pathlib import Path

import pytest

from freetoken.hardware.cgroup import CgroupLimits, MemoryLimit
from freetoken.hardware.model import Os, Ram
from freetoken.hardware.ram import read_ram
from freetoken.hardware.wsl import WindowsFacts, is_wsl, parse_wsl_version, read_windows
from freetoken.units import GIB, KIB, MIB
from tests.fakes.machines import FakePrograms, Usage, make_reader, meminfo, wsl_machine


def test_available_is_the_least_of_the_kernels_figure_and_what_the_cgroup_leaves(tmp_path: Path) -> None:
    reader = make_reader(
        tmp_path, {"/proc/meminfo": meminfo(64 * GIB, 50 * GIB, swap_total=8 * GIB, swap_free=5 * GIB)}
    )
    limits = CgroupLimits(memory=MemoryLimit(16 * GIB, 6 * GIB))
    assert read_ram(reader, Os(), limits) == Ram(
        total_bytes=64 * GIB, available_bytes=10 * GIB, cgroup_limit_bytes=16 * GIB, cgroup_used_bytes=6 * GIB,
        swap_total_bytes=8 * GIB, swap_used_bytes=3 * GIB, memlock_bytes=8 * MIB,
    )  # fmt: skip


def test_a_cgroup_limit_above_the_machine_is_no_limit(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, {"/proc/meminfo": meminfo(8 * GIB, 6 * GIB)})
    ram = read_ram(reader, Os(), CgroupLimits(memory=MemoryLimit(16 * GIB, 0)))
    assert (ram.available_bytes, ram.cgroup_limit_bytes) == (6 * GIB, None)


def test_a_kernel_without_memavailable_is_summed_up(tmp_path: Path) -> None:
    text = "MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 20 kB\nCached: 300 kB\n"
    assert read_ram(make_reader(tmp_path, {"/proc/meminfo": text}), Os(), CgroupLimits()).available_bytes == 420 * KIB


def test_tmpfs_mounts_are_added_up_and_one_mounted_twice_counts_once(tmp_path: Path) -> None:
    mounts = (
        "1 0 0:30 / /tmp rw - tmpfs tmpfs rw\n2 0 0:31 / /dev/shm rw - tmpfs shm rw\n"
        "3 0 0:31 / /mnt/twice rw - tmpfs shm rw\n4 0 0:32 / /gone rw - tmpfs tmpfs rw\n"
        "5 0 0:33 / /mnt/my\\040tmp rw - tmpfs tmpfs rw\n6 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
    )
    usage = {name: Usage(4 * GIB, GIB, 3 * GIB) for name in ("/tmp", "/dev/shm", "/mnt/twice", "/mnt/my tmp", "/")}
    reader = make_reader(
        tmp_path, {"/proc/meminfo": meminfo(8 * GIB, 6 * GIB), "/proc/self/mountinfo": mounts}, usage=usage
    )
    assert read_ram(reader, Os(), CgroupLimits()).tmpfs_used_bytes == 3 * GIB


def test_wsl_caps_what_may_be_pinned_and_windows_says_what_it_has_free(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, {"/proc/meminfo": meminfo(20 * GIB, 18 * GIB)}, memlock=None)
    ram = read_ram(reader, Os(is_wsl=True), CgroupLimits(), WindowsFacts("2.7.13.0", 5 * GIB))
    assert (ram.pinnable_bytes, ram.windows_available_bytes, ram.memlock_bytes) == (8 * GIB, 5 * GIB, None)


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("WSL version: 2.7.13.0\r\nKernel version: 6.6.87.2-1\r\n".encode("utf-16-le"), "2.7.13.0"),
        ("\ufeffWSL-Version: 2.0.9.0\r\n".encode("utf-16"), "2.0.9.0"),
        ("WSL 版本： 2.6.1.0\r\n内核版本： 6.6\r\n".encode(), "2.6.1.0"),
        (b"Invalid command line option: --version\r\n", None),
        (b"", None),
        (b"\0\0\0\0", None),
    ],
)
def test_wsl_version_is_read_in_any_language_and_encoding(output: bytes, version: str | None) -> None:
    assert parse_wsl_version(output) == version


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2"}, True),
        ({"/proc/sys/kernel/osrelease": "4.4.0-19041-Microsoft"}, True),
        ({"/proc/sys/kernel/osrelease": "6.9.0-mine", "/dev/dxg": ""}, True),
        ({"/proc/sys/kernel/osrelease": "6.8.0-1015-azure"}, False),
        ({}, False),
    ],
)
def test_wsl_is_known_by_its_kernel_or_its_devices(tmp_path: Path, files: dict[str, str], expected: bool) -> None:
    assert is_wsl(make_reader(tmp_path, files)) is expected


def test_windows_is_asked_once_each_and_its_answers_are_typed(tmp_path: Path) -> None:
    reader, _ = wsl_machine(tmp_path, wsl_version="2.7.13.0", windows_free=5 * GIB)
    assert read_windows(reader) == WindowsFacts("2.7.13.0", 5 * GIB)
    assert isinstance(reader.run, FakePrograms)
    assert sorted(argv[0].rsplit("/", 1)[-1] for argv in reader.run.asked) == ["powershell.exe", "wsl.exe"]


def test_a_windows_that_does_not_answer_leaves_both_unknown(tmp_path: Path) -> None:
    files = {"/mnt/c/Windows/System32/wsl.exe": ""}
    assert read_windows(make_reader(tmp_path, files)) == WindowsFacts(None, None)
