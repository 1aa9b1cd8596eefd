"""Arithmetic on timestamps: from what the client saw to TTFT, ITL, TPOT, tok/s and their intervals. Pure.

All times are seconds on one monotonic clock. Definitions are STYLE's table of words. Intervals are 95 % bootstrap
percentiles over whole requests, because the gaps within one request are no independent measurements. Turns differ
from each other by design (their prompts grow), so each turn is resampled by itself: the interval tells how far the
figure would move in another run of the same workload. As a bootstrap over n values is too narrow by sqrt((n-1)/n),
it is widened by that factor; with one value for each turn there is no spread to see, and requests are pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from freetoken.bench.result import Estimate, RequestFigures

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

RESAMPLES = 1000
MOST_DRAWN_VALUES = 20_000_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class RequestTimes:
    """One answered request: where it stands in the run, when it was sent and when each piece of text came."""

    repeat: int
    conversation: int
    turn: int
    sent_s: float
    #: When each piece of generated text was received; never empty.
    pieces_s: tuple[float, ...]
    #: When the last token had come: the last piece, or the end that was told after tokens without text.
    last_s: float
    completion_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    #: Prompt tokens that no earlier request has sent; None where that is not known.
    fresh_tokens: int | None = None
    is_estimated: bool = False

    @property
    def first_s(self) -> float:
        """When the first generated text was received."""
        return self.pieces_s[0]

    @property
    def ttft_s(self) -> float:
        """Request sent -> first generated token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Request sent -> last token."""
        return self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (tokens - 1); None with fewer than two tokens, or all at once."""
        if self.completion_tokens < 2 or self.last_s <= self.first_s:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that were computed rather than found in the prefix cache; None where that is not known."""
        if self.prompt_tokens is not None and self.cached_tokens is not None:
            return self.prompt_tokens - self.cached_tokens
        return self.fresh_tokens


@dataclass(frozen=True)
class RepeatTotals:
    """What was read around one repeat. Counters are differences; None where there is no such counter."""

    started_s: float
    ended_s: float
    hits: int | None = None
    lookups: int | None = None
    miss_bytes: int | None = None
    energy_j: float | None = None


@dataclass(frozen=True)
class Measurements:
    """All that the figures are computed from."""

    requests: tuple[RequestTimes, ...]
    repeats: tuple[RepeatTotals, ...] = ()
    vram_peak_bytes: int | None = None
    ram_peak_bytes: int | None = None
    power_w: float | None = None
    extra: dict[str, Estimate] = field(default_factory=dict)


def compute_metrics(found: Measurements, seed: int = 0) -> dict[str, Estimate]:
    """Every figure that can be computed, by name."""
    requests, metrics = found.requests, dict(found.extra)

    def add(name: str, values: Sequence[float | None], reduce: Reduce = mean_of, scale: float = 1.0) -> None:
        kept = [(one, value * scale) for one, value in zip(requests, values, strict=True) if value is not None]
        if kept:
            groups = [(one.turn, (value,)) for one, value in kept]
            metrics[name] = estimate(groups, reduce, seed)

    ttft, e2e, tpot = ([getattr(one, name) for one in requests] for name in ("ttft_s", "e2e_s", "tpot_s"))
    is_first = [one.turn == 0 for one in requests]
    add("ttft_ms", ttft, scale=1000)
    add("ttft_p50_ms", ttft, percentile_of(50), 1000)
    add("ttft_p95_ms", ttft, percentile_of(95), 1000)
    add("ttft_cold_ms", [value if first else None for value, first in zip(ttft, is_first, strict=True)], scale=1000)
    add("ttft_warm_ms", [None if first else value for value, first in zip(ttft, is_first, strict=True)], scale=1000)
    add("e2e_ms", e2e, scale=1000)
    add("e2e_p50_ms", e2e, percentile_of(50), 1000)
    add("e2e_p95_ms", e2e, percentile_of(95), 1000)
    add("turn_time_s", e2e)
    add("turn_time_p95_s", e2e, percentile_of(95))
    add("tpot_ms", tpot, scale=1000)
    add("tpot_p95_ms", tpot, percentile_of(95), 1000)
    add("decode_tps", [1 / value if value else None for value in tpot])
    add("prefill_tps", [compute_prefill_tps(one) for one in requests])
    metrics |= _itl(requests, seed)
    metrics |= _of_repeats(found, seed)
    for name, value in (("vram_peak_bytes", found.vram_peak_bytes), ("ram_peak_bytes", found.ram_peak_bytes),
                        ("power_w", found.power_w)):  # fmt: skip
        if value:
            metrics[name] = Estimate(mean=value, low=value, high=value, n=1)
    return metrics


def compute_prefill_tps(one: RequestTimes) -> float | None:
    """Prompt tokens computed per second until the first token: a lower bound of the prefill's own rate."""
    computed = one.computed_tokens
    return computed / one.ttft_s if computed and one.ttft_s > 0 else None


def compute_gaps(one: RequestTimes) -> tuple[float, ...]:
    """Seconds between consecutive pieces of text: the ITLs, where each piece is one token."""
    return tuple(later - earlier for earlier, later in pairwise(one.pieces_s))


def compute_total_decode_tps(requests: Sequence[RequestTimes]) -> float | None:
    """Decoded tokens of all `requests` per second, while as many of them decode as ever do at once.

    Equal requests at once add up; requests that the engine queues one after the other do not. Where the most at once
    is a passing moment (under half of the time), all of the time in which at least one decodes counts.
    """
    spans = [(one.first_s, one.last_s, 1 / tpot) for one in requests if (tpot := one.tpot_s) is not None]
    moments = sorted({moment for first, last, _ in spans for moment in (first, last)})
    by_count: dict[int, tuple[float, float]] = {}
    for start, end in pairwise(moments):
        rates = [rate for first, last, rate in spans if first <= start and end <= last]
        seconds, tokens = by_count.get(len(rates), (0.0, 0.0))
        by_count[len(rates)] = (seconds + end - start, tokens + sum(rates) * (end - start))
    by_count.pop(0, None)
    if not by_count:
        return None
    busy_s = sum(seconds for seconds, _ in by_count.values())
    seconds, tokens = by_count[max(by_count)]
    if seconds < busy_s / 2:
        seconds, tokens = busy_s, sum(tokens for _, tokens in by_count.values())
    return tokens / seconds


def make_figures(one: RequestTimes) -> RequestFigures:
    """The request for people and files: milliseconds instead of timestamps."""
    tpot = one.tpot_s
    return RequestFigures(
        repeat=one.repeat, conversation=one.conversation, turn=one.turn, prompt_tokens=one.prompt_tokens,
        cached_tokens=one.cached_tokens, completion_tokens=one.completion_tokens, ttft_ms=one.ttft_s * 1000,
        e2e_ms=one.e2e_s * 1000, tpot_ms=tpot * 1000 if tpot is not None else None, chunk_count=len(one.pieces_s),
        is_estimated=one.is_estimated,
    )  # fmt: skip


def _itl(requests: Sequence[RequestTimes], seed: int) -> dict[str, Estimate]:
    groups = [(one.turn, gaps) for one in requests if (gaps := tuple(gap * 1000 for gap in compute_gaps(one)))]
    if not groups:
        return {}
    reductions = {"itl_ms": mean_of, "itl_p50_ms": percentile_of(50), "itl_p95_ms": percentile_of(95)}
    return {name: estimate(groups, reduce, seed) for name, reduce in reductions.items()}


def _of_repeats(found: Measurements, seed: int) -> dict[str, Estimate]:
    """Figures that a repeat gives as a whole."""
    values: dict[str, list[float]] = {}
    for index, totals in enumerate(found.repeats):
        inside = [one for one in found.requests if one.repeat == index]
        tokens = sum(one.completion_tokens for one in inside)
        elapsed = totals.ended_s - totals.started_s
        figures = {
            "total_decode_tps": compute_total_decode_tps(inside),
            "output_tps": tokens / elapsed if elapsed > 0 else None,
            "hit_ratio": totals.hits / totals.lookups if totals.lookups and totals.hits is not None else None,
            "miss_bytes_per_token": totals.miss_bytes / tokens if totals.miss_bytes is not None and tokens else None,
            "joules_per_token": totals.energy_j / tokens if totals.energy_j and tokens else None,
        }
        for name, value in figures.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    estimates = {name: estimate([(0, (one,)) for one in many], mean_of, seed) for name, many in values.items()}
    if (hits := estimates.get("hit_ratio")) is not None:
        estimates["hit_ratio"] = hits.model_copy(update={"high": min(1.0, hits.high)})
    return estimates


#: From values along the last axis to one figure.
Reduce = Callable[["Array"], "Array"]


def mean_of(values: Array) -> Array:
    """The mean along the last axis."""
    result: Array = values.mean(axis=-1)
    return result


def percentile_of(percent: float) -> Reduce:
    """A reduction to the percentile, linear between neighbours."""
    import numpy as np

    def reduce(values: Array) -> Array:
        return np.asarray(np.percentile(values, percent, axis=-1), dtype=float)

    return reduce


def estimate(groups: Sequence[tuple[int, Sequence[float]]], reduce: Reduce, seed: int = 0) -> Estimate:
    """`reduce` over all values, with its interval; `groups` are (stratum, the values of one measurement)."""
    import numpy as np

    values = np.asarray([value for _, several in groups for value in several], dtype=float)
    figure = float(reduce(values))
    if len(groups) < 2:
        return Estimate(mean=figure, low=figure, high=figure, n=len(groups))
    strata: dict[int, list[int]] = {}
    for index, (stratum, _) in enumerate(groups):
        strata.setdefault(stratum, []).append(index)
    pools = list(strata.values()) if min(map(len, strata.values())) > 1 else [list(range(len(groups)))]
    drawn = _resample(groups, pools, reduce, np.random.default_rng(seed))
    widen = max((len(pool) / (len(pool) - 1)) ** 0.5 for pool in pools)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    # The figure itself is always inside, also where a percentile sits at the edge of what was drawn; and what is never
    # negative does not become so by widening.
    wide_low, wide_high = figure + (float(low) - figure) * widen, figure + (float(high) - figure) * widen
    floor = 0.0 if values.min() >= 0 else wide_low
    return Estimate(
        mean=figure, low=min(figure, max(floor, wide_low)), high=max(figure, wide_high), n=len(groups)
    )  # fmt: skip


def _resample(
    groups: Sequence[tuple[int, Sequence[float]]], pools: Sequence[Sequence[int]], reduce: Reduce,
    rng: np.random.Generator,
) -> Array:  # fmt: skip
    import numpy as np

    rows = [np.asarray(several, dtype=float) for _, several in groups]
    # Long answers have so many gaps that fewer draws tell as much, and a run should not end with a long silence.
    draws = min(RESAMPLES, max(200, MOST_DRAWN_VALUES // max(1, sum(map(len, rows)))))
    picks = np.concatenate([rng.choice(pool, (draws, len(pool))) for pool in map(np.asarray, pools)], axis=1)
    if all(len(row) == 1 for row in rows):
        return reduce(np.concatenate(rows)[picks])
    return np.asarray([float(reduce(np.concatenate([rows[index] for index in pick]))) for pick in picks])
