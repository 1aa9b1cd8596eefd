"""Checks of GPU, driver, toolchain, VRAM, link and power. Pure: every fact comes in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from packaging.version import InvalidVersion, Version

from freetoken.adapters.base import EngineNeeds
from freetoken.doctor.facts import Facts
from freetoken.doctor.model import Check, failed, passed, skipped, warned
from freetoken.hardware.catalog import H2D_BYTES_PER_S_PER_LANE
from freetoken.hardware.model import Gpu, Hardware
from freetoken.units import MIB, format_bytes, format_rate

LEAST_DRIVER = "580"
#: A card's limit below this share of its default is a cap that somebody set.
CAPPED_RATIO = 0.9
#: Others' VRAM that deserves a word: this many bytes, or this share of the card.
HELD_BYTES, HELD_RATIO = 512 * MIB, 0.06
_INSTALL_DRIVER = (
    "install NVIDIA driver 580 or newer and reboot (Ubuntu: `sudo apt install nvidia-driver-580-open`; "
    "Fedora: `sudo dnf install akmod-nvidia`)"
)
_INSTALL_CUDA = (
    "install the CUDA 13 toolkit (Ubuntu: `sudo apt install cuda-toolkit-13-0` from NVIDIA's repository) and put "
    "`/usr/local/cuda-13.0/bin` on PATH"
)


def check_gpus(hardware: Hardware, facts: Facts, needs: Mapping[str, EngineNeeds]) -> Iterator[Check]:
    """Everything about GPUs, one check after the other."""
    yield check_presence(hardware)
    nvidia = [gpu for gpu in hardware.gpus if gpu.vendor == "nvidia"]
    if not nvidia:
        names = ("driver", "compute_capability", "torch_cuda", "cuda_toolkit", "compilers", "vram", "pcie", "power")
        yield from (skipped(name, "there is no NVIDIA GPU") for name in names if name != "power")
        yield check_power_source(hardware, facts)
        return
    yield check_driver(hardware)
    yield check_capability(nvidia, needs)
    yield check_torch(hardware)
    yield check_toolkit(hardware, _engines_for(nvidia, needs))
    yield check_compilers(hardware, _engines_for(nvidia, needs))
    for gpu in nvidia:
        yield check_vram(gpu)
        yield check_link(gpu, hardware, nvidia)
        yield check_power_limit(gpu)
    yield check_power_source(hardware, facts)


def check_presence(hardware: Hardware) -> Check:
    """A GPU that can be used, or why there is none."""
    nvidia = [gpu.name for gpu in hardware.gpus if gpu.vendor == "nvidia"]
    driverless = next((note for note in hardware.notes if "driver" in note), None)
    masked = next((note for note in hardware.notes if note.startswith("CUDA_VISIBLE_DEVICES")), None)
    if nvidia:
        return warned("gpu", masked, "`unset CUDA_VISIBLE_DEVICES`") if masked else passed("gpu", ", ".join(nvidia))
    if masked:
        return failed("gpu", masked, "`unset CUDA_VISIBLE_DEVICES`")
    if driverless:
        return failed("gpu", driverless, _INSTALL_DRIVER)
    if hardware.gpus:
        names = ", ".join(gpu.name for gpu in hardware.gpus)
        return warned(
            "gpu", f"{names}: not used, models run on the CPU", "an NVIDIA card, or an engine that drives this one"
        )
    return skipped("gpu", "there is no GPU; models run on the CPU with engine `native`")


def check_driver(hardware: Hardware) -> Check:
    """r580 or newer."""
    driver = hardware.software.driver
    if driver is None:
        return failed("driver", "the driver's version cannot be read", _INSTALL_DRIVER)
    if _is_older(driver, LEAST_DRIVER):
        if hardware.os.is_wsl:
            fix = (
                "install a Windows driver of 580 or newer (never a Linux driver inside WSL), then `wsl.exe --shutdown`"
            )
        else:
            fix = _INSTALL_DRIVER
        return failed("driver", f"driver {driver} is older than {LEAST_DRIVER}, which CUDA 13 needs", fix)
    return passed("driver", f"driver {driver}, CUDA {hardware.software.cuda_driver or 'version unknown'}")


def check_capability(gpus: Iterable[Gpu], needs: Mapping[str, EngineNeeds]) -> Check:
    """Which engines each card is new enough for."""
    words, usable, is_served = [], set(needs), True
    for gpu in gpus:
        able = [name for name, need in needs.items() if _can_run(gpu, need)]
        unable = [f"{name} from {need.compute_capability}" for name, need in needs.items() if name not in able]
        usable, is_served = usable & set(able), is_served and not unable
        text = f"{gpu.name} has {gpu.compute_capability or 'an unknown one'}: runs {', '.join(able) or 'no engine'}"
        words.append(text + (f"; not {', '.join(unable)}" if unable else ""))
    found = "; ".join(words)
    if is_served:
        return passed("compute_capability", found)
    choice = next((name for name in needs if name in usable), None)
    fix = f"`--set engine.name={choice}`, or " if choice else ""
    return warned("compute_capability", found, f"{fix}a card of Ampere (RTX 30) or newer, which runs all engines")


def check_torch(hardware: Hardware) -> Check:
    """Our own torch sees the GPU, and the driver is new enough for it."""
    software = hardware.software
    if software.torch is None:
        return skipped("torch_cuda", "torch is not installed here")
    if software.torch_cuda is None:
        return warned(
            "torch_cuda", f"torch {software.torch} is built for the CPU: engine `native` does not use the GPU",
            "`pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130`",
        )  # fmt: skip
    if software.cuda_driver is not None and _major(software.cuda_driver) < _major(software.torch_cuda):
        found = f"torch {software.torch} needs CUDA {software.torch_cuda}, the driver gives {software.cuda_driver}"
        return failed("torch_cuda", found, _INSTALL_DRIVER)
    return passed("torch_cuda", f"torch {software.torch}, CUDA {software.torch_cuda}")


def check_toolkit(hardware: Hardware, engines: Mapping[str, EngineNeeds]) -> Check:
    """nvcc of the CUDA major that engines compile their kernels with, which is torch's."""
    software = hardware.software
    wanted = {name: need.cuda_toolkit for name, need in engines.items() if need.cuda_toolkit}
    if not wanted:
        return skipped("cuda_toolkit", "no engine for this card compiles kernels")
    names = ", ".join(f"`{name}`" for name in wanted)
    if software.nvcc is None:
        return failed("cuda_toolkit", f"nvcc is not found; {names} compiles kernels at its first start", _INSTALL_CUDA)
    least = max(map(_major, wanted.values()))
    toolkit = software.cuda_toolkit
    if toolkit is None:
        return warned("cuda_toolkit", f"the CUDA version of {software.nvcc} cannot be read", _INSTALL_CUDA)
    if _major(toolkit) != least:
        return failed("cuda_toolkit", f"nvcc is of CUDA {toolkit}; {names} was built for CUDA {least}", _INSTALL_CUDA)
    if software.torch_cuda is not None and _major(software.torch_cuda) != _major(toolkit):
        return warned(
            "cuda_toolkit", f"nvcc is of CUDA {toolkit}, torch here of CUDA {software.torch_cuda}", _INSTALL_CUDA
        )
    return passed("cuda_toolkit", f"CUDA {toolkit}, {software.nvcc}")


def check_compilers(hardware: Hardware, engines: Mapping[str, EngineNeeds]) -> Check:
    """g++ and ninja, which build kernels at an engine's first start."""
    wanted = {tool for need in engines.values() for tool in need.tools} & {"g++", "ninja"}
    if not wanted:
        return skipped("compilers", "no engine for this card compiles kernels")
    found = {"g++": hardware.software.gxx, "ninja": hardware.software.ninja}
    missing = sorted(tool for tool in wanted if found[tool] is None)
    if missing:
        packages = " ".join({"g++": "g++", "ninja": "ninja-build"}[tool] for tool in missing)
        return failed("compilers", f"{' and '.join(missing)} not found on PATH", f"`sudo apt install {packages}`")
    return passed("compilers", ", ".join(str(found[tool]) for tool in sorted(wanted)))


def check_vram(gpu: Gpu) -> Check:
    """Free VRAM, and who holds the rest."""
    held = gpu.vram_total_bytes - gpu.vram_free_bytes
    free, total = format_bytes(gpu.vram_free_bytes), format_bytes(gpu.vram_total_bytes)
    found = f"{gpu.name}: {free} of {total} free"
    names = [
        f"{one.name} ({one.pid}) {format_bytes(one.used_bytes) if one.used_bytes else ''}".strip()
        for one in gpu.holders
    ]
    if names:
        found += f"; held by {', '.join(names)}"
    if held <= max(HELD_BYTES, int(HELD_RATIO * gpu.vram_total_bytes)):
        return passed("vram", found)
    fix = (
        f"close {', '.join(one.name for one in gpu.holders)}"
        if names
        else "close programs that draw or compute on the GPU"
    )
    if gpu.has_display:
        fix += ", or let an integrated GPU drive the display"
    return warned("vram", found, fix)


def check_link(gpu: Gpu, hardware: Hardware, gpus: list[Gpu]) -> Check:
    """PCIe generation and width now against what slot and card could do, and against the measured rate."""
    link = gpu.pcie
    if not (link.max_generation and link.max_width):
        return skipped("pcie", f"{gpu.name}: the driver does not tell the link")
    most = f"{link.max_generation}.0 x{link.max_width}"
    rate = H2D_BYTES_PER_S_PER_LANE.get(link.max_generation, 0.2e9) * link.max_width
    now = f"{link.generation}.0 x{link.width} now" if link.generation and link.width else "link now unknown"
    found = f"{gpu.name}: {now}, up to {most} (about {format_rate(rate)})"
    if link.generation and link.generation < link.max_generation:
        found += "; an idle link steps down, so look at it under load"
    better = [other for other in gpus if other is not gpu and _lanes(other) >= 4 * _lanes(gpu)]
    if better:
        fix = f"run on the other card: `--set settings.gpu={better[0].index}`, or move this one to a faster slot"
        return warned("pcie", found, fix)
    if link.width and link.width < link.max_width:
        return warned("pcie", f"{found}; {link.max_width - link.width} lanes are not used", _RESEAT)
    if link.card_generation and link.card_generation > link.max_generation:
        fix = "move the card to the slot next to the CPU, or raise that slot's PCIe generation in the firmware set-up"
        return warned("pcie", f"{found}; the card could do {link.card_generation}.0", fix)
    measured = hardware.bandwidth.h2d_bytes_per_s
    is_measured = (
        measured is not None and hardware.source_of("bandwidth.h2d_bytes_per_s") == "measured" and len(gpus) == 1
    )
    if is_measured and measured is not None and measured < 0.6 * rate:
        return warned("pcie", f"{found}; measured {format_rate(measured)}", _RESEAT)
    return passed("pcie", found + (f"; measured {format_rate(measured)}" if is_measured and measured else ""))


_RESEAT = "reseat the card, use the slot next to the CPU, and see that no M.2 drive shares its lanes"


def check_power_limit(gpu: Gpu) -> Check:
    """The card's power limit against its own default."""
    if gpu.power_limit_w is None or gpu.power_default_w is None:
        return skipped("power_limit", f"{gpu.name}: the driver does not tell the power limit")
    found = f"{gpu.name}: {gpu.power_limit_w:.0f} W of {gpu.power_default_w:.0f} W"
    if gpu.power_limit_w < CAPPED_RATIO * gpu.power_default_w:
        return warned("power_limit", found, f"`sudo nvidia-smi -i {gpu.index} -pl {gpu.power_default_w:.0f}`")
    return passed("power_limit", found)


def check_power_source(hardware: Hardware, facts: Facts) -> Check:
    """Battery, firmware profile and Windows' power scheme: each lowers clocks."""
    power = facts.power
    if power.on_battery:
        return warned("power_source", "running on battery: GPU and CPU clocks are held down", "plug the charger in")
    if power.platform_profile in ("low-power", "quiet", "cool"):
        found = f"the firmware's power profile is `{power.platform_profile}`"
        return warned("power_source", found, "`powerprofilesctl set performance`")
    if power.windows_scheme == "saver":
        fix = "`powercfg.exe /setactive SCHEME_MIN` (high performance)"
        return warned("power_source", "Windows' power scheme is the power saver", fix)
    if power.on_battery is None and power.platform_profile is None and power.windows_scheme is None:
        return skipped("power_source", "the machine does not tell its power source: a desktop or a server")
    words = [f"profile {power.platform_profile}"] if power.platform_profile else []
    words += [f"Windows scheme {power.windows_scheme}"] if power.windows_scheme else []
    return passed("power_source", ", ".join(["on mains" if power.on_battery is False else "source unknown", *words]))


def _engines_for(gpus: Iterable[Gpu], needs: Mapping[str, EngineNeeds]) -> dict[str, EngineNeeds]:
    """Engines that one of `gpus` is new enough for."""
    found = list(gpus)
    return {name: need for name, need in needs.items() if any(_can_run(gpu, need) for gpu in found)}


def _can_run(gpu: Gpu, need: EngineNeeds) -> bool:
    if need.compute_capability is None:
        return True
    return gpu.compute_capability is not None and not _is_older(gpu.compute_capability, need.compute_capability)


def _lanes(gpu: Gpu) -> float:
    return H2D_BYTES_PER_S_PER_LANE.get(gpu.pcie.max_generation or 1, 0.2e9) * (gpu.pcie.max_width or 1)


def _is_older(found: str, wanted: str) -> bool:
    try:
        return Version(found) < Version(wanted)
    except InvalidVersion:
        return False


def _major(version: str) -> int:
    head = version.split(".")[0]
    return int(head) if head.isdigit() else 0
