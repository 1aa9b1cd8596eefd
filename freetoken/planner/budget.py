"""Ledgers of a request: what there is, what is kept back by policy, what past launches taught, what is missing.

Adds up the lines of an engine's `MemoryModel`; knows nothing of any engine, and solves nothing (`solve.py` does).
"""

from __future__ import annotations

from typing import NamedTuple

from freetoken.hardware.model import Gpu
from freetoken.planner.memory import Admission, Ledger, Line, MemoryModel, ResolvedSettings
from freetoken.planner.plan import PlanRequest
from freetoken.units import GIB, MIB, format_bytes

#: Free VRAM under WDDM and WSL2 below which runs page and slow down 2 to 6 times instead of failing.
WSL_HEADROOM_BYTES = 3 * GIB // 2
#: Never planned away on any machine: the accuracy that a plan is held to.
LEAST_HEADROOM_BYTES = 150 * MIB
#: Left to the system besides everything that was in use when RAM was read.
_CHUNK = "settings.prefill_chunk_tokens"
RAM_HEADROOM_BYTES = 512 * MIB


class Budget(NamedTuple):
    """The three ledgers of one set of settings, and the engine's own verdict."""

    settings: ResolvedSettings
    vram: Ledger | None
    ram: Ledger
    disk: Ledger
    admission: Admission

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """The ledgers that depend on settings, VRAM first."""
        return tuple(ledger for ledger in (self.vram, self.ram, self.disk) if ledger is not None)

    @property
    def is_feasible(self) -> bool:
        """Every ledger holds its peak with its headroom, and the engine would start."""
        return self.admission.is_admitted and not any(ledger.missing_bytes for ledger in self.ledgers)

    @property
    def missing_bytes(self) -> int:
        """Bytes missing over memory and disk, plus what the engine's own rule misses; 0 when it fits."""
        refused = 0 if self.admission.is_admitted else max(1, self.admission.needed_bytes - self.admission.budget_bytes)
        return max(sum(ledger.missing_bytes for ledger in self.ledgers), refused)


def choose_gpu(request: PlanRequest) -> Gpu | None:
    """The GPU that the recipe's `settings.gpu` names; None without one. Raises KeyError for an unknown name."""
    return request.hardware.pick_gpu(request.recipe.settings.gpu)


def find_gpu(request: PlanRequest, settings: ResolvedSettings) -> Gpu | None:
    """The GPU of resolved `settings`; None on the CPU."""
    if settings.device == "cpu":
        return None
    return choose_gpu(request)


def is_wsl_policy(request: PlanRequest) -> bool:
    """WSL's headroom counts: by the recipe's word, or because the machine is one and no size was given."""
    policy = request.recipe.headroom
    return policy == "wsl" or (request.hardware.os.is_wsl and not isinstance(policy, int))


def compute_headroom(request: PlanRequest, gpu: Gpu) -> int:
    """VRAM bytes that stay free at the peak.

    `server`: 150 MiB or 1.5 % of the card, whichever is more. `desktop`: 512 MiB or 4 %. `wsl`: 1.5 GiB, since
    past that point a run pages silently. A size is taken as it is. An uncertain reading of free VRAM is covered too.
    """
    policy = request.recipe.headroom
    if isinstance(policy, int):
        return policy
    shares = {"server": (LEAST_HEADROOM_BYTES, 0.015), "desktop": (512 * MIB, 0.04), "wsl": (WSL_HEADROOM_BYTES, 0.04)}
    least, share = shares["wsl" if is_wsl_policy(request) else policy]
    return max(least, int(share * gpu.vram_total_bytes), gpu.vram_free_spread_bytes)


def headroom_note(request: PlanRequest) -> str:
    """The policy in words, e.g. `wsl (this machine runs WSL)`."""
    policy = request.recipe.headroom
    if isinstance(policy, int):
        return f"{format_bytes(policy)}, as the recipe says"
    if is_wsl_policy(request) and policy != "wsl":
        return f"wsl (the recipe says `{policy}`, but this machine runs WSL)"
    return policy


def make_budget(request: PlanRequest, model: MemoryModel, settings: ResolvedSettings) -> Budget:
    """The ledgers of finished `settings` and the engine's verdict on them."""
    return Budget(
        settings=settings,
        vram=make_vram_ledger(request, model, settings),
        ram=make_ram_ledger(request, model, settings),
        disk=make_disk_ledger(request, model, settings),
        admission=model.admission(request, settings),
    )


def make_vram_ledger(request: PlanRequest, model: MemoryModel, settings: ResolvedSettings) -> Ledger | None:
    """The VRAM ledger; None on a CPU-only device. Available = free now + what our own deployment gives back."""
    gpu = find_gpu(request, settings)
    if gpu is None:
        return None
    available = min(gpu.vram_total_bytes, gpu.vram_free_bytes + request.reclaimable_vram_bytes)
    return Ledger(
        kind="vram",
        total_bytes=gpu.vram_total_bytes,
        available_bytes=available,
        headroom_bytes=compute_headroom(request, gpu),
        lines=correct_lines(request, model.vram_lines(request, settings)),
    )


def make_ram_ledger(request: PlanRequest, model: MemoryModel, settings: ResolvedSettings) -> Ledger:
    """The RAM ledger. Under WSL, Windows' own free memory counts where it is the smaller figure."""
    ram = request.hardware.ram
    available = available_ram(request)
    lines = model.ram_lines(request, settings)
    if settings.device == "cpu":
        lines = correct_lines(request, lines)
    return Ledger(
        kind="ram",
        total_bytes=ram.total_bytes,
        available_bytes=available,
        headroom_bytes=_ram_headroom(request, settings),
        lines=lines,
    )


def _ram_headroom(request: PlanRequest, settings: ResolvedSettings) -> int:
    """Host bytes that stay free: a little, or what the recipe says where no GPU is what its word is about."""
    policy = request.recipe.headroom
    if settings.device == "cpu" and isinstance(policy, int):
        return policy
    return min(RAM_HEADROOM_BYTES, request.hardware.ram.total_bytes // 50)


def available_ram(request: PlanRequest) -> int:
    """Host bytes that may be used: what is available now, and no more than Windows has free under WSL."""
    ram = request.hardware.ram
    return min(ram.available_bytes, ram.windows_available_bytes or ram.available_bytes)


def make_disk_ledger(request: PlanRequest, model: MemoryModel, settings: ResolvedSettings) -> Ledger:
    """The disk ledger: what still has to be written, not what is already there."""
    disk = request.hardware.disk
    return Ledger(
        kind="disk",
        total_bytes=disk.total_bytes or disk.free_bytes,
        available_bytes=disk.free_bytes,
        headroom_bytes=0,
        lines=model.disk_lines(request, settings),
    )


def correct_lines(request: PlanRequest, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """`lines` corrected by what past launches measured: a line that was too small grows, one too large shrinks.

    What a prefill chunk takes is off in proportion to the chunk: measured with a small one, it is off by more with a
    large one. Where what was measured was less than planned, the smaller share of that is believed.
    """
    residuals = {one.key: one for one in request.calibration.residuals}
    if not residuals:
        return lines
    corrected = []
    for line in lines:
        residual = residuals.get(line.key)
        if residual is not None and residual.planned_bytes and line.knob == _CHUNK:
            scaled = round(residual.bytes * line.bytes / residual.planned_bytes)
            residual = residual.model_copy(update={"bytes": max(scaled, residual.bytes)})
        if residual is None or residual.bytes == 0:
            corrected.append(line)
            continue
        times = "launch" if residual.runs == 1 else "launches"
        sign = "+" if residual.bytes > 0 else "-"
        change = f"{sign} {format_bytes(abs(residual.bytes))} measured in {residual.runs} {times}"
        formula = f"{line.formula} {change}" if line.formula else change
        amount = max(0, line.bytes + residual.bytes)
        corrected.append(line.model_copy(update={"bytes": amount, "formula": formula, "source": "measured"}))
    return tuple(corrected)


def describe_track_record(request: PlanRequest) -> str:
    """How far past plans were off on this machine, in words; empty where none was measured."""
    calibration = request.calibration
    if calibration.mean_error_ratio is None or calibration.launches == 0:
        return ""
    times = "launch" if calibration.launches == 1 else "launches"
    return f"plans were {calibration.mean_error_ratio:.1%} off on average over {calibration.launches} {times} here"


def first_that_does_not_fit(ledger: Ledger) -> Line | None:
    """The line to blame: in the first phase that overflows, the allocation that no longer fits; None if all do.

    Lines stand in the order in which an engine allocates, so this is where it would die. No line is to blame where
    the headroom alone is more than there is.
    """
    limit = ledger.available_bytes - ledger.headroom_bytes
    if limit <= 0:
        return None
    for phase in ("load", "capture", "prefill", "decode"):
        taken = 0
        for line in ledger.lines:
            if phase in line.phases:
                taken += line.bytes
                if taken > limit:
                    return line
    return None
