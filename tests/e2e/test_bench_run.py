"""`run_workload` against an engine process whose TTFT and ITL are known."""

import json
import time

import pytest

from freetoken.bench.run import BenchFailedError, BenchOptions, run_workload
from freetoken.bench.sample import GpuReading, HostReading
from freetoken.recipe.workload import Workload
from tests.fakes.precise import read_prompts, read_truth, run_precise_engine

QUICK = BenchOptions(warm_up_tokens=4, sample_period_s=0.05, read_gpu=lambda: None)


def make_workload(**facts):
    sizes = {"name": "w", "turns": 1, "prompt_tokens": 200, "output_tokens": 40, "context_tokens": 4096}
    return Workload.model_validate(sizes | facts)


def test_eight_streams_at_300_tokens_a_second_are_timed_as_they_were():
    """Held against what the engine did at that very time: a busy machine delays both, and 2 % is for a quiet one."""
    with run_precise_engine("--ttft-s", 0.4, "--itl-s", 1 / 300, "--counts") as url:
        workload = make_workload(concurrency=8, output_tokens=450)
        result = run_workload(url, workload, repeats=1, options=QUICK)
        truth = read_truth(url)[-8:]
    first = sum(one["first"] - one["received"] for one in truth) / 8
    rates = [(one["tokens"] - 1) / (one["last"] - one["first"]) for one in truth]
    assert result.metrics["decode_tps"].mean == pytest.approx(sum(rates) / 8, rel=0.08)
    assert result.metrics["total_decode_tps"].mean == pytest.approx(8 * 300, rel=0.15)
    assert result.metrics["ttft_ms"].mean == pytest.approx(1000 * first, rel=0.15)
    assert result.tokens.completion == 8 * 450
    assert (result.is_valid, result.findings) == (True, ())


def test_a_conversation_sends_its_whole_history_with_the_real_answers():
    with run_precise_engine("--ttft-s", 0, "--itl-s", 0, "--counts") as url:
        workload = make_workload(turns=3, shared_prefix_tokens=100, concurrency=2)
        result = run_workload(url, workload, repeats=2, options=QUICK)
        prompts = read_prompts(url)[3:]
    by_size = sorted(prompts, key=len)
    for shorter in by_size[:8]:
        assert any(longer.startswith(shorter) and len(longer) > len(shorter) for longer in by_size[4:])
    sizes = {(one.turn, one.prompt_tokens) for one in result.requests}
    for turn, size in sizes:
        assert size == pytest.approx(300 + 240 * turn, abs=12)
    # The prefix is shared within a repeat, and another in the next.
    assert len({prompt[:60] for prompt in prompts}) == 2
    assert result.findings == ()
    assert result.metrics["hit_ratio"].mean == 0.75


def test_no_prompt_is_ever_sent_twice_whatever_the_seed():
    with run_precise_engine("--ttft-s", 0, "--itl-s", 0) as url:
        for _ in range(2):
            run_workload(url, make_workload(output_tokens=4), repeats=2, seed=7, options=QUICK)
        prompts = read_prompts(url)
    assert len(set(prompts)) == len(prompts) == 8
    without_first_line = [prompt.partition("\n")[2][:300] for prompt in prompts]
    assert without_first_line[:4] == without_first_line[4:], "the text itself is the seed's"


def test_unseen_prompts_are_others():
    with run_precise_engine("--ttft-s", 0, "--itl-s", 0) as url:
        for is_unseen in (False, True):
            found = run_workload(url, make_workload(output_tokens=4), repeats=1, unseen=is_unseen, options=QUICK)
            assert found.is_unseen == is_unseen
        seen, unseen = (prompt.partition("\n")[2] for prompt in read_prompts(url)[2::3])
    assert seen[:200] != unseen[:200]


def test_chunks_of_several_tokens_are_counted_by_usage_and_told():
    with run_precise_engine("--ttft-s", 0.05, "--itl-s", 0.002, "--tokens-per-chunk", 4, "--counts") as url:
        result = run_workload(url, make_workload(output_tokens=80), repeats=1, options=QUICK)
    assert result.tokens.completion == 80
    assert [one.message for one in result.findings] == ["80 tokens came in 20 chunks: ITL is the gap between chunks"]
    assert result.is_valid


def test_a_tokenizer_of_one_token_a_character_is_learned_within_the_context():
    with run_precise_engine("--ttft-s", 0, "--itl-s", 0.001, "--context", 1024, "--characters", 1, "--counts") as url:
        result = run_workload(url, make_workload(context_tokens=1024), repeats=1, options=QUICK)
    assert result.is_valid
    assert result.requests[0].prompt_tokens == pytest.approx(200, rel=0.1)


def test_a_context_that_holds_nothing_is_told():
    with (
        run_precise_engine("--ttft-s", 0, "--itl-s", 0, "--context", 8) as url,
        pytest.raises(BenchFailedError, match="prompt is too long"),
    ):
        run_workload(url, make_workload(), repeats=1, options=QUICK)


def test_without_usage_figures_are_marked_as_estimated():
    with run_precise_engine("--ttft-s", 0, "--itl-s", 0.001, "--no-usage") as url:
        result = run_workload(url, make_workload(), repeats=1, options=QUICK)
    assert result.tokens.is_estimated
    assert result.requests[0].is_estimated
    assert result.requests[0].prompt_tokens is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--most-tokens", 30), "1 of 1 answers were shorter than asked for, one had 30 of 40 tokens"),
        (("--cached", 190000), "the prefix cache answered 190,000 tokens"),
    ],
)
def test_an_engine_that_does_less_than_asked_makes_the_run_invalid(arguments, words):
    with run_precise_engine("--ttft-s", 0, "--itl-s", 0.001, *arguments) as url:
        result = run_workload(url, make_workload(), repeats=1, options=QUICK)
    assert not result.is_valid
    assert words in result.invalid_because


def test_a_prompt_that_turned_out_too_long_is_sent_again_shorter():
    with run_precise_engine("--ttft-s", 0, "--itl-s", 0, "--context", 225) as url:
        result = run_workload(url, make_workload(context_tokens=240), repeats=1, options=QUICK)
    assert result.requests[0].prompt_tokens <= 185


def test_a_context_that_cannot_hold_the_workload_is_told_with_what_helps():
    with (
        run_precise_engine("--ttft-s", 0, "--itl-s", 0, "--context", 100) as url,
        pytest.raises(BenchFailedError) as caught,
    ):
        run_workload(url, make_workload(context_tokens=240), repeats=1, options=QUICK)
    assert caught.value.message.startswith("`w` was not measured: the engine answered 400: prompt is too long")
    assert caught.value.hint == "the workload needs 240 KV tokens: `ft ctl cache rebuild --kv 240`"


def test_an_engine_that_breaks_costs_the_run_and_nothing_else():
    words = "the engine answered 500: the fake broke"
    with run_precise_engine("--fail-at", 3) as url, pytest.raises(BenchFailedError, match=words):
        run_workload(url, make_workload(), repeats=1, options=QUICK)


def test_an_engine_that_hangs_is_given_up_at_the_deadline():
    options = BenchOptions(warm_up_tokens=4, read_gpu=lambda: None, deadline_s=0.6)
    with run_precise_engine("--ttft-s", 60) as url:
        started = time.monotonic()
        with pytest.raises(BenchFailedError, match=r"`w` was not measured within 0.6 s"):
            run_workload(url, make_workload(), repeats=1, options=options)
        assert time.monotonic() - started < 20


def test_what_the_machine_did_meanwhile_is_in_the_result():
    gpu = GpuReading(vram_used_bytes=5 << 30, power_w=50.0, throttle=frozenset({"hardware thermal"}))
    options = BenchOptions(
        warm_up_tokens=4, sample_period_s=0.02, read_gpu=lambda: gpu, read_host=lambda: HostReading(engine_bytes=7)
    )
    with run_precise_engine("--ttft-s", 0.1, "--itl-s", 0.005) as url:
        result = run_workload(url, make_workload(), repeats=1, options=options)
    assert result.mean("vram_peak_bytes") == 5 << 30
    assert (result.mean("ram_peak_bytes"), result.mean("power_w")) == (7, 50.0)
    assert result.mean("joules_per_token") > 0
    assert result.invalid_because == "the GPU's clocks were held down (hardware thermal) in 100% of the samples"
    assert json.loads(result.model_dump_json())["is_valid"] is False
