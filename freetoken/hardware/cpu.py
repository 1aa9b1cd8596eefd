"""The CPU as this process may use it: cores under SMT and on hybrid CPUs, affinity, quota, instruction sets."""

from __future__ import annotations

import re

from freetoken.hardware.cgroup import CgroupLimits
from freetoken.hardware.model import Cpu
from freetoken.hardware.reader import Reader, parse_cpu_list, parse_table

# Kernel flag -> the name by which engines and recipes ask for it, in the order shown.
_ISA = {
    "sse4_2": "sse4_2", "avx": "avx", "f16c": "f16c", "fma": "fma", "avx2": "avx2", "avx_vnni": "avx_vnni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512vl": "avx512vl", "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16", "avx512_fp16": "avx512_fp16", "amx_tile": "amx_tile", "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16", "asimd": "neon", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve",
    "sve2": "sve2",
}  # fmt: skip
_ARM_CORES = {
    (0x41, 0xD0C): "Neoverse N1", (0x41, 0xD40): "Neoverse V1", (0x41, 0xD49): "Neoverse N2",
    (0x41, 0xD4F): "Neoverse V2", (0x41, 0xD0B): "Cortex-A76", (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE", (0x41, 0xD87): "Cortex-A725", (0x41, 0xD85): "Cortex-X925",
    (0xC0, 0xAC3): "Ampere Altra", (0x61, 0x22): "Apple M1", (0x61, 0x32): "Apple M2",
}  # fmt: skip
_TOPOLOGY = "/sys/devices/system/cpu"


def read_cpu(reader: Reader, limits: CgroupLimits | None = None) -> Cpu:
    """The CPU below `reader`; `usable_cores` is what affinity and the quota of `limits` leave of its physical cores."""
    info = reader.text("/proc/cpuinfo")
    online = _online_cpus(reader, info)
    core_of = _core_of(reader, info, online)
    allowed = (reader.affinity() & online) or online
    quota = limits.quota_cpus if limits else None
    usable = len({core_of[cpu] for cpu in allowed})
    if quota is not None:
        usable = min(usable, max(1, int(quota)))
    performance, efficiency = _hybrid_cores(reader, core_of)
    return Cpu(
        model=_model_name(reader, info),
        physical_cores=len(set(core_of.values())),
        logical_cores=len(online),
        usable_cores=max(1, usable),
        performance_cores=performance,
        efficiency_cores=efficiency,
        affinity_cpus=len(allowed) if allowed != online else None,
        quota_cpus=quota,
        isa=_read_isa(info),
        numa_nodes=_numa_nodes(reader),
    )


def read_cache_bytes(reader: Reader) -> int:
    """Bytes of all last-level caches together, 0 where sysfs does not tell: a buffer must be larger to show RAM."""
    sizes: dict[str, int] = {}
    for cpu in reader.names(_TOPOLOGY):
        for level in ("index3", "index2"):
            folder = f"{_TOPOLOGY}/{cpu}/cache/{level}"
            if size := re.fullmatch(r"(\d+)K", reader.word(f"{folder}/size")):
                sizes[f"{level} {reader.word(f'{folder}/shared_cpu_list')}"] = int(size[1]) * 1024
                break
    return sum(sizes.values())


def _online_cpus(reader: Reader, info: str) -> frozenset[int]:
    listed = parse_cpu_list(reader.word(f"{_TOPOLOGY}/online"))
    found = listed or frozenset(int(number) for number in re.findall(r"^processor\s*:\s*(\d+)", info, re.MULTILINE))
    return found or frozenset({0})


def _core_of(reader: Reader, info: str, online: frozenset[int]) -> dict[int, tuple[int, int]]:
    """Logical CPU -> (package, core); a CPU whose place is not known is a core of its own."""
    from_info = _cores_in_cpuinfo(info)
    places: dict[int, tuple[int, int]] = {}
    for cpu in online:
        package = reader.number(f"{_TOPOLOGY}/cpu{cpu}/topology/physical_package_id")
        core = reader.number(f"{_TOPOLOGY}/cpu{cpu}/topology/core_id")
        siblings = parse_cpu_list(reader.word(f"{_TOPOLOGY}/cpu{cpu}/topology/thread_siblings_list"))
        if siblings:
            # Core ids repeat across dies on some servers; the siblings' list never lies about who shares a core.
            places[cpu] = (package or 0, min(siblings))
        elif core is not None:
            places[cpu] = (package or 0, core)
        else:
            places[cpu] = from_info.get(cpu, (0, -1 - cpu))
    return places


def _cores_in_cpuinfo(info: str) -> dict[int, tuple[int, int]]:
    places = {}
    for block in info.split("\n\n"):
        table = parse_table(block)
        if table.get("processor", "").isdigit() and table.get("core id", "").isdigit():
            places[int(table["processor"])] = (int(table.get("physical id", "0") or 0), int(table["core id"]))
    return places


def _hybrid_cores(reader: Reader, core_of: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Performance and efficiency cores of a hybrid CPU; (0, 0) where all are alike."""
    big = parse_cpu_list(reader.word("/sys/devices/cpu_core/cpus"))
    small = parse_cpu_list(reader.word("/sys/devices/cpu_atom/cpus"))
    if not (big and small):
        capacity = {cpu: reader.number(f"{_TOPOLOGY}/cpu{cpu}/cpu_capacity") for cpu in core_of}
        known = {value for value in capacity.values() if value is not None}
        if len(known) < 2:
            return 0, 0
        big = frozenset(cpu for cpu, value in capacity.items() if value == max(known))
        small = frozenset(capacity) - big
    return tuple(len({core_of[cpu] for cpu in group if cpu in core_of}) for group in (big, small))  # type: ignore[return-value]


def _model_name(reader: Reader, info: str) -> str:
    table = parse_table(info)
    if name := table.get("model name") or table.get("Model"):
        return " ".join(name.replace("(R)", "").replace("(TM)", "").replace("(tm)", "").split())
    try:
        implementer, part = int(table["CPU implementer"], 0), int(table["CPU part"], 0)
    except (KeyError, ValueError):
        return reader.word("/proc/device-tree/model").strip("\0") or "unknown"
    return _ARM_CORES.get((implementer, part), f"ARM core {implementer:#04x}:{part:#05x}")


def _read_isa(info: str) -> tuple[str, ...]:
    table = parse_table(info)
    flags = set((table.get("flags") or table.get("Features") or "").split())
    return tuple(name for flag, name in _ISA.items() if flag in flags)


def _numa_nodes(reader: Reader) -> int:
    """Nodes that have memory (CPU-less ones of a GPU or CXL included), at least 1."""
    nodes = parse_cpu_list(reader.word("/sys/devices/system/node/has_memory"))
    nodes = nodes or parse_cpu_list(reader.word("/sys/devices/system/node/online"))
    return max(1, len(nodes))
