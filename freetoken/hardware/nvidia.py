"""NVIDIA GPUs through NVML; through `nvidia-smi` where the library does not load.

NVML is asked only where a driver shows itself, so that a machine without one pays nothing. Every question may be
unsupported on some card or in some container, and then its answer is None or 0, never an error.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from freetoken.hardware.model import Gpu, GpuHolder, PcieLink, Ram
from freetoken.hardware.reader import Reader
from freetoken.units import MIB

SMI_TIMEOUT_S = 5.0
_SMI_FIELDS = ("index", "name", "uuid", "memory.total", "memory.free", "compute_cap", "driver_version", "power.limit",
               "power.default_limit", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
               "pcie.link.width.max", "display_active")  # fmt: skip
_WSL_SMI = "/usr/lib/wsl/lib/nvidia-smi"
_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
#: CUDA cores of one streaming multiprocessor, by compute capability.
_CORES_PER_SM = {"6.0": 64, "7.0": 64, "7.5": 64, "8.0": 64}


@dataclass(frozen=True)
class NvidiaFacts:
    """What the driver says."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: str | None = None
    notes: tuple[str, ...] = ()


def load_nvml() -> Any:
    """The module `pynvml`, initialised; None where the library is not there."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # a missing package, library, device file or permission: all mean "ask otherwise"
        return None
    return pynvml


def read_nvidia(reader: Reader, ram: Ram, nvml_loader: Callable[[], Any] = load_nvml) -> NvidiaFacts:
    """Every NVIDIA GPU that CUDA would see here, MIG slices among them. `ram` is what a unified-memory GPU shares."""
    if not any(map(reader.exists, _SIGNS)):
        return NvidiaFacts()
    nvml = nvml_loader()
    if nvml is None:
        return _with_visible(reader, read_smi(reader))
    try:
        gpus = tuple(_read_device(nvml, reader, handle, index, ram) for index, handle in enumerate(_handles(nvml)))
        cuda = _ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
        facts = NvidiaFacts(
            gpus=gpus,
            driver=_text(_ask(nvml.nvmlSystemGetDriverVersion)),
            cuda_driver=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        )
    finally:
        _ask(nvml.nvmlShutdown)
    return _with_visible(reader, facts)


def is_laptop_name(name: str) -> bool:
    """Whether the card is a laptop variant by its name: `RTX 4060 Laptop GPU`, `GTX 1650 Mobile`, `... Max-Q`."""
    if re.search(r"\bworkstation\b", name, re.IGNORECASE):  # `PRO 6000 Blackwell Max-Q Workstation Edition`
        return False
    return re.search(r"\blaptop\b|\bmobile\b|max-?q|\b\d{3,4}M\b|\bRTX 2050\b", name, re.IGNORECASE) is not None


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where the driver does not support the question."""
    try:
        return question(*arguments)
    except Exception:  # NVMLError and, in older libraries, AttributeError or a missing symbol
        return None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _handles(nvml: Any) -> Iterator[Any]:
    """Devices in NVML's order; where MIG is on, its slices instead of the card."""
    for index in range(_ask(nvml.nvmlDeviceGetCount) or 0):
        handle = _ask(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        mode = _ask(nvml.nvmlDeviceGetMigMode, handle)
        slices = range(_ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0) if mode and mode[0] else ()
        found = [
            one for slot in slices if (one := _ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)) is not None
        ]
        yield from found or [handle]


def _read_device(nvml: Any, reader: Reader, handle: Any, index: int, ram: Ram) -> Gpu:
    # A slice of a MIG card answers for its memory and uuid; link, power and capability are its parent's.
    card = _ask(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle) or handle
    name = _text(_ask(nvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU"
    total, free, is_unified = _memory(nvml, handle, ram)
    capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, card)
    capability_text = f"{capability[0]}.{capability[1]}" if capability else None
    return Gpu(
        index=index,
        name=name,
        uuid=_text(_ask(nvml.nvmlDeviceGetUUID, handle)),
        compute_capability=capability_text,
        vram_total_bytes=total,
        vram_free_bytes=free,
        pcie=_link(nvml, card),
        sm_count=_sm_count(nvml, handle, card, capability_text),
        is_integrated=is_unified,
        is_laptop=is_laptop_name(name),
        has_display=bool(_ask(nvml.nvmlDeviceGetDisplayActive, card)),
        power_limit_w=_watts(_ask(nvml.nvmlDeviceGetPowerManagementLimit, card)),
        power_default_w=_watts(_ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit, card)),
        holders=_holders(nvml, reader, handle),
    )


def _memory(nvml: Any, handle: Any, ram: Ram) -> tuple[int, int, bool]:
    """(total, free, whether it is the host's memory) in bytes."""
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None or not memory.total:
        # GB10 and Jetson share the host's memory and do not answer.
        return ram.total_bytes, ram.available_bytes, True
    return int(memory.total), min(int(memory.free), int(memory.total)), False


def _link(nvml: Any, card: Any) -> PcieLink:
    return PcieLink(
        generation=_ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, card) or None,
        width=_ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, card) or None,
        max_generation=_ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, card) or None,
        max_width=_ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, card) or None,
        card_generation=_ask(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration, card) or None,
    )


def _sm_count(nvml: Any, handle: Any, card: Any, capability: str | None) -> int | None:
    attributes = _ask(nvml.nvmlDeviceGetAttributes, handle) if handle is not card else None
    if attributes is not None and attributes.multiprocessorCount:
        return int(attributes.multiprocessorCount)
    cores = _ask(nvml.nvmlDeviceGetNumGpuCores, card)
    return cores // _CORES_PER_SM.get(capability, 128) if cores and capability else None


def _watts(milliwatts: int | None) -> float | None:
    return milliwatts / 1000 if milliwatts else None


def _holders(nvml: Any, reader: Reader, handle: Any) -> tuple[GpuHolder, ...]:
    """Processes that hold VRAM, the largest first; 0 bytes where the driver does not say how much (WSL, containers)."""
    used: dict[int, int] = {}
    for question in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _ask(question, handle) or ():
            used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory or 0)
    holders = [
        GpuHolder(pid=pid, name=_process_name(nvml, reader, pid), used_bytes=count) for pid, count in used.items()
    ]
    return tuple(sorted(holders, key=lambda holder: (-holder.used_bytes, holder.pid)))


def _process_name(nvml: Any, reader: Reader, pid: int) -> str:
    """The program's name without its path, which may hold a user's name."""
    name = reader.word(f"/proc/{pid}/comm") or _text(_ask(nvml.nvmlSystemGetProcessName, pid)) or "unknown"
    return re.split(r"[/\\]", name)[-1] or "unknown"


def _with_visible(reader: Reader, facts: NvidiaFacts) -> NvidiaFacts:
    """`facts` without the GPUs that CUDA_VISIBLE_DEVICES hides, and a note that says so."""
    chosen = reader.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not facts.gpus:
        return facts
    entries = [entry.strip() for entry in chosen.split(",")]
    if any(entry.isdigit() for entry in entries) and not _is_index_order_known(reader, facts.gpus):
        note = (
            f"CUDA_VISIBLE_DEVICES={chosen} counts in CUDA's own order; set CUDA_DEVICE_ORDER=PCI_BUS_ID or name a uuid"
        )
        return NvidiaFacts(facts.gpus, facts.driver, facts.cuda_driver, (*facts.notes, note))
    kept: list[Gpu] = []
    for entry in entries:
        match = next((gpu for gpu in facts.gpus if _is_named(gpu, entry)), None)
        if match is None:  # CUDA, too, stops at the first entry that it does not know
            break
        kept.append(match)
    if len(kept) == len(facts.gpus):
        return facts
    note = f"CUDA_VISIBLE_DEVICES={chosen} leaves {len(kept)} of {len(facts.gpus)} NVIDIA GPUs to this process"
    return NvidiaFacts(tuple(kept), facts.driver, facts.cuda_driver, (*facts.notes, note))


def _is_index_order_known(reader: Reader, gpus: tuple[Gpu, ...]) -> bool:
    return reader.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1


def _is_named(gpu: Gpu, entry: str) -> bool:
    return entry == str(gpu.index) or bool(entry and not entry.isdigit() and gpu.uuid and gpu.uuid.startswith(entry))


def read_smi(reader: Reader) -> NvidiaFacts:
    """What `nvidia-smi` says; its absence or failure becomes a note."""
    in_wsl = _WSL_SMI if reader.exists(_WSL_SMI) else None
    program = reader.which("nvidia-smi") or in_wsl
    if program is None:
        return NvidiaFacts(notes=("an NVIDIA driver is here, but neither its library nor `nvidia-smi` can be used",))
    query = (program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits")
    output = reader.run(query, SMI_TIMEOUT_S)
    if output is None:
        return NvidiaFacts(notes=("an NVIDIA driver is here, but `nvidia-smi` fails; after a driver update, reboot",))
    lines = csv.reader(output.decode(errors="replace").splitlines())
    rows = [
        dict(zip(_SMI_FIELDS, map(str.strip, line), strict=True)) for line in lines if len(line) == len(_SMI_FIELDS)
    ]
    rows = [row for row in rows if _smi_number(row["memory.total"]) is not None]
    header = (reader.run((program,), SMI_TIMEOUT_S) or b"").decode(errors="replace")
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", header)
    return NvidiaFacts(
        gpus=tuple(map(_gpu_of_row, rows)),
        driver=rows[0]["driver_version"] if rows else None,
        cuda_driver=cuda[1] if cuda else None,
    )


def _smi_number(text: str) -> float | None:
    """A figure of `nvidia-smi`; None for `[N/A]` and its like."""
    match = re.fullmatch(r"\d+(\.\d+)?", text)
    return float(text) if match else None


def _gpu_of_row(row: dict[str, str]) -> Gpu:
    def count(name: str) -> int | None:
        value = _smi_number(row.get(name, ""))
        return int(value) if value else None

    total = int(_smi_number(row["memory.total"]) or 0) * MIB
    return Gpu(
        index=count("index") or 0,
        name=row["name"],
        uuid=row["uuid"] if row["uuid"].startswith(("GPU-", "MIG-")) else None,
        compute_capability=row["compute_cap"] if _smi_number(row["compute_cap"]) else None,
        vram_total_bytes=total,
        vram_free_bytes=min(total, int(_smi_number(row["memory.free"]) or 0) * MIB),
        pcie=PcieLink(
            generation=count("pcie.link.gen.current"),
            width=count("pcie.link.width.current"),
            max_generation=count("pcie.link.gen.max"),
            max_width=count("pcie.link.width.max"),
        ),
        is_laptop=is_laptop_name(row["name"]),
        has_display=row.get("display_active") == "Enabled",
        power_limit_w=_smi_number(row.get("power.limit", "")),
        power_default_w=_smi_number(row.get("power.default_limit", "")),
    )
