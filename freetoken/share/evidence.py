"""Evidence from the store: what a recipe came to on this machine, and what failed, told without saying whose it is."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from freetoken.adapters import ADAPTERS, get_adapter
from freetoken.deploy.lock import Lock
from freetoken.share.model import (
    Evidence,
    Failed,
    Figure,
    MachineClass,
    Measured,
    StudyPoint,
    WorkloadRef,
    compact,
)
from freetoken.share.portable import hash_workload
from freetoken.share.rows import RecipeRows, find_rows
from freetoken.share.study import pick_points
from freetoken.units import GIB

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.recipe.model import Recipe
    from freetoken.store import Store
    from freetoken.store.rows import ResultRow, RunRow

#: Figures that are worth telling; what a result row holds beside them stays here.
FIGURES = (
    "decode_tps", "total_decode_tps", "prefill_tps", "ttft_ms", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms",
    "itl_p95_ms", "tpot_ms", "turn_time_s", "e2e_ms", "hit_ratio", "vram_peak_bytes", "ram_peak_bytes",
    "joules_per_token",
)  # fmt: skip
MAX_MEASURED, MAX_FAILED = 40, 40
#: Memory is sold in these steps; what a kernel or a driver keeps of it differs from boot to boot.
_RAM_STEP, _VRAM_STEP = GIB, GIB // 4
#: A failure that no setting is to blame for: a port that was taken, a full disk.
_OF_THE_MACHINE = ""
#: What the adapter says of a failure -> its class in a bundle; the rest is the machine's own affair.
_KINDS = {
    "vram_oom": "memory", "ram_oom": "memory", "plan_floor": "memory", "kv_floor": "memory", "pin_refused": "memory",
    "paging": "memory", "killed": "killed", "hang": "hang", "engine_died": "crash", "bad_checkpoint": "checkpoint",
    "bad_flag": "flag", "unsupported": "unsupported", "no_gpu": "unsupported",
}  # fmt: skip
#: Where no adapter knows the words.
_FAILURES = (
    ("out of memory", "memory"), ("out of vram", "memory"), ("killed", "killed"), ("hang", "hang"),
    ("did not answer", "hang"), ("exit", "crash"), ("ended with", "crash"), ("never became ready", "crash"),
)  # fmt: skip


def make_machine_class(hardware: Hardware, fingerprint: str | None) -> MachineClass:
    """The class of `hardware`: what changes speed and memory, nothing that tells one machine from its twin."""
    gpu = hardware.pick_gpu("auto")
    return MachineClass(
        fingerprint=fingerprint,
        gpu=_text(gpu.name) if gpu else None,
        compute_capability=gpu.compute_capability if gpu else None,
        vram_bytes=_rounded(gpu.vram_total_bytes, _VRAM_STEP) if gpu else 0,
        pcie_generation=gpu.pcie.max_generation if gpu else None,
        pcie_width=gpu.pcie.max_width if gpu else None,
        cpu=_text(hardware.cpu.model),
        cores=hardware.cpu.physical_cores,
        ram_bytes=_rounded(hardware.ram.total_bytes, _RAM_STEP),
        disk=hardware.disk.kind,
        os="wsl" if hardware.os.is_wsl else hardware.os.name,
        driver=_text(hardware.software.driver) if hardware.software.driver else None,
    )


def gather_evidence(
    recipe: Recipe, lock: Lock | None, store: Store | None, *, study: Sequence[StudyPoint] = (),
    base: Evidence | None = None,
) -> Evidence:  # fmt: skip
    """What this state folder knows of `recipe`; `base`, the evidence that it was imported with, where that is little.

    Evidence is of one machine: what came is not mixed with what was measured here.
    """
    slot_bytes = lock.slot_bytes if lock is not None else 0
    rows = find_rows(recipe, store)
    measured, failed = _summarise(rows.results, slot_bytes), _list_failures(recipe, rows.runs, slot_bytes)
    # The one answer that proves a start, or a start that failed, is less than what came; nor are the two mixed.
    if base is not None and not study and all(one.kind == "proof" for one in measured):
        return base
    return Evidence(
        engine=recipe.engine.name,
        engine_version=_find_version(lock, rows),
        workload=WorkloadRef(name=recipe.workload.name, sha256=hash_workload(recipe.workload)),
        machine=make_machine_class(rows.machine.hardware, rows.machine.fingerprint) if rows.machine else None,
        planned=compact(lock.settings, slot_bytes) if lock is not None else {},
        measured=measured,
        failed=failed,
        study=pick_points(study, recipe.tune.objective),
    )


def _find_version(lock: Lock | None, rows: RecipeRows) -> str | None:
    if lock is not None and lock.engine.version is not None:
        return lock.engine.version
    return next((row.engine_version for row in rows.results if row.engine_version is not None), None)


def _summarise(results: Iterable[ResultRow], slot_bytes: int) -> tuple[Measured, ...]:
    """One entry for each kind and set of settings, the ones measured last first; of too many the fastest stay."""
    groups: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in results:
        settings = compact(row.settings, slot_bytes)
        groups.setdefault((row.kind, tuple(settings.items()), bool(row.invalid_because)), []).append(row)
    found = []
    for (kind, settings, is_invalid), rows in groups.items():
        figures = summarise_figures([row.metrics for row in rows])
        if figures:
            day = max(row.measured_at for row in rows)[:10]
            is_estimated = any(row.is_estimated for row in rows)
            found.append(
                Measured(
                    kind=kind, day=day, settings=dict(settings), figures=figures, is_estimated=is_estimated,
                    is_invalid=is_invalid,
                )
            )  # fmt: skip
    fastest = sorted(found, key=lambda one: (one.is_invalid, -_decode_tps(one)))[:MAX_MEASURED]
    return tuple(one for one in found if one in fastest)


def _decode_tps(one: Measured) -> float:
    figure = one.figures.get("decode_tps")
    return figure.median if figure is not None else 0.0


def summarise_figures(metrics: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """Median over several measurements, with the widest interval that any of them or their spread gives."""
    found = {}
    for name in FIGURES:
        values = [one[name] for one in metrics if name in one]
        if not values:
            continue
        ends = [_interval(name, one) for one in metrics if name in one]
        median = _three_digits(statistics.median(values))
        low, high = _three_digits(min(one for one, _ in ends)), _three_digits(max(one for _, one in ends))
        found[name] = Figure(median=median, low=min(low, median), high=max(high, median), n=len(values))
    return found


def _interval(name: str, metrics: Mapping[str, float]) -> tuple[float, float]:
    """The 95 % interval that a measurement gives a figure; the figure itself where it gives none."""
    value = metrics[name]
    # A trial tells the standard error of its turns and of its decode rate.
    noise = {"turn_time_s": "noise_ratio", "decode_tps": "decode_noise_ratio"}.get(name, "")
    half = 1.96 * metrics.get(noise, 0.0) * value
    low, high = metrics.get(f"{name}_low", value - half), metrics.get(f"{name}_high", value + half)
    return max(0.0, min(low, value)), max(high, value)


def _list_failures(recipe: Recipe, runs: Iterable[RunRow], slot_bytes: int) -> tuple[Failed, ...]:
    """Settings that did not start, each once for each kind of failure, the last first."""
    found: dict[tuple[Any, ...], Failed] = {}
    for run in runs:
        if run.outcome != "failed":
            continue
        settings = compact(run.plan.get("settings") or {}, slot_bytes)
        kind, missing = _judge_failure(recipe.engine.name, run)
        if kind == _OF_THE_MACHINE:
            continue
        one = Failed(kind=kind, day=run.started_at[:10], settings=settings, missing_bytes=missing)
        found.setdefault((kind, tuple(settings.items())), one)
    return tuple(found.values())[:MAX_FAILED]


def _judge_failure(engine: str, run: RunRow) -> tuple[str, int]:
    """Class of a failure, in a word that names nothing of the machine, and the bytes that were missing where told."""
    words = run.error or ""
    told = get_adapter(engine).classify_failure(words, run.exit_code) if engine in ADAPTERS else None
    if told is not None and told.kind != "unknown":
        return _KINDS.get(told.kind, _OF_THE_MACHINE), told.missing_bytes or 0
    lower = words.lower()
    return next((kind for text, kind in _FAILURES if text in lower), "unknown"), 0


def _three_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(value: int, step: int) -> int:
    return round(value / step) * step


def _text(value: str) -> str:
    return "".join(one for one in value if one.isprintable())[:120]
