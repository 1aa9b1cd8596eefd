"""Predicted speed: the published check of the practical form, and what follows from it."""

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.planner.memory import ResolvedSettings, SpeedTraits
from freetoken.planner.plan import Calibration
from freetoken.planner.rates import Rates, resolve_rates
from freetoken.planner.roofline import (
    compute_chunk,
    compute_decode_step,
    compute_prefill_s,
    computed_prompt_tokens,
    fit_hit_curve,
    predict_hit_ratio,
    predict_speed,
)
from freetoken.recipe.workload import Workload
from tests.fakes.planner_cases import make_gpu, make_machine, make_qwen_shape, make_recipe, make_request

EXPERT_NVFP4, EXPERT_BF16 = 1_769_472, 6_291_456
DENSE_ELEMENTS = 1_305_408_128 + 125_829_120 + 508_559_360  # all but the embedding
WEIGHTS = 3 * 2048 * 512


def traits(path, expert_bytes=EXPERT_NVFP4, dense=1.83e9, overhead=0.003):
    return SpeedTraits(
        experts=10_240, experts_per_token=320, expert_bytes=int(expert_bytes), dense_read_bytes=int(dense),
        kv_read_bytes_per_token=20_480, active_parameters=3e9, miss_path=path, efficiency=0.8, step_overhead_s=overhead,
    )  # fmt: skip


def rates(vram, pcie, cpu=1e12):
    return Rates(
        vram=vram * 1e9, pcie=pcie * 1e9, pcie_pageable=1e9, dram=cpu * 1e9, cpu_experts=cpu * 1e9, disk=1e9, flops=1e13
    )


# name, traits, rates, slots, context, c, measured tok/s, error as published
RUNS = [
    ("4060 Laptop, hybrid, 40k read", traits("hybrid", overhead=0.005), rates(256, 11.8, 47.5), 1638, 40_000, 9,
     39.3, 0.03),
    ("5070 Ti, 5,120 slots, 64k read", traits("pcie", overhead=0.0025), rates(896, 52), 5120, 65_536, 9, 118.8, 0.03),
    ("RTX 2000 Ada, Q4, 6,510 slots", traits("pcie", WEIGHTS * 4.85 / 8, DENSE_ELEMENTS * 5.3 / 8, 0.003),
     rates(224, 14.9), 6510, 2_000, 9, 61.1, 0.04),
    ("RTX 2000 Ada, Q6, 4,720 slots", traits("pcie", WEIGHTS * 6.5625 / 8, DENSE_ELEMENTS * 6.5625 / 8, 0.0025),
     rates(224, 14.9), 4720, 2_000, 9, 47.9, 0.07),
    ("3090 on PCIe 3, 512 slots", traits("pcie"), rates(936, 12.1), 512, 0, 10, 25.3, 0.11),
    ("5060 Ti, 256 slots", traits("pcie", overhead=0.004), rates(448, 13), 256, 0, 9, 23.0, 0.06),
    ("4090 BF16, hybrid, 64k KV", traits("hybrid", EXPERT_BF16, DENSE_ELEMENTS * 2, 0.004), rates(1008, 25.1, 63.2),
     2590, 2_000, 9, 42.7, 0.27),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model", "rate", "slots", "context", "c", "measured", "error"), RUNS)
def test_practical_form_predicts_published_runs_within_the_stated_error(
    name, model, rate, slots, context, c, measured, error
):
    step = compute_decode_step(model, rate, slots=slots, context_tokens=context, curve=c)
    assert 1 / step.seconds == pytest.approx(measured, rel=error + 0.01), name


def test_offload_and_hybrid_bracket_the_published_5090_run():
    slots = int(0.37 * 10_240)
    pair = []
    for path in ("pcie", "hybrid"):
        model = traits(path, EXPERT_BF16, DENSE_ELEMENTS * 2)
        pair.append(
            1 / compute_decode_step(model, rates(1792, 52.7, 77.3), slots=slots, context_tokens=0, curve=9).seconds
        )
    assert pair[0] < 83
    assert pair[1] > 77
    assert pair == [pytest.approx(78, rel=0.03), pytest.approx(91, rel=0.05)]


@pytest.mark.parametrize(
    ("share", "hit"),
    [(0.025, 0.20), (0.05, 0.32), (0.12, 0.57), (0.225, 0.74), (0.37, 0.85), (0.5, 0.91), (0.65, 0.95)],
)
def test_hit_law_gives_the_published_example_values(share, hit):
    assert predict_hit_ratio(share, 9) == pytest.approx(hit, abs=0.03)


def test_hit_law_is_exact_at_both_ends_and_one_reading_pins_its_parameter():
    assert (predict_hit_ratio(0, 9), predict_hit_ratio(1, 9), predict_hit_ratio(1.5, 9)) == (0, 1, 1)
    assert fit_hit_curve(0.05, 0.367) == pytest.approx(10.0, abs=0.2)
    assert fit_hit_curve(0.3, predict_hit_ratio(0.3, 7.5)) == pytest.approx(7.5)
    assert [fit_hit_curve(*pair) for pair in ((0, 0.5), (1, 1), (0.5, 0), (0.5, 1))] == [None] * 4


def test_cpu_strategy_computes_every_expert_from_host_memory():
    step = compute_decode_step(traits("dram"), rates(336, 12, 32), slots=512, context_tokens=0, curve=9)
    assert step.hit_ratio == 0
    assert step.miss_bytes == 320 * EXPERT_NVFP4
    assert step.miss_s == pytest.approx(320 * EXPERT_NVFP4 / 32e9)


def streaming(**changes):
    return traits("pcie").model_copy(
        update={"prefill_stream_bytes": 10_240 * EXPERT_NVFP4, "stream_path": "pcie", "chunk_overhead_s": 0.0} | changes
    )


def test_one_pass_over_the_bank_takes_the_published_time_and_bounds_prefill():
    chunk = compute_chunk(streaming(), rates(336, 11.8), 1024)
    assert chunk.stream_s == pytest.approx(1.54, abs=0.01)
    assert 1024 / chunk.stream_s == pytest.approx(667, rel=0.01)


def test_serial_streaming_adds_up_what_double_buffering_hides():
    overlapped, serial = streaming(), streaming(is_stream_overlapped=False)
    both = compute_chunk(overlapped, rates(336, 11.8), 4096), compute_chunk(serial, rates(336, 11.8), 4096)
    assert both[0].seconds == max(both[0].stream_s, both[0].compute_s)
    assert both[1].seconds == pytest.approx(both[1].stream_s + both[1].compute_s)


def test_two_small_chunks_stream_the_bank_twice():
    model, rate = streaming(), rates(4800, 50.9)._replace(flops=6e14)
    one, two = compute_prefill_s(model, rate, 2000, 2048), compute_prefill_s(model, rate, 2000, 1024)
    assert (one, two) == (pytest.approx(0.35, abs=0.02), pytest.approx(0.70, abs=0.03))  # measured 0.35 and 0.70


def test_attention_makes_the_last_chunk_of_a_long_prompt_dearer():
    model = streaming(full_attention_layers=10, attention_width=4096)
    assert (
        compute_chunk(model, rates(336, 50), 8192, 200_000).seconds > compute_chunk(model, rates(336, 50), 8192).seconds
    )


def test_a_prefix_cache_leaves_only_what_is_new_to_compute():
    work = Workload(turns=3, shared_prefix_tokens=1000, prompt_tokens=200, output_tokens=50)
    assert [computed_prompt_tokens(work, turn, True) for turn in (1, 2, 3)] == [(1200, 0), (200, 1250), (200, 1500)]
    assert [computed_prompt_tokens(work, turn, False) for turn in (1, 2, 3)] == [(1200, 0), (1450, 0), (1700, 0)]


SETTINGS = ResolvedSettings(gpu="0", expert_slots=1200, kv_tokens=8192, prefill_chunk_tokens=4096, prefix_cache=True)


def predict(calibration=Calibration(), **machine):  # noqa: B008
    request = make_request(make_recipe(), make_machine(make_gpu(6, 5.6), **machine), calibration=calibration)
    return predict_speed(request, SETTINGS, FreetokenAdapter().memory_model.speed_traits(request, SETTINGS))


def test_prediction_of_a_6_gb_laptop_is_the_published_one_and_names_its_limit():
    found = predict()
    assert found.decode_tps == pytest.approx(29, rel=0.1)  # 1,218 slots, plain offload
    assert found.limited_by == "pcie"
    assert found.decode_tps_low < found.decode_tps < found.decode_tps_high
    assert found.ttft_low_s < found.ttft_s < found.ttft_high_s
    assert found.notes[1] == "hit rate from a published prior (c = 9, 8 to 10), not measured here"


def test_measured_curve_and_overhead_replace_the_prior_and_narrow_the_range():
    prior, known = predict(), predict(Calibration(hit_curve_c=14.0, step_overhead_s=0.002, launches=3))
    assert known.decode_tps > prior.decode_tps
    assert known.hit_ratio == pytest.approx(predict_hit_ratio(1200 / 10_240, 14.0))
    width = [(one.decode_tps_high - one.decode_tps_low) / one.decode_tps for one in (prior, known)]
    assert width[1] < width[0]
    assert not any("prior" in note for note in known.notes)


def test_rates_that_a_profile_lacks_are_guessed_and_said_so():
    from freetoken.hardware.model import Bandwidth

    machine = make_machine(make_gpu(6, 5.6), bandwidth=Bandwidth())
    found = resolve_rates(machine, machine.gpus[0])
    assert found.pcie == pytest.approx(12.4e9)  # 4.0 x8
    assert found.vram == pytest.approx(285e9)  # 30 SMs
    assert found.guessed == ("dram", "h2d", "vram", "disk")
    notes = predict(bandwidth=Bandwidth()).notes
    assert any(note.startswith("guessed bandwidths: dram, h2d, vram, disk") for note in notes)


def test_fused_needs_no_link_and_is_limited_by_vram():
    request = make_request(make_recipe(), make_machine(make_gpu(24, 23.5)))
    settings = SETTINGS.model_copy(update={"strategy": "fused", "expert_slots": 0})
    found = predict_speed(request, settings, FreetokenAdapter().memory_model.speed_traits(request, settings))
    assert (found.hit_ratio, found.miss_bytes_per_token, found.limited_by) == (None, None, "vram")
    assert make_qwen_shape().experts.count == 10_240
