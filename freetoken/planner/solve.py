"""`make_plan`: limits first and all at once, then the fastest settings that fit, or a reasoned no.

The workload's KV comes first, expert slots take the rest; every value of the recipe is obeyed or refused, never
changed. The search enumerates the engine's candidates and solves the slots of each: both are arithmetic, so that
the answer is the same on every machine and takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from freetoken.planner import explain
from freetoken.planner.budget import Budget, describe_track_record, find_gpu, make_budget
from freetoken.planner.limits import check_limits
from freetoken.planner.memory import Finding, MemoryModel, ResolvedSettings
from freetoken.planner.plan import Plan, PlanRequest, Prediction, Refusal
from freetoken.planner.provenance import explain_settings
from freetoken.planner.rates import Rates, resolve_rates
from freetoken.planner.roofline import predict_speed
from freetoken.recipe.model import Size

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter

#: Candidates this close to the best predicted one count as equal; the adapter's order of preference then decides.
TIE_RATIO = 0.03


class Attempt(NamedTuple):
    """One candidate with its slots solved; `finding` says why a fixed slot count cannot be."""

    budget: Budget
    prediction: Prediction
    finding: Finding | None = None

    @property
    def is_feasible(self) -> bool:
        """It fits, the engine would start, and nothing fixed is out of range."""
        return self.finding is None and self.budget.is_feasible


def make_plan(request: PlanRequest, adapter: EngineAdapter, *, force: bool = False) -> Plan | Refusal:
    """The fastest plan that fits, or why there is none. `force` plans what was refused and marks it so."""
    findings = check_limits(request, adapter.limits)
    tuned = overlay_tuned(request)
    attempt = None
    if tuned is not request:
        attempt = search(tuned, adapter.memory_model)
        if attempt is not None and attempt.is_feasible:
            return _answer(tuned, adapter, attempt, findings, force)
        findings = (*findings, _tuned_does_not_fit(request))
    return _answer(request, adapter, search(request, adapter.memory_model), findings, force)


def _answer(
    request: PlanRequest, adapter: EngineAdapter, attempt: Attempt | None, findings: tuple[Finding, ...], force: bool
) -> Plan | Refusal:
    fatal = tuple(finding for finding in findings if finding.is_fatal)
    if attempt is not None and attempt.finding is not None:
        fatal = (*fatal, attempt.finding)
    if attempt is not None and attempt.budget.is_feasible and not fatal:
        return _plan(request, adapter, attempt, findings)
    if force and attempt is not None:
        return _plan(request, adapter, attempt, _forced(findings, attempt), is_forced=True)
    return explain.make_refusal(request, adapter, attempt, tuple(dict.fromkeys((*fatal, *findings))))


def search(request: PlanRequest, model: MemoryModel) -> Attempt | None:
    """The best feasible attempt, else the one that misses least; None where the engine has no candidate at all."""
    rates: dict[str, Rates] = {}
    attempts = []
    for candidate in model.candidates(request):
        if candidate.device not in rates:
            rates[candidate.device] = resolve_rates(request.hardware, find_gpu(request, candidate))
        attempts.append(solve_slots(request, model, candidate, rates[candidate.device]))
    feasible = [attempt for attempt in attempts if attempt.is_feasible]
    if feasible:
        return choose(request, feasible)
    if not attempts:
        return None
    return min(attempts, key=lambda attempt: (attempt.finding is not None, attempt.budget.missing_bytes))


def solve_slots(request: PlanRequest, model: MemoryModel, candidate: ResolvedSettings, rates: Rates) -> Attempt:
    """`candidate` with the most expert slots that fit, or with the fewest where not even those do."""
    low, high = model.slot_range(request, candidate)
    fixed = fixed_slots(request, model, candidate)
    if fixed is not None and high:
        is_size = isinstance(request.recipe.settings.expert_slots, Size)
        slots = min(fixed, high) if is_size else fixed
        budget = budget_at(request, model, candidate, slots)
        finding = None if low <= slots <= high else explain.slots_out_of_range(request, slots, low, high)
        return _attempt(request, model, budget, rates, finding)
    return _attempt(request, model, _most_slots(request, model, candidate, low, high), rates)


def _most_slots(request: PlanRequest, model: MemoryModel, candidate: ResolvedSettings, low: int, high: int) -> Budget:
    least = budget_at(request, model, candidate, low)
    if high <= low or not least.is_feasible:
        return least
    most = budget_at(request, model, candidate, high)
    if most.is_feasible:
        return most
    slopes = _slopes(least, most, low, high)
    best, fits, fails, step = least, low, high, 1
    probe = low + min(
        (int(spare / each) for spare, each in zip(_spares(least), slopes, strict=True) if each > 0), default=0
    )
    while fails - fits > 1:
        # A guess outside the bracket says nothing: halve it then. Steps double, so a bad first guess costs little.
        middle = probe if fits < probe < fails else (fits + fails) // 2
        tried = budget_at(request, model, candidate, middle)
        if tried.is_feasible:
            best, fits, probe = tried, middle, middle + step
            if any(spare < each for spare, each in zip(_spares(tried), slopes, strict=True)):
                break
        else:
            fails, probe = middle, middle - step
        step *= 2
    return best


def _spares(budget: Budget) -> tuple[int, ...]:
    """Bytes left beside headroom in each ledger, and what the engine's own rule leaves."""
    ledgers = tuple(ledger.left_bytes - ledger.headroom_bytes for ledger in budget.ledgers)
    return (*ledgers, budget.admission.budget_bytes - budget.admission.needed_bytes)


def _slopes(least: Budget, most: Budget, low: int, high: int) -> tuple[float, ...]:
    """Bytes that one more slot takes from each of `_spares`, between the two ends.

    The engine's rule counts only where its budget does not move with the slots, as it does with an automatic ratio.
    """
    slopes = [(near - far) / (high - low) for near, far in zip(_spares(least), _spares(most), strict=True)]
    if least.admission.budget_bytes != most.admission.budget_bytes:
        slopes[-1] = 0.0
    return tuple(slopes)


def budget_at(request: PlanRequest, model: MemoryModel, candidate: ResolvedSettings, slots: int) -> Budget:
    """The ledgers of `candidate` with `slots` expert slots, everything that follows from them filled in."""
    settings = candidate if candidate.expert_slots == slots else candidate.model_copy(update={"expert_slots": slots})
    return make_budget(request, model, model.finish(request, settings))


def fixed_slots(request: PlanRequest, model: MemoryModel, candidate: ResolvedSettings) -> int | None:
    """Slots that the recipe fixes, as a count or as a size; None where it says `auto`."""
    wanted = request.recipe.settings.expert_slots
    if wanted == "auto":
        return None
    if not isinstance(wanted, Size):
        return int(wanted)
    one = candidate.model_copy(update={"expert_slots": 1})
    lines = model.vram_lines(request, one) or model.ram_lines(request, one)
    each = next((line.bytes for line in lines if line.key == "expert_slots"), 0)
    return wanted.bytes // each if each else 0


def _attempt(
    request: PlanRequest, model: MemoryModel, budget: Budget, rates: Rates, finding: Finding | None = None
) -> Attempt:
    traits = model.speed_traits(request, budget.settings)
    return Attempt(budget, predict_speed(request, budget.settings, traits, rates=rates), finding)


def score(request: PlanRequest, prediction: Prediction) -> float:
    """What the recipe's objective makes of a prediction: smaller is better."""
    match request.recipe.tune.objective:
        case "decode_tps" | "throughput" | "efficiency":
            return 1 / prediction.decode_tps
        case "ttft":
            return prediction.ttft_s
        case _:
            return prediction.mean_turn_time_s or 1 / prediction.decode_tps


def choose(request: PlanRequest, feasible: list[Attempt]) -> Attempt:
    """The best predicted attempt; of those within 3 % of it the first, which holds the fewest surprises."""
    best = min(score(request, attempt.prediction) for attempt in feasible)
    return next(one for one in feasible if score(request, one.prediction) <= best * (1 + TIE_RATIO))


def overlay_tuned(request: PlanRequest) -> PlanRequest:
    """`request` with its `auto` settings taken from the best tuned result; itself where there is none to take."""
    settings = request.recipe.settings
    update = {
        name: value
        for name, value in request.calibration.tuned.items()
        if name in type(settings).model_fields and getattr(settings, name) == "auto" and value is not None
    }
    if not update:
        return request
    # Validated again: a stored result is input like any other.
    merged = type(settings).model_validate(settings.model_dump() | update)
    source = request.calibration.tuned_from or "tuned result"
    provenance = request.provenance | {f"settings.{name}": source for name in update}
    recipe = request.recipe.model_copy(update={"settings": merged})
    return request.model_copy(update={"recipe": recipe, "provenance": provenance})


def _tuned_does_not_fit(request: PlanRequest) -> Finding:
    source = request.calibration.tuned_from or "the tuned result"
    return Finding(check="tuned", message=f"{source} does not fit what is free now; planned afresh", is_fatal=False)


def _forced(findings: tuple[Finding, ...], attempt: Attempt) -> tuple[Finding, ...]:
    said = [
        finding.model_copy(update={"is_fatal": False, "message": f"forced: {finding.message}"})
        if finding.is_fatal
        else finding
        for finding in findings
    ]
    if attempt.finding is not None:
        said.append(attempt.finding.model_copy(update={"is_fatal": False}))
    if not attempt.budget.is_feasible:
        message = f"forced: {explain.describe_shortfall(attempt.budget)}"
        said.append(Finding(check="does_not_fit", message=message, is_fatal=False))
    return tuple(said)


def _start_slots(request: PlanRequest, adapter: EngineAdapter, settings: ResolvedSettings) -> int | None:
    """The fewest slots with which these settings start, where the recipe wants to grow from there; else None."""
    if not request.recipe.grow or not settings.expert_slots or "live_resize" not in adapter.capabilities:
        return None
    # Overlap is decided already, and two layers of experts are the least that starts with it.
    fixed = {} if settings.prefill_overlap is None else {"prefill_overlap": settings.prefill_overlap}
    recipe = request.recipe.model_copy(update={"settings": request.recipe.settings.model_copy(update=fixed)})
    low, _ = adapter.memory_model.slot_range(request.model_copy(update={"recipe": recipe}), settings)
    return low if 0 < low < settings.expert_slots else None


def _plan(
    request: PlanRequest,
    adapter: EngineAdapter,
    attempt: Attempt,
    findings: tuple[Finding, ...],
    *,
    is_forced: bool = False,
) -> Plan:
    recipe, budget = request.recipe, attempt.budget
    return Plan(
        recipe_name=recipe.name,
        engine=adapter.name,
        engine_version=request.engine_version,
        model_name=request.shape.name,
        model_path=request.model_path,
        download_bytes=request.download_bytes,
        model_note=request.model_note,
        settings=budget.settings,
        start_slots=_start_slots(request, adapter, budget.settings),
        provenance=explain_settings(request, attempt.budget),
        vram=budget.vram,
        ram=budget.ram,
        disk=budget.disk,
        prediction=attempt.prediction,
        findings=(*findings, *explain.missed_targets(request, attempt.prediction)),
        admission=budget.admission,
        host=recipe.serve.host,
        port=recipe.serve.port,
        served_model_name=request.shape.name,
        max_output_tokens=recipe.serve.max_output_tokens,
        is_forced=is_forced,
        hardware_name=request.hardware.name,
        track_record=describe_track_record(request),
    )
