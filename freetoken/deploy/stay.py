"""The least change: a plan that keeps what a running engine could only change by a restart.

Where a recipe leaves a setting open, two plans made minutes apart may choose differently for a few MiB that came or
went. What runs is then kept, unless the free choice is really faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.planner.plan import Plan, PlanRequest

#: A free choice must promise this much more speed to be worth a restart.
WORTH_A_RESTART = 1.1
#: Follow from slots and from what is free at the moment; they never ask for a restart by themselves.
_FOLLOWING = ("memory_ratio", "prefill_overlap", "expert_load")


def make_staying_request(request: PlanRequest, running: Plan, adapter: EngineAdapter) -> PlanRequest | None:
    """`request` with its open settings as they run, where turning them needs a restart; None where none is open."""
    settings = request.recipe.settings
    kept = {
        knob.name: value
        for knob in adapter.knobs
        if knob.cost == "restart"
        and knob.name not in _FOLLOWING
        and getattr(settings, knob.name) == "auto"
        and (value := getattr(running.settings, knob.name)) is not None
    }
    if not kept or running.engine != adapter.name:
        return None
    recipe = request.recipe.model_copy(update={"settings": settings.model_copy(update=kept)})
    provenance = request.provenance | {f"settings.{name}": "what runs" for name in kept}
    return request.model_copy(update={"recipe": recipe, "provenance": provenance})


def is_worth_a_restart(free: Plan, staying: Plan) -> bool:
    """Whether `free` is predicted to be so much faster than `staying` that what runs should be ended for it."""
    if free.prediction is None or staying.prediction is None:
        return False
    before, after = staying.prediction, free.prediction
    if before.mean_turn_time_s and after.mean_turn_time_s:
        return before.mean_turn_time_s > after.mean_turn_time_s * WORTH_A_RESTART
    return after.decode_tps > before.decode_tps * WORTH_A_RESTART
