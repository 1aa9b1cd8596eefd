"""The upstream engine's own arithmetic, against the figures of its own planner function."""

import pytest

from freetoken.adapters.freetoken_arithmetic import (
    AutoPlan,
    AutoRefusal,
    choose_page_tokens,
    compute_fixed_bytes,
    compute_kv_bytes,
    compute_rope_bytes,
    compute_slot_bytes,
    compute_slot_cap,
    graph_batch_sizes,
    resident_alpha_bytes,
    upstream_auto_plan,
)
from freetoken.checkpoint.shape import Attention, Experts
from freetoken.units import GIB, MIB
from tests.fakes.planner_cases import make_qwen_shape, make_tiny_shape

WEIGHTS, EMBEDDING, SLOT, TOKEN = 2_709_175_616 + 67_108_864, 1_017_118_720, 1_781_760, 20_480
STATE, STATE_BF16 = 64_389_120, 32_931_840
CONFIGURATIONS = {  # weights, fixed bytes, overlap
    "A": (WEIGHTS, 25 * STATE, True),
    "B": (WEIGHTS, 9 * STATE, True),
    "C": (WEIGHTS - EMBEDDING, 9 * STATE_BF16, True),
    "D": (WEIGHTS - EMBEDDING, 2 * STATE, False),
}
SLOTS = {  # card in MiB -> slots of A, B, C, D
    6144: (None, 1032, 1762, 1856),
    8188: (1537, 2115, 2845, 2939),
    12282: (3705, 4284, 5013, 5107),
    16376: (5874, 6452, 7182, 7276),
    24564: (10211, 10240, 10240, 10240),
}
CASES = [(card, name, slots) for card, row in SLOTS.items() for name, slots in zip("ABCD", row, strict=True)]


def plan_cell(card_mib, name, **changes):
    weights, fixed, overlap = CONFIGURATIONS[name]
    return upstream_auto_plan(
        (card_mib - 460) * MIB, 0.9, weights, fixed, TOKEN, SLOT, 256, 40, overlap=overlap, **changes
    )  # fmt: skip


@pytest.mark.parametrize(("card_mib", "name", "slots"), CASES)
def test_slots_equal_all_twenty_cells_of_the_engines_own_table(card_mib, name, slots):
    plan = plan_cell(card_mib, name)
    if slots is None:
        assert plan == AutoRefusal(1_080_033_280, 978_082_905, 512, 8192)
    else:
        assert isinstance(plan, AutoPlan)
        assert plan.slots == slots


def test_kv_grows_only_once_every_expert_has_a_slot():
    pages = {(card, name): plan_cell(card, name).pages for card, name, slots in CASES if slots is not None}
    growing = {key: value for key, value in pages.items() if not 8192 <= value <= 8277}
    assert growing == {(24564, "B"): 55_975, (24564, "C"): 119_463, (24564, "D"): 127_647}
    assert pages[24564, "A"] == 8_194


@pytest.mark.parametrize(("name", "least_gib"), [("A", 5.66), ("B", 4.59), ("C", 3.24), ("D", 2.60)])
def test_least_free_vram_that_starts_is_the_published_one(name, least_gib):
    weights, fixed, overlap = CONFIGURATIONS[name]
    below, above = (
        upstream_auto_plan(
            int((least_gib + step) * GIB), 0.9, weights, fixed, TOKEN, SLOT, 256, 40, overlap=overlap
        )
        for step in (-0.01, 0.01)
    )  # fmt: skip
    assert isinstance(below, AutoRefusal)
    assert isinstance(above, AutoPlan)


@pytest.mark.parametrize(("reserve", "cost"), [(32_768, 283), (131_072, 1413), (262_144, 2919)])
def test_context_is_paid_in_slots(reserve, cost):
    short, long = plan_cell(16376, "B"), plan_cell(16376, "B", reserve_tokens=reserve)
    assert short.slots - long.slots == pytest.approx(cost, abs=1)


def test_overlap_is_dropped_only_where_the_kernel_cap_is_below_two_layers():
    assert plan_cell(16376, "B", slot_cap=992) == AutoPlan(
        992, pages=plan_cell(16376, "B", slot_cap=992).pages, has_overlap=True
    )
    assert plan_cell(16376, "B", slot_cap=500).has_overlap is False


def experts(stored, inter, hidden, layers=40, per_layer=256, **more):
    return Experts(
        layers=layers, per_layer=per_layer, top_k=8, hidden_size=hidden, intermediate_size=inter, format=stored,
        expert_bytes=1, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "inter", "hidden", "kernel", "slot"),
    [
        ("bf16", 512, 2048, "triton", 6_291_456),
        ("fp8_block", 512, 2048, "triton", 3_146_112),
        ("nvfp4", 512, 2048, "triton", 1_781_760),
        ("nvfp4", 512, 2048, "marlin", 1_769_472),
        ("bf16", 768, 2048, "triton", 9_437_184),
        ("nvfp4", 1536, 5120, "triton", 13_303_808),
        ("mxfp4", 2880, 2880, "triton", 13_236_480),
        ("ds_fp4", 2048, 4096, "triton", 13_369_344),
        ("nvfp4", 1536, 3072, "triton", 7_987_200),
        ("bf16", 704, 2816, "triton", 11_894_784),
        ("nvfp4", 704, 2816, "triton", 3_362_304),
    ],
)
def test_slot_bytes_equal_the_engines_table(stored, inter, hidden, kernel, slot):
    assert compute_slot_bytes(experts(stored, inter, hidden), kernel) == slot


def test_experts_without_a_gate_have_two_matrices():
    nemotron = experts("nvfp4", 1856, 2688, layers=23, per_layer=128, projections=2)
    assert compute_slot_bytes(nemotron) * nemotron.count == pytest.approx(15.41 * GIB, rel=0.003)  # reported banks


def test_marlin_caps_its_slots_and_keeps_alphas_beside_them():
    known = experts("nvfp4", 512, 2048)
    assert (compute_slot_cap(known), compute_slot_cap(known, "marlin")) == (10_240, 992)
    assert [resident_alpha_bytes(known, kernel) for kernel in ("triton", "w4a4", "marlin")] == [0, 81_920, 40_960]


def test_kv_and_state_bytes_of_qwen_equal_the_worked_example():
    shape = make_qwen_shape()
    assert compute_kv_bytes(shape) == 20_480
    assert compute_rope_bytes(shape) == 67_108_864
    assert compute_fixed_bytes(shape, 4) == 25 * STATE
    assert compute_fixed_bytes(shape, 1) == 9 * STATE
    assert compute_fixed_bytes(shape, 1, state_bytes=2) == 9 * STATE_BF16
    assert compute_fixed_bytes(shape, 1, has_prefix_cache=False) == 2 * STATE


def test_kv_of_a_plain_model_is_512_mib_for_4096_tokens_of_32_layers():
    attention = Attention(kinds=("full",) * 32, heads=32, kv_heads=8, head_dim=128)
    assert compute_kv_bytes(make_tiny_shape(attention=attention)) * 4096 == 512 * MIB


def test_sliding_layers_keep_a_fifth_and_a_map():
    attention = Attention(kinds=("full", "sliding"), heads=8, kv_heads=2, head_dim=64, sliding_window=128)
    shape = make_tiny_shape(attention=attention)
    assert compute_kv_bytes(shape) == 512 + int(0.2 * 512) + 8
    assert compute_fixed_bytes(shape, 2) == 512 * 2 * (2 * 128 + 16 + 128 + 2)


def test_captured_batch_sizes_are_one_two_four_then_eights_and_the_most():
    assert [graph_batch_sizes(most) for most in (1, 3, 4, 20)] == [(1,), (1, 2, 3), (1, 2, 4), (1, 2, 4, 8, 16, 20)]


def test_pages_are_single_tokens_unless_a_family_or_backend_forces_more():
    assert choose_page_tokens(make_qwen_shape(), "triton") == 1
    assert choose_page_tokens(make_qwen_shape(), "trtllm") == 64
    assert choose_page_tokens(make_qwen_shape(family="deepseek_v4"), None) == 128
