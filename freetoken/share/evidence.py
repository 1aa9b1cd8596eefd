"""Evidence from the store: what a recipe came to on this machine, and what failed, told without saying whose it is."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from freetoken.units import GIB

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.recipe.model import Recipe
    from freetoken.store import Store
    from freetoken.store.rows import MachineRow, ResultRow, RunRow

#: Figures that are worth telling; what a result row holds beside them stays here.
FIGURES = (
    "decode_tps", "total_decode_tps", "prefill_tps", "ttft_ms", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms",
    "itl_p95_ms", "tpot_ms", "turn_time_s", "e2e_ms", "hit_ratio", "vram_peak_bytes", "ram_peak_bytes",
    "joules_per_token",
)  # fmt: skip
MAX_MEASURED, MAX_FAILED, MAX_STUDY = 40, 40, 200
#: Memory is sold in these steps; what a kernel or a driver keeps of it differs from boot to boot.
_RAM_STEP, _VRAM_STEP = GIB, GIB // 4
#: What a failed run's sentence means, in a word that names nothing of the machine.
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
    """What this state folder knows of `recipe`, added to `base` (the evidence that it was imported with)."""
    slot_bytes = lock.slot_bytes if lock is not None else 0
    results = _list_results(recipe, store)
    runs = store.list_runs(recipe.name, limit=500) if store is not None else ()
    machine = _find_machine(store, results, runs)
    planned = compact(lock.settings, slot_bytes) if lock is not None else (base.planned if base else {})
    own = Evidence(
        engine=recipe.engine.name,
        engine_version=lock.engine.version if lock is not None else base.engine_version if base else None,
        workload=WorkloadRef(name=recipe.workload.name, sha256=hash_workload(recipe.workload)),
        machine=make_machine_class(machine.hardware, machine.fingerprint)
        if machine
        else base.machine
        if base
        else None,
        planned=planned,
        measured=_summarise(results, slot_bytes),
        failed=_list_failures(runs, slot_bytes),
        study=tuple(study)[:MAX_STUDY],
    )
    return own if base is None else _merge(base, own)


def _class_of(machine: MachineRow | None, base: Evidence | None) -> MachineClass | None:
    if machine is not None:
        return make_machine_class(machine.hardware, machine.fingerprint)
    return base.machine if base is not None else None


def _list_results(recipe: Recipe, store: Store | None) -> Sequence[ResultRow]:
    if store is None:
        return ()
    found = store.list_results(recipe=recipe.name, engine=recipe.engine.name, limit=1000)
    return [one for one in found if one.workload == recipe.workload.name]


def _find_machine(store: Store | None, results: Sequence[ResultRow], runs: Sequence[RunRow]) -> MachineRow | None:
    if store is None:
        return None
    known = [one.machine_id for one in results] + [one.machine_id for one in runs]
    wanted = next((one for one in known if one is not None), None)
    return next((one for one in store.list_machines() if one.id == wanted), None)


def _summarise(results: Iterable[ResultRow], slot_bytes: int) -> tuple[Measured, ...]:
    """One entry for each kind and set of settings, the ones measured last first."""
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
    return tuple(found[:MAX_MEASURED])


def summarise_figures(metrics: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """Median over several measurements, with the widest interval that any of them or their spread gives."""
    found = {}
    for name in FIGURES:
        values = [one[name] for one in metrics if name in one]
        if not values:
            continue
        lows = [one.get(f"{name}_low", one[name]) for one in metrics if name in one]
        highs = [one.get(f"{name}_high", one[name]) for one in metrics if name in one]
        median = _three_digits(statistics.median(values))
        low, high = _three_digits(min(lows)), _three_digits(max(highs))
        found[name] = Figure(median=median, low=min(low, median), high=max(high, median), n=len(values))
    return found


def _list_failures(runs: Iterable[RunRow], slot_bytes: int) -> tuple[Failed, ...]:
    found: dict[tuple[Any, ...], Failed] = {}
    for run in runs:
        if run.outcome != "failed":
            continue
        settings = compact(run.plan.get("settings") or {}, slot_bytes)
        one = Failed(kind=_name_failure(run.error or ""), day=run.started_at[:10], settings=settings)
        found.setdefault((one.kind, tuple(settings.items())), one)
    return tuple(found.values())[:MAX_FAILED]


def _name_failure(words: str) -> str:
    lower = words.lower()
    return next((kind for text, kind in _FAILURES if text in lower), "unknown")


def _merge(base: Evidence, own: Evidence) -> Evidence:
    """What came with the recipe, with what this machine added; where nothing was added, exactly what came."""
    if not (own.measured or own.failed or own.study):
        return base
    return own


def _three_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(value: int, step: int) -> int:
    return round(value / step) * step


def _text(value: str) -> str:
    return "".join(one for one in value if one.isprintable())[:120]
