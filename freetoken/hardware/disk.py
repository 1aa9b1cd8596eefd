"""The file system under a path: how big, how free, and what kind of device it sits on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from freetoken.hardware.model import Disk
from freetoken.hardware.reader import Reader

Kind = Literal["nvme", "ssd", "hdd", "network", "unknown"]
# `9p` and `drvfs` are WSL's view of Windows drives: an order of magnitude slower than its own disk.
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "drvfs", "virtiofs", "ceph", "glusterfs", "lustre", "afs", "beegfs",
    "gpfs", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "fuse.glusterfs",
}  # fmt: skip
# A virtual disk says "rotational" whatever is below it.
_VIRTUAL = ("vd", "xvd", "nbd", "loop", "ram", "zram")


def read_disk(reader: Reader, path: Path) -> Disk:
    """Free bytes, size and kind of what holds `path`; of its nearest parent where it does not exist yet."""
    place = _existing_parent(reader, path)
    try:
        usage = reader.disk_usage(place)
        total, free = int(usage.total), int(usage.free)
    except OSError:
        total, free = None, 0
    source, filesystem = _mount_of(reader, reader.resolve(str(place)))
    return Disk(
        path=str(path),
        total_bytes=total,
        free_bytes=free,
        kind=_kind(reader, source, filesystem),
        filesystem=filesystem,
    )


def _existing_parent(reader: Reader, path: Path) -> Path:
    path = path.expanduser().absolute()
    while not reader.exists(str(path)) and path != path.parent:
        path = path.parent
    return path


def _mount_of(reader: Reader, real_path: str) -> tuple[str, str | None]:
    """(source, file system type) of the deepest mount that holds `real_path`; the last of equals is on top."""
    best = -1
    answer: tuple[str, str | None] = ("", None)
    for line in reader.text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 2:
            continue
        point = fields[4].replace("\\040", " ").rstrip("/")
        if (real_path + "/").startswith(point + "/") and len(point) >= best:
            best, answer = len(point), (tail[1], tail[0])
    return answer


def _kind(reader: Reader, source: str, filesystem: str | None) -> Kind:
    if filesystem in _NETWORK:
        return "network"
    if not source.startswith("/dev/"):
        return "unknown"
    name = reader.resolve(source).rsplit("/", 1)[-1]
    kinds = {_device_kind(reader, device) for device in _physical_devices(reader, name)}
    # A volume over several devices is as slow as its slowest one.
    order: tuple[Kind, ...] = ("hdd", "unknown", "ssd", "nvme")
    return next((kind for kind in order if kind in kinds), "unknown")


def _physical_devices(reader: Reader, name: str, depth: int = 0) -> list[str]:
    """Whole disks below the block device `name`: its parent if it is a partition, its slaves if it is mapped."""
    if slaves := reader.names(f"/sys/class/block/{name}/slaves"):
        return [disk for slave in slaves if depth < 8 for disk in _physical_devices(reader, slave, depth + 1)]
    if reader.exists(f"/sys/class/block/{name}/partition"):
        return [reader.resolve(f"/sys/class/block/{name}").split("/")[-2]]
    return [name]


def _device_kind(reader: Reader, name: str) -> Kind:
    if name.startswith("nvme"):
        return "nvme"
    vendor = reader.word(f"/sys/class/block/{name}/device/vendor").lower()
    model = reader.word(f"/sys/class/block/{name}/device/model").lower()
    if name.startswith(_VIRTUAL) or vendor.startswith(("msft", "qemu", "vmware", "vbox")) or "virtual" in model:
        return "unknown"
    rotational = reader.number(f"/sys/class/block/{name}/queue/rotational")
    return "unknown" if rotational is None else "hdd" if rotational else "ssd"
