"""`/v1/models`, `/v1/chat/completions`, `/v1/completions` as OpenAI's clients speak them, and `/generate`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from freetoken.server.errors import ApiError
from freetoken.server.generation import TextStream, make_request, make_sampling, run_while_connected
from freetoken.server.output import Piece, make_parser
from freetoken.server.schemas import ChatBody, CompletionBody, GenerateBody
from freetoken.server.sse import format_event, make_stream
from freetoken.server.state import RequestEntry, ServerState
from freetoken.server.text import PromptTooLongError, TextCodec

DONE = "data: [DONE]\n\n"


def make_router(state: ServerState) -> APIRouter:
    """The endpoints, bound to `state`."""
    router = APIRouter()

    @router.get("/v1")
    async def root() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe_model(state)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != state.options.served_model_name:
            raise ApiError(
                404, f"no model `{name}` here, only `{state.options.served_model_name}`", code="model_not_found"
            )
        return _describe_model(state)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatBody) -> Response:
        entry = note_entry(request, state, body.stream)
        answer = await start_chat(state, body, entry, request.scope.get("ft.body_bytes", 0))
        if body.stream:
            events = _stream_chat(answer, include_usage=body.wants_usage)
            return make_stream(events, request.url.path, entry)
        return JSONResponse(await run_while_connected(request, _whole_chat(answer)))

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        entry = note_entry(request, state, body.stream)
        streams = await _start_completions(state, body, entry)
        if body.stream:
            events = _stream_completion(state, streams[0], include_usage=body.wants_usage)
            return make_stream(events, request.url.path, entry)
        return JSONResponse(await run_while_connected(request, _whole_completions(state, streams)))

    @router.post("/generate", response_model=None)
    async def generate(request: Request, body: GenerateBody) -> Response:
        entry = note_entry(request, state, is_stream=True)
        if body.max_tokens < 1:
            raise ApiError(400, f"`max_tokens` is {body.max_tokens}, it must be at least 1")
        stream = await _start_greedy(state, body, entry)
        return make_stream(_stream_generate(stream), request.url.path, entry)

    return router


def note_entry(request: Request, state: ServerState, is_stream: bool) -> RequestEntry:
    """The row of this request in the ring, which the middleware has begun."""
    entry: RequestEntry = request.scope.get("ft.entry") or RequestEntry(request.method, request.url.path)
    entry.model, entry.stream = state.options.served_model_name, is_stream
    return entry


class ChatAnswer:
    """A chat generation on its way: the text stream, and the parser that tells its parts."""

    def __init__(
        self, state: ServerState, stream: TextStream, prompt_text: str, tools: list[dict[str, Any]] | None
    ) -> None:
        self.stream = stream
        self.model = state.options.served_model_name
        self._parser = make_parser(prompt_text, tools, is_harmony=state.codec.speaks_harmony)
        self.has_called = False

    async def pieces(self) -> AsyncIterator[Piece]:
        """Content, reasoning and tool calls as they come."""
        async for text in self.stream:
            for piece in self._parser.add(text):
                yield self._note(piece)
        for piece in self._parser.flush():
            yield self._note(piece)

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended."""
        return "tool_calls" if self.has_called and self.stream.finish_reason == "stop" else self.stream.finish_reason

    def _note(self, piece: Piece) -> Piece:
        self.has_called = self.has_called or piece.call is not None
        return piece


async def start_chat(
    state: ServerState, body: ChatBody, entry: RequestEntry | None, body_bytes: int = 0
) -> ChatAnswer:  # fmt: skip
    """Renders, encodes and submits. Raises UsageError, ContextTooLongError, ApiError."""
    codec = state.serving_codec
    body.refuse_unsupported()
    tools = body.offered_tools
    prompt, ids = await state.run_aside(
        body_bytes, lambda: encode_chat(codec, body, state.serving_engine.context_limit)
    )
    request = make_request(
        state,
        ids,
        body.token_limit,
        make_sampling(state, body),
        ignore_eos=body.ignore_eos,
        stop_token_ids=body.stop_token_ids,
    )
    stream = TextStream(state, request, body.stops, skip_special=not codec.speaks_harmony, entry=entry)
    return ChatAnswer(state, stream, prompt, tools)


def encode_chat(codec: TextCodec, body: ChatBody, most_tokens: int) -> tuple[str, list[int]]:
    """(the rendered prompt, its ids). Raises UsageError."""
    if len(body.messages) > most_tokens:
        raise PromptTooLongError(f"{len(body.messages):,} messages have a token each at least", most_tokens)
    prompt = codec.render_chat(body.messages, body.offered_tools, body.template_options)
    return prompt, codec.encode_rendered(prompt, most_tokens)


async def _whole_chat(answer: ChatAnswer) -> dict[str, Any]:
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls = []
    async for piece in answer.pieces():
        if piece.call is not None:
            calls.append(_describe_call(piece))
        else:
            texts[piece.kind].append(piece.text)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["content"])}
    if texts["reasoning"]:
        message["reasoning_content"] = "".join(texts["reasoning"])
    if calls:
        message["tool_calls"], message["content"] = calls, message["content"] or None
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    return _frame("chat.completion", answer.model) | {"choices": [choice], "usage": answer.stream.usage}


async def _stream_chat(answer: ChatAnswer, *, include_usage: bool) -> AsyncIterator[str]:
    frame, calls = _frame("chat.completion.chunk", answer.model), 0

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return format_event(frame | {"choices": [choice]} | ({"usage": None} if include_usage else {}))

    yield chunk({"role": "assistant", "content": ""})
    async for piece in answer.pieces():
        if piece.call is not None:
            yield chunk({"tool_calls": [{"index": calls} | _describe_call(piece)]})
            calls += 1
        else:
            yield chunk({"content" if piece.kind == "content" else "reasoning_content": piece.text})
    yield chunk({}, answer.finish_reason)
    if include_usage:
        yield format_event(frame | {"choices": [], "usage": answer.stream.usage})
    yield DONE


async def _start_completions(state: ServerState, body: CompletionBody, entry: RequestEntry) -> list[TextStream]:
    codec = state.serving_codec
    body.refuse_unsupported()
    sampling = make_sampling(state, body)
    most = state.serving_engine.context_limit
    ids = [await state.run_aside(len(one), partial(codec.encode, one, most)) for one in body.prompts]
    requests = [
        make_request(
            state, one, body.max_tokens, sampling, ignore_eos=body.ignore_eos, stop_token_ids=body.stop_token_ids
        )
        for one in ids
    ]
    streams: list[TextStream] = []
    try:
        for request in requests:
            streams.append(TextStream(state, request, body.stops, entry=entry))
    except Exception:
        for stream in streams:
            stream.handle.cancel()
        raise
    return streams


async def _whole_completions(state: ServerState, streams: list[TextStream]) -> dict[str, Any]:
    tasks = [asyncio.ensure_future(stream.read_all()) for stream in streams]
    try:
        texts = await asyncio.gather(*tasks)
    finally:
        for task, stream in zip(tasks, streams, strict=True):
            task.cancel()
            stream.handle.cancel()
    choices = [
        {"index": index, "text": text, "logprobs": None, "finish_reason": stream.finish_reason}
        for index, (text, stream) in enumerate(zip(texts, streams, strict=True))
    ]
    usages = [stream.usage for stream in streams]
    usage = {key: sum(one[key] for one in usages) for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
    frame = _frame("text_completion", state.options.served_model_name)
    return frame | {"choices": choices, "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}}


async def _stream_completion(state: ServerState, stream: TextStream, *, include_usage: bool) -> AsyncIterator[str]:
    frame = _frame("text_completion", state.options.served_model_name)

    def chunk(text: str, finish_reason: str | None = None) -> str:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return format_event(frame | {"choices": [choice]} | ({"usage": None} if include_usage else {}))

    async for text in stream:
        yield chunk(text)
    yield chunk("", stream.finish_reason)
    if include_usage:
        yield format_event(frame | {"choices": [], "usage": stream.usage})
    yield DONE


async def _start_greedy(state: ServerState, body: GenerateBody, entry: RequestEntry) -> TextStream:
    codec = state.serving_codec
    from freetoken.engine.sampler import SamplingParams

    most = state.serving_engine.context_limit
    ids = await state.run_aside(len(body.prompt), lambda: codec.encode(body.prompt, most))
    request = make_request(state, ids, body.max_tokens, SamplingParams(), ignore_eos=body.ignore_eos)
    return TextStream(state, request, entry=entry)


async def _stream_generate(stream: TextStream) -> AsyncIterator[str]:
    async for text in stream:
        yield format_event({"text": text})
    yield DONE


def _describe_model(state: ServerState) -> dict[str, Any]:
    name = state.options.served_model_name
    described: dict[str, Any] = {
        "id": name, "object": "model", "created": state.created, "owned_by": "FreeToken", "root": name,
        "supported_reasoning_efforts": None, "default_reasoning_effort": None,
    }  # fmt: skip
    if state.is_ready:
        engine = state.engine
        # What can really be served, and what the model itself could hold.
        described |= {"max_model_len": engine.context_limit, "context_length": engine.model_tokens}
    return described


def _describe_call(piece: Piece) -> dict[str, Any]:
    assert piece.call is not None
    function = {"name": piece.call.name, "arguments": piece.call.arguments}
    return {"id": piece.call.id, "type": "function", "function": function}


def _frame(kind: str, model: str) -> dict[str, Any]:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
