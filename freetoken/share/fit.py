"""A recipe of another machine made to fit this one, as little of it given up as possible, and what keeping it costs.

Values that the author fixed and that do not fit here go back to `auto`, one after the other, until the planner says
yes. Of those that fit, some may be far from what this machine could do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from freetoken.recipe.model import HardwareNeeds

if TYPE_CHECKING:
    from freetoken.planner.plan import Plan, Prediction, Refusal
    from freetoken.recipe.load import LoadedRecipe

#: What the recipe asks of a machine, as a thing that may give way: the planner's own answer is more exact.
HARDWARE = "hardware"
#: Fixed values that may give way on another machine, the most machine-bound first. Types of weights never do.
GIVES_WAY = (
    "expert_slots", "prefill_chunk_tokens", "strategy", "embed_on_host", "prefill_overlap", "expert_load",
    "fetch_ratio", "attention", "prefix_cache", "max_running_requests", "kv_tokens",
)  # fmt: skip
#: Fixed values that are what the author asked for rather than a matter of speed.
_ASKED_FOR = ("max_running_requests", "kv_tokens")
#: A turn that is predicted to be so much shorter is worth a word.
_WORTH = 0.05


class Freedom(NamedTuple):
    """Fixed values that this machine would do better without, and what is predicted then."""

    names: tuple[str, ...]
    prediction: Prediction


def fit(
    loaded: LoadedRecipe, plan: Callable[[LoadedRecipe], Plan | Refusal]
) -> tuple[LoadedRecipe, list[str], Plan | Refusal]:
    """The recipe with as few of the author's values given up as lets it fit, which ones, and the planner's answer.

    Where nothing helps, the recipe as it came and the planner's first no.
    """
    first = plan(loaded)
    if first.kind == "plan":
        return loaded, [], first
    tried = loaded
    relaxed: list[str] = []
    for name in (name for name in (HARDWARE, *GIVES_WAY) if _is_fixed(loaded, name)):
        tried, relaxed = _relax(tried, name), [*relaxed, name]
        answer = plan(tried)
        if answer.kind == "plan":
            break
    else:
        return loaded, [], first
    # What was given up before the one that helped may have been given up for nothing.
    for name in relaxed[:-1]:
        fuller = [one for one in relaxed if one != name]
        candidate = loaded
        for one in fuller:
            candidate = _relax(candidate, one)
        again = plan(candidate)
        if again.kind == "plan":
            tried, relaxed, answer = candidate, fuller, again
    return tried, relaxed, answer


def find_freedom(
    loaded: LoadedRecipe, answer: Plan | Refusal, plan: Callable[[LoadedRecipe], Plan | Refusal]
) -> Freedom | None:
    """Which of the values that `loaded` still fixes cost speed here: one where that says nearly all, else all of them.

    None where leaving them open is predicted to gain little.
    """
    names = [one for one in GIVES_WAY if one not in _ASKED_FOR and _is_fixed(loaded, one)]
    now = _turn_time_s(answer)
    if not names or now is None:
        return None
    openest = loaded
    for name in names:
        openest = _relax(openest, name)
    best = _turn_time_s(found := plan(openest))
    if best is None or best > now * (1 - _WORTH):
        return None
    chosen, told = tuple(names), found
    for name in names if len(names) > 1 else ():
        single = plan(_relax(loaded, name))
        reached = _turn_time_s(single)
        if reached is not None and now - reached >= 0.9 * (now - best):
            chosen, told = (name,), single
            break
    prediction = told.prediction if told.kind == "plan" else None
    return Freedom(chosen, prediction) if prediction is not None else None


def _turn_time_s(answer: Plan | Refusal) -> float | None:
    """Seconds of a mean turn, or of a token where that is not predicted."""
    prediction = answer.prediction if answer.kind == "plan" else None
    if prediction is None:
        return None
    return prediction.mean_turn_time_s or 1 / prediction.decode_tps


def _is_fixed(loaded: LoadedRecipe, name: str) -> bool:
    if name == HARDWARE:
        return loaded.recipe.hardware != HardwareNeeds()
    return bool(getattr(loaded.recipe.settings, name) != "auto")


def _relax(loaded: LoadedRecipe, name: str) -> LoadedRecipe:
    recipe = loaded.recipe
    update: dict[str, Any] = {"hardware": HardwareNeeds()}
    if name != HARDWARE:
        update = {"settings": recipe.settings.model_copy(update={name: "auto"})}
    provenance = {key: one for key, one in loaded.provenance.items() if key != f"settings.{name}"}
    return replace(loaded, recipe=recipe.model_copy(update=update), provenance=provenance)
