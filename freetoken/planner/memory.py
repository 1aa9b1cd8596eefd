"""Ledger lines, phases, and the protocols `MemoryModel` and `Limits` that every adapter implements.

A line is a named amount of bytes with its formula and its source, alive in certain phases; the peak of a
ledger is its most expensive phase. The planner adds up and solves; only an engine's model knows what is in it.
"""

# No `from __future__ import annotations`: pydantic would compile each field's annotation again, 5 % of `ft plan`.
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetoken.planner.plan import PlanRequest

Phase = Literal["load", "capture", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("load", "capture", "prefill", "decode")
LineSource = Literal["header", "card", "formula", "measured", "profile", "guess", "policy", "recipe"]


class PlannerModel(BaseModel):
    """Base of planner values: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Line(PlannerModel):
    """One named amount of a ledger. `bytes` may be 0; it is never negative."""

    key: str  # stable, e.g. `kv_cache`; residuals are stored under it
    label: str  # for people, e.g. `KV cache`
    bytes: int = Field(ge=0)
    formula: str = ""  # with the numbers filled in: `8,192 tokens x 20,480 B`
    source: LineSource = "formula"
    phases: tuple[Phase, ...] = PHASES
    #: Recipe field that changes this line most, e.g. `settings.kv_tokens`.
    knob: str | None = None


class Ledger(PlannerModel):
    """One kind of memory: what there is, what is kept back, what the lines take."""

    kind: Literal["vram", "ram", "disk"]
    total_bytes: int = Field(ge=0)
    #: What may be used before headroom: free bytes now.
    available_bytes: int = Field(ge=0)
    headroom_bytes: int = Field(default=0, ge=0)
    lines: tuple[Line, ...] = ()

    def phase_bytes(self, phase: Phase) -> int:
        """Bytes in use in `phase`."""
        return sum(line.bytes for line in self.lines if phase in line.phases)

    @cached_property
    def _peak(self) -> tuple[int, Phase]:
        sums = [(self.phase_bytes(phase), phase) for phase in PHASES]
        return max(sums, key=lambda pair: pair[0])

    @property
    def peak_phase(self) -> Phase:
        """The most expensive phase; the earliest one where several are equal."""
        return self._peak[1]

    @property
    def peak_bytes(self) -> int:
        """Bytes in use in the peak phase."""
        return self._peak[0]

    @property
    def left_bytes(self) -> int:
        """What is left at the peak, headroom included; negative when it does not fit."""
        return self.available_bytes - self.peak_bytes

    @property
    def missing_bytes(self) -> int:
        """What is missing for peak and headroom together; 0 when it fits."""
        return max(0, self.peak_bytes + self.headroom_bytes - self.available_bytes)

    def line(self, key: str) -> Line | None:
        """The line named `key`, or None."""
        return next((line for line in self.lines if line.key == key), None)


class ResolvedSettings(PlannerModel):
    """Every setting with a value: what the engine is told. `None` = does not apply to this engine or strategy."""

    gpu: str | None = None  # uuid or index of the chosen GPU; None on the CPU
    device: Literal["cuda", "cpu"] = "cuda"
    memory_ratio: float | None = None
    expert_slots: int = Field(default=0, ge=0)
    kv_tokens: int = Field(ge=1)
    max_running_requests: int = Field(default=1, ge=1)
    strategy: Literal["fused", "offload", "hybrid", "cpu"] = "offload"
    fetch_ratio: float | None = None
    attention: str | None = None
    prefill_chunk_tokens: int = Field(default=2048, ge=1)
    prefill_overlap: bool | None = None
    prefix_cache: bool | None = None
    embed_on_host: bool = False
    expert_load: Literal["serial", "parallel"] | None = None
    #: Where an expert that is not resident is read from.
    experts_from: Literal["ram", "disk"] | None = None
    cpu_layers: int | None = None
    cpu_threads: int | None = None
    kv_dtype: str = "model"
    state_dtype: str = "model"
    text_only: bool = True


class Finding(PlannerModel):
    """One limit that is not met (`is_fatal`) or that deserves a word."""

    check: str  # e.g. `gpu_generation`
    message: str
    is_fatal: bool = True
    hint: str | None = None


class Admission(PlannerModel):
    """The engine's own start-up arithmetic for given settings: would it start, by its own rule.

    `needed_bytes` and `budget_bytes` are the figures that its refusal would print.
    """

    is_admitted: bool
    needed_bytes: int = 0
    budget_bytes: int = 0
    message: str = ""


class SpeedTraits(PlannerModel):
    """What a decoded token and a prefill chunk cost on an engine, in bytes, FLOPs and seconds.

    `planner/roofline.py` turns these and the machine's bandwidths into tok/s. The source of the constants is
    the engine's own model; a measured step overhead in the calibration replaces `step_overhead_s`.
    """

    #: MoE layers x experts, experts a token uses over all layers, bytes moved for one expert.
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: int = 0
    #: Weights read for each token beside the experts: everything but the embedding table.
    dense_read_bytes: int
    kv_read_bytes_per_token: int = 0
    state_read_bytes: int = 0
    #: Parameters that take part in one token's forward, experts included: 2 FLOPs each.
    active_parameters: float
    #: Layers whose attention grows with the square of the prompt, and heads x head dim of one.
    full_attention_layers: int = 0
    attention_width: int = 0
    #: Where resident experts and dense weights are read from, and how a missing expert gets there.
    resident_in: Literal["vram", "ram"] = "vram"
    miss_path: Literal["none", "pcie", "dram", "hybrid", "disk"] = "none"
    #: Share of the streaming bandwidth that the engine's kernels reach.
    efficiency: float = 0.8
    #: Launches, synchronisation and expert look-up of one decode step.
    step_overhead_s: float = 0.003
    #: The same for one prefill chunk.
    chunk_overhead_s: float = 0.02
    #: Prefill streams the whole bank once a chunk; double-buffered behind compute where `is_stream_overlapped`.
    prefill_stream_bytes: int = 0
    is_stream_overlapped: bool = True
    stream_path: Literal["none", "pcie", "pcie_pageable", "dram", "disk"] = "none"
    #: Share of the machine's peak FLOP/s that prefill reaches with a large chunk, and the half-way chunk.
    compute_efficiency: float = 0.45
    chunk_half_tokens: int = 700
    #: `c` of the hit-rate law for this model family, its range, and whether it is only a prior.
    hit_curve_c: float = 11.0
    hit_curve_range: tuple[float, float] = (7.0, 14.0)
    hit_curve_note: str = ""


class MemoryModel(Protocol):
    """What an engine allocates. Pure arithmetic on the request; no method may touch files or the machine."""

    def candidates(self, request: "PlanRequest") -> "Iterable[ResolvedSettings]":
        """Settings worth a look, every `auto` filled in but `expert_slots` (0) and memory_ratio where it follows.

        Fixed values of the recipe are kept. In order of preference; the planner solves the slots of each.
        """
        ...

    def slot_range(self, request: "PlanRequest", settings: ResolvedSettings) -> tuple[int, int]:
        """Fewest and most expert slots that the engine accepts with `settings`; (0, 0) where there are none."""
        ...

    def vram_lines(self, request: "PlanRequest", settings: ResolvedSettings) -> tuple[Line, ...]:
        """All VRAM lines with `settings`, other processes excluded; empty on a CPU-only device."""
        ...

    def ram_lines(self, request: "PlanRequest", settings: ResolvedSettings) -> tuple[Line, ...]:
        """All host memory lines."""
        ...

    def disk_lines(self, request: "PlanRequest", settings: ResolvedSettings) -> tuple[Line, ...]:
        """All disk lines: what would have to be downloaded or converted."""
        ...

    def finish(self, request: "PlanRequest", settings: ResolvedSettings) -> ResolvedSettings:
        """`settings` with what follows from the solved slots filled in, e.g. the memory ratio that admits them."""
        ...

    def admission(self, request: "PlanRequest", settings: ResolvedSettings) -> Admission:
        """The engine's own verdict on `settings`."""
        ...

    def speed_traits(self, request: "PlanRequest", settings: ResolvedSettings) -> SpeedTraits:
        """What a token and a prefill chunk cost with `settings`."""
        ...


class Limits(Protocol):
    """What an engine can run at all: hardware, software, checkpoint layout."""

    def findings(self, request: "PlanRequest") -> tuple[Finding, ...]:
        """Every limit that is not met, all at once."""
        ...
