"""What a bundle teaches a tuner: points to try first, re-scaled from bytes to this machine's counts, and ones to avoid.

A point is a mapping from a setting's name to its value. Whether it fits here is the planner's to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from freetoken.hardware.fingerprint import compute_fingerprint
from freetoken.share.archive import read_bytes
from freetoken.share.bundle import SUFFIX, Bundle, read_bundle
from freetoken.share.compare import measure_distance
from freetoken.share.imports import find_import, imports_dir
from freetoken.share.model import expand
from freetoken.share.portable import hash_workload
from freetoken.share.study import rank

if TYPE_CHECKING:
    from freetoken.planner.plan import PlanRequest
    from freetoken.recipe.model import Recipe

MAX_SEEDS = 12
#: Failures that the settings are to blame for, wherever they are tried.
_BROKEN = frozenset({"crash", "hang", "garbage"})


class SharedSeeds(NamedTuple):
    """Points, the most promising first, and in words whose they are and how far that machine is from this one."""

    points: tuple[dict[str, Any], ...] = ()
    words: str = ""


def find_seeds(recipe_path: Path | None, request: PlanRequest, slot_bytes: int, objective: str = "") -> SharedSeeds:
    """Points for the tuner of `request`: of the bundle that its recipe came from, or that was imported under its name.

    None where that bundle is of another engine or model.
    """
    recipe = request.recipe
    bundle = _find_bundle(recipe_path, recipe.name)
    if bundle is None or not _is_of(bundle, recipe):
        return SharedSeeds()
    points = make_seeds(bundle, slot_bytes, objective or recipe.tune.objective, cores=request.hardware.cpu.usable_cores)
    return SharedSeeds(points, describe(bundle, request)) if points else SharedSeeds()


def make_seeds(
    bundle: Bundle, slot_bytes: int, objective: str = "turn_time", *, cores: int = 0
) -> tuple[dict[str, Any], ...]:
    """The points of `bundle`, the best by `objective` first and each once; bytes as slots of `slot_bytes` each.

    A `slot_bytes` of 0 takes the author's. Threads become the same share of `cores`; 0 leaves their count.
    """
    slot_bytes = slot_bytes or (bundle.lock.slot_bytes if bundle.lock is not None else 0)
    machine = bundle.evidence.machine
    broken = {_key(one.settings) for one in bundle.evidence.study if one.kind in _BROKEN}
    worked = {_key(one.settings) for one in bundle.evidence.study if one.kind == "ok"}
    seeds: list[dict[str, Any]] = []
    for settings in _ranked(bundle, objective):
        if _key(settings) in broken - worked:
            continue
        point = expand(settings, slot_bytes)
        threads = point.get("cpu_threads")
        if cores and machine is not None and isinstance(threads, int):
            point["cpu_threads"] = max(1, min(cores, round(threads * cores / machine.cores)))
        if point and point not in seeds:
            seeds.append(point)
    return tuple(seeds[:MAX_SEEDS])


def describe(bundle: Bundle, request: PlanRequest) -> str:
    """Whose points they are, and how that machine and workload differ from `request`'s."""
    machine, recipe = bundle.evidence.machine, request.recipe
    fingerprint = compute_fingerprint(request.hardware, recipe.engine.name, request.engine_version)
    distance = measure_distance(machine, request.hardware, fingerprint)
    where = f" on {machine.gpu or machine.cpu}" if machine is not None else ""
    words = [f"found with `{bundle.recipe.name}`{where}"]
    if distance is not None:
        words += ["the same class of machine"] if distance.is_same_class else distance.differences
    if bundle.evidence.workload.sha256 != hash_workload(recipe.workload):
        words.append(f"workload: {bundle.evidence.workload.name} there, {recipe.workload.name} here")
    return "; ".join(words)


def _find_bundle(recipe_path: Path | None, name: str) -> Bundle | None:
    found = find_import(recipe_path)
    if found is not None:
        return found.bundle
    # Whoever tunes a recipe shares the tuned one under its own name.
    for kept in (imports_dir() / f"{name}{SUFFIX}", imports_dir() / f"{name}.tuned{SUFFIX}"):
        if kept.is_file():
            return read_bundle(read_bytes(kept, kept.name), kept.name)
    return None


def _is_of(bundle: Bundle, recipe: Recipe) -> bool:
    theirs = bundle.recipe
    same = all(getattr(theirs.model, name) == getattr(recipe.model, name) for name in ("repo", "path", "file"))
    return same and theirs.engine.name == recipe.engine.name


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _ranked(bundle: Bundle, objective: str) -> Iterator[dict[str, Any]]:
    evidence = bundle.evidence
    timed = [
        ({name: figure.median for name, figure in one.figures.items()}, one.settings)
        for one in evidence.measured
        if not one.is_invalid
    ]
    timed += [(one.figures, one.settings) for one in evidence.study if one.kind == "ok"]
    ranked = sorted(((rank(figures, objective), settings) for figures, settings in timed), key=lambda pair: pair[0])
    yield from (dict(settings) for (order, _), settings in ranked if order < 2)
    if evidence.planned:
        yield dict(evidence.planned)
