"""A model's raw text, told apart as it comes: reasoning, content, tool calls.

Formats: `<think>` blocks; `<tool_call>` blocks with JSON (Hermes, Qwen3) or with `<function=…>` tags (Qwen3-Coder,
Qwen3.5); the channels of gpt-oss. What does not parse stays content, so that nothing a model says is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from freetoken.server.text import longest_partial


@dataclass(frozen=True)
class ToolCall:
    """One call: a fresh id, the function's name, its arguments as a JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True)
class Piece:
    """A piece of output: text of one kind, or a whole tool call."""

    kind: Literal["content", "reasoning", "tool"]
    text: str = ""
    call: ToolCall | None = None


class OutputParser(Protocol):
    """What every format's parser does."""

    def add(self, text: str) -> list[Piece]:
        """Pieces that `text` completes."""
        ...

    def flush(self) -> list[Piece]:
        """What is left at the end."""
        ...


def make_parser(prompt_text: str, tools: Sequence[dict[str, Any]] | None, *, is_harmony: bool) -> OutputParser:
    """The parser for an answer to `prompt_text`; tool calls are looked for only where tools were given."""
    if is_harmony:
        return HarmonyParser(prompt_text)
    is_thinking = prompt_text.rstrip().endswith("<think>")
    return TagParser(tools or (), is_thinking=is_thinking)


class TagParser:
    """`<think>` and `<tool_call>` in plain text."""

    def __init__(self, tools: Sequence[dict[str, Any]] = (), *, is_thinking: bool = False) -> None:
        self._tools = {_function(tool).get("name"): _function(tool) for tool in tools}
        self._mode: Literal["start", "content", "reasoning", "tool"] = "reasoning" if is_thinking else "start"
        self._held = ""
        self._space = ""  # white space that is shown only if content follows
        self._has_spoken = False  # something of the current kind was shown
        self._is_framed = bool(self._tools)  # white space before content is the template's, not the answer's

    def add(self, text: str) -> list[Piece]:
        """Pieces that `text` completes."""
        self._held += text
        return [piece for piece in self._parse() if piece.text or piece.call]

    def flush(self) -> list[Piece]:
        """What is left: held text, and a block that was never closed."""
        held, self._held = self._held, ""
        if self._mode == "tool":
            pieces = self._end_tool(held, is_closed=False)
        elif self._mode == "reasoning":
            pieces = [self._reason(held)]
        else:
            pieces = [Piece("content", self._space + held)]
            self._space = ""
        return [piece for piece in pieces if piece.text or piece.call]

    def _parse(self) -> Iterator[Piece]:
        while True:
            if self._mode == "start":
                # Thinking comes first or not at all: a later `<think>` is content.
                stripped = self._held.lstrip()
                if not stripped or "<think>".startswith(stripped):
                    return
                self._mode = "content"
                if stripped.startswith("<think>"):
                    self._mode, self._held = "reasoning", stripped.removeprefix("<think>")
            mark = {"content": "<tool_call>", "reasoning": "</think>", "tool": "</tool_call>"}[self._mode]
            if self._mode == "content" and not self._tools:
                yield self._say(self._take(len(self._held)))
                return
            place = self._held.find(mark)
            if place < 0:
                if self._mode != "tool":
                    text = self._take(len(self._held) - longest_partial(self._held, (mark,)))
                    yield self._say(text) if self._mode == "content" else self._reason(text)
                return
            text = self._take(place)
            self._held = self._held.removeprefix(mark)
            yield from self._pass_mark(text)

    def _pass_mark(self, text: str) -> Iterator[Piece]:
        """What comes of `text`, which a mark of the current mode has ended."""
        if self._mode == "content":
            yield self._say(text)
            self._mode = "tool"
        elif self._mode == "reasoning":
            yield self._reason(text)
            self._mode, self._has_spoken, self._space = "content", False, ""
            self._is_framed = True
        else:
            yield from self._end_tool(text, is_closed=True)
            self._mode = "content"

    def _end_tool(self, body: str, *, is_closed: bool) -> list[Piece]:
        calls = parse_tool_body(body, self._tools)
        if calls:
            self._space = ""
            return [Piece("tool", call=call) for call in calls]
        return [self._say(f"<tool_call>{body}" + ("</tool_call>" if is_closed else ""))]

    def _say(self, text: str) -> Piece:
        """Content; white space at its end waits, because what follows may be a tool call."""
        text = self._space + text
        if not self._has_spoken and self._is_framed:
            text = text.lstrip()
        body = text.rstrip() if self._tools else text
        self._space = text[len(body) :]
        self._has_spoken = self._has_spoken or bool(body)
        return Piece("content", body)

    def _reason(self, text: str) -> Piece:
        """Reasoning, without the white space that frames it."""
        text = self._space + text
        if not self._has_spoken:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        self._has_spoken = self._has_spoken or bool(body)
        return Piece("reasoning", body)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def parse_tool_body(body: str, tools: dict[Any, dict[str, Any]]) -> list[ToolCall]:
    """The calls inside a `<tool_call>` block; empty where it is in no known form."""
    if "<function=" in body:
        return [
            ToolCall(name, json.dumps(_read_parameters(inside, tools.get(name, {})), ensure_ascii=False))
            for name, inside in _FUNCTION.findall(body)
        ]
    try:
        document = json.loads(body)
    except ValueError:
        return []
    calls = [_read_call(one) for one in (document if isinstance(document, list) else [document])]
    return [call for call in calls if call is not None] if all(calls) else []


def _read_call(document: Any) -> ToolCall | None:
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None
    arguments = document.get("arguments", document.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(document["name"], text)


def _read_parameters(inside: str, function: dict[str, Any]) -> dict[str, Any]:
    schema = (function.get("parameters") or {}).get("properties") or {}
    found = _PARAMETER.findall(inside)
    return {
        name: _read_value(text.removeprefix("\n").removesuffix("\n"), schema.get(name) or {}) for name, text in found
    }


def _read_value(text: str, schema: dict[str, Any]) -> Any:
    """`text` as what the tool's schema says it is; strings stay as they are."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


class HarmonyParser:
    """The channels of gpt-oss: `analysis` is reasoning, `final` content, `commentary to=functions.x` a tool call."""

    _MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>")

    def __init__(self, prompt_text: str = "") -> None:
        self._held = ""
        self._header = ""
        self._body = ""
        # The prompt ends with `<|start|>assistant`, so an answer begins in a header.
        self._is_header = True

    def add(self, text: str) -> list[Piece]:
        """Pieces that `text` completes."""
        self._held += text
        pieces = []
        while (found := self._next_mark()) is not None:
            place, mark = found
            pieces.append(self._consume(self._held[:place]))
            self._held = self._held[place + len(mark) :]
            pieces.append(self._pass_mark(mark))
        kept = longest_partial(self._held, self._MARKS)
        pieces.append(self._consume(self._held[: len(self._held) - kept]))
        self._held = self._held[len(self._held) - kept :]
        return [piece for piece in pieces if piece is not None and (piece.text or piece.call)]

    def flush(self) -> list[Piece]:
        """What is left, a tool call that was cut by its end token included."""
        held, self._held = self._held, ""
        pieces = [self._consume(held), self._end_message()]
        return [piece for piece in pieces if piece is not None and (piece.text or piece.call)]

    def _next_mark(self) -> tuple[int, str] | None:
        found = [(place, mark) for mark in self._MARKS if (place := self._held.find(mark)) >= 0]
        return min(found) if found else None

    def _pass_mark(self, mark: str) -> Piece | None:
        if mark == "<|message|>":
            self._is_header = False
            return None
        if mark in ("<|channel|>", "<|constrain|>"):
            self._header += " "
            return None
        ended = self._end_message()
        self._is_header, self._header = True, ""
        return ended

    def _consume(self, text: str) -> Piece | None:
        if self._is_header:
            self._header += text
            return None
        if self._recipient:
            self._body += text
            return None
        return Piece("reasoning" if "analysis" in self._header.split() else "content", text)

    @property
    def _recipient(self) -> str | None:
        found = re.search(r"to=functions\.([\w.-]+)", self._header)
        return found[1] if found else None

    def _end_message(self) -> Piece | None:
        name, body, self._body = self._recipient, self._body, ""
        return Piece("tool", call=ToolCall(name, body.strip() or "{}")) if name and not self._is_header else None
