"""What a study teaches beyond its own machine: its trials, for whoever shares the recipe, and points from elsewhere.

A study is marked with what it was about when it begins, so that its trials can be told from those of an older form of
the recipe. Points from elsewhere are tried like any other and never believed: figures of another machine stay out of
the study, since the cost model would take them for this one's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from freetoken.recipe.workload import Workload
from freetoken.tuner.history import read_trial
from freetoken.tuner.record import read_knobs
from freetoken.tuner.values import Point, TunerModel

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study

    from freetoken.recipe.model import Recipe
    from freetoken.tuner.knowledge import Candidate
    from freetoken.tuner.method import Method
    from freetoken.tuner.site import PlannedSite

ABOUT = "about"
#: Seeds that are tried before the method takes over: each costs a start.
MAX_SEEDS = 3
#: Outcomes that say something of the settings; an invalid or stopped trial says nothing of them.
_TELLING = frozenset({"ok", "refused", "crash", "hang", "garbage"})


class Seeds(NamedTuple):
    """Points from elsewhere, the most promising first, and in words whose they are and how far that is from here."""

    points: tuple[Point, ...] = ()
    words: str = ""


class About(TunerModel):
    """What a study was about: two studies that agree in this may be told together."""

    recipe: str
    engine: str
    model: str
    workload: Workload
    fingerprint: str
    #: Bytes of one expert slot there; 0 where the engine has none.
    slot_bytes: int = 0
    #: Settings that the recipe fixed, and that every trial therefore had.
    fixed: dict[str, Any] = {}


class ToldTrial(TunerModel):
    """One trial as it may be told: settings, what came of it, figures by the names that the store has for them."""

    settings: dict[str, Any]
    slot_bytes: int
    kind: str
    figures: dict[str, float] = {}
    missing_bytes: int = 0


def mark_study(study: Study, site: PlannedSite, recipe: Recipe) -> None:
    """Writes beside `study` what it is about."""
    from freetoken.hardware.fingerprint import compute_fingerprint

    request = site.request
    forecast = site.forecast(site.planned_point())
    about = About(
        recipe=recipe.name,
        engine=recipe.engine.name,
        model=name_model(recipe),
        workload=recipe.workload,
        fingerprint=compute_fingerprint(request.hardware, recipe.engine.name, request.engine_version),
        slot_bytes=forecast.slot_bytes if forecast is not None else 0,
        fixed=list_fixed(recipe),
    )
    study.set_user_attr(ABOUT, about.model_dump_json())


def list_fixed(recipe: Recipe) -> dict[str, Any]:
    """Settings that the recipe fixes, as every trial has them; slots, which are counted there, and the GPU aside."""
    return {k: value for k, value in recipe.settings.list_fixed().items() if k not in ("gpu", "expert_slots")}


def name_model(recipe: Recipe) -> str:
    """What tells the recipe's model from others."""
    return " ".join(one for one in (recipe.model.repo, recipe.model.path, recipe.model.file) if one)


def read_trials(recipe: Recipe, path: Path) -> tuple[ToldTrial, ...]:
    """The trials of this machine's studies of `recipe` in the storage at `path`, the latest study's first.

    Studies count whose recipe has the name (or is the one that `recipe` was tuned from), the engine, the model and the
    workload of `recipe`, on the machine class of the latest of them. () where nothing was tuned.
    """
    if not path.is_file():
        return ()
    from freetoken.tuner.storage import open_storage

    storage = open_storage(f"sqlite:///{path}")
    wanted = [(about, number) for about, number in _list_studies(storage) if _is_about(about, recipe)]
    if not wanted:
        return ()
    latest = max(wanted, key=lambda one: one[1])[0]
    numbers = sorted((number for about, number in wanted if about.fingerprint == latest.fingerprint), reverse=True)
    by_number = {number: about for about, number in wanted}
    return tuple(one for number in numbers for one in _tell(storage, number, by_number[number]))


def _list_studies(storage: BaseStorage) -> Iterator[tuple[About, int]]:
    for study in storage.get_all_studies():
        try:
            yield About.model_validate_json(study.user_attrs[ABOUT]), study._study_id
        except (KeyError, ValidationError):
            continue  # not of this tool, or from before studies were marked


def _is_about(about: About, recipe: Recipe) -> bool:
    names = {recipe.name, recipe.name.removesuffix(".tuned")}
    return (
        about.recipe in names
        and (about.engine, about.model) == (recipe.engine.name, name_model(recipe))
        and about.workload.model_copy(update={"description": recipe.workload.description}) == recipe.workload
    )


def _tell(storage: BaseStorage, number: int, about: About) -> Iterator[ToldTrial]:
    knobs = read_knobs(storage.get_study_user_attrs(number))
    for trial in storage.get_all_trials(number, deepcopy=False):
        one = read_trial(trial) if trial.state.is_finished() else None
        if one is None or one.outcome.kind not in _TELLING:
            continue
        missing = one.outcome.violation_bytes
        strategy = one.point.get("strategy")
        idle = {knob.name for knob in knobs if not knob.is_relevant(strategy)}
        point = {name: value for name, value in one.point.items() if name not in idle}
        yield ToldTrial(
            settings={**about.fixed, **point}, slot_bytes=about.slot_bytes, kind=one.outcome.kind,
            figures=to_store_names(one.measurement.model_dump(exclude_none=True)) if one.measurement else {},
            # A byte is what a failure counts as that is not for want of memory.
            missing_bytes=missing if missing > 1 else 0,
        )  # fmt: skip


def to_store_names(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures of a measurement by the names of the store: times to a token in ms, a turn in s."""
    found = {}
    for name, value in figures.items():
        is_time = name.startswith(("ttft", "itl"))
        found[name.removesuffix("_s") + "_ms" if is_time else name] = value * 1000 if is_time else value
    return found


def fit_seeds(method: Method, points: Iterable[Point], count: int = MAX_SEEDS) -> list[Point]:
    """The first `count` of `points` that can run here, cut to what fits, one for each start.

    What a point does not say is taken from the engine's default; what this space does not know is left out.
    """
    space, found = method.space, dict[Any, Point]()
    default = method.site.default_point()
    for given in points:
        asked = space.searchable(space.clip({**default, **given}))
        safe = _cut(method, asked)
        if safe is None:
            continue  # it cannot run here whatever its slots
        point = safe.point
        if safe.forecast.high and "expert_slots" in point:
            point = space.clip({**point, "expert_slots": min(asked["expert_slots"], safe.slots)})
        # Where slots are turned inside a start, the method finds the best count there.
        canonical = space.canonical(point)
        key = space.start_key(canonical) if method.can_resize else json.dumps(canonical, sort_keys=True)
        found.setdefault(key, point)
        if len(found) == count:
            break
    return list(found.values())


def _cut(method: Method, point: Point) -> Candidate | None:
    """`point` where it can run here, else with the embedding on the host, else with the next smaller prefill chunk."""
    chunk, space = point.get("prefill_chunk_tokens"), method.space
    smaller = [one for one in space["prefill_chunk_tokens"].values() if int(one) < chunk] if chunk is not None else []
    chunks = [{}, *({"prefill_chunk_tokens": one} for one in sorted(smaller, reverse=True))]
    hosts = [{}, {"embed_on_host": True}] if point.get("embed_on_host") is False else [{}]
    tries = (space.clip({**point, **one, **other}) for one in chunks for other in hosts)
    return next((found for one in tries if (found := method.candidate(one)) is not None), None)


def describe_seeds(tried: Sequence[Point], seeds: Seeds) -> str:
    """One sentence: how many settings from elsewhere are tried first, whose they are, how far away that was."""
    if not seeds.points:
        return ""
    if not tried:
        return f"none of {len(seeds.points)} settings can run here; {seeds.words}"
    verb = "are" if len(tried) > 1 else "is"
    return f"{len(tried)} of {len(seeds.points)} settings {verb} tried first; {seeds.words}"
