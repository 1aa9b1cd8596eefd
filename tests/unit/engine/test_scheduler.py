"""One engine thread on tiny stock models. What is awaited ends by itself; nothing sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from freetoken.engine.generation import GenerationDefaults
from freetoken.engine.request import ContextTooLongError, EngineClosedError, GenerationRequest, RequestHandle
from freetoken.engine.sampler import SamplingParams
from freetoken.engine.scheduler import Engine
from freetoken.errors import FtError
from tests.fakes.stock_engine import generate_alone, make_config, make_loaded, make_model

PROMPTS = [[(7 * place * place + 13 * number + place) % 300 for place in range(5 + 6 * number)] for number in range(8)]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture
def make_engine(model: Any) -> Iterator[Callable[..., Engine]]:
    engines = []

    def make(*, stops: frozenset[int] = frozenset(), family: str | None = None, **changes: Any) -> Engine:
        loaded = make_loaded(model=make_model(family) if family else model)
        engines.append(Engine(loaded, make_config(**changes), defaults=GenerationDefaults(stop_token_ids=stops)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(engine: Engine, prompt: list[int], max_tokens: int = 8, **fields: Any) -> RequestHandle:
    return engine.submit(GenerationRequest(prompt_ids=tuple(prompt), max_tokens=max_tokens, **fields))


class Gate:
    """Holds the engine's thread in its next forward until `open`."""

    def __init__(self, engine: Engine) -> None:
        self.is_held, self._may_go = threading.Event(), threading.Event()
        real = engine._forward.run

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.is_held.set()
            assert self._may_go.wait(30)
            return real(*args, **kwargs)

        engine._forward.run = run  # type: ignore[method-assign]

    def wait(self) -> None:
        assert self.is_held.wait(30)

    def open(self) -> None:
        self._may_go.set()


def test_eight_requests_at_once_give_the_answers_that_each_gives_alone(model: Any, make_engine: Any) -> None:
    engine = make_engine(max_running_requests=2, prefill_chunk_tokens=9)
    handles = [ask(engine, prompt) for prompt in PROMPTS]
    assert [list(handle) for handle in handles] == [generate_alone(model, prompt, 8) for prompt in PROMPTS]
    assert {handle.finish_reason for handle in handles} == {"length"}
    stats = engine.stats()
    assert (stats.completed, stats.running, stats.waiting, stats.kv_used_tokens) == (8, 0, 0, 0)
    assert (stats.prompt_tokens_total, stats.completion_tokens_total) == (sum(map(len, PROMPTS)), 64)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe"])
def test_sliding_and_linear_layers_give_the_same_answers_too(family: str, make_engine: Any) -> None:
    engine = make_engine(family=family, prefill_chunk_tokens=7)
    handles = [ask(engine, prompt, 6) for prompt in PROMPTS[2:5]]
    expected = [generate_alone(engine.loaded.model, prompt, 6) for prompt in PROMPTS[2:5]]
    assert [list(handle) for handle in handles] == expected


def test_a_kept_prefix_changes_no_answer_and_is_counted(model: Any, make_engine: Any) -> None:
    engine = make_engine()
    first = list(ask(engine, PROMPTS[5], 6))
    turn = [*PROMPTS[5], *first, 5, 6, 7]
    second = ask(engine, turn, 6)
    assert list(second) == generate_alone(model, turn, 6)
    # All but the last generated token have their KV.
    assert second.cached_tokens == len(PROMPTS[5]) + 5
    assert engine.stats().cached_tokens_total == second.cached_tokens
    assert engine.flush() == engine.pool.tokens - engine.pool.table.free_tokens + len(turn) + 5


def test_prefill_goes_in_chunks_and_phases_are_told_to_the_experts(make_engine: Any) -> None:
    engine = make_engine(prefill_chunk_tokens=4)
    list(ask(engine, PROMPTS[1], 4))
    assert engine.loaded.experts.phases == ["prefill"] * 3 + ["decode"] * 3


def test_decoding_goes_on_between_the_chunks_of_a_long_prompt(make_engine: Any) -> None:
    engine = make_engine(prefill_chunk_tokens=4)
    gate = Gate(engine)
    short = ask(engine, PROMPTS[0], 20)
    gate.wait()
    long = ask(engine, PROMPTS[7], 1)
    gate.open()
    assert (len(list(short)), len(list(long))) == (20, 1)
    # Two chunks of the short prompt come first, the first of them before the long one is admitted.
    assert len(PROMPTS[7]) == 47
    assert engine.loaded.experts.phases == ["prefill"] * 2 + ["prefill", "decode"] * 12 + ["decode"] * 7


def test_a_stop_token_ends_the_answer_is_counted_and_not_shown(model: Any, make_engine: Any) -> None:
    expected = generate_alone(model, PROMPTS[3], 8)
    stop = next(one for place, one in enumerate(expected) if place > 1 and one not in expected[:place])
    engine = make_engine(stops=frozenset({stop}))
    cut = expected.index(stop)
    handle = ask(engine, PROMPTS[3])
    assert (list(handle), handle.finish_reason, handle.completion_tokens) == (expected[:cut], "stop", cut + 1)
    ignoring = ask(engine, PROMPTS[3], ignore_eos=True)
    assert (list(ignoring), ignoring.finish_reason) == (expected, "length")
    other = ask(engine, PROMPTS[3], stop_token_ids=frozenset({expected[0]}))
    assert (list(other), other.completion_tokens) == ([], 1)


def test_the_same_seed_gives_the_same_text_beside_other_requests(make_engine: Any) -> None:
    engine = make_engine()
    sampling = SamplingParams(temperature=1.5, seed=11)
    alone = list(ask(engine, PROMPTS[4], 12, sampling=sampling))
    handles = [ask(engine, PROMPTS[number], 12, sampling=sampling) for number in (2, 4)]
    assert [list(handle) for handle in handles][1] == alone
    assert list(ask(engine, PROMPTS[4], 12, sampling=SamplingParams(temperature=1.5, seed=12))) != alone


def test_a_request_that_can_never_fit_is_refused_at_once_with_the_numbers(make_engine: Any) -> None:
    engine = make_engine(kv_tokens=100)
    with pytest.raises(ContextTooLongError) as caught:
        ask(engine, [1] * 60, 41)
    assert caught.value.message == (
        "prompt is too long: 101 tokens > 100 maximum (prompt + generation): 60 prompt tokens and max_tokens 41;"
        " the KV cache holds 100, the model 512 positions"
    )
    assert caught.value.hint == "ask for at most 40 tokens, or give the engine more KV"
    assert len(list(ask(engine, [1] * 60, 40))) == 40


def test_a_request_that_has_to_wait_for_kv_waits(make_engine: Any) -> None:
    engine = make_engine(kv_tokens=60, max_running_requests=4)
    gate = Gate(engine)
    first = ask(engine, PROMPTS[0], 50)
    gate.wait()
    second = ask(engine, PROMPTS[0], 20)
    gate.open()
    assert (len(list(first)), len(list(second))) == (50, 20)


def test_cancelling_frees_the_kv_and_lets_the_next_one_in(make_engine: Any) -> None:
    engine = make_engine(kv_tokens=64, max_running_requests=1)
    gate = Gate(engine)
    first, waiting = ask(engine, PROMPTS[0], 50), ask(engine, PROMPTS[1], 50)
    gate.wait()
    assert engine.stats().kv_used_tokens == 55
    first.cancel()
    waiting.cancel()
    gate.open()
    assert first.wait(30)
    assert waiting.wait(30)
    assert (first.finish_reason, len(list(first))) == ("cancelled", 1)
    assert (waiting.finish_reason, list(waiting)) == ("cancelled", [])
    assert len(list(ask(engine, PROMPTS[0], 50))) == 50
    stats = engine.stats()
    assert (stats.kv_used_tokens, stats.cancelled, stats.completed) == (0, 2, 1)


def test_a_request_whose_asker_has_enough_ends_as_completed(make_engine: Any) -> None:
    engine = make_engine(kv_tokens=64, max_running_requests=1)
    gate = Gate(engine)
    enough = ask(engine, PROMPTS[0], 50)
    gate.wait()
    enough.end()
    gate.open()
    assert enough.wait(30)
    assert (enough.finish_reason, len(list(enough))) == ("stop", 1)
    stats = engine.stats()
    assert (stats.kv_used_tokens, stats.cancelled, stats.completed) == (0, 0, 1)


def test_an_error_in_one_request_leaves_the_engine_serving(model: Any, make_engine: Any) -> None:
    engine = make_engine()
    real = engine._forward.run

    def run(token_ids: list[int], *args: Any, **kwargs: Any) -> torch.Tensor:
        if 299 in token_ids:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total")
        if 298 in token_ids:
            raise RuntimeError("shape mismatch")
        return real(token_ids, *args, **kwargs)

    engine._forward.run = run
    starved, broken, good = ask(engine, [1, 299]), ask(engine, [298]), ask(engine, PROMPTS[1])
    with pytest.raises(FtError, match=r"allocate 2\.00 GiB, in prefill of a request of 2 prompt tokens"):
        list(starved)
    with pytest.raises(FtError, match="RuntimeError: shape mismatch"):
        list(broken)
    assert list(good) == generate_alone(model, PROMPTS[1], 8)
    stats = engine.stats()
    assert (stats.failed, stats.completed, stats.kv_used_tokens) == (2, 1, 0)


def test_closing_ends_every_request_with_a_word_and_refuses_new_ones(make_engine: Any) -> None:
    engine = make_engine(max_running_requests=1)
    gate = Gate(engine)
    running, waiting = ask(engine, PROMPTS[0], 400), ask(engine, PROMPTS[1], 100)
    gate.wait()
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open()
    closing.join(30)
    for handle in (running, waiting):
        with pytest.raises(EngineClosedError, match="the engine was stopped"):
            list(handle)
    with pytest.raises(EngineClosedError, match="the engine is stopping and takes no more requests"):
        ask(engine, [1])
    engine.close()


def test_draining_finishes_what_runs_and_admits_nothing_until_resumed(make_engine: Any) -> None:
    engine = make_engine()
    handle = ask(engine, PROMPTS[0], 20)
    assert engine.drain(30)
    assert len(handle.token_ids) == 20
    with pytest.raises(EngineClosedError):
        ask(engine, [1])
    engine.resume()
    assert len(list(ask(engine, PROMPTS[0], 3))) == 3


def test_every_request_leaves_a_line_with_its_numbers(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="freetoken.engine"):
        engine = make_engine()
        handle = ask(engine, PROMPTS[1], 3)
        list(handle)
        engine.close()
    line = caplog.messages[-1]
    assert line.startswith(f"request {handle.number}: 11 prompt tokens (0 cached), 3 generated, first after ")
    assert line.endswith(" tok/s, length")
