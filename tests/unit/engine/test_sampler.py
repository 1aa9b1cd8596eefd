from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from pydantic import ValidationError

from freetoken.engine.sampler import Sampler, SamplingParams

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15]))


def draw(count: int = 2000, **params: object) -> Counter[int]:
    sampler = Sampler(SamplingParams.model_validate({"temperature": 1.0, "seed": 1} | params))
    return Counter(sampler.pick(LOGITS) for _ in range(count))


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert draw(20, temperature=0.0) == {1: 20}


def test_plain_sampling_follows_the_probabilities() -> None:
    counts = draw(4000)
    assert [counts[token] / 4000 for token in range(5)] == pytest.approx([0.05, 0.4, 0.1, 0.3, 0.15], abs=0.025)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    assert draw(temperature=0.2)[1] > 1500
    assert draw(temperature=5.0)[0] > 250


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draw(top_k=2)) == {1, 3}


def test_top_p_keeps_the_fewest_tokens_that_reach_p() -> None:
    assert set(draw(top_p=0.7)) == {1, 3}
    assert set(draw(top_p=0.71)) == {1, 3, 4}
    assert set(draw(top_p=0.01)) == {1}


def test_top_p_counts_within_what_top_k_has_left() -> None:
    # Of 0.4, 0.3, 0.15 the first is 0.47, the first two 0.82.
    assert set(draw(top_k=3, top_p=0.8)) == {1, 3}


def test_top_p_is_exact_where_more_candidates_than_the_first_look_are_needed() -> None:
    logits = torch.zeros(5000)
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.9, seed=0))
    assert len({sampler.pick(logits) for _ in range(3000)}) > 1024


def test_min_p_keeps_what_is_likely_enough_against_the_likeliest() -> None:
    assert set(draw(min_p=0.5)) == {1, 3}


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    def first(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.pick(LOGITS) for _ in range(50)]

    assert first(7) == first(7)
    assert first(7) != first(8)
    assert first(-3) == first(-3)


def test_without_a_seed_two_requests_differ() -> None:
    samplers = [Sampler(SamplingParams(temperature=1.0)) for _ in range(2)]
    assert [samplers[0].pick(LOGITS) for _ in range(60)] != [samplers[1].pick(LOGITS) for _ in range(60)]


def test_presence_and_frequency_penalties_count_generated_tokens_alone() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=0.2, frequency_penalty=0.1), prompt_ids=[1, 1, 1])
    # ln 0.4 - ln 0.3 = 0.288: one use of token 1 costs 0.3, so token 3 follows it at once.
    assert [sampler.pick(LOGITS) for _ in range(3)] == [1, 3, 1]


def test_repetition_penalty_counts_the_prompt_too() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), prompt_ids=[1])
    assert sampler.pick(LOGITS) == 3
    positive = Sampler(SamplingParams(repetition_penalty=2.0), prompt_ids=[0])
    assert positive.pick(torch.tensor([3.0, 2.0])) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_told(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature))
    with pytest.raises(ValueError, match="not finite"):
        sampler.pick(torch.tensor([math.nan, 1.0]))


@pytest.mark.parametrize("field", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"unknown": 1}])
def test_impossible_settings_are_refused(field: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams.model_validate(field)
