"""`ft bench bw`: measures how fast this machine moves bytes and computes experts, and keeps that for the planner.

What is measured is a prior: which strategy and how many slots are best is decided by runs (`ft tune`), since bandwidth
alone mispredicts a hybrid by far. Whatever disturbed the measuring is said beside the figures.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken.adapters import freetoken_profile as upstream
from freetoken.bench.guard import judge_machine
from freetoken.bench.sample import HostReader, Sample, Sampler, find_gpu_reader
from freetoken.deploy.values import DeployModel
from freetoken.errors import UsageError
from freetoken.hardware.expert_kernel import ExpertShape
from freetoken.hardware.measured import read_measured, write_measured
from freetoken.hardware.model import Bandwidth, ExpertRates, Gpu, Hardware
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.checkpoint.shape import Experts

PRIOR = "a prior for planning: which strategy is fastest, a run decides (`ft tune`)"
#: Qwen3.6-35B-A3B, the model that most of this is done for.
DEFAULT_SHAPE = ExpertShape("nvfp4", 2048, 512, 8)
#: More runnable programs than this for each core, and the CPU's figures are somebody else's.
MOST_LOAD = 0.5


class BandwidthReport(DeployModel):
    """What was measured or imported, and what it is worth."""

    device: str
    gpu: str | None = None
    gpu_uuid: str | None = None
    #: All rates that are known of this machine now.
    bandwidth: Bandwidth
    #: The rows of this run, by their key.
    rows: tuple[ExpertRates, ...] = ()
    #: Why the figures may be off; empty where nothing was seen.
    doubts: tuple[str, ...] = ()
    #: True where something was seen that makes them unfit for comparison.
    is_disturbed: bool = False
    stored_at: str
    imported_from: str | None = None
    profile_path: str | None = None
    #: What the upstream engine's own rule makes of the pair: hybrid where the CPU is this much faster than the link.
    rule: str = ""
    note: str = PRIOR


@dataclass(frozen=True)
class Meters:
    """Ways to measure, passed in so that tests need neither a GPU nor seconds."""

    general: Callable[..., Bandwidth]
    experts: Callable[..., ExpertRates]
    load: Callable[[], float] = lambda: os.getloadavg()[0]


def make_meters() -> Meters:
    """The real ones; imports torch."""
    from freetoken.hardware.bandwidth import measure_bandwidth, measure_experts

    return Meters(measure_bandwidth, measure_experts)


def choose_shape(
    format_name: str | None, hidden: int | None, inter: int | None, top_k: int | None, model: Experts | None
) -> ExpertShape:
    """What was asked for, else the model's experts, else those of the model that most of this is done for."""
    base = DEFAULT_SHAPE
    if model is not None:
        if not model.count:
            raise UsageError("the model has no routed experts")
        base = ExpertShape(model.format, model.hidden_size, model.intermediate_size, model.top_k)
    return ExpertShape(format_name or base.format, hidden or base.hidden, inter or base.inter, top_k or base.top_k)


def measure_machine(
    hardware: Hardware, device: str, shape: ExpertShape, meters: Meters, *, threads: int | None = None
) -> BandwidthReport:
    """Measures, keeps what was measured, and says what disturbed it. UsageError for a device that is not here."""
    gpu = find_gpu(hardware, device)
    target = "cpu" if gpu is None else (gpu.uuid or f"cuda:{gpu.index}")
    threads = threads or hardware.cpu.usable_cores
    load = _find_load(hardware, meters.load())
    doubts = [*_find_holders(gpu), *load]
    samples: tuple[Sample, ...] = ()
    with Sampler(find_gpu_reader(gpu.uuid if gpu else None), HostReader(os.getpid())) as sampler:
        row = meters.experts(shape, target, threads=threads)
        # Streams in pieces of this expert's size: what another engine's kernel can reach at most.
        general = meters.general(target, row.expert_bytes, threads=threads)
        samples = sampler.samples()
    findings = judge_machine(samples) if gpu is not None else ()
    doubts += [one.message for one in findings]
    is_disturbed = bool(load) or any(one.is_invalidating for one in findings)
    row = row.model_copy(update={"doubts": tuple(doubts), "is_disturbed": is_disturbed})
    known = _known(hardware, gpu)
    # Disturbed figures only fill gaps: they never take the place of what was measured in peace.
    rates = (general.merged(known) if is_disturbed else known.merged(general)).merged(
        Bandwidth(experts={row.key: row})
    )  # fmt: skip
    path = write_measured(hardware, rates, gpu=gpu)
    return BandwidthReport(
        device=target, gpu=gpu.name if gpu else None, gpu_uuid=gpu.uuid if gpu else None, bandwidth=rates, rows=(row,),
        doubts=tuple(doubts), is_disturbed=is_disturbed, stored_at=str(path), rule=describe_rule(rates, gpu),
    )  # fmt: skip


def import_profile(hardware: Hardware, device: str, source: Path) -> BandwidthReport:
    """Takes the rows of the upstream engine's own profile over. BadFileError where it is of another GPU or version."""
    profile, gpu = upstream.read_profile(source), find_gpu(hardware, device)
    found, doubts = upstream.make_rates(profile, gpu)
    known = _known(hardware, gpu)
    if known.dram_bytes_per_s is not None and known.sources.get("dram_bytes_per_s") == "measured":
        found = found.model_copy(update={"dram_bytes_per_s": None, "sources": {}})
    rates = known.merged(found)
    path = write_measured(hardware, rates, gpu=gpu)
    return BandwidthReport(
        device=(gpu.uuid if gpu else None) or "cpu",
        gpu=gpu.name if gpu else None,
        gpu_uuid=gpu.uuid if gpu else None,
        bandwidth=rates,
        rows=tuple(found.experts.values()),
        doubts=doubts,
        stored_at=str(path),
        imported_from=str(source),
        rule=describe_rule(rates, gpu),
    )


def write_upstream_profile(
    hardware: Hardware, report: BandwidthReport, path: Path | None, *, engine_version: str | None = None,
    is_forced: bool = False,
) -> BandwidthReport:  # fmt: skip
    """Writes what was measured in the upstream engine's format, to `path` or where that engine looks."""
    gpu = require_gpu(hardware, report.gpu_uuid or "cpu")
    target = path or upstream.find_profile_path(gpu)
    for row in report.rows:
        named = row.model_copy(update={"threads": upstream.count_executor_threads(hardware.cpu.physical_cores)})
        now = datetime.datetime.now(datetime.UTC)
        document = upstream.make_profile(hardware, gpu, report.bandwidth, named, engine_version=engine_version, now=now)
        upstream.write_profile(target, document, is_forced=is_forced)
    return report.model_copy(update={"profile_path": str(target)})


def require_gpu(hardware: Hardware, device: str) -> Gpu:
    """The NVIDIA GPU that `device` names. UsageError for the CPU: the upstream engine keeps no profile without one."""
    gpu = find_gpu(hardware, device)
    if gpu is None or gpu.uuid is None:
        raise UsageError("the engine keeps a profile for each NVIDIA GPU, and there is none to measure here")
    return gpu


def find_gpu(hardware: Hardware, device: str) -> Gpu | None:
    """The NVIDIA GPU that `device` names (`auto`, `cpu`, `cuda`, `cuda:1`, a uuid); None for the CPU. UsageError."""
    cards = [gpu for gpu in hardware.gpus if gpu.vendor == "nvidia"]
    if device == "cpu" or (device == "auto" and not cards):
        return None
    if device in ("auto", "cuda"):
        chosen = hardware.pick_gpu()
        if chosen is not None and chosen.vendor == "nvidia":
            return chosen
    name = device.removeprefix("cuda:")
    for gpu in cards:
        if name in (str(gpu.index), gpu.uuid):
            return gpu
    listed = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in cards) or "none"
    raise UsageError(f"device `{device}` is not here; NVIDIA GPUs: {listed}", hint="`--device cpu`")


def describe_rule(rates: Bandwidth, gpu: Gpu | None) -> str:
    """The upstream engine's own rule on the general pair, in words; "" without a GPU or a figure."""
    cpu, link = rates.cpu_experts_bytes_per_s, rates.h2d_bytes_per_s
    if gpu is None or cpu is None or link is None:
        return ""
    verdict = "hybrid may pay" if cpu > upstream.THRESHOLD * link else "offload"
    return f"the CPU reads experts {cpu / link:.2f} times as fast as the link brings them: {verdict}, by rule of thumb"


def _known(hardware: Hardware, gpu: Gpu | None) -> Bandwidth:
    """What is known of this very GPU: the probe's rates are those of the GPU that would be chosen."""
    stored = read_measured(hardware, gpu=gpu)
    is_chosen = gpu is None or gpu == hardware.pick_gpu()
    base = hardware.bandwidth if is_chosen else Bandwidth()
    return base.merged(stored) if stored is not None else base


def _find_holders(gpu: Gpu | None) -> list[str]:
    if gpu is None:
        return []
    return [
        f"`{one.name}` (process {one.pid}) was on the GPU"
        + (f" with {format_bytes(one.used_bytes)} of VRAM" if one.used_bytes else "")
        for one in gpu.holders
    ]


def _find_load(hardware: Hardware, load: float) -> list[str]:
    cores = hardware.cpu.usable_cores
    if load <= MOST_LOAD * cores:
        return []
    return [f"other programs computed meanwhile: {load:.1f} were runnable on {cores} cores"]
