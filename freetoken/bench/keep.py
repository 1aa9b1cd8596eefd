"""Recordings made: from a proxy's exchanges or a file of OpenAI-style requests, with the workload that replays them."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from freetoken.bench.proxy import Exchange
from freetoken.bench.recording import (
    MOST_FILE_BYTES,
    Conversation,
    Header,
    Recorder,
    Turn,
    format_lines,
    format_turn,
    read_recording,
)
from freetoken.errors import BadFileError, FtError, UsageError
from freetoken.recipe.workload import Workload

#: Room beside the largest recorded request: the fresh first line, and answers that differ in length.
SPARE_TOKENS = 64
#: Where no `usage` was recorded.
CHARACTERS_PER_TOKEN = 3.5
Source = Literal["proxy", "import"]


class RecordingWriter:
    """Appends each exchange to a new file at once, so that a killed recorder loses nothing that it had seen."""

    def __init__(self, path: Path, note: Callable[[str], None] = lambda _: None) -> None:
        self.path, self._note, self._recorder, self._lock = path, note, Recorder(), threading.Lock()
        self.turns = self._size = 0
        self.conversations: set[int] = set()
        try:
            # 0600: scrubbed or not, these are a person's words.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise UsageError(f"{path} exists; a recording is never written over") from error
        except OSError as error:
            raise FtError(f"{path} cannot be written: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._write(Header(ft_recording=1, source="proxy").model_dump_json() + "\n")

    def keep(self, exchange: Exchange) -> None:
        """Writes the turn; what cannot be kept is told and passed over."""
        with self._lock:
            try:
                turn = self._recorder.add(
                    exchange.kind, exchange.body, exchange.answer, exchange.usage, sent_s=exchange.sent_s,
                    ended_s=exchange.ended_s,
                )  # fmt: skip
                self._write(format_turn(turn))
            except (FtError, ValueError, OSError) as error:
                self._note(f"not recorded: {error}")
                return
            self.turns += 1
            self.conversations.add(turn.conversation)
            self._note(f"conversation {turn.conversation + 1}, turn {turn.turn + 1}")

    def _write(self, line: str) -> None:
        self._size += len(line.encode())
        if self._size > MOST_FILE_BYTES:
            raise BadFileError(f"the recording is full: {MOST_FILE_BYTES >> 20} MiB")
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        """Closes the file; one without a request is taken away again."""
        with self._lock:
            self._file.close()
            if not self.turns:
                self.path.unlink(missing_ok=True)


def import_requests(source: Path, target: Path) -> tuple[int, tuple[str, ...]]:
    """Writes the requests in `source` (JSONL) as a recording; how many turns, and what was left out in words.

    A line is a request body, a batch line with a `body`, a logged pair of `request` and `response`, or a whole
    conversation that ends with its answer. Raises BadFileError where nothing can be used, UsageError for a `target`
    that exists.
    """
    recorder, turns, left_out = Recorder(), [], []
    for number, document in _read_documents(source):
        try:
            if document is None:
                raise BadFileError("no JSON object")
            turns += [recorder.add(kind, body, answer, usage) for kind, body, answer, usage in _requests_in(document)]
        except (FtError, ValueError) as error:
            left_out.append(f"{source.name}:{number}: {getattr(error, 'message', error)}")
    if not turns:
        raise BadFileError(f"{source} holds no OpenAI-style request", details=tuple(left_out[:5]))
    _write_new(target, "".join(format_lines("import", turns)))
    return len(turns), tuple(left_out)


def _read_documents(source: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    try:
        if source.stat().st_size > MOST_FILE_BYTES:
            raise BadFileError(f"{source} is larger than {MOST_FILE_BYTES >> 20} MiB")
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BadFileError(f"{source} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):
                document = None
            yield number, document if isinstance(document, dict) else None


_Parts = tuple[Literal["chat", "completion"], dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]


def _requests_in(document: dict[str, Any]) -> Iterator[_Parts]:
    body = next((document[key] for key in ("body", "request") if isinstance(document.get(key), dict)), document)
    response = document.get("response")
    response = response if isinstance(response, dict) else {}
    response = response["body"] if isinstance(response.get("body"), dict) else response
    usage = response.get("usage") if isinstance(response.get("usage"), dict) else None
    if "messages" not in body:
        yield "completion", body, _answer_of(response), usage
        return
    messages = body["messages"]
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise BadFileError("`messages` is no list of messages")
    if not messages or messages[-1].get("role") != "assistant":
        yield "chat", body, _answer_of(response), usage
        return
    for index, message in enumerate(messages):
        if message.get("role") == "assistant" and index:
            yield "chat", body | {"messages": messages[:index]}, message, None


def _answer_of(response: dict[str, Any]) -> dict[str, Any] | None:
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    if isinstance(message, dict):
        return message
    return {"role": "assistant", "content": str(choice["text"])} if choice.get("text") else None


def _write_new(path: Path, text: str) -> None:
    """Writes a new file whole or not at all."""
    if path.exists():
        raise UsageError(f"{path} exists; a recording is never written over")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FtError(f"{path} cannot be written: {error.strerror}") from error


def write_workload(recording: Path) -> tuple[Path, Workload]:
    """Writes the workload that replays `recording` beside it, as `NAME.yaml`."""
    workload = describe_recording(recording.stem, recording.name, read_recording(recording))
    path = recording.with_name(f"{workload.name}.yaml")  # a workload is called as its file is
    facts = {
        "name": workload.name, "description": workload.description, "turns": workload.turns,
        "shared_prefix_tokens": 0, "prompt_tokens": workload.prompt_tokens, "output_tokens": workload.output_tokens,
        "concurrency": workload.concurrency, "context_tokens": workload.context_tokens, "text": "recorded",
        "recording": workload.recording,
    }  # fmt: skip
    # JSON strings are YAML strings, whatever is in them.
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in facts.items())
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise FtError(f"{path} cannot be written: {error.strerror}") from error
    return path, workload


def describe_recording(name: str, recording: str, conversations: Sequence[Conversation]) -> Workload:
    """The workload that `conversations` are: turns, context and concurrency as they were, tokens where known."""
    turns = max(map(len, conversations))
    outputs = [_output_tokens(one) for conversation in conversations for one in conversation]
    context = max(map(_context_tokens, conversations)) + SPARE_TOKENS
    output = max(1, round(sum(outputs) / len(outputs)))
    prompt = max(0, math.ceil(context / turns) - output)
    count = sum(map(len, conversations))
    return Workload(
        name=re.sub(r"[^\w.-]+", "-", name).strip("-.") or "recorded",
        description=f"{count} recorded requests in {len(conversations)} conversations",
        turns=min(1000, turns), prompt_tokens=prompt, output_tokens=output,
        concurrency=min(1024, find_concurrency(conversations)),
        context_tokens=max(context, turns * (prompt + output)), text="recorded", recording=recording,
    )  # fmt: skip


def _output_tokens(turn: Turn) -> int:
    said = str((turn.answer or {}).get("content") or "")
    return turn.completion_tokens or min(turn.max_tokens or 256, math.ceil(len(said) / CHARACTERS_PER_TOKEN) or 256)


def _context_tokens(conversation: Conversation) -> int:
    """Tokens of the largest request of a conversation with its answer: as counted, else by its characters."""
    largest = characters = said = 0
    for turn in conversation:
        characters += len(turn.prompt) + sum(len(json.dumps(one)) for one in turn.messages)
        characters += sum(len(json.dumps(one)) for one in turn.tools)
        prompt = turn.prompt_tokens or math.ceil(characters / CHARACTERS_PER_TOKEN) + said
        output = _output_tokens(turn)
        said += output
        largest = max(largest, prompt + output)
    return largest


def find_concurrency(conversations: Sequence[Conversation]) -> int:
    """Most requests that were on their way at once; 1 where no times were recorded."""
    turns = [turn for conversation in conversations for turn in conversation if turn.ended_s > turn.sent_s]
    moments = sorted([(turn.ended_s, -1) for turn in turns] + [(turn.sent_s, 1) for turn in turns])
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return max(1, most)
