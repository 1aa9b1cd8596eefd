"""What kind of device holds a path, however many layers are in between."""

from pathlib import Path

import pytest

from freetoken.hardware.disk import read_disk
from freetoken.hardware.model import Disk
from freetoken.units import GIB
from tests.fakes.machines import ROOT_ON_NVME, Usage, make_reader

USAGE = {"/": Usage(100 * GIB, 40 * GIB, 60 * GIB)}


def mount(filesystem: str, source: str) -> dict[str, str]:
    return {
        "/proc/self/mountinfo": f"1 0 8:1 / / rw - {filesystem} {source} rw\n",
        **({source: ""} if source[0] == "/" else {}),
    }


LUKS = {
    **mount("ext4", "/dev/mapper/luks-1"),
    "/dev/mapper/luks-1": "-> ../dm-0",
    "/dev/dm-0": "",
    "/sys/devices/virtual/block/dm-0/slaves/nvme0n1p3": "[dir]",
    "/sys/class/block/dm-0": "-> ../../devices/virtual/block/dm-0",
    "/sys/devices/pci0/nvme0n1/nvme0n1p3/partition": "3",
    "/sys/class/block/nvme0n1p3": "-> ../../devices/pci0/nvme0n1/nvme0n1p3",
}
WSL = {
    **mount("ext4", "/dev/sdc"),
    "/sys/class/block/sdc/device/vendor": "Msft",
    "/sys/class/block/sdc/queue/rotational": "1",
}
RAID = {
    **mount("xfs", "/dev/md0"),
    "/sys/class/block/md0/slaves/sda": "[dir]",
    "/sys/class/block/md0/slaves/sdb": "[dir]",
    "/sys/class/block/sda/queue/rotational": "0",
    "/sys/class/block/sdb/queue/rotational": "1",
}


@pytest.mark.parametrize(
    ("files", "kind", "filesystem"),
    [
        (ROOT_ON_NVME, "nvme", "ext4"),
        (LUKS, "nvme", "ext4"),
        (RAID, "hdd", "xfs"),
        ({**mount("ext4", "/dev/sda"), "/sys/class/block/sda/queue/rotational": "0"}, "ssd", "ext4"),
        ({**mount("ext4", "/dev/sda"), "/sys/class/block/sda/queue/rotational": "1"}, "hdd", "ext4"),
        ({**mount("ext4", "/dev/vda"), "/sys/class/block/vda/queue/rotational": "1"}, "unknown", "ext4"),
        (WSL, "unknown", "ext4"),
        (mount("nfs4", "server:/export"), "network", "nfs4"),
        (mount("9p", "D:\\134"), "network", "9p"),
        (mount("overlay", "overlay"), "unknown", "overlay"),
        ({}, "unknown", None),
    ],
)  # fmt: skip
def test_the_kind_of_a_disk(tmp_path: Path, files: dict[str, str], kind: str, filesystem: str | None) -> None:
    disk = read_disk(make_reader(tmp_path, files, usage=USAGE), Path("/models"))
    expected = {"total_bytes": 100 * GIB, "free_bytes": 60 * GIB, "kind": kind, "filesystem": filesystem}
    assert disk == Disk.model_validate({"path": "/models", **expected})


def test_the_deepest_mount_that_holds_the_path_is_taken_not_one_with_a_similar_name(tmp_path: Path) -> None:
    files = {
        "/data/models": "[dir]",
        "/proc/self/mountinfo": (
            "1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:9 / /data rw - nfs s:/x rw\n"
            "3 1 0:8 / /data/mod rw - tmpfs tmpfs rw\n"
        ),
    }
    disk = read_disk(make_reader(tmp_path, files, usage={"/data/models": USAGE["/"]}), Path("/data/models/qwen"))
    assert (disk.kind, disk.filesystem, disk.free_bytes) == ("network", "nfs", 60 * GIB)


def test_a_disk_that_does_not_answer_has_nothing_free(tmp_path: Path) -> None:
    assert read_disk(make_reader(tmp_path, {}), Path("/models")) == Disk(path="/models", free_bytes=0)
