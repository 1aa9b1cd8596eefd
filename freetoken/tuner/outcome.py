"""What a study is asked for and what it answers: wishes of the command line, the preview, the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetoken.tuner.confirm import Confirmation
from freetoken.tuner.headline import Headline
from freetoken.tuner.values import Point, TunerModel

if TYPE_CHECKING:
    from freetoken.recipe.load import LoadedRecipe


class TuneResult(TunerModel):
    """What a study found."""

    kind: str = "tuned"
    study: str
    recipe: str
    workload: str
    objectives: tuple[str, ...]
    reason: str
    trials: int
    starts: int
    crashes: int
    duration_s: float
    #: What is to be run: what was confirmed to be better than the baseline, else the baseline. Where the default does
    #: not work, the fastest that was measured, unless a comparison found that it is not.
    best: Point = {}
    best_figures: dict[str, float] = {}
    #: The figures that stand for `best` and for `baseline`, with their intervals.
    best_headline: Headline | None = None
    baseline: Point = {}
    baseline_words: str = ""
    baseline_headline: Headline | None = None
    #: What was held against the baseline and did not win; {} where it won, or nothing was found.
    candidate: Point = {}
    missed: tuple[str, ...] = ()
    front: tuple[dict[str, Any], ...] = ()
    confirmation: Confirmation | None = None
    #: True for a confirmed gain, and where the engine's default does not work but `best` does: only then it is
    #: written, kept and taken up by the next plan.
    is_tuned: bool = False
    tuned_recipe: str | None = None
    soak: str = ""
    warnings: tuple[str, ...] = ()


class TunePreview(TunerModel):
    """What `--dry-run` shows: the space, the first points, no launch."""

    kind: str = "dry_run"
    study: str
    knobs: tuple[dict[str, Any], ...]
    default: Point
    default_words: str
    planned: Point
    #: Points of a shared bundle that a new study would try first, and whose they are.
    seeds: tuple[Point, ...] = ()
    seeds_words: str = ""
    device: str


@dataclass
class Options:
    """The command line's wishes; None = the recipe's."""

    objectives: tuple[str, ...] = ()
    budget_s: float | None = None
    trials: int | None = None
    starts: int | None = None
    is_resuming: bool = False
    storage: str | None = None
    soak_s: float = 0.0
    repeats: int | None = None
    seed: int = 0
    log: str | None = None


def choose_workload(loaded: LoadedRecipe, name: str | None) -> LoadedRecipe:
    """`loaded` with another workload."""
    if name is None:
        return loaded
    from freetoken.recipe.load import load_workload

    workload = load_workload(name)
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"workload": workload}))


def free_settings(loaded: LoadedRecipe) -> LoadedRecipe:
    """`loaded` with every setting open that a search may turn; the device and what changes answers stay as they are."""
    settings = loaded.recipe.settings
    kept = {name: getattr(settings, name) for name in ("gpu", "kv_dtype", "state_dtype")}
    provenance = {
        key: origin for key, origin in loaded.provenance.items()
        if not key.startswith("settings.") or key.removeprefix("settings.") in kept
    }  # fmt: skip
    recipe = loaded.recipe.model_copy(update={"settings": type(settings)(**kept)})
    return replace(loaded, recipe=recipe, provenance=provenance)


def parse_objectives(values: Sequence[str]) -> tuple[str, ...]:
    """`--objective a --objective b` or `--objective a,b`."""
    return tuple(one.strip() for value in values for one in value.split(",") if one.strip())
