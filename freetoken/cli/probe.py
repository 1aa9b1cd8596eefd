"""`ft probe`: read this machine, or a profile, and show or save it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table
from freetoken.errors import UsageError
from freetoken.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.hardware.model import Bandwidth, Cpu, Disk, Gpu, Hardware, Ram


@click.command(
    "probe",
    epilog=examples("ft probe --bandwidth --save my-laptop", "ft probe --profile rtx-3060-laptop-6gb --json"),
)
@click.option("--save", metavar="NAME", help="Write a profile NAME.yaml to ./profiles, else to the state folder.")
@click.option("--yes", is_flag=True, help="Overwrite a profile of that name.")
@click.option("--bandwidth", is_flag=True, help="Measure how fast memory, link and disk move bytes (some seconds).")
@click.option(
    "--device", default="auto", show_default=True, help="What `--bandwidth` measures: cpu, cuda:0 or a GPU's uuid."
)
@click.option(
    "--disk", type=click.Path(path_type=Path), metavar="FOLDER", help="Folder of the models; else the hub cache."
)
@click.option("--profile", metavar="NAME", help="Show a profile instead of this machine.")
@click.option("--list", "is_list", is_flag=True, help="List the profiles that can be named.")
@json_option
def command(
    save: str | None,
    yes: bool,
    bandwidth: bool,
    device: str,
    disk: Path | None,
    profile: str | None,
    is_list: bool,
    as_json: bool,
) -> None:
    """Read what this machine has; `--save` writes a profile that another machine can plan for."""
    if is_list:
        _list_profiles(as_json)
        return
    target = _target(save, yes)
    hardware = _read(profile, bandwidth, device, disk)
    if target is not None:
        from freetoken.hardware.profiles import write_profile

        note(f"wrote {write_profile(hardware, target)}")
    emit(hardware, as_json=as_json, render=lambda console: _render(hardware, console))


def _read(profile: str | None, bandwidth: bool, device: str, disk: Path | None) -> Hardware:
    if profile is not None:
        if bandwidth:
            raise UsageError("`--bandwidth` measures this machine, `--profile` shows another", hint="leave one out")
        from freetoken.hardware.profiles import load_profile

        return load_profile(profile)
    from freetoken.hardware.probe import probe_hardware

    hardware = probe_hardware(disk)
    if not bandwidth:
        return hardware
    note("measuring memory, link and disk")
    from freetoken.hardware.bandwidth import measure_bandwidth
    from freetoken.hardware.measured import write_measured

    place = Path(hardware.disk.path) if hardware.disk.path else None
    rates = hardware.bandwidth.merged(measure_bandwidth(device, disk_folder=place))
    write_measured(hardware, rates)
    return hardware.model_copy(update={"bandwidth": rates})


def _target(save: str | None, yes: bool) -> Path | None:
    """Where to write; checked before anything is measured."""
    if save is None:
        return None
    from freetoken.hardware.profiles import profile_path

    path = profile_path(save)
    if path.exists() and not yes:
        raise UsageError(f"{path} exists", hint=f"`ft probe --save {save} --yes` overwrites it")
    return path


def _list_profiles(as_json: bool) -> None:
    from freetoken.hardware.profiles import list_profiles

    profiles = list_profiles()
    rows = [(profile.name, profile.description) for profile in profiles]
    render = lambda console: print_table(console, ("profile", "machine"), rows)  # noqa: E731
    emit(list(profiles), as_json=as_json, render=render)


def _render(hardware: Hardware, console: Console) -> None:
    title = hardware.name if not hardware.description else f"{hardware.name}: {hardware.description}"
    print_table(console, ("what", "found", "source"), make_rows(hardware), title=title, notes=hardware.notes)


def make_rows(hardware: Hardware) -> list[tuple[str, str, str]]:
    """What was found, line by line: name, value for people, and how it is known."""
    rows = [row for index, gpu in enumerate(hardware.gpus) for row in _gpu_rows(gpu, f"gpus.{index}")]
    rows += [] if hardware.gpus else [("GPU", "none", "gpus")]
    rows += _cpu_rows(hardware.cpu) + _ram_rows(hardware.ram) + _disk_rows(hardware.disk)
    rows += _bandwidth_rows(hardware.bandwidth) + _software_rows(hardware)
    return [(label, value, hardware.source_of(field)) for label, value, field in rows]


def _gpu_rows(gpu: Gpu, at: str) -> list[tuple[str, str, str]]:
    kind = [f"compute capability {gpu.compute_capability}"] if gpu.compute_capability else []
    kind += [f"{gpu.sm_count} SMs"] if gpu.sm_count else []
    kind += ["laptop"] if gpu.is_laptop else []
    kind += ["integrated"] if gpu.is_integrated else []
    spread = f" ± {format_bytes(gpu.vram_free_spread_bytes)}" if gpu.vram_free_spread_bytes else ""
    link = gpu.pcie
    now = f"{link.generation}.0 x{link.width or '?'} now" if link.generation else ""
    most = f"up to {link.max_generation}.0 x{link.max_width or '?'}" if link.max_generation else ""
    rows = [
        (f"GPU {gpu.index}", ", ".join([gpu.name, *kind]), at),
        ("  VRAM", f"{format_bytes(gpu.vram_total_bytes)}, free {format_bytes(gpu.vram_free_bytes)}{spread}",
         f"{at}.vram_free_bytes"),
        ("  PCIe", ", ".join(filter(None, (now, most))) or "unknown", f"{at}.pcie"),
    ]  # fmt: skip
    if gpu.power_limit_w:
        rows.append(("  power limit", f"{gpu.power_limit_w:.0f} W", f"{at}.power_limit_w"))
    held = [f"{holder.name} ({holder.pid}) {_held(holder.used_bytes)}" for holder in gpu.holders]
    rows += [("  VRAM held by", ", ".join(held), f"{at}.holders")] if held else []
    return rows


def _held(used_bytes: int) -> str:
    return format_bytes(used_bytes) if used_bytes else "unknown"


def _cpu_rows(cpu: Cpu) -> list[tuple[str, str, str]]:
    cores = f"{cpu.physical_cores} cores, {cpu.logical_cores} threads"
    if cpu.efficiency_cores:
        cores += f" ({cpu.performance_cores} performance, {cpu.efficiency_cores} efficiency)"
    limits = [f"affinity leaves {cpu.affinity_cpus} CPUs"] if cpu.affinity_cpus else []
    limits += [f"cgroup quota {cpu.quota_cpus:g} CPUs"] if cpu.quota_cpus else []
    rows = [("CPU", f"{cpu.model}, {cores}", "cpu.physical_cores")]
    rows += [("  usable", ", ".join([f"{cpu.usable_cores} cores", *limits]), "cpu.usable_cores")]
    rows += [("  ISA", " ".join(cpu.isa) or "unknown", "cpu.isa")]
    return rows + ([("  NUMA", f"{cpu.numa_nodes} nodes", "cpu.numa_nodes")] if cpu.numa_nodes > 1 else [])


def _ram_rows(ram: Ram) -> list[tuple[str, str, str]]:
    total, available = format_bytes(ram.total_bytes), format_bytes(ram.available_bytes)
    rows = [("RAM", f"{total}, available {available}", "ram.available_bytes")]
    optional = (
        ("  cgroup limit", ram.cgroup_limit_bytes, "cgroup_limit_bytes"),
        ("  swap in use", ram.swap_used_bytes or None, "swap_used_bytes"),
        ("  tmpfs in use", ram.tmpfs_used_bytes or None, "tmpfs_used_bytes"),
        ("  may be pinned", ram.pinnable_bytes, "pinnable_bytes"),
        ("  free in Windows", ram.windows_available_bytes, "windows_available_bytes"),
    )
    return rows + [(label, format_bytes(count), f"ram.{name}") for label, count, name in optional if count is not None]


def _disk_rows(disk: Disk) -> list[tuple[str, str, str]]:
    of = f" of {format_bytes(disk.total_bytes)}" if disk.total_bytes else ""
    kind = "" if disk.kind == "unknown" else f", {disk.kind}"
    place = f", {disk.path}" if disk.path else ""
    return [("disk", f"{format_bytes(disk.free_bytes)} free{of}{kind}{place}", "disk.free_bytes")]


def _bandwidth_rows(bandwidth: Bandwidth) -> list[tuple[str, str, str]]:
    labels = (
        ("host to GPU, pinned", "h2d_bytes_per_s"),
        ("host to GPU, pageable", "h2d_pageable_bytes_per_s"),
        ("RAM, streaming read", "dram_bytes_per_s"),
        ("RAM, expert by expert", "cpu_experts_bytes_per_s"),
        ("VRAM, streaming read", "vram_bytes_per_s"),
        ("host to GPU while the CPU reads", "h2d_overlap_bytes_per_s"),
        ("RAM while the GPU is fed", "cpu_experts_overlap_bytes_per_s"),
        ("disk, large reads", "disk_bytes_per_s"),
    )
    rates = [(label, getattr(bandwidth, name), f"bandwidth.{name}") for label, name in labels]
    return [(label, format_rate(rate), field) for label, rate, field in rates if rate]


def _software_rows(hardware: Hardware) -> list[tuple[str, str, str]]:
    software, system = hardware.software, hardware.os
    wsl = f", WSL {system.wsl_version or '(version unknown)'}" if system.is_wsl else ""
    container = ", in a container" if system.is_container else ""
    kernel = f", kernel {system.kernel}" if system.kernel else ""
    driver = f"{software.driver} (CUDA {software.cuda_driver or 'unknown'})" if software.driver else "none"
    toolkit = f"{software.cuda_toolkit or 'version unknown'}, {software.nvcc}" if software.nvcc else "none"
    torch = f"{software.torch}, built for {'CUDA ' + software.torch_cuda if software.torch_cuda else 'the CPU'}"
    return [
        ("system", f"{system.distribution or system.name}{kernel}, {system.arch}{wsl}{container}", "os"),
        ("NVIDIA driver", driver, "software.driver"),
        ("CUDA toolkit", toolkit, "software.cuda_toolkit"),
        ("g++, ninja", f"{software.gxx or 'none'}, {software.ninja or 'none'}", "software.gxx"),
        *([("torch", torch, "software.torch")] if software.torch else []),
    ]
