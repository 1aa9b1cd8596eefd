"""`Hardware`: the typed description of one machine, as probed or as written in `profiles/*.yaml`.

Every figure may carry a source: `measured`, `vendor` or `guessed`. A profile and a probe are the same value,
so that `ft plan --profile NAME` and `ft plan` on the machine itself take the same path.
"""

# No `from __future__ import annotations`: pydantic would compile each field's annotation again, 5 % of `ft plan`.
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from freetoken import units

Source = Literal["measured", "vendor", "guessed"]


def _finite(value: float) -> float:
    if not value < float("inf"):  # NaN and infinity alike
        raise ValueError(f"`{value}` is not a finite number")
    return value


ByteCount = Annotated[int, BeforeValidator(units.parse_bytes), Field(ge=0)]
#: Rates that depend on the format and shape of the experts.
EXPERT_RATES = (
    "cpu_experts_bytes_per_s", "h2d_bytes_per_s", "cpu_experts_overlap_bytes_per_s", "h2d_overlap_bytes_per_s",
)  # fmt: skip
Rate = Annotated[float, AfterValidator(_finite), Field(gt=0)]


class HardwareModel(BaseModel):
    """Base of everything in a profile: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PcieLink(HardwareModel):
    """A PCIe link: generation and lanes now (an idle link steps down), and at most in this slot."""

    generation: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    max_generation: int | None = Field(default=None, ge=1)
    max_width: int | None = Field(default=None, ge=1)
    #: What the card could do in a better slot.
    card_generation: int | None = Field(default=None, ge=1)


class GpuHolder(HardwareModel):
    """A process that holds VRAM now."""

    pid: int
    name: str
    used_bytes: ByteCount


class Gpu(HardwareModel):
    """One GPU. `compute_capability` is `8.6` style; `None` where the vendor is not NVIDIA."""

    index: int = 0
    name: str
    uuid: str | None = None
    vendor: Literal["nvidia", "amd", "intel", "apple"] = "nvidia"
    compute_capability: str | None = None
    vram_total_bytes: ByteCount
    vram_free_bytes: ByteCount
    #: Free VRAM is uncertain by this much either way (a desktop, a browser); 0 when it was just read.
    vram_free_spread_bytes: ByteCount = 0
    pcie: PcieLink = PcieLink()
    sm_count: int | None = None
    is_integrated: bool = False
    is_laptop: bool = False
    has_display: bool = False
    power_limit_w: float | None = None
    #: What the card's limit is set to when nobody lowers it; above `power_limit_w` the card is capped.
    power_default_w: float | None = None
    holders: tuple[GpuHolder, ...] = ()

    @model_validator(mode="after")
    def _free_is_part_of_total(self) -> "Gpu":
        if self.vram_free_bytes > self.vram_total_bytes:
            free, total = units.format_bytes(self.vram_free_bytes), units.format_bytes(self.vram_total_bytes)
            raise ValueError(f"`vram_free_bytes` is {free}, more than the card's {total}")
        return self


class Cpu(HardwareModel):
    """The CPU as this process may use it: affinity and cgroup quota already applied to `usable_cores`."""

    model: str = "unknown"
    physical_cores: int = Field(default=1, ge=1)
    logical_cores: int = Field(default=1, ge=1)
    #: Physical cores that affinity and the cgroup's CPU quota leave to this process.
    usable_cores: int = Field(default=1, ge=1)
    #: Of a hybrid CPU: physical performance and efficiency cores; both 0 where all cores are alike.
    performance_cores: int = Field(default=0, ge=0)
    efficiency_cores: int = Field(default=0, ge=0)
    #: Logical CPUs in this process's affinity mask; None where nothing narrows it.
    affinity_cpus: int | None = Field(default=None, ge=1)
    #: CPUs' worth of time that the tightest cgroup allows; None where there is no quota.
    quota_cpus: float | None = Field(default=None, gt=0)
    isa: tuple[str, ...] = ()
    numa_nodes: int = Field(default=1, ge=1)


class Ram(HardwareModel):
    """Host memory. `available_bytes` is already the least of MemAvailable and what the cgroup leaves."""

    total_bytes: ByteCount
    available_bytes: ByteCount
    #: The tightest memory limit of this process's cgroups, and what is in use under it.
    cgroup_limit_bytes: ByteCount | None = None
    cgroup_used_bytes: ByteCount | None = None
    swap_total_bytes: ByteCount = 0
    swap_used_bytes: ByteCount = 0
    tmpfs_used_bytes: ByteCount = 0
    #: How much may be page-locked; `None` where nothing is known to limit it.
    pinnable_bytes: ByteCount | None = None
    #: RLIMIT_MEMLOCK, the ceiling of `mlock` (not of CUDA's own pinning); None = unlimited.
    memlock_bytes: ByteCount | None = None
    #: Windows' own free memory, where WSL hides it.
    windows_available_bytes: ByteCount | None = None

    @model_validator(mode="after")
    def _available_is_part_of_total(self) -> "Ram":
        if self.available_bytes > self.total_bytes:
            available, total = units.format_bytes(self.available_bytes), units.format_bytes(self.total_bytes)
            raise ValueError(f"`available_bytes` is {available}, more than the machine's {total}")
        return self


class Disk(HardwareModel):
    """The file system that holds the models."""

    path: str | None = None
    total_bytes: ByteCount | None = None
    free_bytes: ByteCount
    kind: Literal["nvme", "ssd", "hdd", "network", "unknown"] = "unknown"
    filesystem: str | None = None


class ExpertRates(HardwareModel):
    """Rates of experts of one format and shape, with the kernel of one engine; overlap: link and CPU at once."""

    engine: str
    format: str
    hidden: int = Field(ge=1)
    inter: int = Field(ge=1)
    top_k: int = Field(ge=1)
    threads: int = Field(ge=1)
    expert_bytes: ByteCount | None = None
    cpu_experts_bytes_per_s: Rate | None = None
    h2d_bytes_per_s: Rate | None = None
    cpu_experts_overlap_bytes_per_s: Rate | None = None
    h2d_overlap_bytes_per_s: Rate | None = None
    #: What the kernel says of itself, e.g. its instruction set.
    kernel: str = ""
    measured_at: str | None = None
    #: Why the figures may be off; empty where nothing was seen.
    doubts: tuple[str, ...] = ()
    #: Something held the machine down meanwhile: the row is kept to be seen, and no plan starts from it.
    is_disturbed: bool = False

    @property
    def key(self) -> str:
        """`native/nvfp4:2048x512:top8:t7`: one row for each."""
        return f"{self.engine}/{self.format}:{self.hidden}x{self.inter}:top{self.top_k}:t{self.threads}"


class Bandwidth(HardwareModel):
    """How fast bytes move, in bytes per second, each with how it is known.

    `h2d` is a host to device copy from pinned memory in expert-sized pieces; `dram` and `vram` are streaming
    reads; `cpu_experts` is the CPU expert kernel's rate on host RAM. `*_overlap` were taken concurrently.
    `piece_bytes` and `threads` are what they were taken with.
    """

    h2d_bytes_per_s: Rate | None = None
    h2d_pageable_bytes_per_s: Rate | None = None
    dram_bytes_per_s: Rate | None = None
    vram_bytes_per_s: Rate | None = None
    disk_bytes_per_s: Rate | None = None
    cpu_experts_bytes_per_s: Rate | None = None
    h2d_overlap_bytes_per_s: Rate | None = None
    cpu_experts_overlap_bytes_per_s: Rate | None = None
    sources: dict[str, Source] = {}
    measured_at: str | None = None
    piece_bytes: ByteCount | None = None
    threads: int | None = Field(default=None, ge=1)
    #: Rates of single formats and shapes, by their `key`.
    experts: dict[str, ExpertRates] = {}

    def for_experts(self, engine: str, format_name: str, hidden: int, inter: int) -> "Bandwidth":
        """These rates with those that `engine` reached on experts of this very format and shape in their place.

        The newest undisturbed row counts where there are several (other thread counts); without one nothing changes.
        """
        wanted = (engine, format_name, hidden, inter)
        rows = [
            one
            for one in self.experts.values()
            if (one.engine, one.format, one.hidden, one.inter) == wanted and not one.is_disturbed
        ]
        if not rows:
            return self
        row = max(rows, key=lambda one: one.measured_at or "")
        known = {name: getattr(row, name) for name in EXPERT_RATES if getattr(row, name) is not None}
        sources: dict[str, Source] = dict.fromkeys(known, "measured")
        return self.model_copy(update=known | {"sources": self.sources | sources})

    def merged(self, newer: "Bandwidth") -> "Bandwidth":
        """These rates with everything that `newer` knows in their place."""
        known = newer.model_dump(exclude_none=True, exclude={"sources", "experts"})
        both = {"sources": self.sources | newer.sources, "experts": self.experts | newer.experts}
        return self.model_copy(update=known | both)


class Os(HardwareModel):
    """Operating system and, under WSL, its version. `name` is the kernel's: `linux`, `darwin`."""

    name: str = "linux"
    distribution: str | None = None
    kernel: str | None = None
    arch: str = "x86_64"
    is_wsl: bool = False
    wsl_version: str | None = None
    is_container: bool = False


class Software(HardwareModel):
    """Driver and toolchain facts that engines ask for; `None` where it is not there.

    `nvcc`, `gxx` and `ninja` are where the program was found (the bare name in a saved profile); the others are
    versions. `torch_cuda` is the CUDA that our own torch was built for: None for a CPU build.
    """

    driver: str | None = None
    cuda_driver: str | None = None
    cuda_toolkit: str | None = None
    nvcc: str | None = None
    gxx: str | None = None
    ninja: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None


class Hardware(HardwareModel):
    """One machine: what the planner plans for."""

    name: str = "this machine"
    description: str = ""
    gpus: tuple[Gpu, ...] = ()
    cpu: Cpu = Cpu()
    ram: Ram
    disk: Disk
    bandwidth: Bandwidth = Bandwidth()
    os: Os = Os()
    software: Software = Software()
    #: Dotted field path -> how it and what is below it is known; what is not named is `default_source`.
    sources: dict[str, Source] = {}
    default_source: Source = "measured"
    #: True where this was read from this very machine a moment ago.
    is_probed: bool = False
    #: What a person should know about this description, one sentence each: a card without a driver, a masked GPU.
    notes: tuple[str, ...] = ()

    def source_of(self, field: str) -> Source:
        """How the figure at the dotted path `field` is known; the longest path in `sources` counts."""
        table, below = dict(self.sources), "bandwidth."
        table |= {below + name: source for name, source in self.bandwidth.sources.items()}
        parts = field.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((table[prefix] for prefix in prefixes if prefix in table), self.default_source)

    def for_experts(self, engine: str, format_name: str, hidden: int, inter: int) -> "Hardware":
        """This machine with the rates that were measured for such experts with this engine; itself without any."""
        found = self.bandwidth.for_experts(engine, format_name, hidden, inter)
        return self if found is self.bandwidth else self.model_copy(update={"bandwidth": found})

    def pick_gpu(self, choice: str | int = "auto") -> Gpu | None:
        """The GPU that `settings.gpu` names: index, uuid, or for `auto` the fastest NVIDIA one with most VRAM free.

        None when there is no GPU and `auto` was asked. Raises KeyError when a named one is not there.
        """
        if choice == "auto":
            ranked = sorted(self.gpus, key=_gpu_rank, reverse=True)
            return ranked[0] if ranked else None
        for gpu in self.gpus:
            if str(choice) in (str(gpu.index), gpu.uuid):
                return gpu
        raise KeyError(str(choice))


def _gpu_rank(gpu: Gpu) -> tuple[Any, ...]:
    """NVIDIA before others, cards before integrated ones, then free VRAM weighed by the link.

    A miss costs the link and VRAM decides how many misses there are, so a card in a slot five times as fast wins
    unless the other has half as much again free (two equal cards, one of them behind a chipset and without a display).
    """
    link = (gpu.pcie.max_generation or 4) * (gpu.pcie.max_width or 8)
    return (gpu.vendor == "nvidia", not gpu.is_integrated, gpu.vram_free_bytes * link**0.25, -gpu.index)
