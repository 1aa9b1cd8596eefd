"""Fields that parse and whose effect this version does not have: refused with a sentence, never ignored silently.

What one engine cannot do is told by its adapter's `Limits`; here stands what holds for every engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.recipe.model import Recipe, Tune


@dataclass(frozen=True)
class Effect:
    """A field without an effect: refused, or (not `is_fatal`) only told."""

    key: str
    message: str
    is_fatal: bool = True


def check_effects(recipe: Recipe) -> tuple[Effect, ...]:
    """Every field of `recipe` that would have no effect; defaults are not told."""
    found: list[Effect] = []
    settings = recipe.settings
    if recipe.grow and settings.strategy in ("fused", "cpu"):
        message = f"`grow: true` grows expert slots, which the strategy `{settings.strategy}` does not size"
        found.append(Effect("grow", message))
    if settings.fetch_ratio != "auto" and settings.strategy != "hybrid":
        message = (
            f"`settings.fetch_ratio` belongs to the strategy `hybrid`, `settings.strategy` is `{settings.strategy}`"
        )
        found.append(Effect("settings.fetch_ratio", message))
    if recipe.model.repo is None and recipe.model.revision != "main":
        found.append(Effect("model.revision", "`model.revision` belongs to `model.repo`; a `model.path` has none"))
    if recipe.model.repo is None and recipe.model.source != "huggingface":
        found.append(Effect("model.source", "`model.source` belongs to `model.repo`; a `model.path` has none"))
    if recipe.workload.recording is not None and recipe.workload.text != "recorded":
        found.append(Effect("workload.recording", "`workload.recording` is read with `workload.text: recorded` only"))
    unused = [name for name in recipe.allow_quality_changes if getattr(settings, name) == "model"]
    for name in unused:
        message = (
            f"`allow_quality_changes` lists `{name}`, which only `ft tune` would change; this version has no tuner"
        )
        found.append(Effect("allow_quality_changes", message, is_fatal=False))
    # `tune.objective` counts here already: the planner ranks what fits by it.
    if (recipe.tune.budget, recipe.tune.trials) != (Tune().budget, Tune().trials):
        message = "`tune.budget` and `tune.trials` are for `ft tune`, which this version does not have"
        found.append(Effect("tune", message, is_fatal=False))
    return tuple(found)
