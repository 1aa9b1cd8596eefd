"""A reasoned no in words: what is missing, which line is to blame, what would make it a yes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.planner.budget import Budget, first_that_does_not_fit
from freetoken.planner.memory import Finding, Ledger
from freetoken.planner.plan import PlanRequest, Prediction, Refusal
from freetoken.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.planner.solve import Attempt

#: Lines named in the summary of a ledger; the rest is added up.
LARGEST_LINES = 4


def make_refusal(
    request: PlanRequest, adapter: EngineAdapter, attempt: Attempt | None, findings: tuple[Finding, ...]
) -> Refusal:
    """The refusal of `request`: findings first, then the bytes, then repairs that were each planned again."""
    from freetoken.planner.repair import find_repairs, suggest_alternatives

    budget = attempt.budget if attempt is not None else None
    short = blamed_ledger(budget) if budget is not None else None
    blamed = first_that_does_not_fit(short) if short is not None else None
    fatal = [finding for finding in findings if finding.is_fatal]
    return Refusal(
        recipe_name=request.recipe.name,
        engine=adapter.name,
        model_name=request.shape.name,
        download_bytes=request.download_bytes,
        model_note=request.model_note,
        message=_headline(request, adapter, budget, fatal),
        findings=findings,
        missing_bytes=budget.missing_bytes if budget is not None else 0,
        ledger=short.kind if short is not None else None,
        blamed_line=blamed.key if blamed is not None else None,
        settings=budget.settings if budget is not None else None,
        vram=budget.vram if budget is not None else None,
        ram=budget.ram if budget is not None else None,
        disk=budget.disk if budget is not None else None,
        admission=budget.admission if budget is not None else None,
        repairs=find_repairs(request, adapter),
        alternatives=suggest_alternatives(request, adapter, budget, fatal),
    )


def blamed_ledger(budget: Budget) -> Ledger | None:
    """The ledger that misses most; the VRAM one where only the engine's own rule refuses; None when all fit."""
    short = [ledger for ledger in budget.ledgers if ledger.missing_bytes]
    if short:
        return max(short, key=lambda ledger: ledger.missing_bytes)
    return None if budget.admission.is_admitted else budget.vram


def _headline(request: PlanRequest, adapter: EngineAdapter, budget: Budget | None, fatal: list[Finding]) -> str:
    name = request.shape.name
    if fatal and budget is not None and not budget.is_feasible:
        shortfall = describe_shortfall(budget)
        return f"`{name}` cannot run here with engine `{adapter.name}`: {fatal[0].message}; and it {shortfall}"
    if fatal:
        return f"`{name}` cannot run here with engine `{adapter.name}`: {fatal[0].message}"
    if budget is None:
        return f"engine `{adapter.name}` has no way to run `{name}` with these settings"
    return f"`{name}` {describe_shortfall(budget)}"


def describe_shortfall(budget: Budget) -> str:
    """`needs 12.9 GiB of VRAM at its peak (prefill), 11.2 GiB may be used, ... (weights 2.9 GiB, KV cache ...)`."""
    parts = [_describe_ledger(ledger) for ledger in budget.ledgers if ledger.missing_bytes]
    if not budget.admission.is_admitted:
        parts.append(f"would be refused by the engine itself: {budget.admission.message}")
    return "; ".join(parts) or "fits"


def _describe_ledger(ledger: Ledger) -> str:
    what = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}[ledger.kind]
    usable = max(0, ledger.available_bytes - ledger.headroom_bytes)
    phase = "" if ledger.kind == "disk" else f" at its peak ({ledger.peak_phase})"
    lines = sorted((line for line in ledger.lines if ledger.peak_phase in line.phases), key=lambda one: -one.bytes)
    named = ", ".join(f"{line.label} {format_bytes(line.bytes)}" for line in lines[:LARGEST_LINES] if line.bytes)
    kept = ""
    if ledger.headroom_bytes > ledger.available_bytes // 4:
        kept = f" of {format_bytes(ledger.available_bytes)} free ({format_bytes(ledger.headroom_bytes)} are headroom)"
    return (
        f"needs {format_bytes(ledger.peak_bytes)} of {what}{phase}, {format_bytes(usable)} may be used{kept}, "
        f"{format_bytes(ledger.missing_bytes)} are missing ({named})"
    )


def slots_out_of_range(request: PlanRequest, slots: int, low: int, high: int) -> Finding:
    """The finding for a fixed slot count that the engine would not start with."""
    return Finding(
        check="expert_slots",
        message=f"{slots:,} expert slots are out of range: with these settings the engine takes {low:,} to {high:,}",
        hint=f"`--set settings.expert_slots={min(max(slots, low), high)}`, or `auto`",
    )


def missed_targets(request: PlanRequest, prediction: Prediction) -> tuple[Finding, ...]:
    """Warnings for targets of `good_enough` that the prediction does not reach."""
    targets, missed = request.recipe.good_enough, []
    if targets.decode_tps is not None and prediction.decode_tps < targets.decode_tps:
        missed.append(f"decode_tps {prediction.decode_tps:.3g} predicted, {targets.decode_tps:g} wanted")
    if targets.prefill_tps is not None and prediction.prefill_tps < targets.prefill_tps:
        missed.append(f"prefill_tps {prediction.prefill_tps:.3g} predicted, {targets.prefill_tps:g} wanted")
    ttft = targets.ttft_p95 if targets.ttft_p95 is not None else targets.ttft_p50
    if ttft is not None and prediction.ttft_s > ttft:
        missed.append(f"TTFT {format_seconds(prediction.ttft_s)} predicted, {format_seconds(ttft)} wanted")
    # Engines with exact routing decode evenly but for misses: the slow end of the range stands for the 95th percentile.
    itl = 1 / prediction.decode_tps_low
    if targets.itl_p95 is not None and itl > targets.itl_p95:
        missed.append(f"ITL {format_seconds(itl)} predicted, {format_seconds(targets.itl_p95)} wanted")
    turn = prediction.mean_turn_time_s
    if targets.turn_time is not None and turn is not None and turn > targets.turn_time:
        missed.append(f"turn time {format_seconds(turn)} predicted, {format_seconds(targets.turn_time)} wanted")
    return tuple(Finding(check="good_enough", message=one, is_fatal=False) for one in missed)
