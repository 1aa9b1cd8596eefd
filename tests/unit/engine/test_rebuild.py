from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from freetoken.engine import rebuild as module
from freetoken.engine.generation import GenerationDefaults
from freetoken.engine.request import GenerationRequest
from freetoken.engine.scheduler import Engine
from tests.fakes.stock_engine import generate_alone, make_config, make_loaded, make_model
from tests.unit.engine.test_scheduler import PROMPTS, Gate, ask


@pytest.fixture
def engine() -> Iterator[Engine]:
    loaded: Any = make_loaded(model=make_model())
    config: Any = make_config(kv_tokens=200)
    engine = Engine(loaded, config, defaults=GenerationDefaults())
    yield engine
    engine.close()


def test_slots_and_kv_are_resized_in_the_middle_of_an_answer_without_changing_it(engine: Engine) -> None:
    gate = Gate(engine)
    handle = ask(engine, PROMPTS[4], 30)
    gate.wait()
    gate.open()
    results = [engine.rebuild(expert_slots=4, kv_tokens=300), engine.rebuild(kv_tokens=70), engine.rebuild(12)]
    assert list(handle) == generate_alone(engine.loaded.model, PROMPTS[4], 30)
    assert [(one.status, one.expert_slots, one.kv_tokens) for one in results] == [
        ("ok", 4, 300), ("ok", 4, 70), ("ok", 12, 70),
    ]  # fmt: skip
    assert engine.last_rebuild == results[-1]
    assert engine.state == "serving"


def test_kv_below_what_runs_or_waits_is_busy_and_keeps_the_old_cache(engine: Engine) -> None:
    gate = Gate(engine)
    first = ask(engine, PROMPTS[0], 50)
    gate.wait()
    second, third = ask(engine, PROMPTS[0], 60), ask(engine, PROMPTS[0], 100)
    futures = [engine._post(lambda tokens=tokens: engine._rebuild(None, tokens)) for tokens in (40, 104)]
    gate.open()
    kept = "old cache kept, still serving"
    assert [(one.status, one.error) for one in (future.result(30) for future in futures)] == [
        ("busy", f"running requests hold 55 tokens of KV, more than the 40 asked for; {kept}"),
        ("busy", f"a waiting request needs 105 tokens of KV, more than the 104 asked for; {kept}"),
    ]
    assert [len(list(one)) for one in (first, second, third)] == [50, 60, 100]
    assert engine.pool.tokens == 200


@pytest.mark.parametrize(("slots", "kv", "words"), [
    (1, None, "requested 1 expert slots, outside 2 to 18 of the strategy `offload`"),
    (19, None, "requested 19 expert slots, outside 2 to 18 of the strategy `offload`"),
    (None, 0, "requested KV of 0 tokens is below 1"),
    (18, 100_000, "requested cache (moe=18 slots, kv=100000 tokens) needs 36.6 MiB > budget 1.08 MiB"),
])  # fmt: skip
def test_what_does_not_fit_is_rejected_with_the_numbers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, slots: int | None, kv: int | None, words: str
) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda _: module.RESERVE_BYTES + (1 << 20))
    result = engine.rebuild(slots, kv)
    assert (result.status, result.error) == ("rejected", f"{words}; old cache kept, still serving")
    assert (result.expert_slots, result.kv_tokens) == (8, 200)


def test_limits_follow_from_the_budget(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda _: module.RESERVE_BYTES + 384 * 1000)
    limits = engine.cache_status().limits
    budget = 8 * 1024 + 200 * 384 + 384 * 1000
    assert (limits.budget_bytes, limits.kv_min, limits.kv_max) == (budget, 1, 1200)
    assert (limits.slots_min, limits.slots_max) == (2, 18)


def test_no_slots_can_be_asked_for_where_the_strategy_has_none(engine: Engine) -> None:
    engine.loaded.engine_config.strategy = "fused"
    engine.loaded.experts.expert_slots = 18
    assert engine.rebuild(expert_slots=10).status == "rejected"
    assert engine.rebuild(expert_slots=18, kv_tokens=150).status == "ok"
    assert (engine.cache_status().limits.slots_min, engine.cache_status().limits.slots_max) == (18, 18)


def test_running_out_of_memory_in_a_resize_puts_the_old_sizes_back(engine: Engine) -> None:
    engine.loaded.experts.fail_resize_to = 12
    result = engine.rebuild(expert_slots=12, kv_tokens=100)
    assert (result.status, result.expert_slots, result.kv_tokens) == ("rejected", 8, 200)
    assert "CUDA out of memory" in (result.error or "")
    assert engine.rebuild(expert_slots=11).status == "ok"


def test_where_the_old_sizes_cannot_be_had_either_the_engine_has_failed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resize(slots: int) -> int:
        engine.loaded.experts.expert_slots = 0
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.loaded.experts, "resize", resize)
    result = engine.rebuild(expert_slots=12)
    assert (result.status, engine.state) == ("failed", "failed")
    assert "could not be restored" in (engine.failure or "")


def test_a_second_rebuild_at_the_same_time_is_a_conflict(engine: Engine) -> None:
    gate = Gate(engine)
    handle = ask(engine, PROMPTS[0], 4)
    gate.wait()
    first = engine.rebuild(expert_slots=4, timeout_s=0)
    second = engine.rebuild(expert_slots=5)
    gate.open()
    list(handle)
    assert (first.status, first.error) == ("timeout", "still rebuilding after 0 s")
    assert (second.status, second.is_conflict, second.error) == ("busy", True, "another rebuild is in progress")
    engine.flush()
    assert engine.rebuild(expert_slots=5).status == "ok"


def test_a_queued_request_that_no_longer_fits_after_a_resize_is_refused(engine: Engine) -> None:
    gate = Gate(engine)
    handle = ask(engine, PROMPTS[0], 4)
    gate.wait()
    future = engine._post(lambda: (engine.pool.resize(50), engine._refuse_too_long()))
    waiting = engine.submit(GenerationRequest(prompt_ids=(1, 2), max_tokens=90))
    gate.open()
    future.result(30)
    list(handle)
    assert waiting.wait(30)
    assert (waiting.finish_reason, str(waiting.error).split(":")[0]) == ("error", "prompt is too long")
