"""The control client against what the upstream engine was recorded to answer (freetoken 0.2.1)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetoken.adapters.control import ControlClient, EngineReplyError, EngineUnreachableError

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fixtures" / "control_replies.json").read_text())
Handler = Callable[[httpx.Request], httpx.Response]


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def connect(
    *answers: httpx.Response | Handler, key: str | None = None, seen: list[httpx.Request] | None = None
) -> ControlClient:
    """A client whose calls get `answers` in turn, the last one for ever."""
    clock, left = Clock(), list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        answer = left.pop(0) if len(left) > 1 else left[0]
        # Handed out several times, a response must not be read up.
        if isinstance(answer, httpx.Response):
            return httpx.Response(answer.status_code, content=answer.content)
        return answer(request)

    return ControlClient(
        "http://engine:1919/", key, transport=httpx.MockTransport(handle), sleep=clock.sleep, now=lambda: clock.now
    )


def reply(document: Any, code: int = 200) -> httpx.Response:
    return httpx.Response(code, json=document)


def stream(*documents: Any, end: str = "data: [DONE]\n\n") -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {json.dumps(one)}\n\n" for one in documents) + end)


def test_health_is_ready_only_when_ok_and_serving() -> None:
    loading = connect(reply(RECORDED["health_loading"])).health()
    assert (loading.status, loading.phase, loading.is_ready) == ("loading", "expert_banks", False)
    assert loading.progress is not None
    assert (loading.progress.done_bytes, loading.progress.total_bytes) == (5_000, 20_000)
    ready = connect(reply(RECORDED["health_ok"])).health()
    assert (ready.is_ready, ready.model, ready.version) == (True, "q36", "0.2.1")
    assert not connect(reply(RECORDED["health_ok"] | {"maintenance": "rebuilding"})).health().is_ready
    failed = connect(reply(RECORDED["health_error"])).health()
    assert failed.message is not None
    assert failed.message.startswith("AssertionError: cache budget too small")


def test_recorded_stats_are_read_with_their_names() -> None:
    stats = connect(reply(RECORDED["stats"])).stats()
    assert (stats.model.id, stats.model.ctx, stats.model.attn) == ("q36", 262144, "hybrid_linear")
    assert stats.kv is not None
    assert stats.mamba is not None
    assert (stats.kv.total_pages, stats.kv.page_size, stats.mamba.total_slots, stats.swa) == (8277, 1, 8, None)
    assert (stats.vram_bytes, stats.gpus[0]["name"]) == (7340032000, "NVIDIA H200")
    assert (stats.requests.completed, stats.requests.completion_tokens_total) == (3, 384)
    assert (stats.throughput.decode_tps, stats.moe_hits) == (128.6, None)


def test_recorded_cache_status_is_read_and_what_is_unknown_is_kept() -> None:
    status = connect(reply(RECORDED["cache_status"] | {"news": 1})).cache_status()
    assert (status.kv_tokens, status.expert_slots, status.state) == (8277, 1944, "serving")
    assert status.geometry.unit_bytes.model_dump() == {
        "kv_per_token": 20480, "moe_per_expert": 1781760, "mamba_per_slot": 64389120, "swa_per_token": 0,
    }  # fmt: skip
    assert (status.geometry.limits.moe_experts.min, status.geometry.limits.moe_experts.max) == (256, 2364)
    assert status.model_extra == {"news": 1}


def test_a_rebuild_asks_in_slots_and_whole_pages() -> None:
    seen: list[httpx.Request] = []
    status = RECORDED["cache_status"] | {"geometry": RECORDED["cache_status"]["geometry"] | {"page_size": 64}}
    client = connect(reply(status), reply(RECORDED["rebuild_ok"]), seen=seen)
    result = client.rebuild(expert_slots=768, kv_tokens=8200, timeout_s=9)
    assert (result.is_ok, result.moe_cache_size) == (True, 768)
    assert [(one.method, one.url.path) for one in seen] == [("GET", "/v1/cache/status"), ("POST", "/v1/cache/rebuild")]
    assert json.loads(seen[1].content) == {"mode": "if_idle", "timeout": 9, "moe_cache_size": 768, "num_pages": 129}


def test_a_recorded_rejection_is_an_answer_with_its_reason() -> None:
    result = connect(reply(RECORDED["rebuild_rejected"], 503)).rebuild(expert_slots=1800)
    assert (result.status, result.is_ok, result.moe_cache_size) == ("rejected", False, 1533)
    assert result.error is not None
    assert "needs 3.14 GiB > budget 2.70 GiB" in result.error


def test_a_busy_engine_is_asked_again_until_the_time_is_up() -> None:
    busy, conflict = reply({"status": "busy"}, 503), reply({"status": "busy"}, 409)
    result = connect(busy, conflict, busy, reply(RECORDED["rebuild_ok"])).rebuild(768)
    assert (result.status, result.duration_s) == ("ok", 1.5)
    assert connect(busy).rebuild(768, timeout_s=2).status == "busy"


def test_a_rebuild_that_takes_long_is_waited_for() -> None:
    during = reply({"state": "rebuilding"})
    after = reply({"state": "serving", "last_rebuild": RECORDED["rebuild_ok"]})
    result = connect(reply({"status": "timeout"}, 504), during, during, after).rebuild(768)
    assert (result.status, result.moe_cache_size, result.duration_s) == ("ok", 768, 1.0)
    assert connect(reply({"status": "timeout"}, 504), during).rebuild(768, timeout_s=3).status == "timeout"


@pytest.mark.parametrize("status", ["failed", "unsupported", "loading"])
def test_other_ends_of_a_rebuild_are_answers_too(status: str) -> None:
    assert connect(reply({"status": status, "error": "why"}, 503)).rebuild(768).status == status


@pytest.mark.parametrize(("answer", "words", "code"), [
    (reply({"error": "model is still loading"}, 503), "/v1/stats answered 503: model is still loading", None),
    (reply({"error": "Unauthorized"}, 401), "/v1/stats answered 401: Unauthorized", None),
    (reply({"error": {"message": "too long", "code": "context_length_exceeded"}}, 400),
     "/v1/stats answered 400: too long", "context_length_exceeded"),
    (httpx.Response(502, text="<html>bad gateway"), "/v1/stats answered 502: <html>bad gateway", None),
])  # fmt: skip
def test_errors_are_told_in_the_engines_own_words(answer: httpx.Response, words: str, code: str | None) -> None:
    with pytest.raises(EngineReplyError) as caught:
        connect(answer).stats()
    assert (caught.value.message, caught.value.status_code, caught.value.code) == (words, answer.status_code, code)


def test_something_else_behind_the_port_is_told() -> None:
    with pytest.raises(EngineReplyError, match="not as the control API does"):
        connect(httpx.Response(200, text="hello")).health()


def test_a_dead_engine_is_told_with_its_address() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[Errno 111] Connection refused")

    with pytest.raises(EngineUnreachableError, match=r"http://engine:1919 cannot be reached: .*refused"):
        connect(refuse).health()

    def hang(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("slow")

    with pytest.raises(EngineUnreachableError, match="did not answer in time"):
        connect(hang).health()


def test_the_key_goes_out_as_a_bearer() -> None:
    seen: list[httpx.Request] = []
    connect(reply(RECORDED["health_ok"]), key="sesame", seen=seen).health()
    assert seen[0].headers["authorization"] == "Bearer sesame"


def test_a_flush_waits_for_an_idle_engine() -> None:
    busy = reply({"status": "busy"}, 503)
    connect(busy, busy, reply({"status": "ok"})).flush()
    with pytest.raises(EngineReplyError, match="/v1/cache/flush answered 503"):
        connect(busy).flush(timeout_s=2)


def test_generated_text_comes_in_pieces_and_errors_in_the_stream_are_raised() -> None:
    assert list(connect(stream({"text": "a"}, {"text": "b"})).generate("x")) == ["a", "b"]
    with pytest.raises(EngineReplyError, match="out of memory"):
        list(connect(stream({"text": "a"}, {"error": {"message": "out of memory"}})).generate("x"))


def test_a_completion_is_timed_and_counted_by_usage() -> None:
    def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}

    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}
    seen: list[httpx.Request] = []
    found = connect(stream(chunk(""), chunk("ab"), chunk("c"), chunk("", "length"), usage), seen=seen).complete(
        "x", 3, model="m"
    )
    assert (found.text, found.prompt_tokens, found.completion_tokens, found.finish_reason) == ("abc", 7, 3, "length")
    body = json.loads(seen[0].content)
    assert body == {
        "model": "m", "prompt": "x", "max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with pytest.raises(EngineReplyError, match="without `usage`"):
        connect(stream(chunk("ab"))).complete("x", 3, model="m")


def test_recorded_requests_are_read() -> None:
    page = connect(reply({"entries": [RECORDED["request"]], "next_cursor": 9})).requests(since=3, limit=1)
    assert (page.next_cursor, page.entries[0].path, page.entries[0].completion_tokens) == (9, "/v1/chat/completions", 5)
