"""The full prefill chunk and the sizes read back, on a client that counts tokens as told."""

from __future__ import annotations

import random
from typing import Any

import pytest

from freetoken.adapters.control import EngineReplyError
from freetoken.adapters.replies import CacheStatus, Completion, Stats
from freetoken.deploy.prove import fill_chunk, find_drift, measure_lines, read_strategy
from freetoken.errors import NotReadyError
from tests.unit.deploy.test_diff import make_recipe, plan_of


class CountingClient:
    """Counts a token for every `characters` characters, and refuses more than `limit`."""

    def __init__(self, characters: float, limit: int) -> None:
        self.characters, self.limit = characters, limit
        self.prompts: list[str] = []

    def complete(self, prompt: str, max_tokens: int, **_: Any) -> Completion:
        self.prompts.append(prompt)
        tokens = int(len(prompt) / self.characters)
        if tokens + max_tokens > self.limit:
            raise EngineReplyError("prompt is too long", status_code=400, code="context_length_exceeded")
        return Completion(text="", ttft_s=0.1, duration_s=0.1, prompt_tokens=tokens, completion_tokens=max_tokens)


@pytest.mark.parametrize("characters", [1.0, 2.7, 3.3, 4.0, 6.5])
@pytest.mark.parametrize(("wanted", "limit"), [(256, 2048), (2040, 2048), (8192, 65536), (1, 64)])
def test_a_chunk_is_filled_whatever_the_tokenizer(characters: float, wanted: int, limit: int) -> None:
    client = CountingClient(characters, limit)
    found = fill_chunk(client, wanted, limit, 3.3, random.Random(0))  # type: ignore[arg-type]
    assert wanted <= found.prompt_tokens < limit
    assert len({prompt[:16] for prompt in client.prompts}) == len(client.prompts)


def test_a_chunk_that_cannot_be_filled_is_not_ready() -> None:
    with pytest.raises(NotReadyError, match="no prompt of 500 tokens could be made within a context of 100"):
        fill_chunk(CountingClient(3.0, 100), 500, 100, 3.0, random.Random(0))  # type: ignore[arg-type]


def make_status(**geometry: Any) -> CacheStatus:
    values = {"num_pages": 2048, "page_size": 1, "moe_cache_size": 16} | geometry
    return CacheStatus.model_validate({"state": "serving", "geometry": values})


def test_sizes_that_equal_the_plan_are_no_drift_and_whole_pages_are_allowed() -> None:
    plan = plan_of(make_recipe())
    assert find_drift(plan, make_status(), "offload") == ()
    assert find_drift(plan, make_status(num_pages=33, page_size=64), "offload") == (
        "`kv_tokens` is 2,112, planned 2,048",
    )
    assert find_drift(plan_of(make_recipe(), kv_tokens=2050), make_status(num_pages=33, page_size=64), None) == ()


def test_every_wrong_size_is_named_and_slots_only_where_there_are_some() -> None:
    plan = plan_of(make_recipe())
    assert find_drift(plan, make_status(moe_cache_size=9, num_pages=1024), "cpu") == (
        "`expert_slots` is 9, planned 16",
        "`kv_tokens` is 1,024, planned 2,048",
        "`strategy` is `cpu`, planned `offload`",
    )
    assert find_drift(plan_of(make_recipe(), strategy="fused", expert_slots=0), make_status(), "fused") == ()


def test_the_strategy_is_found_wherever_the_api_puts_it() -> None:
    nowhere, stats = make_status(), Stats.model_validate({})
    assert read_strategy(nowhere, stats) is None
    assert read_strategy(nowhere, Stats.model_validate({"strategy": "cpu"})) == "cpu"
    assert read_strategy(make_status(moe_strategy="offload"), stats) == "offload"


def test_measured_lines_are_unit_costs_times_counts_unless_the_engine_adds_up_itself() -> None:
    plan = plan_of(make_recipe())
    status = make_status(unit_bytes={"kv_per_token": 10, "moe_per_expert": 100, "mamba_per_slot": 7}, num_mamba_slots=2)
    computed = {"kv_cache": 20480, "expert_slots": 1600, "linear_state": 21}
    assert measure_lines(plan, status, Stats.model_validate({})) == computed
    told = Stats.model_validate({"memory": {"kv_cache": 20500, "dense_weights": 5, "head": 0}})
    assert measure_lines(plan, status, told) == {**computed, "kv_cache": 20500, "dense_weights": 5}
