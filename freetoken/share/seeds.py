"""What a bundle teaches a tuner: points to try first, re-scaled from bytes to this machine's counts, and ones to avoid.

A point is a mapping from a setting's name to its value. Slots that are more than this machine's plan holds are cut to
what the plan holds, since the author's best is often simply "as many as fit".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freetoken.share.archive import read_bytes
from freetoken.share.bundle import SUFFIX, Bundle, read_bundle
from freetoken.share.imports import find_import, imports_dir
from freetoken.share.model import expand

MAX_SEEDS = 12


def find_seeds(recipe_path: Path | None, name: str, slot_bytes: int, most_slots: int = 0) -> tuple[dict[str, Any], ...]:
    """Points for the tuner of a recipe: of the bundle that it came from, or that was imported under its name."""
    found = find_import(recipe_path)
    if found is not None:
        return make_seeds(found.bundle, slot_bytes, most_slots)
    kept = imports_dir() / f"{name}{SUFFIX}"
    if not kept.is_file():
        return ()
    return make_seeds(read_bundle(read_bytes(kept, kept.name), kept.name), slot_bytes, most_slots)


def make_seeds(bundle: Bundle, slot_bytes: int, most_slots: int = 0) -> tuple[dict[str, Any], ...]:
    """The points of `bundle`, the fastest first and each once, with at most `most_slots` slots of `slot_bytes` each.

    A `slot_bytes` of 0 takes the author's, a `most_slots` of 0 cuts nothing.
    """
    slot_bytes = slot_bytes or (bundle.lock.slot_bytes if bundle.lock is not None else 0)
    seeds: list[dict[str, Any]] = []
    for settings in _ranked(bundle):
        point = expand(settings, slot_bytes)
        if isinstance(point.get("expert_slots"), int) and most_slots:
            point["expert_slots"] = min(point["expert_slots"], most_slots)
        if point and point not in seeds:
            seeds.append(point)
    return tuple(seeds[:MAX_SEEDS])


def _ranked(bundle: Bundle) -> Iterator[dict[str, Any]]:
    evidence = bundle.evidence
    timed = [
        (one.figures["decode_tps"].median, one.settings)
        for one in evidence.measured
        if not one.is_invalid and "decode_tps" in one.figures
    ]
    timed += [(one.figures["decode_tps"], one.settings) for one in evidence.study if "decode_tps" in one.figures]
    yield from (dict(settings) for _, settings in sorted(timed, key=lambda pair: -pair[0]))
    if evidence.planned:
        yield dict(evidence.planned)
