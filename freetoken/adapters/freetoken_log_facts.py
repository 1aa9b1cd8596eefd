"""Figures that only the upstream engine's log has: expert hits of decode steps, and what a first start compiled."""

from __future__ import annotations

import re
from datetime import datetime

from freetoken.adapters.log_patterns import ANSI
from freetoken.adapters.replies import MoeHits

#: One line each so many decode steps (`--decode-log-interval`); its counters are of those steps alone.
STEPS_PER_LINE = 40
#: Seconds that graph capture and prefill warm-up take from a warm cache: 3 and 1.1 on an H200.
USUAL_CAPTURE_S, USUAL_WARMUP_S = 3.0, 1.1
#: Less than this beyond the usual is a slow machine rather than a compiler.
LEAST_COMPILE_S = 8.0
_GROUP = re.compile(
    r"(?:pinned|locked) (\d+) layers?: hit ([\d.]+)%, per layer-step miss ([\d.]+) fetch ([\d.]+) cpu ([\d.]+)"
)
_STAMP = r"\[(\d{4}-\d\d-\d\d\|\d\d:\d\d:\d\d)[^\]]*\][^\n]*"
_CAPTURE_BEGINS = re.compile(_STAMP + r"Start capturing CUDA graphs")
_CAPTURE_ENDS = re.compile(_STAMP + r"Free GPU memory after capturing CUDA graphs")
_WARMUP = re.compile(r"Prefill warmup complete for lengths \[[^\]]*\] in ([\d.]+) s")


def parse_hits(log: str, slot_bytes: int = 0) -> MoeHits | None:
    """Lookups, hits and misses over the stats lines of `log`; bytes of the misses that were fetched, with `slot_bytes`.

    None where no line tells: counters off, the strategy `cpu`, or fewer decode steps than one line takes. A line
    tells shares and means, so counts are rounded; a line without a single miss says nothing about how many lookups
    it had and takes the mean of the others.
    """
    groups = [tuple(map(float, found)) for found in _GROUP.findall(ANSI.sub("", log))]
    if not groups:
        return None
    known = [miss / (1 - hit / 100) for _, hit, miss, _, _ in groups if hit < 100 and miss > 0]
    usual = sum(known) / len(known) if known else 0.0
    lookups = misses = fetched = 0.0
    for layers, hit, miss, fetch, _ in groups:
        steps = layers * STEPS_PER_LINE
        lookups += steps * (miss / (1 - hit / 100) if hit < 100 and miss > 0 else usual)
        misses += steps * miss
        fetched += steps * fetch
    ratio = 1 - misses / lookups if lookups else 1.0
    return MoeHits(
        lookups=round(lookups), hits=round(lookups) - round(misses), misses=round(misses),
        miss_bytes=round(fetched * slot_bytes), hit_ratio=round(ratio, 4),
    )  # fmt: skip


def parse_compile_s(log: str) -> float:
    """Seconds beyond the usual that graph capture and warm-up of the last start took; 0 where that is little."""
    plain = ANSI.sub("", log)
    begins, ends, warmups = (
        list(pattern.finditer(plain)) for pattern in (_CAPTURE_BEGINS, _CAPTURE_ENDS, _WARMUP)
    )  # fmt: skip
    extra = 0.0
    if begins and ends and ends[-1].start() > begins[-1].start():
        extra += max(0.0, (_time(ends[-1][1]) - _time(begins[-1][1])).total_seconds() - USUAL_CAPTURE_S)
    if warmups and (not begins or warmups[-1].start() > begins[-1].start()):
        extra += max(0.0, float(warmups[-1][1]) - USUAL_WARMUP_S)
    return extra if extra >= LEAST_COMPILE_S else 0.0


def _time(stamp: str) -> datetime:
    return datetime.strptime(stamp, "%Y-%m-%d|%H:%M:%S")
