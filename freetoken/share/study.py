"""The tuner's trials in a bundle: which of them travel, and in which order whoever tunes elsewhere should try them.

A study of 45 minutes holds 20 to 60 trials, and a tuner that starts from them pays a start for each that it repeats:
the fastest settings and the failures nearest to working say nearly all. So at most `MAX_OK` successes and
`MAX_BROKEN` failures travel, about 40 KiB, which a person can still read.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from freetoken.share.model import StudyPoint, compact

MAX_OK, MAX_BROKEN = 40, 24
#: Objective of a recipe -> figure it is read from, and whether more of it is better.
_FIGURES: dict[str, tuple[str, bool]] = {
    "turn_time": ("turn_time_s", False), "decode_tps": ("decode_tps", True), "ttft": ("ttft_ms", False),
    "throughput": ("total_decode_tps", True), "efficiency": ("joules_per_token", False),
}  # fmt: skip
#: Failures in the order in which they are worth knowing: what an engine did before what the planner said.
_BROKEN = ("garbage", "hang", "crash", "refused")


def make_point(
    settings: Mapping[str, Any], slot_bytes: int, kind: str, figures: Mapping[str, float], missing_bytes: int = 0
) -> StudyPoint:
    """One trial as it travels: slots in bytes, figures to four digits."""
    rounded = {name: float(f"{value:.4g}") for name, value in sorted(figures.items())}
    return StudyPoint(
        settings=compact(dict(settings), slot_bytes), kind=kind, figures=rounded, missing_bytes=missing_bytes
    )


def make_points(trials: Iterable[Any]) -> tuple[StudyPoint, ...]:
    """The same for what the tuner tells of its trials (`tuner.seeds.ToldTrial`, whose room is not imported here)."""
    return tuple(make_point(one.settings, one.slot_bytes, one.kind, one.figures, one.missing_bytes) for one in trials)


def pick_points(points: Iterable[StudyPoint], objective: str) -> tuple[StudyPoint, ...]:
    """What of `points` travels: successes by `objective`, best first, then failures, the nearest to working first.

    Settings that were tried several times are told once, with the median of each figure; a failure once for each kind.
    """
    successes: dict[str, list[StudyPoint]] = {}
    failures: dict[tuple[str, str], StudyPoint] = {}
    for one in points:
        key = json.dumps(one.settings, sort_keys=True)
        if one.kind == "ok":
            successes.setdefault(key, []).append(one)
        else:
            failures.setdefault((one.kind, key), one)
    merged = sorted(((key, _merge(group)) for key, group in successes.items()), key=lambda pair: pair[0])
    best = sorted((one for _, one in merged), key=lambda one: rank(one.figures, objective))
    near = sorted(failures.items(), key=lambda pair: (_weight(pair[1].kind), pair[1].missing_bytes, pair[0]))
    return (*best[:MAX_OK], *(one for _, one in near[:MAX_BROKEN]))


def rank(figures: Mapping[str, float], objective: str) -> tuple[int, float]:
    """A key by which the best comes first; figures without the objective's come last, by tokens per second."""
    for order, (name, is_more) in enumerate((_FIGURES.get(objective, _FIGURES["turn_time"]), _FIGURES["decode_tps"])):
        if name in figures:
            return order, -figures[name] if is_more else figures[name]
    return 2, 0.0


def _merge(group: Sequence[StudyPoint]) -> StudyPoint:
    names = sorted({name for one in group for name in one.figures})
    figures = {name: statistics.median(one.figures[name] for one in group if name in one.figures) for name in names}
    return group[0].model_copy(update={"figures": {name: float(f"{value:.4g}") for name, value in figures.items()}})


def _weight(kind: str) -> int:
    return _BROKEN.index(kind) if kind in _BROKEN else len(_BROKEN)
