"""Readers of the machine: a played /proc, a played NVML, and a sampler that is stopped."""

import os
import time
from types import SimpleNamespace

from freetoken.bench.sample import GpuReading, HostReader, HostReading, NvmlReader, Sampler


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_host_memory_is_that_of_the_engines_whole_tree(tmp_path):
    status = "Name:\tx\nRssAnon:\t     {} kB\nRssFile:\t 900 kB\nRssShmem:\t 4 kB\nVmSwap:\t 2 kB\n"
    write(tmp_path / "proc", {
        "meminfo": "SwapTotal: 1000 kB\nSwapFree: 400 kB\n",
        "stat": "cpu  100 0 50 900 10 0 50 0 0 0\ncpu0 1\n",
        "7/status": status.format(10), "8/status": status.format(20),
        "7/task/7/children": "8 ", "8/task/8/children": "",
        "7/stat": "7 (a b) S " + "0 " * 10 + "300 100 0", "8/stat": "8 (c) S " + "0 " * 10 + "100 0 0",
    })  # fmt: skip
    found = HostReader(7, root=tmp_path)()
    tick = os.sysconf("SC_CLK_TCK")
    assert (found.engine_bytes, found.engine_swap_bytes, found.swap_used_bytes) == (38 << 10, 4 << 10, 600 << 10)
    assert found.engine_pids == {7, 8}
    assert found.cpu_busy_s == 200 / tick
    assert 500 / tick <= found.cpu_own_s <= 500 / tick + time.process_time()


def test_a_machine_that_tells_nothing_reads_as_nothing(tmp_path):
    found = HostReader(None, root=tmp_path)()
    assert (found.engine_bytes, found.swap_used_bytes, found.cpu_busy_s, found.engine_pids) == (None, None, None, set())


def refuse(*_):
    raise RuntimeError("not supported")


def make_nvml(**answers):
    names = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption",
             "nvmlDeviceGetClockInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetCurrPcieLinkWidth",
             "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetComputeRunningProcesses",
             "nvmlDeviceGetGraphicsRunningProcesses")  # fmt: skip
    return SimpleNamespace(
        **dict.fromkeys(names, refuse) | {key: lambda *_, one=one: one for key, one in answers.items()}
    )


def test_a_gpu_is_read_through_nvml():
    nvml = make_nvml(
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=5), nvmlDeviceGetPowerUsage=45_000,
        nvmlDeviceGetTotalEnergyConsumption=2_000, nvmlDeviceGetClockInfo=1500,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=80), nvmlDeviceGetCurrPcieLinkWidth=8,
        nvmlDeviceGetCurrPcieLinkGeneration=4, nvmlDeviceGetCurrentClocksThrottleReasons=0x41,
        nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=7, usedGpuMemory=3)],
        nvmlDeviceGetGraphicsRunningProcesses=[SimpleNamespace(pid=9, usedGpuMemory=None)],
    )  # fmt: skip
    assert NvmlReader(nvml, "handle")() == GpuReading(
        vram_used_bytes=5, power_w=45.0, energy_j=2.0, clock_mhz=1500, busy_percent=80,
        throttle=frozenset({"hardware thermal"}), link_width=8, link_generation=4, processes={7: 3, 9: 0},
    )  # fmt: skip


def test_what_a_driver_refuses_is_none():
    assert NvmlReader(make_nvml(), "handle")() == GpuReading()


def test_a_sampler_reads_until_it_is_stopped():
    with Sampler(lambda: None, HostReading, period_s=0.005) as sampler:
        time.sleep(0.1)
    count = len(sampler.samples())
    assert count >= 2
    time.sleep(0.03)
    assert len(sampler.samples()) == count
    assert sampler.samples(start_s=float("inf")) == ()
