"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's shapes on top of the chat path."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from freetoken.errors import UsageError
from freetoken.server.generation import run_while_connected
from freetoken.server.openai_api import ChatAnswer, encode_chat, note_entry, start_chat
from freetoken.server.output import Piece
from freetoken.server.schemas import ChatBody, CountBody, MessagesBody
from freetoken.server.sse import format_event, make_stream
from freetoken.server.state import ServerState
from freetoken.server.text import join_parts

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
#: Texts of more tokens than so many contexts hold are not counted.
_COUNTED_CONTEXTS = 16


def make_router(state: ServerState) -> APIRouter:
    """The endpoints, bound to `state`."""
    router = APIRouter()

    @router.post("/v1/messages", response_model=None)
    async def messages(request: Request, body: MessagesBody) -> Response:
        entry = note_entry(request, state, body.stream)
        answer = await start_chat(state, make_chat_body(body), entry, request.scope.get("ft.body_bytes", 0))
        if body.stream:
            return make_stream(_stream(answer), request.url.path, entry)
        return JSONResponse(await run_while_connected(request, _whole(answer)))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountBody) -> dict[str, int]:
        chat, codec = make_chat_body(body), state.codec
        chat.refuse_unsupported()
        # Whether it fits is what the client wants to find out: a count of more than that is an answer too.
        most = _COUNTED_CONTEXTS * state.engine.context_limit
        size = request.scope.get("ft.body_bytes", 0)
        _, ids = await state.run_aside(size, lambda: encode_chat(codec, chat, most))
        return {"input_tokens": len(ids)}

    return router


def make_chat_body(body: MessagesBody | CountBody) -> ChatBody:
    """The same request in OpenAI's shape. Raises UsageError for what has no counterpart."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": join_parts(body.system)})
    for message in body.messages:
        messages.extend(_convert_message(message))
    fields: dict[str, Any] = {"messages": messages, "tools": [_convert_tool(one) for one in body.tools or ()] or None}
    if body.thinking is not None:
        fields["thinking"] = body.thinking
    choice = (body.tool_choice or {}).get("type")
    if choice not in (None, "auto", "none"):
        raise UsageError(f"`tool_choice` of type `{choice}` is not supported: this engine cannot force a call")
    fields["tool_choice"] = choice
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
        fields |= {name: getattr(body, name) for name in ("temperature", "top_k", "top_p")}
    return ChatBody.model_validate(fields)


def _convert_message(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One message may become several: tool results are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content or ""}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise UsageError("`content` of a message must be a text or a list of blocks (objects with a `type`)")
    texts, calls, results = [], [], []
    for block in content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {
                "name": block.get("name"),
                "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
            }
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = join_parts(block.get("content"))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(join_parts([block]))
    converted: list[dict[str, Any]] = list(results)
    if texts or calls or not results:
        converted.append({"role": role, "content": "".join(texts)} | ({"tool_calls": calls} if calls else {}))
    return converted


def _convert_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise UsageError(
            f"tool `{tool.get('name') or tool.get('type')}` has no `input_schema`: only custom tools are supported"
        )
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


async def _whole(answer: ChatAnswer) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    async for piece in answer.pieces():
        if piece.call is not None:
            blocks.append(_tool_block(piece, _read_arguments(piece.call.arguments)))
            continue
        kind, field = ("text", "text") if piece.kind == "content" else ("thinking", "thinking")
        if not blocks or blocks[-1]["type"] != kind:
            blocks.append({"type": kind, field: ""} | ({"signature": ""} if kind == "thinking" else {}))
        blocks[-1][field] += piece.text
    reason, sequence = _stop(answer)
    return _message(answer) | {
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(answer),
    }


async def _stream(answer: ChatAnswer) -> AsyncIterator[str]:
    def event(kind: str, **fields: Any) -> str:
        return format_event({"type": kind} | fields, kind)

    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer)}
    yield event("message_start", message=_message(answer) | begun)
    index, open_kind = -1, None
    async for piece in answer.pieces():
        if piece.kind != open_kind or piece.call is not None:
            if open_kind is not None:
                yield event("content_block_stop", index=index)
            index, open_kind = index + 1, piece.kind
            yield event("content_block_start", index=index, content_block=_empty_block(piece))
        yield event("content_block_delta", index=index, delta=_delta(piece))
    if open_kind is not None:
        yield event("content_block_stop", index=index)
    reason, sequence = _stop(answer)
    yield event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=_usage(answer))
    yield event("message_stop")


def _empty_block(piece: Piece) -> dict[str, Any]:
    if piece.call is not None:
        return _tool_block(piece, {})
    return (
        {"type": "text", "text": ""}
        if piece.kind == "content"
        else {"type": "thinking", "thinking": "", "signature": ""}
    )


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.call is not None:
        return {"type": "input_json_delta", "partial_json": piece.call.arguments}
    if piece.kind == "content":
        return {"type": "text_delta", "text": piece.text}
    return {"type": "thinking_delta", "thinking": piece.text}


def _tool_block(piece: Piece, arguments: Any) -> dict[str, Any]:
    assert piece.call is not None
    return {"type": "tool_use", "id": piece.call.id, "name": piece.call.name, "input": arguments}


def _read_arguments(text: str) -> Any:
    """The arguments as a value; text that is not JSON is handed on as it is, under `raw`."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"raw": text}


def _message(answer: ChatAnswer) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": answer.model}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    usage = answer.stream.usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"],
    }  # fmt: skip


def _stop(answer: ChatAnswer) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if answer.stream.matched_stop is not None:
        return "stop_sequence", answer.stream.matched_stop
    return _STOP_REASONS.get(answer.finish_reason, "end_turn"), None
