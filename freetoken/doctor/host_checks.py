"""Checks of CPU, RAM, swap, tmpfs and disk. Pure: every fact comes in."""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.doctor.facts import Facts
from freetoken.doctor.model import Check, failed, passed, skipped, warned
from freetoken.hardware.model import Hardware
from freetoken.units import GIB, MIB, format_bytes, format_rate

#: Less available RAM than this runs no MoE model worth the name.
LEAST_RAM_BYTES = 4 * GIB
#: Free disk: below the first no download is worth starting, below the second most checkpoints do not fit.
LEAST_DISK_BYTES, ROOMY_DISK_BYTES = 5 * GIB, 40 * GIB
#: Swap and tmpfs in use that deserve a word.
SWAP_BYTES, TMPFS_BYTES = 256 * MIB, GIB
#: One channel of DDR4-3200 or DDR5-4800 streams about 19 to 24 GB/s; two channels of the slowest DDR4 reach more.
ONE_CHANNEL_BYTES_PER_S = 25e9
#: Fewer cores than this cannot saturate two channels, so a low rate tells nothing.
CORES_TO_SATURATE = 4


def check_host(hardware: Hardware, facts: Facts) -> Iterator[Check]:
    """Everything about the host, one check after the other."""
    yield check_isa(hardware)
    yield check_ram(hardware)
    yield check_channels(hardware)
    yield check_swap(hardware)
    yield check_tmpfs(hardware)
    yield check_oom_daemons(facts)
    yield check_memlock(hardware)
    yield check_disk(hardware)


def check_isa(hardware: Hardware) -> Check:
    """AVX2 or NEON, without which experts on the CPU crawl; and cores that limits take away."""
    cpu = hardware.cpu
    words = f"{cpu.model}, {cpu.usable_cores} of {cpu.physical_cores} cores usable"
    if cpu.isa and not {"avx2", "neon"} & set(cpu.isa):
        return warned(
            "cpu", f"{words}, without AVX2: experts on the CPU are slow", "keep experts in VRAM: a smaller model"
        )
    if cpu.usable_cores < cpu.physical_cores:
        reasons = [f"affinity leaves {cpu.affinity_cpus} CPUs"] if cpu.affinity_cpus else []
        reasons += [f"the cgroup's quota is {cpu.quota_cpus:g} CPUs"] if cpu.quota_cpus else []
        fix = "raise the limit of the container, service or `taskset` that `ft` runs in"
        return warned("cpu", f"{words} ({', '.join(reasons)})", fix)
    return passed("cpu", words)


def check_ram(hardware: Hardware) -> Check:
    """RAM really available: less other programs, the cgroup's limit, and under WSL what Windows itself has free."""
    ram = hardware.ram
    available, total = ram.available_bytes, ram.total_bytes
    found = f"{format_bytes(available)} of {format_bytes(total)} available"
    if ram.windows_available_bytes is not None and ram.windows_available_bytes < available:
        windows = format_bytes(ram.windows_available_bytes)
        fix = "close programs in Windows, and set `autoMemoryReclaim=gradual` under `[experimental]` in .wslconfig"
        text = f"WSL shows {format_bytes(available)} available, but Windows has {windows} free"
        return (failed if ram.windows_available_bytes < LEAST_RAM_BYTES else warned)("ram", text, fix)
    if ram.cgroup_limit_bytes is not None and ram.cgroup_limit_bytes < total:
        found += f"; the cgroup's limit is {format_bytes(ram.cgroup_limit_bytes)}"
    if available < LEAST_RAM_BYTES:
        return failed("ram", found, "end other programs, or raise the container's memory limit")
    if available < total // 2:
        return warned("ram", found, "end other programs (`ps aux --sort=-rss | head`), or raise the container's limit")
    return passed("ram", found)


def check_channels(hardware: Hardware) -> Check:
    """Whether the measured rate looks like one memory channel: experts on the CPU run at that rate."""
    rate = hardware.bandwidth.dram_bytes_per_s
    if rate is None or hardware.source_of("bandwidth.dram_bytes_per_s") != "measured":
        return skipped("ram_channels", "memory bandwidth is not measured: `ft probe --bandwidth` does it")
    found = f"RAM streams {format_rate(rate)}"
    if (hardware.bandwidth.threads or hardware.cpu.usable_cores) < CORES_TO_SATURATE:
        return skipped("ram_channels", f"{found}, with too few cores to tell channels apart")
    if rate < ONE_CHANNEL_BYTES_PER_S:
        fix = "put equal modules into both channels (slots A2 and B2), and switch XMP or EXPO on in the firmware"
        return warned("ram_channels", f"{found}: that looks like one channel", fix)
    return passed("ram_channels", found)


def check_swap(hardware: Hardware) -> Check:
    """Swap in use: an expert that was swapped out comes back at the disk's speed."""
    ram = hardware.ram
    if not ram.swap_total_bytes:
        return passed("swap", "there is no swap")
    found = f"{format_bytes(ram.swap_used_bytes)} of {format_bytes(ram.swap_total_bytes)} swap in use"
    if ram.swap_used_bytes < SWAP_BYTES:
        return passed("swap", found)
    if ram.available_bytes > ram.swap_used_bytes + GIB:
        return warned("swap", found, "`sudo swapoff -a && sudo swapon -a` brings it back into RAM")
    return warned("swap", f"{found}, and RAM has no room for it", "end other programs first")


def check_tmpfs(hardware: Hardware) -> Check:
    """Files in tmpfs are RAM."""
    used = hardware.ram.tmpfs_used_bytes
    found = f"tmpfs holds {format_bytes(used)} of RAM"
    if used >= TMPFS_BYTES:
        return warned("tmpfs", found, "delete what is not needed: `du -xhd1 /tmp /dev/shm /run`")
    return passed("tmpfs", found)


def check_oom_daemons(facts: Facts) -> Check:
    """Daemons that end processes while RAM is still free, e.g. at 10 % left."""
    if not facts.oom_daemons:
        return passed("oom_daemons", "no early OOM daemon runs")
    names = ", ".join(facts.oom_daemons)
    fix = 'allow it less: e.g. `EARLYOOM_ARGS="-m 2"` in /etc/default/earlyoom, or stop it while a model loads'
    return warned("oom_daemons", f"{names} may end a load before RAM is full", fix)


def check_memlock(hardware: Hardware) -> Check:
    """RLIMIT_MEMLOCK, which matters where pinning is capped and layers have to be locked instead."""
    limit = hardware.ram.memlock_bytes
    if limit is None:
        return passed("memlock", "memory locking is not limited")
    found = f"a process may lock {format_bytes(limit)}"
    if not hardware.os.is_wsl:
        return passed("memlock", f"{found}; CUDA's own pinning is not bound by that")
    if limit >= hardware.ram.total_bytes // 2:
        return passed("memlock", found)
    fix = "add `* - memlock unlimited` to /etc/security/limits.conf and open a new session"
    return warned("memlock", f"{found}: layers beyond WSL's pin limit cannot be locked", fix)


def check_disk(hardware: Hardware) -> Check:
    """The disk that holds the models: room and kind."""
    disk = hardware.disk
    kind = "" if disk.kind == "unknown" else f", {disk.kind}"
    of = f" of {format_bytes(disk.total_bytes)}" if disk.total_bytes else ""
    found = f"{disk.path or 'models'}: {format_bytes(disk.free_bytes)}{of} free{kind}"
    move = "move the models: `export HF_HOME=/path/on/another/disk`"
    if disk.free_bytes < LEAST_DISK_BYTES:
        return failed("disk", found, f"`ft model remove NAME`, or {move}")
    if disk.kind == "network" and disk.filesystem in ("9p", "drvfs"):
        return warned("disk", f"{found}: a Windows drive, ten times slower than WSL's own", "`export HF_HOME=~/hf`")
    if disk.kind in ("hdd", "network"):
        return warned("disk", f"{found}: loading takes minutes, and experts cannot be read from it", move)
    if disk.free_bytes < ROOMY_DISK_BYTES:
        return warned("disk", found, f"`ft model remove NAME`, or {move}; a 35B MoE model takes about 22 GiB")
    return passed("disk", found)
