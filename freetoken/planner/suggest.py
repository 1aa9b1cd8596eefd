"""What a machine can run well, out of models whose shapes are known: quantisation and engine chosen for each.

Every quantisation of a model is planned on every engine; the best plan stands for the model. Models are ranked by the
speed that is predicted, and those that do not fit, or only crawl, are named with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from freetoken.checkpoint.shape import ModelShape
from freetoken.planner.budget import Budget
from freetoken.planner.explain import blamed_ledger
from freetoken.planner.limits import check_limits
from freetoken.planner.memory import PlannerModel
from freetoken.planner.plan import PlanRequest
from freetoken.planner.solve import Attempt, score, search
from freetoken.units import format_bytes, format_significant

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter

#: Below this a person reads faster than the model writes; such a plan fits and is not called running well.
LEAST_TPS = 8.0


class Candidate(NamedTuple):
    """One checkpoint: the model that it is a quantisation of, its own name, the requests for each engine."""

    family: str
    name: str
    repo: str
    shape: ModelShape
    requests: tuple[tuple[EngineAdapter, PlanRequest], ...]


class Suggestion(PlannerModel):
    """One model with the quantisation and engine that run it best here. Bytes, tok/s and seconds."""

    model: str
    checkpoint: str
    repo: str
    quantization: str
    engine: str
    #: False where this version plans for the engine and does not start it.
    is_launched: bool = True
    parameters: int
    active_parameters: int
    decode_tps: float
    decode_tps_low: float
    decode_tps_high: float
    prefill_tps: float
    ttft_s: float
    turn_time_s: float | None = None
    limited_by: str
    hit_ratio: float | None = None
    vram_bytes: int | None = None
    ram_bytes: int
    disk_bytes: int
    command: str


class Unsuitable(PlannerModel):
    """One model that does not run well here, and why: the nearest of its quantisations."""

    model: str
    checkpoint: str
    engine: str
    reason: str


class Suggestions(PlannerModel):
    """What `ft plan --suggest` answers: best first."""

    kind: Literal["suggestions"] = "suggestions"
    hardware_name: str
    workload: str
    suggestions: tuple[Suggestion, ...] = ()
    unsuitable: tuple[Unsuitable, ...] = ()


def suggest(candidates: Iterable[Candidate], hardware_name: str, workload: str, options: str = "") -> Suggestions:
    """The best plan of each model, fastest first, and what keeps the others from running well.

    `options` is what a command needs to plan for the same machine again.
    """
    best: dict[str, tuple[tuple[bool, float], Suggestion]] = {}
    nearest: dict[str, tuple[tuple[bool, float], Unsuitable]] = {}
    for candidate in candidates:
        for adapter, request in candidate.requests:
            attempt, reason = try_candidate(request, adapter)
            if attempt is not None and not reason:
                # What can only be planned gives way to whatever can be started, however fast it would be.
                cost = (not adapter.is_launched, score(request, attempt.prediction))
                found = _describe(candidate, adapter, attempt, options)
                best[candidate.family] = min(best.get(candidate.family, (cost, found)), (cost, found), key=_cost)
                continue
            known = Unsuitable(model=candidate.family, checkpoint=candidate.name, engine=adapter.name, reason=reason)
            pair = (_distance(attempt), known)
            nearest[candidate.family] = min(nearest.get(candidate.family, pair), pair, key=_cost)
    rows = sorted((row for _, row in best.values()), key=lambda row: (-row.decode_tps, row.model))
    rest = sorted((one for name, (_, one) in nearest.items() if name not in best), key=lambda one: one.model)
    return Suggestions(hardware_name=hardware_name, workload=workload, suggestions=tuple(rows), unsuitable=tuple(rest))


def try_candidate(request: PlanRequest, adapter: EngineAdapter) -> tuple[Attempt | None, str]:
    """The best attempt, and in words what keeps it from running well; no words where nothing does.

    No attempt where the engine cannot run the checkpoint at all. Repairs are not searched for: that is `ft plan`'s.
    """
    fatal = [finding for finding in check_limits(request, adapter.limits) if finding.is_fatal]
    if fatal:
        return None, fatal[0].message
    attempt = search(request, adapter.memory_model)
    if attempt is None:
        return None, f"engine `{adapter.name}` has no way to run it with these settings"
    if not attempt.is_feasible:
        return attempt, _describe_shortfall(attempt.budget)
    if attempt.prediction.decode_tps < LEAST_TPS:
        rate = format_significant(attempt.prediction.decode_tps)
        return attempt, f"fits with {rate} tok/s predicted: too slow to read along"
    return attempt, ""


def _describe_shortfall(budget: Budget) -> str:
    """The ledger that misses most, in half a line."""
    short = blamed_ledger(budget)
    if short is None or not short.missing_bytes:
        return budget.admission.message
    what = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}[short.kind]
    usable = max(0, short.available_bytes - short.headroom_bytes)
    needs = f"needs {format_bytes(short.peak_bytes)} of {what}, {format_bytes(usable)} may be used"
    return f"{format_bytes(short.missing_bytes)} of {what} missing: {needs}"


def _cost(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _distance(attempt: Attempt | None) -> tuple[bool, float]:
    """How far from a yes: slow ones first, of them the fastest; then by missing bytes; last what is unsupported."""
    if attempt is None:
        return (True, float("inf"))
    if attempt.is_feasible:
        return (False, -attempt.prediction.decode_tps)
    return (True, float(attempt.budget.missing_bytes))


def count_parameters(shape: ModelShape) -> tuple[int, int]:
    """(all, active for a token) parameters, vision and drafting layers left out."""
    experts = shape.experts
    each = experts.projections * experts.hidden_size * experts.intermediate_size
    always = sum(group.elements for group in (shape.dense, shape.shared_experts, shape.embedding, shape.head))
    return always + each * experts.count, always + each * experts.layers * experts.top_k


def _describe(candidate: Candidate, adapter: EngineAdapter, attempt: Attempt, options: str) -> Suggestion:
    prediction, budget = attempt.prediction, attempt.budget
    total, active = count_parameters(candidate.shape)
    words = ("ft plan", candidate.name, f"--engine {adapter.name}", options)
    return Suggestion(
        model=candidate.family,
        checkpoint=candidate.name,
        repo=candidate.repo,
        quantization=candidate.shape.quantization,
        engine=adapter.name,
        is_launched=adapter.is_launched,
        parameters=total,
        active_parameters=active,
        decode_tps=prediction.decode_tps,
        decode_tps_low=prediction.decode_tps_low,
        decode_tps_high=prediction.decode_tps_high,
        prefill_tps=prediction.prefill_tps,
        ttft_s=prediction.ttft_s,
        turn_time_s=prediction.mean_turn_time_s,
        limited_by=prediction.limited_by,
        hit_ratio=prediction.hit_ratio,
        vram_bytes=budget.vram.peak_bytes if budget.vram else None,
        ram_bytes=budget.ram.peak_bytes,
        disk_bytes=candidate.shape.disk_bytes,
        command=" ".join(word for word in words if word),
    )
