"""What the machine did beside the run: VRAM, power, clocks, link, host memory, other processes; read twice a second.

Readers are passed in, so that tests play any machine. A reading that the driver or the kernel refuses is None, never
an error: a run without a GPU, or in a container that hides other processes, still measures what it can.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

PERIOD_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
#: NVML's bits of why clocks are below what was asked for. Idle and application clocks are no reason to worry.
THROTTLE_BITS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal",
                 0x80: "power brake"}  # fmt: skip


@dataclass(frozen=True)
class GpuReading:
    """The GPU at one moment."""

    vram_used_bytes: int | None = None
    power_w: float | None = None
    #: Counts up since the driver was loaded.
    energy_j: float | None = None
    clock_mhz: int | None = None
    #: 0 to 100.
    busy_percent: int | None = None
    throttle: frozenset[str] = frozenset()
    link_width: int | None = None
    link_generation: int | None = None
    #: Process -> bytes of VRAM; 0 where the driver does not say how much.
    processes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HostReading:
    """Host memory at one moment. The engine's own memory leaves out files that are only mapped."""

    engine_bytes: int | None = None
    engine_swap_bytes: int | None = None
    swap_used_bytes: int | None = None
    #: CPU seconds of all processes, and of the engine's and this one, since some moment in the past; and CPUs.
    cpu_busy_s: float | None = None
    cpu_own_s: float = 0.0
    cpu_count: int = 1
    #: The engine's process and those below it.
    engine_pids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sample:
    """One look, on the client's clock."""

    at_s: float
    gpu: GpuReading | None
    host: HostReading


ReadGpu = Callable[[], GpuReading | None]
ReadHost = Callable[[], HostReading]


class Sampler:
    """Reads every `period_s` in a thread of its own until it is stopped."""

    def __init__(
        self, read_gpu: ReadGpu, read_host: ReadHost, *, period_s: float = PERIOD_S,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._read_gpu, self._read_host, self._period_s, self._now = read_gpu, read_host, period_s, now
        self._samples: list[Sample] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10)

    def look(self) -> Sample:
        """Reads now."""
        sample = Sample(self._now(), self._read_gpu(), self._read_host())
        self._samples.append(sample)
        return sample

    def samples(self, start_s: float = float("-inf"), end_s: float = float("inf")) -> tuple[Sample, ...]:
        """What was read between two moments."""
        return tuple(one for one in list(self._samples) if start_s <= one.at_s <= end_s)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self.look()


def peak_vram(samples: Sequence[Sample]) -> int | None:
    """Most VRAM that the engine held, by its own processes where the driver tells, else all that was in use."""
    return max((found for one in samples if (found := _own_vram(one)) is not None), default=None)


def _own_vram(sample: Sample) -> int | None:
    if sample.gpu is None:
        return None
    own = sum(count for pid, count in sample.gpu.processes.items() if pid in sample.host.engine_pids)
    return own or sample.gpu.vram_used_bytes


def peak_ram(samples: Sequence[Sample]) -> int | None:
    """Most host memory that the engine's processes held; None where its process is not known."""
    return max((one.host.engine_bytes for one in samples if one.host.engine_bytes), default=None)


def mean_power(samples: Sequence[Sample]) -> float | None:
    """Watts over the samples, by the energy counter where there is one."""
    readings = [(one.at_s, one.gpu) for one in samples if one.gpu is not None]
    if energy := energy_between(samples):
        elapsed = readings[-1][0] - readings[0][0]
        return energy / elapsed if elapsed > 0 else None
    watts = [gpu.power_w for _, gpu in readings if gpu.power_w is not None]
    return sum(watts) / len(watts) if watts else None


def energy_between(samples: Sequence[Sample]) -> float | None:
    """Joules from the first to the last sample: the counter's difference, else power times time (trapezoids)."""
    readings = [(one.at_s, one.gpu) for one in samples if one.gpu is not None]
    counted = [gpu.energy_j for _, gpu in readings if gpu.energy_j is not None]
    if len(counted) > 1 and counted[-1] > counted[0]:
        return counted[-1] - counted[0]
    points = [(at, gpu.power_w) for at, gpu in readings if gpu.power_w is not None]
    if len(points) < 2:
        return None
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))


class NvmlReader:
    """Reads one NVIDIA GPU. `nvml` is the module `pynvml`, initialised."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def __call__(self) -> GpuReading:
        """The GPU now."""
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        power, energy = self._ask("nvmlDeviceGetPowerUsage"), self._ask("nvmlDeviceGetTotalEnergyConsumption")
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return GpuReading(
            vram_used_bytes=int(memory.used) if memory is not None else None,
            power_w=power / 1000 if power else None,
            energy_j=energy / 1000 if energy else None,
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", 1),
            busy_percent=int(rates.gpu) if rates is not None else None,
            throttle=frozenset(word for bit, word in THROTTLE_BITS.items() if int(reasons or 0) & bit),
            link_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth") or None,
            link_generation=self._ask("nvmlDeviceGetCurrPcieLinkGeneration") or None,
            processes=self._processes(),
        )

    def _processes(self) -> dict[int, int]:
        used: dict[int, int] = {}
        for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self._ask(question) or ():
                used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory or 0)
        return used

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except Exception:  # NVMLError, or a library without this question
            return None


def find_gpu_reader(uuid: str | None) -> ReadGpu:
    """A reader of the GPU that the engine uses; of the only one where the engine does not say; else of none."""
    from freetoken.hardware.nvidia import load_nvml
    from freetoken.hardware.reader import Reader

    nothing: ReadGpu = lambda: None  # noqa: E731
    if not any(map(Reader().exists, ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg"))):
        return nothing
    nvml = load_nvml()
    if nvml is None:
        return nothing
    with contextlib.suppress(Exception):  # a GPU that went away, a uuid of another machine
        if uuid:
            return NvmlReader(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        if nvml.nvmlDeviceGetCount() == 1:
            return NvmlReader(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
    return nothing


class HostReader:
    """Reads the engine's process tree and the machine's swap from /proc below `root`."""

    def __init__(self, engine_pid: int | None, *, root: Path = Path("/")) -> None:
        self._pid, self._proc = engine_pid, root / "proc"

    def __call__(self) -> HostReading:
        """Host memory now."""
        memory = _read_kib(self._proc / "meminfo")
        swap = memory["SwapTotal"] - memory["SwapFree"] if {"SwapTotal", "SwapFree"} <= memory.keys() else None
        pids = frozenset(self._tree(self._pid)) if self._pid is not None else frozenset[int]()
        found = [status for pid in pids if (status := _read_kib(self._proc / str(pid) / "status"))]
        return HostReading(
            engine_bytes=sum(one.get("RssAnon", 0) + one.get("RssShmem", 0) for one in found) if found else None,
            engine_swap_bytes=sum(one.get("VmSwap", 0) for one in found) if found else None,
            swap_used_bytes=swap,
            cpu_busy_s=self._busy_s(),
            cpu_own_s=time.process_time() + sum(map(self._used_s, pids)),
            cpu_count=os.cpu_count() or 1,
            engine_pids=pids,
        )

    def _busy_s(self) -> float | None:
        """CPU seconds that were not idle, of all CPUs."""
        words = _read_text(self._proc / "stat").partition("\n")[0].split()
        if len(words) < 9 or words[0] != "cpu":
            return None
        user, nice, system, _, _, irq, softirq, *_ = map(int, words[1:])
        return (user + nice + system + irq + softirq) / _TICKS

    def _used_s(self, pid: int) -> float:
        words = _read_text(self._proc / str(pid) / "stat").rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS if len(words) > 12 else 0.0

    def _tree(self, pid: int) -> Iterator[int]:
        yield pid
        for path in self._proc.glob(f"{pid}/task/*/children"):
            for child in _read_text(path).split():
                yield from self._tree(int(child))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _read_kib(path: Path) -> dict[str, int]:
    """`Name:  123 kB` lines in bytes."""
    rows = (line.split() for line in _read_text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
