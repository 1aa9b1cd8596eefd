"""What control groups leave to this process, v1 and v2 alike, nested ones walked up to the root: the least counts.

A group's page cache can be reclaimed, so its inactive file pages do not count as used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from freetoken.hardware.reader import Reader

# v1 writes "no limit" as the largest multiple of the page size below 2^63.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """One group's limit and what is used under it, in bytes."""

    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        """What may still be taken."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits on the way up; None where there is none."""

    memory: MemoryLimit | None = None
    #: CPUs' worth of time.
    quota_cpus: float | None = None


def read_cgroup_limits(reader: Reader) -> CgroupLimits:
    """The least memory left and the least CPU quota over this process's group and all of its parents."""
    memory = [limit for folder in _folders(reader, "memory") if (limit := _memory_limit(reader, folder))]
    quotas = [quota for folder in _folders(reader, "cpu") if (quota := _cpu_quota(reader, folder))]
    return CgroupLimits(
        memory=min(memory, key=lambda limit: (limit.left_bytes, limit.limit_bytes), default=None),
        quota_cpus=min(quotas, default=None),
    )


def _folders(reader: Reader, controller: str) -> Iterator[str]:
    """Folders of `controller` from this process's group up to the root, of both hierarchies."""
    groups = _own_groups(reader)
    for mount_root, mount_point, options in _mounts(reader):
        key = "" if options == "v2" else next((name for name in groups if controller in name.split(",")), None)
        if key is None or key not in groups or (options != "v2" and controller not in options.split(",")):
            continue
        below = groups[key]
        # In a container without its own cgroup namespace the mount shows only a part of the tree.
        if mount_root != "/" and (below + "/").startswith(mount_root + "/"):
            below = below[len(mount_root) :]
        parts = [part for part in below.split("/") if part and part != ".."]
        for length in range(len(parts), -1, -1):
            yield "/".join((mount_point.rstrip("/"), *parts[:length]))


def _own_groups(reader: Reader) -> dict[str, str]:
    """Controllers (`""` for v2) -> path of this process's group, from /proc/self/cgroup."""
    groups: dict[str, str] = {}
    for line in reader.text("/proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            groups[fields[1]] = fields[2]
    return groups


def _mounts(reader: Reader) -> Iterator[tuple[str, str, str]]:
    """(root, mount point, `v2` or the v1 controllers) of every cgroup mount."""
    for line in reader.text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) >= 5 and len(tail) >= 3 and tail[0] in ("cgroup", "cgroup2"):
            yield fields[3], fields[4], "v2" if tail[0] == "cgroup2" else tail[2]


def _memory_limit(reader: Reader, folder: str) -> MemoryLimit | None:
    """The limit of one group: `memory.max` and `memory.high` (v2), or `memory.limit_in_bytes` (v1)."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [limit for name in names if (limit := reader.number(f"{folder}/{name}")) is not None]
    limits = [limit for limit in limits if 0 <= limit < _UNLIMITED]
    if not limits:
        return None
    used = reader.number(f"{folder}/memory.current")
    if used is None:
        used = reader.number(f"{folder}/memory.usage_in_bytes") or 0
    return MemoryLimit(min(limits), max(0, used - _reclaimable_bytes(reader, folder)))


def _reclaimable_bytes(reader: Reader, folder: str) -> int:
    table = dict(line.split(" ", 1) for line in reader.text(f"{folder}/memory.stat").splitlines() if " " in line)
    for name in ("total_inactive_file", "inactive_file"):
        if table.get(name, "").strip().isdigit():
            return int(table[name])
    return 0


def _cpu_quota(reader: Reader, folder: str) -> float | None:
    """CPUs' worth of time of one group: `cpu.max` (v2), or quota and period (v1)."""
    quota, _, period = reader.word(f"{folder}/cpu.max").partition(" ")
    if not quota:
        quota, period = reader.word(f"{folder}/cpu.cfs_quota_us"), reader.word(f"{folder}/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
        return int(quota) / int(period)
    return None
