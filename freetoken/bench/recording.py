"""Recorded requests as a file: conversations with their turns, without headers, keys or persons.

JSONL: a first line that says what this is, then one line for each turn. A turn holds only what it adds to the one
before, so a file grows with what was said. Only known fields are kept, every text is scrubbed before it is kept, and
a file is read as data of a stranger: typed, sizes limited, unknown keys refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from freetoken.bench.scrub import scrub, scrub_text
from freetoken.errors import BadFileError

FORMAT_VERSION = 1
MOST_FILE_BYTES = 64 << 20
MOST_TURNS = 20_000
#: Texts of one turn, in characters.
MOST_TURN_CHARACTERS = 4_000_000
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class Header(BaseModel):
    """The first line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ft_recording: Literal[1]
    source: Literal["proxy", "import"] = "proxy"


class Turn(BaseModel):
    """One request, as what it adds to its conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    conversation: int = Field(ge=0, le=MOST_TURNS)
    turn: int = Field(ge=0, le=MOST_TURNS)
    kind: Literal["chat", "completion"]
    #: Messages after the answer to the turn before; for a completion the text after it.
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str = Field(default="", max_length=MOST_TURN_CHARACTERS)
    #: Tool schemas, with the first turn of a conversation.
    tools: tuple[dict[str, Any], ...] = ()
    #: What was answered. A replay takes the model's new answer instead, so that history and cache are real; only where
    #: it called tools does the next turn begin with the recorded answer, because the results belong to those calls.
    answer: dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    prompt_tokens: int | None = Field(default=None, ge=0)
    completion_tokens: int | None = Field(default=None, ge=0)
    #: Seconds since the recording began.
    sent_s: float = Field(default=0.0, ge=0)
    ended_s: float = Field(default=0.0, ge=0)


Conversation = tuple[Turn, ...]


def read_recording(path: Path) -> tuple[Conversation, ...]:
    """The conversations in `path`, each with its turns in order. Raises BadFileError, naming the line."""
    turns: dict[int, list[Turn]] = {}
    for number, line in enumerate(_read_lines(path), start=1):
        if number == 1:
            _check_header(path, line)
            continue
        turn = _parse_turn(path, number, line)
        known = turns.setdefault(turn.conversation, [])
        if turn.turn != len(known):
            raise BadFileError(f"{path}:{number}: turn {turn.turn} of a conversation that has {len(known)} so far")
        known.append(turn)
        if number > MOST_TURNS:
            raise BadFileError(f"{path} has more than {MOST_TURNS:,} turns")
    if not turns:
        raise BadFileError(f"{path} holds no requests")
    return tuple(tuple(one) for one in turns.values())


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise BadFileError(f"{path} is larger than {MOST_FILE_BYTES >> 20} MiB")
        with path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except OSError as error:
        raise BadFileError(f"{path} cannot be read: {error.strerror}", hint="`ft workload record` makes one") from error


def _check_header(path: Path, line: bytes) -> None:
    try:
        Header.model_validate_json(line)
    except ValidationError as error:
        raise BadFileError(
            f"{path}:1: no recording of version {FORMAT_VERSION}: {error.errors()[0]['msg']}",
            hint=f"`ft workload record --import {path.name} --out NEW.jsonl` takes plain OpenAI-style requests",
        ) from error


def _parse_turn(path: Path, number: int, line: bytes) -> Turn:
    try:
        turn = Turn.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadFileError(f"{path}:{number}: `{where}`: {first['msg']}") from error
    if len(line) > 2 * MOST_TURN_CHARACTERS:
        raise BadFileError(f"{path}:{number}: one turn of {len(line):,} bytes")
    return turn


@dataclass
class _Open:
    """A conversation that may go on: what has been sent and answered so far, scrubbed."""

    index: int
    kind: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str = ""
    turns: int = 0


class Recorder:
    """Turns whole requests into turns: each is matched with the conversation that it continues."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._count = 0

    def add(
        self, kind: Literal["chat", "completion"], body: dict[str, Any], answer: dict[str, Any] | None = None,
        usage: dict[str, Any] | None = None, *, sent_s: float = 0.0, ended_s: float = 0.0,
    ) -> Turn:  # fmt: skip
        """The turn that `body` is, scrubbed. Raises BadFileError for what is no request, or too large."""
        usage = usage or {}
        facts: dict[str, Any] = {
            "max_tokens": _whole(body.get("max_completion_tokens") or body.get("max_tokens")),
            "prompt_tokens": _whole(usage.get("prompt_tokens")),
            "completion_tokens": _whole(usage.get("completion_tokens")),
            "sent_s": round(max(0.0, sent_s), 3), "ended_s": round(max(0.0, ended_s), 3),
        }  # fmt: skip
        scrubbed = _clean_message(answer) if answer is not None else None
        if kind == "chat":
            return self._add_chat(body, scrubbed, facts)
        return self._add_completion(body, scrubbed, facts)

    def _add_chat(self, body: dict[str, Any], answer: dict[str, Any] | None, facts: dict[str, Any]) -> Turn:
        messages = _clean_messages(body.get("messages"))
        _limit(json.dumps(messages))
        known = max(
            (one for one in self._open if one.kind == "chat" and _continues(one.messages, messages)),
            key=lambda one: len(one.messages), default=None,
        )  # fmt: skip
        if known is None:
            known = self._start("chat")
        new = _after_answer(messages[len(known.messages) :]) if known.turns else messages
        tools = scrub(body.get("tools") or []) if known.turns == 0 else []
        _limit(json.dumps(tools))
        turn = Turn(
            conversation=known.index, turn=known.turns, kind="chat", messages=tuple(new), answer=answer,
            tools=tuple(one for one in tools if isinstance(one, dict)), **facts,
        )  # fmt: skip
        known.messages, known.turns = messages, known.turns + 1
        return turn

    def _add_completion(self, body: dict[str, Any], answer: dict[str, Any] | None, facts: dict[str, Any]) -> Turn:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str) or not prompt:
            raise BadFileError("a completion without a text as its `prompt`")
        _limit(prompt)
        prompt = scrub_text(prompt)
        known = max(
            (one for one in self._open if one.kind == "completion" and prompt.startswith(one.prompt)),
            key=lambda one: len(one.prompt), default=None,
        )  # fmt: skip
        if known is None:
            known = self._start("completion")
        turn = Turn(
            conversation=known.index, turn=known.turns, kind="completion", prompt=prompt[len(known.prompt) :],
            answer=answer, **facts,
        )  # fmt: skip
        known.prompt, known.turns = prompt + str((answer or {}).get("content") or ""), known.turns + 1
        return turn

    def _start(self, kind: str) -> _Open:
        if self._count >= MOST_TURNS:
            raise BadFileError(f"more than {MOST_TURNS:,} conversations")
        fresh = _Open(self._count, kind)
        self._count += 1
        self._open.append(fresh)
        return fresh


def _limit(text: str) -> None:
    if len(text) > MOST_TURN_CHARACTERS:
        raise BadFileError(f"a request of {len(text):,} characters, at most {MOST_TURN_CHARACTERS:,} are kept")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20 else None


def _clean_messages(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise BadFileError("a chat request without a list of `messages`")
    return [_clean_message(one) for one in found]


def _clean_message(message: dict[str, Any]) -> dict[str, Any]:
    """Role, text and tool calls, scrubbed. Images and whatever else a message may carry are left out."""
    role = message.get("role")
    clean: dict[str, Any] = {"role": role if role in ROLES else "user", "content": _text_of(message.get("content"))}
    if isinstance(calls := message.get("tool_calls"), list) and calls:
        clean["tool_calls"] = [_clean_call(one) for one in calls if isinstance(one, dict)]
    if isinstance(name := message.get("name"), str):
        clean["name"] = scrub_text(name[:128])
    if isinstance(call_id := message.get("tool_call_id"), str):
        clean["tool_call_id"] = _short_id(call_id)
    return clean


def _short_id(text: str) -> str:
    # An id only has to be the same in a call and its result; what it looked like is nobody's business.
    return "call_" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _clean_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call.get("function"), dict) else {}
    assert isinstance(function, dict)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    try:  # a secret's name inside of the arguments is only seen in the parsed form
        text = json.dumps(scrub(json.loads(text)), ensure_ascii=False)
    except ValueError:
        text = scrub_text(text)
    name = scrub_text(str(function.get("name") or ""))
    return {"id": _short_id(str(call.get("id"))), "type": "function", "function": {"name": name, "arguments": text}}


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        parts = (one.get("text") for one in content if isinstance(one, dict) and one.get("type", "text") == "text")
        content = "\n".join(part for part in parts if isinstance(part, str))
    return scrub_text(content) if isinstance(content, str) else ""


def _continues(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether `now` begins with what was sent before, and goes on."""
    return len(now) > len(before) and now[: len(before)] == before


def _after_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What follows the assistant's own message; all of it where there is none, or one that called tools."""
    is_plain = messages[0]["role"] == "assistant" and not messages[0].get("tool_calls")
    return messages[1:] if len(messages) > 1 and is_plain else messages


def format_lines(source: Literal["proxy", "import"], turns: Iterable[Turn]) -> Iterator[str]:
    """The lines of a recording, header first."""
    yield Header(ft_recording=1, source=source).model_dump_json() + "\n"
    for turn in turns:
        yield format_turn(turn)


def format_turn(turn: Turn) -> str:
    """The line of one turn."""
    return turn.model_dump_json(exclude_defaults=True, exclude_none=True) + "\n"
