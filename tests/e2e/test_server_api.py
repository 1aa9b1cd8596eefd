"""The HTTP API as clients use it: the official `openai` and `anthropic` packages, and plain HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from freetoken.adapters.control import ControlClient
from freetoken.engine.scheduler import Engine
from freetoken.server.body import MAX_BYTES
from freetoken.server.state import LARGE_BYTES
from freetoken.server.text import TextCodec
from tests.fakes.http_server import serve
from tests.fakes.stock_text import Parrot, make_codec, make_parrot_engine

TOOLS: Any = [{
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}]  # fmt: skip
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Served:
    """A server around a parrot that counts as fast as it can, two requests at a time."""

    def __init__(self, url: str, engine: Engine, codec: TextCodec) -> None:
        self.url, self.engine, self.codec = url, engine, codec
        self.parrot: Parrot = engine.loaded.model
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        self.control = ControlClient(url)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        # As ASCII, in which half a surrogate pair can be written too.
        headers = {"content-type": "application/json"}
        return httpx.post(self.url + path, content=json.dumps(body), headers=headers, trust_env=False, timeout=120)

    def used_tokens(self) -> int:
        kv = self.control.stats().kv
        assert kv is not None
        return kv.used_pages


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    codec = make_codec()
    engine = make_parrot_engine(codec)
    with serve(engine, codec) as (url, _):
        yield Served(url, engine, codec)


@pytest.fixture
def server(module_server: Served) -> Iterator[Served]:
    yield module_server
    module_server.parrot.delay_s, module_server.parrot.fail_on = 0.0, ""
    assert wait_until(lambda: module_server.engine.active_count == 0)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say [[{text}]]"}]


def test_a_completion_is_the_same_whole_and_streamed_with_usage(server: Served) -> None:
    arguments: Any = {"model": "parrot", "prompt": "say [[naïve 北京 🎉]]", "temperature": 0}
    whole = server.openai.completions.create(**arguments)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("naïve 北京 🎉", "stop")
    assert whole.usage is not None
    # 18 bytes and the stop token; every byte is a token.
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (26, 19)
    chunks = list(server.openai.completions.create(stream=True, stream_options={"include_usage": True}, **arguments))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "naïve 北京 🎉"
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens if chunks[-1].usage else 0) == ([], 19)


def test_several_prompts_get_one_choice_each(server: Served) -> None:
    found = server.openai.completions.create(model="parrot", prompt=["say [[one]]", "say [[two!]]"], max_tokens=10)
    assert [(choice.index, choice.text) for choice in found.choices] == [(0, "one"), (1, "two!")]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (11 + 12, 4 + 5)


def test_a_chat_is_the_same_whole_and_streamed_with_reasoning_and_tools(server: Served) -> None:
    text = f"<think>hm</think>Let me add.\n{CALL}"
    arguments: Any = {"model": "parrot", "messages": say(text), "tools": TOOLS, "max_tokens": 200}
    whole = server.openai.chat.completions.create(**arguments).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert (whole.message.content, whole.message.reasoning_content) == ("Let me add.", "hm")  # type: ignore[attr-defined]
    assert whole.message.tool_calls is not None
    function = whole.message.tool_calls[0].function  # type: ignore[union-attr]
    assert (function.name, json.loads(function.arguments)) == ("add", {"a": 1})
    deltas, reasons = [], []
    for chunk in server.openai.chat.completions.create(stream=True, **arguments):
        deltas.append(chunk.choices[0].delta)
        reasons.append(chunk.choices[0].finish_reason)
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Let me add."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls if call.function] == [
        (0, "add", '{"a": 1}')
    ]
    assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_tools_are_passed_through_the_chat_template_and_results_back(server: Served) -> None:
    plain = server.openai.chat.completions.create(model="parrot", messages=say("x"))
    call: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    with_tools = server.openai.chat.completions.create(
        model="parrot", tools=TOOLS,
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "2"}, *say("x"),
        ],
    )  # fmt: skip
    assert plain.usage is not None
    assert with_tools.usage is not None
    # The template writes `tools: add ` into a system turn, and a turn for each of the two messages.
    added = len("system\ntools: add \n") + 2 + len("assistant\n(called add a=1)\n") + 2 + len("tool\n2\n") + 2
    assert with_tools.usage.prompt_tokens - plain.usage.prompt_tokens == added


def test_anthropic_messages_whole_streamed_and_counted(server: Served) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    client = anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    arguments: Any = {"model": "parrot", "max_tokens": 200, "messages": say(f"Sure. {CALL}"), "tools": tools}
    whole = client.messages.create(**arguments)
    assert [block.type for block in whole.content] == ["text", "tool_use"]
    assert (whole.content[0].text, whole.content[1].name, whole.content[1].input) == ("Sure.", "add", {"a": 1})
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**arguments) as stream:
        kinds = [event.type for event in stream if event.type.startswith(("message", "content"))]
        final = stream.get_final_message()
    assert kinds[0], kinds[-1] == ("message_start", "message_stop")
    assert [(block.type, getattr(block, "text", None)) for block in final.content] == [
        ("text", "Sure."),
        ("tool_use", None),
    ]
    assert (final.content[1].input, final.usage.output_tokens) == ({"a": 1}, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model="parrot", messages=arguments["messages"], tools=tools)
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert counted.input_tokens == total
    stopped = client.messages.create(
        model="parrot", max_tokens=50, messages=say("one two three"), stop_sequences=["two"]
    )
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one ", "stop_sequence", "two")
    cut = client.messages.create(model="parrot", max_tokens=3, messages=say("one two"))
    assert (cut.content[0].text, cut.stop_reason) == ("one", "max_tokens")


def test_anthropic_errors_have_their_shape(server: Served) -> None:
    answer = server.post("/v1/messages", {"model": "parrot", "messages": say("x"), "max_tokens": 5000})
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_exactly_before_it(server: Served, stream: bool) -> None:
    body: Any = {"model": "parrot", "prompt": "say [[one STO STOP two]]", "stop": ["STOP", "two"]}
    if stream:
        chunks = list(server.openai.completions.create(stream=True, **body))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = server.openai.completions.create(**body).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == ("one STO ", "stop")
    assert wait_until(lambda: server.used_tokens() == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_stop_string_ended_counts_as_completed(server: Served, stream: bool) -> None:
    def count() -> tuple[int, int]:
        found = server.control.stats().requests.model_dump()
        return found["completed"], found["cancelled"]

    completed, cancelled = count()
    server.parrot.delay_s = 0.005
    body = {"prompt": "say [[one STOP " + "x" * 200 + "]]", "stop": ["STOP"], "max_tokens": 300, "stream": stream}
    assert server.post("/v1/completions", body).status_code == 200
    assert wait_until(lambda: sum(count()) == completed + cancelled + 1)
    assert count() == (completed + 1, cancelled)


def test_max_tokens_ends_with_length_and_ignore_eos_goes_on(server: Served) -> None:
    cut = server.openai.completions.create(model="parrot", prompt="say [[abcdef]]", max_tokens=3)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("abc", "length")
    on = server.openai.completions.create(
        model="parrot", prompt="say [[ab]]", max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert on.usage is not None
    assert (on.choices[0].text, on.choices[0].finish_reason, on.usage.completion_tokens) == ("ab", "length", 6)


def test_a_request_without_max_tokens_gets_the_servers_default(server: Served) -> None:
    found = server.openai.completions.create(model="parrot", prompt="count")
    assert found.usage is not None
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (64, "length")


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(server: Served) -> None:
    tokens = server.engine.pool.tokens
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model="parrot", prompt="x" * 1000, max_tokens=tokens)
    error: Any = caught.value.body
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    assert error["message"].startswith(
        f"prompt is too long: {1000 + tokens} tokens > {tokens} maximum (prompt + generation): 1000 prompt tokens and"
        f" max_tokens {tokens}; the KV cache holds {tokens}, the model 4096 positions"
    )
    assert server.engine.active_count == 0


@pytest.mark.parametrize(("path", "body", "code", "words"), [
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "could not encode request"),
    ("/v1/chat/completions", {"messages": []}, 422, "`messages`"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 3}, 400, "`n` is 3"),
    ("/v1/completions", {"prompt": [1, 2, 3]}, 400, "token ids are not supported"),
    ("/v1/completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 422, "`temperature`"),
    ("/generate", {"prompt": "x", "max_tokens": 0}, 400, "`max_tokens` is 0"),
    ("/v1/nothing", {}, 404, "Not Found: POST /v1/nothing"),
    ("/v1/cache/rebuild", {"timeout": 1e308}, 422, "`timeout`"),
    ("/v1/cache/flush?timeout=1e308", {}, 422, "`timeout`"),
    ("/v1/completions", {"prompt": ["x"] * 1025}, 400, "`prompt` is a list of 1,025, at most 1024 are taken at once"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "`content` is a number, expected"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": "x"}}]}, 400, "`content` is an object"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": []}}]},
     400, "every one of `tools` needs a `function` with a `name`"),
])  # fmt: skip
def test_errors_have_openais_shape_and_a_sentence(server: Served, path: str, body: Any, code: int, words: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == code
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert words in answer.json()["error"]["message"]


HALF = "ab\ud800"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/generate")


def ask(path: str, text: str) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": text}]}
    return {"max_tokens": 1} | ({"prompt": text} if path in ("/v1/completions", "/generate") else chat)


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
def test_half_a_surrogate_pair_in_a_prompt_is_refused_in_a_sentence(server: Served, path: str) -> None:
    answer = server.post(path, ask(path, HALF))
    assert answer.status_code == 400
    assert "is half a surrogate pair (`\\ud800`)" in answer.json()["error"]["message"]


def test_half_a_surrogate_pair_elsewhere_is_told_back_without_harm(server: Served) -> None:
    answer = server.post("/v1/chat/completions", ask("/v1/chat/completions", "x") | {"response_format": {"type": HALF}})
    assert answer.json()["error"]["message"] == "`response_format` of type `ab\\ud800` is not supported"


ODD = (
    None, 5, 1e308, "", HALF, [], {}, [None], ["x"], {"type": []}, [{"type": "text", "text": 5}],
    [{"type": "tool_use", "name": [], "input": 5}], [{"type": "tool_result", "content": 5}], [{"function": 5}],
)  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("field", ["role", "content", "tool_calls"])
def test_nothing_in_a_message_is_a_failure_of_the_server(server: Served, path: str, field: str) -> None:
    with httpx.Client(trust_env=False, timeout=120, headers={"content-type": "application/json"}) as client:
        for value in ODD:
            body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x", field: value}]}
            answer = client.post(server.url + path, content=json.dumps(body))
            assert answer.status_code in (200, 400, 422), (value, answer.text)


@pytest.mark.parametrize("content", [5, ["x"], {"type": "text"}])
def test_content_of_a_message_that_is_no_list_of_blocks_is_refused(server: Served, content: Any) -> None:
    answer = server.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": content}]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"].startswith("`content` of a message must be a text or a list of blocks")


@pytest.mark.parametrize(("body", "words"), [
    (b'{"prompt": "\xc3\xa9", x}', "the body is no JSON: expecting property name enclosed in double quotes at byte 17"),
    (b"", "`body`: Field required"),
    (b'{"prompt": "\xff"}', "the body is no JSON that can be read: it is no UTF-8 text at byte 12"),
    (b"[" * 200_000, "the body is no JSON that can be read: it is nested too deep"),
])  # fmt: skip
def test_a_body_that_is_no_json_is_told_with_the_place(server: Served, body: bytes, words: str) -> None:
    for path in PATHS:
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + path, content=body, headers=headers, trust_env=False)
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]["message"] == words


def test_a_body_of_another_kind_is_told_what_to_send(server: Served) -> None:
    answer = httpx.post(server.url + "/generate", data={"prompt": "x"}, trust_env=False)
    assert answer.json()["error"]["message"] == (
        "the body is sent as `application/x-www-form-urlencoded`; send it with `Content-Type: application/json`"
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_beyond_the_limit_is_refused_with_the_numbers(server: Served, path: str, is_announced: bool) -> None:
    size = MAX_BYTES + 1
    pieces = [b"x" * 65536] * (MAX_BYTES // 65536) + [b"x"]
    content: Any = b"".join(pieces) if is_announced else iter(pieces)
    answer = httpx.post(server.url + path, content=content, trust_env=False, timeout=120)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == (
        f"the body is too large: {'' if is_announced else 'at least '}{size:,} bytes, at most {MAX_BYTES:,} are taken"
    )
    assert answer.json()["error"]["type"] == "request_too_large"
    assert server.openai.completions.create(model="parrot", prompt="say [[fine]]").choices[0].text == "fine"


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_cannot_fit_by_its_bytes_is_never_put_into_tokens(
    server: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.codec, "_make_ids", lambda *_, **__: pytest.fail("the text was put into tokens"))
    longest, tokens = server.codec.longest_token_bytes, server.engine.pool.tokens
    answer = server.post(path, ask(path, "x" * 8_000_000))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    message = answer.json()["error"]["message"]
    assert message.startswith("prompt is too long: 8,000,0")
    assert f" tokens at least, as none holds more than {longest} bytes, more than the {tokens:,} that fit" in message


def test_small_requests_are_served_while_a_large_text_is_put_into_tokens(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, done = threading.Event(), threading.Event()
    encode = server.codec.encode

    def wait(text: str, most_tokens: int | None = None) -> list[int]:
        if len(text) >= LARGE_BYTES:
            begun.set()
            assert done.wait(60)
        return encode(text, most_tokens)

    monkeypatch.setattr(server.codec, "encode", wait)
    large = {"prompt": "x" * LARGE_BYTES, "max_tokens": 1}
    # As many as there are threads for the small ones, if they were to use the same.
    with ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(server.post, "/v1/completions", large) for _ in range(40)]
        try:
            assert begun.wait(60)
            for path in PATHS:
                assert server.post(path, ask(path, "x")).status_code == 200
        finally:
            done.set()
        assert {one.result(60).status_code for one in answers} == {400}


def test_running_out_of_memory_fails_that_request_alone(server: Served) -> None:
    server.parrot.fail_on = "BOOM"
    answer = server.post("/v1/completions", {"prompt": "BOOM"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
    assert answer.json()["error"]["message"].startswith(
        "CUDA out of memory. Tried to allocate 2.00 GiB, in prefill of a request of 4 prompt tokens"
    )
    with pytest.raises(openai.APIError, match="out of memory"):
        list(server.openai.completions.create(model="parrot", prompt="BOOM", stream=True))
    assert server.openai.completions.create(model="parrot", prompt="say [[fine]]").choices[0].text == "fine"
    entries = server.control.requests(limit=512).entries
    assert "out of memory" in (entries[-2].error or "")
    assert (entries[-1].error, entries[-1].status) == (None, 200)


def test_a_seed_repeats_a_text_and_temperature_defaults_to_one(server: Served) -> None:
    def draw(seed: int) -> str:
        found = server.openai.completions.create(
            model="parrot", prompt="count", max_tokens=20, seed=seed, temperature=100
        )
        return found.choices[0].text

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_generate_streams_greedy_text(server: Served) -> None:
    answer = server.post("/generate", {"prompt": "say [[né]]", "max_tokens": 9})
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert "".join(json.loads(event.removeprefix("data: "))["text"] for event in events) == "né"


def test_eight_clients_at_once_get_their_own_answers(server: Served) -> None:
    texts = [f"answer number {number} {'é' * number}" for number in range(8)]

    def ask(text: str) -> str:
        return server.openai.completions.create(model="parrot", prompt=f"say [[{text}]]", temperature=0).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, texts)) == texts
    assert server.used_tokens() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_kv(server: Served, stream: bool) -> None:
    server.parrot.delay_s = 0.02
    before = server.control.stats().requests.model_extra or {}
    body = {"prompt": "count", "max_tokens": 900, "stream": stream, "ignore_eos": True}
    with httpx.Client(trust_env=False, timeout=httpx.Timeout(5, read=0.6)) as client:
        if stream:
            with client.stream("POST", server.url + "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # kept: letting go of the iterator would close the connection
                assert next(lines).startswith('data: {"id":"cmpl-')
                assert server.used_tokens() == 905
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(server.url + "/v1/completions", json=body)
    assert wait_until(lambda: server.used_tokens() == 0, 5)
    after = server.control.stats().requests.model_extra or {}
    assert after["cancelled"] == before["cancelled"] + 1


def test_slots_and_kv_resized_in_the_middle_of_an_answer_leave_it_unchanged(server: Served) -> None:
    expected = "".join(chr(97 + number % 26) for number in range(150))
    pieces: list[str] = []
    resized = threading.Event()

    def read() -> None:
        for piece in server.control.generate(f"say [[{expected}]]", 160):
            pieces.append(piece)
            if len(pieces) == 20:
                resized.wait(10)

    reader = threading.Thread(target=read)
    server.parrot.delay_s = 0.005
    reader.start()
    assert wait_until(lambda: len(pieces) >= 20)
    with ControlClient(server.url) as control:
        results = [control.rebuild(expert_slots=slots, kv_tokens=kv) for slots, kv in ((3, 2000), (12, 330), (8, 1024))]
    resized.set()
    reader.join(30)
    assert [result.status for result in results] == ["ok", "ok", "ok"]
    assert "".join(pieces) == expected


def test_models_tell_what_can_be_served_and_what_the_model_could(server: Served) -> None:
    found = server.openai.models.list().data[0]
    assert (found.id, found.max_model_len, found.context_length) == (  # type: ignore[attr-defined]
        "parrot", server.engine.pool.tokens, 4096,
    )  # fmt: skip
    assert server.openai.models.retrieve("parrot").id == "parrot"
    with pytest.raises(openai.NotFoundError, match="no model `gpt` here, only `parrot`"):
        server.openai.models.retrieve("gpt")


def test_a_key_is_asked_for_everywhere_but_on_health() -> None:
    codec = make_codec()
    with serve(make_parrot_engine(codec), codec, api_key="sesame") as (url, _):
        answers = [
            httpx.get(url + "/v1/models", headers=headers, trust_env=False).status_code
            for headers in ({}, {"x-api-key": "no"}, {"x-api-key": "sesame"}, {"Authorization": "Bearer sesame"})
        ]
        assert answers == [401, 401, 200, 200]
        assert httpx.get(url + "/health", trust_env=False).json()["status"] == "ok"
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        with ControlClient(url, "sesame") as control:
            assert control.complete("say [[x]]", 1).text == "x"
