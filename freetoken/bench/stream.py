"""A streamed answer taken apart after the fact: events with the time at which their last byte was received.

Nothing is parsed while the answer comes, so that the time of a piece is taken as early as possible and eight fast
streams do not wait for each other's JSON. A streamed chunk is not a token: counts come from `usage`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.errors import FtError


class BadAnswerError(FtError):
    """The engine answered with something that is no completion: an error event, no text, other JSON.

    `code` is the class that an error event states, e.g. `context_length_exceeded`.
    """

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Answer:
    """What one stream told. Times are on the client's clock."""

    text: str
    #: Texts of the parts that are no plain content, joined: reasoning.
    reasoning: str
    pieces_s: tuple[float, ...]
    last_s: float
    completion_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    #: True without `usage`: then pieces were counted.
    is_estimated: bool
    tool_calls: tuple[dict[str, Any], ...] = ()


def split_events(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """(time, document) of each `data:` event, up to `[DONE]`. Raises BadAnswerError for what is no JSON object."""
    rest = b""
    for at, data in reads:
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            body = line[5:].strip()
            if body == b"[DONE]":
                return
            yield at, _parse(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise BadAnswerError(f"the engine streamed what is no JSON object: {body[:120].decode(errors='replace')!r}")
    if document.get("error"):
        error = document["error"]
        text, code = (error.get("message", error), error.get("code")) if isinstance(error, dict) else (error, None)
        raise BadAnswerError(f"the engine failed within a stream: {text!s:.300}", code=code)
    return document


def read_answer(reads: Sequence[tuple[float, bytes]]) -> Answer:
    """The answer in `reads`. Raises BadAnswerError where no text came."""
    content: list[str] = []
    reasoning: list[str] = []
    pieces: list[float] = []
    calls: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    finish_reason, finished_s = None, None
    for at, document in split_events(reads):
        usage = document.get("usage") or usage
        for choice in document.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            content.append(text)
            reasoning.append(thought)
            _gather_calls(calls, delta.get("tool_calls") or ())
            if text or thought or delta.get("tool_calls"):
                pieces.append(at)
            if choice.get("finish_reason"):
                finish_reason, finished_s = choice["finish_reason"], at
    if not pieces:
        raise BadAnswerError(f"the engine's answer has no text (finish reason: {finish_reason or 'none'})")
    counted = _count(usage, "completion_tokens")
    tokens = counted if counted else len(pieces)
    # Tokens that decode to no text of their own (half a character, special ones) end with the word that all is done.
    last = finished_s if finished_s is not None and tokens > len(pieces) else pieces[-1]
    return Answer(
        text="".join(content), reasoning="".join(reasoning), pieces_s=tuple(pieces), last_s=max(last, pieces[-1]),
        completion_tokens=tokens, prompt_tokens=_count(usage, "prompt_tokens"), cached_tokens=_cached(usage),
        finish_reason=finish_reason, is_estimated=not counted, tool_calls=tuple(calls[key] for key in sorted(calls)),
    )  # fmt: skip


def _gather_calls(calls: dict[int, dict[str, Any]], deltas: Sequence[dict[str, Any]]) -> None:
    for delta in deltas:
        call = calls.setdefault(
            int(delta.get("index") or 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        function = delta.get("function") or {}
        call["id"] = delta.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _cached(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    return _count(details, "cached_tokens") if isinstance(details, dict) else None
