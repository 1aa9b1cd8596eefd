"""Machines made of recorded files and answers: a folder plays `/`, a table plays the programs, a class plays NVML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from freetoken.hardware.reader import Reader
from freetoken.units import GIB, MIB


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Writes `files` (absolute name -> text) below `root`; `-> target` makes a symbolic link, `[dir]` a folder."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
        elif text == "[dir]":
            path.mkdir(exist_ok=True)
        else:
            path.write_text(text)
            if "/bin/" in name or name.endswith(".exe"):
                path.chmod(0o755)
    return root


class FakePrograms:
    """Answers by the program's bare name or the whole command line; what is not listed fails. Keeps what was asked."""

    def __init__(self, answers: Mapping[str, bytes]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, argv: tuple[str, ...], timeout_s: float) -> bytes | None:
        self.asked.append(argv)
        bare = argv[0].rsplit("/", 1)[-1]
        return self.answers.get(" ".join((bare, *argv[1:])), self.answers.get(bare))


def make_reader(
    root: Path,
    files: Mapping[str, str],
    *,
    programs: Mapping[str, bytes] | None = None,
    environ: Mapping[str, str] | None = None,
    affinity: frozenset[int] | None = None,
    memlock: int | None = 8 * MIB,
    usage: Mapping[str, Usage] | None = None,
    arch: str = "x86_64",
    torch: Path | None = None,
) -> Reader:
    """A reader of the machine that `files` describe."""
    disks = dict(usage or {})

    def disk_usage(path: Path) -> Usage:
        if (found := disks.get(str(path))) is None:
            raise FileNotFoundError(str(path))
        return found

    return Reader(
        root=write_tree(root, files),
        run=FakePrograms(programs or {}),
        environ={"PATH": "/usr/local/bin:/usr/bin", "HOME": "/home/ann", **(environ or {})},
        affinity=lambda: frozenset(range(4096)) if affinity is None else affinity,
        memlock=lambda: memlock,
        disk_usage=disk_usage,
        package_folder=lambda name: torch if name == "torch" else None,
        arch=arch,
    )


def cpuinfo(model: str, logical: int, flags: str, *, threads_per_core: int = 2) -> str:
    """/proc/cpuinfo of an x86 machine with one package."""
    block = "processor\t: {n}\nmodel name\t: {model}\nphysical id\t: 0\ncore id\t\t: {core}\nflags\t\t: {flags}\n"
    cores = logical // threads_per_core
    return "\n".join(block.format(n=n, model=model, core=n % cores, flags=flags) for n in range(logical)) + "\n"


def meminfo(total: int, available: int, *, swap_total: int = 0, swap_free: int = 0) -> str:
    """/proc/meminfo with sizes in bytes."""
    rows = {
        "MemTotal": total,
        "MemFree": available // 2,
        "MemAvailable": available,
        "SwapTotal": swap_total,
        "SwapFree": swap_free,
    }
    return "".join(f"{name}:{size // 1024:>15} kB\n" for name, size in rows.items())


def topology(groups: list[tuple[int, int]]) -> dict[str, str]:
    """sysfs topology: each group is (package, threads) of one core; CPUs are numbered core by core."""
    files, cpu = {}, 0
    for core, (package, threads) in enumerate(groups):
        siblings = range(cpu, cpu + threads)
        for sibling in siblings:
            base = f"/sys/devices/system/cpu/cpu{sibling}/topology"
            files[f"{base}/physical_package_id"] = f"{package}\n"
            files[f"{base}/core_id"] = f"{core}\n"
            files[f"{base}/thread_siblings_list"] = ",".join(map(str, siblings)) + "\n"
        cpu += threads
    files["/sys/devices/system/cpu/online"] = f"0-{cpu - 1}\n"
    return files


AVX2 = "fpu sse4_2 avx f16c fma avx2 avx_vnni"
AVX512 = "fpu sse4_2 avx f16c fma avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16"


class FakeNvml:
    """As much of `pynvml` as the probe asks; a card is a dict, and what it lacks is `not supported`."""

    class NVMLError(Exception):
        pass

    def __init__(self, cards: list[dict[str, Any]], *, driver: str = "580.95.05", cuda: int = 13000) -> None:
        self.cards, self.driver, self.cuda = cards, driver, cuda
        self.is_shut_down = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def ask(handle: dict[str, Any], *arguments: Any) -> Any:
            if name not in handle:
                raise self.NVMLError("Not Supported")
            value = handle[name]
            return value(*arguments) if callable(value) else value

        return ask

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return f"C:\\Users\\ann\\program{pid}.exe"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def nvmlShutdown(self) -> None:
        self.is_shut_down = True


def nvml_card(
    name: str, total_mib: int, free_mib: int, capability: tuple[int, int] = (8, 6), *, cores: int | None = None,
    link: tuple[int, int, int, int, int] = (1, 8, 4, 8, 4), power: tuple[int, int] | None = None,
    uuid: str = "GPU-11111111-2222-3333-4444-555555555555", display: bool = False,
    compute: list[tuple[int, int | None]] | None = None, graphics: list[tuple[int, int | None]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A card for `FakeNvml`; `link` = generation and width now, then the most of both, then the card's generation."""
    card: dict[str, Any] = {
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=total_mib * MIB, free=free_mib * MIB),
        "nvmlDeviceGetCudaComputeCapability": capability,
        "nvmlDeviceGetDisplayActive": int(display),
        "nvmlDeviceGetComputeRunningProcesses": _processes(compute),
        "nvmlDeviceGetGraphicsRunningProcesses": _processes(graphics),
    }
    names = (
        "CurrPcieLinkGeneration",
        "CurrPcieLinkWidth",
        "MaxPcieLinkGeneration",
        "MaxPcieLinkWidth",
        "GpuMaxPcieLinkGeneration",
    )
    card |= {f"nvmlDeviceGet{name}": value for name, value in zip(names, link, strict=True)}
    if cores is not None:
        card["nvmlDeviceGetNumGpuCores"] = cores
    if power is not None:
        card["nvmlDeviceGetPowerManagementLimit"], card["nvmlDeviceGetPowerManagementDefaultLimit"] = power
    return card


def _processes(pairs: list[tuple[int, int | None]] | None) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in pairs or []]


NVIDIA_DRIVER = {
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n",
    "/dev/nvidiactl": "",
}

CUDA_13 = {
    "/usr/local/cuda-13.0/version.json": '{"cuda": {"name": "CUDA SDK", "version": "13.0.2"}}',
    "/usr/local/cuda-13.0/bin/nvcc": "",
    "/usr/local/bin/nvcc": "-> ../cuda-13.0/bin/nvcc",
    "/usr/bin/g++": "",
    "/usr/bin/ninja": "",
}

ROOT_ON_NVME = {
    "/proc/self/mountinfo": (
        "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
        "23 22 0:21 / /sys rw - sysfs sysfs rw\n"
        "24 22 0:22 / /tmp rw,nosuid - tmpfs tmpfs rw,size=16G\n"
    ),
    "/dev/nvme0n1p2": "",
    "/sys/devices/pci0/nvme0n1/nvme0n1p2/partition": "2\n",
    "/sys/devices/pci0/nvme0n1/queue/rotational": "0\n",
    "/sys/class/block/nvme0n1": "-> ../../devices/pci0/nvme0n1",
    "/sys/class/block/nvme0n1p2": "-> ../../devices/pci0/nvme0n1/nvme0n1p2",
}


def linux_laptop(root: Path) -> tuple[Reader, FakeNvml]:
    """A laptop with 6 performance and 8 efficiency cores, 31 GiB of RAM and an RTX 4060 that also holds a browser."""
    performance = [(0, 2)] * 6
    efficiency = [(0, 1)] * 8
    files = {
        "/proc/cpuinfo": cpuinfo("13th Gen Intel(R) Core(TM) i9-13900H", 20, AVX2, threads_per_core=1),
        "/proc/meminfo": meminfo(31 * GIB, 22 * GIB, swap_total=8 * GIB, swap_free=7 * GIB),
        "/proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n",
        "/proc/4242/comm": "firefox\n",
        "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
        "/sys/devices/cpu_core/cpus": "0-11\n",
        "/sys/devices/cpu_atom/cpus": "12-19\n",
        "/sys/devices/system/node/has_memory": "0\n",
        "/sys/class/power_supply/AC/type": "Mains\n",
        "/sys/class/power_supply/AC/online": "0\n",
        "/sys/class/power_supply/BAT0/type": "Battery\n",
        "/sys/class/power_supply/BAT0/status": "Discharging\n",
        "/home/ann/.cache/huggingface/hub": "[dir]",
        **topology(performance + efficiency),
        **NVIDIA_DRIVER,
        **CUDA_13,
        **ROOT_ON_NVME,
    }
    usage = {"/": Usage(900 * GIB, 700 * GIB, 200 * GIB), "/tmp": Usage(16 * GIB, GIB, 15 * GIB)}
    usage |= {"/home/ann/.cache/huggingface/hub": usage["/"]}
    card = nvml_card(
        "NVIDIA GeForce RTX 4060 Laptop GPU", 8188, 7400, (8, 9), cores=3072, link=(1, 8, 4, 8, 4),
        graphics=[(4242, 300 * MIB)], display=True,
    )  # fmt: skip
    environ = {"HF_HOME": "/home/ann/.cache/huggingface"}
    return make_reader(root, files, usage=usage, environ=environ), FakeNvml([card])


def wsl_machine(root: Path, *, wsl_version: str = "2.6.1.0", windows_free: int = 5 * GIB) -> tuple[Reader, FakeNvml]:
    """WSL2 on a desktop: 24 GiB for Linux, an RTX 3060 whose holders NVML cannot name, models on a Windows drive."""
    files = {
        "/proc/cpuinfo": cpuinfo("12th Gen Intel(R) Core(TM) i5-12600KF", 16, AVX2),
        "/proc/meminfo": meminfo(24 * GIB, 20 * GIB, swap_total=6 * GIB, swap_free=6 * GIB),
        "/proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n",
        "/proc/self/cgroup": "0::/init.scope\n",
        "/proc/sys/fs/binfmt_misc/WSLInterop": "enabled\n",
        "/dev/dxg": "",
        "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.2 LTS"\n',
        "/mnt/c/Windows/System32/wsl.exe": "",
        "/mnt/c/Windows/System32/WindowsPowerShell/v1.0/powershell.exe": "",
        "/mnt/d/models": "[dir]",
        "/proc/self/mountinfo": (
            "60 1 8:32 / / rw,relatime - ext4 /dev/sdc rw\n80 60 0:50 / /mnt/d rw,noatime - 9p D:\\134 rw,aname=drvfs\n"
        ),
        "/dev/sdc": "",
        "/sys/class/block/sdc/queue/rotational": "1\n",
        "/sys/class/block/sdc/device/vendor": "Msft    \n",
        "/usr/bin/g++": "",
        **topology([(0, 2)] * 8),
    }
    lines = f"WSL-Version: {wsl_version}\r\nKernelversion: 6.6.87.2-1\r\nWindows-Version: 10.0.26200.1\r\n"
    programs = {
        "wsl.exe --version": lines.encode("utf-16-le"),
        "powershell.exe": f"{windows_free // 1024}\r\n".encode(),
        "powercfg.exe": b"Power Scheme GUID: 381b4222-f694-41f0-9685-ff5bb260df2e  (Balanced)\r\n",
    }
    usage = {"/mnt/d/models": Usage(900 * GIB, 880 * GIB, 20 * GIB), "/": Usage(250 * GIB, 200 * GIB, 50 * GIB)}
    card = nvml_card(
        "NVIDIA GeForce RTX 3060", 12288, 10800, link=(4, 16, 4, 16, 4), cores=3584, power=(170000, 170000),
        compute=[(77, None)], display=True,
    )  # fmt: skip
    environ = {"HF_HOME": "/mnt/d/models", "WSL_DISTRO_NAME": "Ubuntu"}
    return make_reader(root, files, programs=programs, usage=usage, environ=environ), FakeNvml([card], driver="595.71")


def headless_server(root: Path) -> tuple[Reader, FakeNvml]:
    """Two sockets of 16 cores, 256 GiB, two RTX 3090 of which the second sits in a slow slot; a container's limits."""
    files = {
        "/proc/cpuinfo": cpuinfo("INTEL(R) XEON(R) GOLD 6526Y", 64, AVX512),
        "/proc/meminfo": meminfo(256 * GIB, 200 * GIB),
        "/proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
        "/proc/self/cgroup": "0::/\n",
        "/.dockerenv": "",
        "/etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
        "/sys/devices/system/node/has_memory": "0-1\n",
        "/sys/fs/cgroup/memory.max": f"{64 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{20 * GIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon {14 * GIB}\ninactive_file {6 * GIB}\n",
        "/sys/fs/cgroup/cpu.max": "800000 100000\n",
        "/data": "[dir]",
        "/dev/sdb": "",
        "/sys/class/block/sdb/queue/rotational": "1\n",
        **topology([(0, 2)] * 16 + [(1, 2)] * 16),
        **NVIDIA_DRIVER,
        **CUDA_13,
        "/proc/self/mountinfo": (
            "1 0 0:44 / / rw - overlay overlay rw\n"
            "2 1 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
            "3 1 8:16 / /data rw - ext4 /dev/sdb rw\n"
        ),
    }
    usage = {"/data": Usage(4000 * GIB, 1000 * GIB, 3000 * GIB)}
    cards = [
        nvml_card("NVIDIA GeForce RTX 3090", 24576, 24240, cores=10496, link=(4, 16, 4, 16, 4), power=(350000, 350000),
                  uuid="GPU-aaaaaaaa-0000-0000-0000-000000000000"),
        nvml_card("NVIDIA GeForce RTX 3090", 24576, 24240, cores=10496, link=(3, 4, 3, 4, 4), power=(280000, 350000),
                  uuid="GPU-bbbbbbbb-0000-0000-0000-000000000000"),
    ]  # fmt: skip
    return make_reader(root, files, usage=usage, environ={"HF_HOME": "/data"}, memlock=None), FakeNvml(cards)


def cpu_only(root: Path) -> tuple[Reader, FakeNvml]:
    """Eight cores with AVX2, 32 GiB, no GPU, no compiler."""
    files = {
        "/proc/cpuinfo": cpuinfo("AMD Ryzen 7 5700G with Radeon Graphics", 16, AVX2),
        "/proc/meminfo": meminfo(31 * GIB, 27 * GIB),
        "/proc/sys/kernel/osrelease": "6.12.0\n",
        "/proc/self/cgroup": "0::/user.slice\n",
        "/etc/os-release": "PRETTY_NAME=Fedora\n",
        **topology([(0, 2)] * 8),
        **ROOT_ON_NVME,
    }
    usage = {"/": Usage(500 * GIB, 100 * GIB, 400 * GIB), "/tmp": Usage(16 * GIB, 2 * GIB, 14 * GIB)}
    return make_reader(root, files, usage=usage, environ={"HF_HOME": "/"}), FakeNvml([])
