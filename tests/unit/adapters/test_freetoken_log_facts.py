"""Figures that only the upstream engine's log has, over lines as 0.2.1 printed them on an H200."""

import httpx
import pytest

from freetoken.adapters.control import ControlClient
from freetoken.adapters.freetoken_log_facts import parse_compile_s, parse_hits
from freetoken.adapters.replies import MoeHits

PREFIX = "\x1b[1m[2026-11-29|16:24:40|core|rank=0]\x1b[0m \x1b[32mINFO    \x1b[0m "
OFFLOAD = PREFIX + "MoE decode, pinned 40 layers: hit 71.8%, per layer-step miss 2.25 fetch 2.25 cpu 0.00\n"
HYBRID = PREFIX + "MoE decode, pinned 40 layers: hit 86.8%, per layer-step miss 1.06 fetch 0.75 cpu 0.31\n"
MIXED = (
    PREFIX + "MoE decode, pinned 31 layers: hit 80.0%, per layer-step miss 1.60 fetch 1.60 cpu 0.00; "
    "locked 4 layers: hit 50.0%, per layer-step miss 4.00 fetch 1.00 cpu 3.00; cpu-only 5 layers\n"
)
SLOT_BYTES = 1_781_760


def test_hits_of_one_line_are_shares_of_the_steps_between_two_lines():
    # 40 layers x 40 steps x 2.25 misses; a step of a layer looks up eight experts.
    found = parse_hits(OFFLOAD, SLOT_BYTES)
    assert found == MoeHits(lookups=12766, hits=9166, misses=3600, miss_bytes=3600 * SLOT_BYTES, hit_ratio=0.718)
    assert found.lookups / (40 * 40) == pytest.approx(8, abs=0.03)


def test_only_misses_that_were_fetched_are_traffic():
    found = parse_hits(HYBRID, SLOT_BYTES)
    assert (found.misses, found.miss_bytes) == (1696, 1200 * SLOT_BYTES)
    assert found.hit_ratio == pytest.approx(0.868, abs=1e-3)


def test_layer_groups_count_by_their_layers():
    found = parse_hits(MIXED)
    assert found.misses == round(31 * 40 * 1.6 + 4 * 40 * 4.0)
    assert found.hit_ratio == pytest.approx(1 - found.misses / (35 * 40 * 8), abs=1e-3)


def test_a_line_without_a_miss_counts_like_the_others():
    found = parse_hits(OFFLOAD + PREFIX + "MoE decode, pinned 40 layers: hit 100.0%, per layer-step miss 0.00 fetch "
                       "0.00 cpu 0.00\n")  # fmt: skip
    assert found.hit_ratio == pytest.approx((0.718 + 1) / 2, abs=1e-3)
    assert parse_hits(PREFIX + "MoE decode, pinned 40 layers: hit 100.0%, per layer-step miss 0.00 fetch 0.00 cpu 0.00"
                      ).hit_ratio == 1.0  # fmt: skip


def test_no_line_is_no_figure():
    assert parse_hits(PREFIX + "MoE decode, cpu-only 40 layers\n") is None
    assert parse_hits("") is None


def capture(begin, end, warmup):
    return (
        f"[2026-11-29|{begin}|core|rank=0] INFO     Start capturing CUDA graphs with sizes: [1]\n"
        f"[2026-11-29|{end}|core|rank=0] INFO     Free GPU memory after capturing CUDA graphs: 0.27 GiB\n"
        f"[2026-11-29|{end}|core|rank=0] INFO     Prefill warmup complete for lengths [80, 128] in {warmup} s\n"
    )


#: The recorded first start of `lean6`, and a later one of `cpu_8`.
FIRST, LATER = capture("16:23:49", "16:24:17", "21.187"), capture("16:08:02", "16:08:05", "1.088")


def test_a_first_start_is_told_by_what_capture_and_warm_up_took_beyond_the_usual():
    assert parse_compile_s(FIRST) == pytest.approx(28 - 3.0 + 21.187 - 1.1)
    assert parse_compile_s(LATER) == 0.0
    assert parse_compile_s("") == 0.0


def test_the_last_start_of_a_log_counts():
    assert parse_compile_s(FIRST + LATER) == 0.0
    assert parse_compile_s(LATER + FIRST) > 40


def test_the_control_client_takes_hits_from_the_log_where_the_api_has_none():
    replies = {
        "/v1/stats": {"uptime_s": 3},
        "/v1/cache/status": {"geometry": {"unit_bytes": {"moe_per_expert": SLOT_BYTES}}},
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=replies[request.url.path]))
    client = ControlClient("http://engine", transport=transport, read_hits=lambda size: parse_hits(OFFLOAD, size))
    assert client.stats().moe_hits == parse_hits(OFFLOAD, SLOT_BYTES)
    replies["/v1/stats"]["moe_hits"] = {"lookups": 10, "hits": 9, "misses": 1, "miss_bytes": 5}
    assert client.stats().moe_hits.hits == 9
