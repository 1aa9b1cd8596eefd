"""Our control API has every field that the upstream engine was recorded to send, and one client reads both."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetoken.adapters.control import ControlClient, EngineReplyError
from freetoken.engine.scheduler import Engine
from tests.fakes.http_server import serve
from tests.fakes.stock_text import make_codec, make_parrot_engine

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "control_replies.json").read_text())


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Engine]]:
    codec = make_codec()
    engine = make_parrot_engine(codec)
    with serve(engine, codec) as (url, _):
        yield url, engine


@pytest.fixture(scope="module")
def client(served: tuple[str, Engine]) -> Iterator[ControlClient]:
    with ControlClient(served[0]) as client:
        client.complete("abc", 4)
        yield client


def missing(recorded: Any, ours: Any, path: str = "") -> list[str]:
    """Fields of `recorded` that `ours` lacks or has of another kind; null stands for any kind."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        return [
            found
            for key, value in recorded.items()
            for found in (missing(value, ours[key], f"{path}.{key}") if key in ours else [f"{path}.{key} is not there"])
        ]
    if recorded is None or ours is None or isinstance(ours, type(recorded)):
        return []
    both_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (recorded, ours))
    return [] if both_numbers else [f"{path} is {ours!r}, was {recorded!r}"]


@pytest.mark.parametrize(("path", "recorded"), [
    ("/health", "health_ok"), ("/v1/stats", "stats"), ("/v1/cache/status", "cache_status"),
])  # fmt: skip
def test_every_recorded_field_is_there(
    served: tuple[str, Engine], client: ControlClient, path: str, recorded: str
) -> None:
    ours = httpx.get(served[0] + path, trust_env=False).json()
    assert missing(RECORDED[recorded], ours) == []


def test_every_field_of_a_recorded_rebuild_and_request_is_there(
    served: tuple[str, Engine], client: ControlClient
) -> None:
    answer = httpx.post(served[0] + "/v1/cache/rebuild", json={"moe_cache_size": 9}, trust_env=False)
    assert (answer.status_code, missing(RECORDED["rebuild_ok"], answer.json())) == (200, [])
    listed = httpx.get(served[0] + "/v1/requests", trust_env=False).json()
    assert missing(RECORDED["request"], listed["entries"][0]) == []


def test_the_client_reads_every_reply(client: ControlClient) -> None:
    assert client.health().is_ready
    stats, status = client.stats(), client.cache_status()
    assert stats.kv is not None
    assert stats.moe_hits is not None
    assert stats.moe_hits.lookups == stats.moe_hits.hits + stats.moe_hits.misses > 0
    assert status.kv_tokens == stats.kv.total_pages * stats.kv.page_size
    assert client.requests().entries[-1].path == "/v1/completions"
    assert client.prepare_stop is not None


def test_a_resize_is_read_back_and_an_impossible_one_changes_nothing(client: ControlClient) -> None:
    assert client.rebuild(expert_slots=6, kv_tokens=500).is_ok
    status = client.cache_status()
    assert (status.expert_slots, status.kv_tokens, status.state) == (6, 500, "serving")
    refused = client.rebuild(expert_slots=10_000)
    assert (refused.status, refused.moe_cache_size) == ("rejected", 6)
    assert refused.error == (
        "requested 10000 expert slots, outside 2 to 18 of the strategy `offload`; old cache kept, still serving"
    )
    assert client.cache_status().last_rebuild == refused.model_dump(exclude={"duration_s"})


@pytest.mark.parametrize(("body", "code", "status"), [
    ({"num_mamba_slots": 3}, 503, "unsupported"), ({"num_swa_pages": 3}, 422, "failed"),
    ({"num_swa_pages": 3, "swa_full_tokens_ratio": 0.5}, 422, "failed"), ({}, 200, "ok"),
])  # fmt: skip
def test_pools_that_are_not_there_are_refused_with_upstreams_codes(
    served: tuple[str, Engine], body: dict[str, Any], code: int, status: str
) -> None:
    answer = httpx.post(served[0] + "/v1/cache/rebuild", json=body, trust_env=False)
    assert (answer.status_code, answer.json()["status"]) == (code, status)


def test_a_busy_engine_and_a_conflict_have_upstreams_codes(served: tuple[str, Engine], client: ControlClient) -> None:
    url, engine = served
    handle_prompt = "count "
    stream = client.generate(handle_prompt, 200, ignore_eos=True)
    next(stream)
    try:
        busy = httpx.post(url + "/v1/cache/rebuild", json={"num_pages": 10}, trust_env=False)
        assert (busy.status_code, busy.json()["status"], busy.json()["num_pages"]) == (503, "busy", engine.pool.tokens)
        assert "running requests hold 206 tokens of KV, more than the 10 asked for" in busy.json()["error"]
        engine._rebuild_lock.acquire()
        conflict = httpx.post(url + "/v1/cache/rebuild", json={"num_pages": 600}, trust_env=False)
        assert (conflict.status_code, conflict.json()["status"]) == (409, "busy")
    finally:
        if engine._rebuild_lock.locked():
            engine._rebuild_lock.release()
        stream.close()


def test_flush_answers_to_get_and_post(served: tuple[str, Engine], client: ControlClient) -> None:
    # What a client has left is ended between two steps, and its KV is kept until then.
    deadline = time.monotonic() + 30
    while client.stats().requests.active and time.monotonic() < deadline:
        time.sleep(0.01)
    client.flush()
    assert httpx.get(served[0] + "/v1/cache/flush", trust_env=False).json() == {"status": "ok", "dropped_tokens": 0}


def test_before_the_model_is_loaded_health_answers_and_all_else_says_loading() -> None:
    with serve(None, make_codec()) as (url, state), ControlClient(url) as client:
        state.set_progress("expert_banks", 1, 4)
        found = client.health()
        assert (found.status, found.phase, found.is_ready) == ("loading", "expert_banks", False)
        with pytest.raises(EngineReplyError, match="answered 503: model is still loading"):
            client.stats()
        assert client.rebuild(expert_slots=3).status == "loading"
        with pytest.raises(EngineReplyError, match="answered 503: model is still loading"):
            client.complete("x", 1)
        assert httpx.get(url + "/v1/models", trust_env=False).json()["data"][0]["id"] == "parrot"


def test_prepare_stop_drains_and_closes_admission() -> None:
    codec = make_codec()
    with serve(make_parrot_engine(codec), codec) as (url, state), ControlClient(url) as client:
        client.complete("abc", 4)
        answer = httpx.post(url + "/v1/admin/prepare-stop", json={}, trust_env=False).json()
        assert answer == {
            "instance_id": state.instance_id, "model_id": "parrot", "prompt_tokens_total": 3,
            "completion_tokens_total": 4, "uptime_s": answer["uptime_s"], "drain_complete": True,
        }  # fmt: skip
        assert (client.health().maintenance, client.health().is_ready) == ("stopping", False)
        with pytest.raises(EngineReplyError, match="503: server unavailable: it is stopping"):
            client.complete("x", 1)
