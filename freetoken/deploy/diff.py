"""Declared against running: what differs, what each difference costs, and the least that gets there. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freetoken.deploy.values import Change, Diff

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.planner.plan import Plan
    from freetoken.recipe.model import Recipe

#: Fields of a plan that a running engine cannot change. The ledgers and the prediction only follow.
_FIXED = ("engine", "engine_version", "model_path", "host", "port", "served_model_name", "max_output_tokens")
#: Follows from slots and KV where the recipe leaves it open: on a live resize it stays what the engine started with.
_FOLLOWS = "memory_ratio"


@dataclass(frozen=True)
class Current:
    """What runs now: the plan and recipe it was started from, and the sizes that the engine itself tells."""

    plan: Plan
    recipe: Recipe
    expert_slots: int | None = None
    kv_tokens: int | None = None


def make_diff(current: Current | None, plan: Plan, recipe: Recipe, adapter: EngineAdapter) -> Diff:
    """The least action that turns `current` into `plan`."""
    if current is None:
        return Diff(action="launch", reason="nothing of this name runs")
    fixed = _fixed_changes(current, plan, recipe)
    settings = _settings_changes(current, plan, recipe, adapter)
    changes = (*fixed, *settings)
    if not changes:
        return Diff(action="nothing", reason="it runs as declared")
    if all(change.cost == "live" for change in changes):
        return Diff(action="resize", reason="every change can be made while it runs", changes=changes)
    names = ", ".join(f"`{change.field}`" for change in changes if change.cost == "restart")
    return Diff(action="restart", reason=f"{names} cannot be changed while it runs", changes=changes)


def _fixed_changes(current: Current, plan: Plan, recipe: Recipe) -> tuple[Change, ...]:
    pairs: list[tuple[str, Any, Any]] = [(key, getattr(current.plan, key), getattr(plan, key)) for key in _FIXED]
    before, after = current.recipe, recipe
    pairs += [
        ("engine.env", before.engine.env, after.engine.env),
        ("engine.extra_args", before.engine.extra_args, after.engine.extra_args),
        ("serve.api_key_env", before.serve.api_key_env, after.serve.api_key_env),
    ]
    return tuple(Change(field=key, before=old, after=new) for key, old, new in pairs if old != new)


def _settings_changes(current: Current, plan: Plan, recipe: Recipe, adapter: EngineAdapter) -> tuple[Change, ...]:
    before, after = current.plan.settings, plan.settings
    if _is_free(current.recipe) and _is_free(recipe):
        after = after.model_copy(update={_FOLLOWS: getattr(before, _FOLLOWS)})
    live = adapter.live_changes(before, after)
    live_names = {knob.name for knob in adapter.knobs if knob.cost == "live"} if live is None else set(live)
    changes = []
    for name, old in before.model_dump().items():
        new = getattr(after, name)
        # What the engine itself says counts: somebody may have resized it by hand. Where it has the wanted size
        # already and its plan has not, that size was never proven, and the change is made for the proof's sake.
        running = {"expert_slots": current.expert_slots, "kv_tokens": current.kv_tokens}.get(name)
        old = old if running is None or running == new else running
        # What an adapter waives stays what the engine started with.
        is_waived = live is not None and name not in live_names and running is None
        if old != new and not is_waived:
            can_live = name in live_names or (running is not None and live is not None)
            changes.append(
                Change(field=f"settings.{name}", before=old, after=new, cost="live" if can_live else "restart")
            )
    return tuple(changes)


def _is_free(recipe: Recipe) -> bool:
    return recipe.settings.memory_ratio == "auto"
