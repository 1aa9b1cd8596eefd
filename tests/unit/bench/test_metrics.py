"""Figures from timestamps, held against sums done by hand."""

import random

import numpy as np
import pytest

from freetoken.bench.metrics import (
    Measurements,
    RepeatTotals,
    RequestTimes,
    compute_gaps,
    compute_metrics,
    compute_prefill_tps,
    compute_total_decode_tps,
    estimate,
    make_figures,
    mean_of,
    percentile_of,
)
from freetoken.bench.result import Estimate, RequestFigures


def make_request(sent=10.0, ttft=0.5, itl=0.02, tokens=11, repeat=0, conversation=0, turn=0, **more):
    first = sent + ttft
    pieces = tuple(first + index * itl for index in range(tokens))
    facts = {"pieces_s": pieces, "last_s": pieces[-1], "completion_tokens": tokens, "prompt_tokens": 100} | more
    return RequestTimes(repeat=repeat, conversation=conversation, turn=turn, sent_s=sent, **facts)


def test_ttft_tpot_and_latency_follow_their_definitions():
    one = make_request()
    assert (one.ttft_s, one.tpot_s, one.e2e_s) == pytest.approx((0.5, 0.02, 0.7))
    assert compute_gaps(one) == pytest.approx((0.02,) * 10)


def test_tpot_counts_tokens_by_usage_and_not_by_chunks():
    one = make_request(tokens=11, completion_tokens=21)
    assert one.tpot_s == pytest.approx(0.2 / 20)


@pytest.mark.parametrize("tokens", [1, 2])
def test_tpot_is_unknown_for_one_token_or_all_at_once(tokens):
    one = make_request(tokens=1, completion_tokens=tokens)
    assert one.tpot_s is None


def test_prefill_counts_only_what_was_computed():
    told = make_request(cached_tokens=60, fresh_tokens=100)
    fresh, unknown = make_request(fresh_tokens=100), make_request()
    assert compute_prefill_tps(told) == pytest.approx(40 / 0.5)
    assert compute_prefill_tps(fresh) == pytest.approx(200)
    assert compute_prefill_tps(unknown) is None


def test_streams_at_once_add_up_and_queued_ones_do_not():
    at_once = [make_request(), make_request(conversation=1)]
    queued = [make_request(), make_request(sent=20.0)]
    assert compute_total_decode_tps(at_once) == pytest.approx(100)
    assert compute_total_decode_tps(queued) == pytest.approx(50)


def test_a_moment_in_which_two_streams_overlap_is_no_concurrency():
    """The second begins to decode just before the first ends: 20 decoded tokens in 0.39 s."""
    assert compute_total_decode_tps([make_request(), make_request(sent=10.19)]) == pytest.approx(20 / 0.39)


def test_streams_that_start_a_little_apart_are_counted_while_all_decode():
    assert compute_total_decode_tps([make_request(), make_request(sent=10.02)]) == pytest.approx(100)


def test_total_decode_of_nothing_is_unknown():
    assert compute_total_decode_tps([make_request(tokens=1)]) is None


def test_all_figures_of_a_run_are_there_with_their_units():
    requests = tuple(make_request(sent=10.0 + 5 * turn, ttft=0.5 - 0.3 * turn, turn=turn) for turn in range(2))
    totals = RepeatTotals(10.0, 16.0, hits=30, lookups=40, miss_bytes=2200, energy_j=110.0)
    found = compute_metrics(Measurements(requests, (totals,), vram_peak_bytes=7, ram_peak_bytes=8, power_w=9.0))
    assert {name: pytest.approx(one.mean) for name, one in found.items()} == {
        "ttft_ms": 350, "ttft_p50_ms": 350, "ttft_p95_ms": 485, "ttft_cold_ms": 500, "ttft_warm_ms": 200,
        "e2e_ms": 550, "e2e_p50_ms": 550, "e2e_p95_ms": 685, "turn_time_s": 0.55, "turn_time_p95_s": 0.685,
        "tpot_ms": 20, "tpot_p95_ms": 20, "itl_ms": 20, "itl_p50_ms": 20, "itl_p95_ms": 20, "decode_tps": 50,
        "total_decode_tps": 50, "output_tps": 22 / 6, "hit_ratio": 0.75, "miss_bytes_per_token": 100,
        "joules_per_token": 5, "vram_peak_bytes": 7, "ram_peak_bytes": 8, "power_w": 9,
    }  # fmt: skip


def test_what_was_not_counted_is_left_out():
    found = compute_metrics(Measurements((make_request(),), (RepeatTotals(10.0, 11.0),)))
    absent = {"hit_ratio", "miss_bytes_per_token", "joules_per_token", "power_w", "prefill_tps", "ttft_warm_ms"}
    assert not absent & set(found)


def test_an_estimate_of_one_value_has_no_width():
    assert estimate([(0, (3.0,))], mean_of) == Estimate(mean=3, low=3, high=3, n=1)


def test_widening_makes_nothing_negative():
    found = estimate([(0, (0.0,)), (0, (1.0,))], mean_of)
    assert (found.low, found.mean) == (0.0, 0.5)


def test_an_interval_ignores_what_differs_by_design_between_turns():
    turns = [(turn, (100.0 * turn,)) for turn in range(1, 7) for _ in range(3)]
    found = estimate(turns, mean_of)
    assert (found.low, found.mean, found.high, found.n) == (350, 350, 350, 18)


def test_an_interval_is_the_same_for_the_same_seed_and_holds_its_figure():
    rng = random.Random(5)
    groups = [(0, tuple(rng.expovariate(1) for _ in range(9))) for _ in range(6)]
    first, again = (estimate(groups, percentile_of(95), seed=3) for _ in range(2))
    assert first == again
    assert first.low <= first.mean <= first.high


def test_intervals_over_three_repeats_cover_the_truth_as_often_as_they_say():
    """A run of six turns and three repeats, 300 times; 95 % intervals must not be 80 % ones."""
    rng, covered = np.random.default_rng(1), 0
    for trial in range(300):
        groups = [(turn, (10 * turn + rng.normal(),)) for turn in range(6) for _ in range(3)]
        found = estimate(groups, mean_of, seed=trial)
        covered += found.low <= 25 <= found.high
    assert covered / 300 > 0.91


def test_a_request_for_files_has_milliseconds_instead_of_moments():
    one = make_request(sent=8.0, ttft=0.5, itl=0.25, tokens=5, turn=2, cached_tokens=4)
    assert make_figures(one) == RequestFigures(
        repeat=0, conversation=0, turn=2, prompt_tokens=100, cached_tokens=4, completion_tokens=5,
        ttft_ms=500, e2e_ms=1500, tpot_ms=250, chunk_count=5,
    )  # fmt: skip
