"""Where every resolved value of a plan came from: command line, recipe, tuned result, or the planner and why."""

from __future__ import annotations

from freetoken.planner.budget import Budget, headroom_note
from freetoken.planner.memory import ResolvedSettings
from freetoken.planner.plan import PlanRequest
from freetoken.units import format_bytes


def explain_settings(request: PlanRequest, budget: Budget) -> dict[str, str]:
    """`settings.NAME` -> source for every resolved setting that has a value, and the headroom policy."""
    origins = {}
    for name, value in budget.settings:
        if value is None:
            continue
        key = f"settings.{name}"
        origins[key] = _given(request, name) or f"planner: {_reason(request, budget, name)}"
    origins["headroom"] = request.provenance.get("headroom", "recipe default") + f": {headroom_note(request)}"
    return origins


def _given(request: PlanRequest, name: str) -> str | None:
    """Who fixed the setting; None where the planner chose it."""
    settings = request.recipe.settings
    if name not in type(settings).model_fields or getattr(settings, name) in ("auto", "model"):
        return None
    return request.provenance.get(f"settings.{name}", "recipe")


def _reason(request: PlanRequest, budget: Budget, name: str) -> str:
    settings, workload = budget.settings, request.recipe.workload
    match name:
        case "kv_tokens":
            return f"what workload `{workload.name}` needs ({workload.concurrency} x {workload.context_tokens:,})"
        case "max_running_requests":
            return f"the concurrency of workload `{workload.name}`"
        case "expert_slots":
            return _slots_reason(budget)
        case "memory_ratio":
            return "so that the engine's own rule admits slots and KV, and a live resize to more; all sizes are given"
        case "gpu" | "device":
            return "the fastest GPU with free VRAM" if settings.device == "cuda" else "no GPU that this engine can use"
        case "attention":
            return "what the engine runs without extras"
        case "prefill_overlap":
            return "on where two layers of experts fit in the slots"
        case "prefix_cache":
            return "later turns compute only what is new" if settings.prefix_cache else "nothing to share, or no room"
        case "embed_on_host":
            return "frees VRAM for expert slots" if settings.embed_on_host else "VRAM is not short of it"
        case "expert_load":
            return "by RAM available while loading"
        case "experts_from":
            return "by RAM available"
        case "cpu_threads":
            return "one a usable physical core"
        case "kv_dtype" | "state_dtype":
            return "as the model has it; answers stay unchanged"
        case "text_only":
            return "the workload is text"
        case _:
            return f"best predicted {request.recipe.tune.objective.replace('_', ' ')}"


def _slots_reason(budget: Budget) -> str:
    settings: ResolvedSettings = budget.settings
    if settings.strategy == "fused":
        return "all experts are resident without slots"
    ledger = budget.vram or budget.ram
    spare = ledger.left_bytes - ledger.headroom_bytes
    return f"what {ledger.kind.upper()} leaves after KV and headroom ({format_bytes(spare)} over)"
