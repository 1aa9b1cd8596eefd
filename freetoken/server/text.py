"""Between text and token ids: the tokenizer and its chat template, text out of a growing list of ids, stop strings."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from freetoken.errors import BadFileError, UsageError

#: A UTF-8 character has at most 4 bytes; what is still broken after this many tokens will not become whole.
_MAX_PENDING_TOKENS = 8
#: Characters of a text for each token of the context that are encoded to see whether the rest is worth it.
_PROBED_CHARACTERS = 8


class PromptTooLongError(UsageError):
    """A prompt that cannot fit, found before it was put into tokens as a whole."""

    def __init__(self, why: str, most_tokens: int) -> None:
        super().__init__(
            f"prompt is too long: {why}, more than the {most_tokens:,} that fit (prompt + generation)",
            hint="shorten the prompt, or give the engine more KV",
        )


class TextCodec:
    """A checkpoint's tokenizer. `encode_*` raise UsageError for a request that cannot be put into tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Encoding runs in worker threads, and a fast tokenizer may be set up anew by each call.
        self._lock = threading.Lock()
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        #: No token stands for more bytes of text: vocabularies write a byte as one character at least.
        self.longest_token_bytes = max((len(text.encode()) for text in self.vocabulary), default=1)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if (backend := self._backend) is not None:
            # A file may ask to cut or fill texts, which `transformers` undoes with every call.
            backend.no_truncation()
            backend.no_padding()
            if backend.normalizer is not None:
                # What is composed or folded first can lose three bytes of four.
                self.longest_token_bytes *= 4

    @property
    def speaks_harmony(self) -> bool:
        """Whether the model marks channels with special tokens, as the gpt-oss family does."""
        return {"<|channel|>", "<|message|>", "<|end|>"} <= self.vocabulary.keys()

    def encode(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Ids of a raw prompt, with the special tokens that the tokenizer puts around one (a BOS where it has one).

        With `most_tokens`, a text that is certain to have more raises PromptTooLongError before it costs anything.
        """
        ids = self._encode(text, most_tokens, add_special=True)
        if not ids:
            raise UsageError("the prompt is empty: it has no tokens")
        return ids

    def render_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, options: dict[str, Any]
    ) -> str:
        """The prompt text that the chat template (rendered in a sandbox) makes of `messages` and `tools`."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template; use /v1/completions with a plain prompt")
        arguments = {"add_generation_prompt": True} | options
        try:
            text = self.tokenizer.apply_chat_template(
                [_prepare_message(one) for one in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                **arguments,
            )
        except UsageError:
            raise
        except Exception as error:
            # Templates call `raise_exception` and fail in Jinja's, Python's and their own ways: all are the request's.
            raise UsageError(f"could not encode request: {type(error).__name__}: {error}") from error
        return str(text)

    def encode_rendered(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Ids of a rendered chat prompt, which already holds its special tokens; `most_tokens` as for `encode`."""
        ids = self._encode(text, most_tokens, add_special=False)
        if not ids:
            raise UsageError("the chat template made an empty prompt of these messages")
        return ids

    def _encode(self, text: str, most_tokens: int | None, *, add_special: bool) -> list[int]:
        size = _count_bytes(text)
        if most_tokens is not None:
            self._refuse_hopeless(text, size, most_tokens)
        return self._make_ids(text, add_special=add_special)

    def _refuse_hopeless(self, text: str, size: int, most_tokens: int) -> None:
        """By its bytes alone; else by its beginning, since a text of an ordinary kind has a few bytes a token."""
        least = -(-size // self.longest_token_bytes)
        if least > most_tokens:
            longest = self.longest_token_bytes
            raise PromptTooLongError(
                f"{size:,} bytes are {least:,} tokens at least, as none holds more than {longest:,} bytes", most_tokens
            )
        length = _PROBED_CHARACTERS * most_tokens
        while 2 * length < len(text):
            count = len(self._make_ids(text[:length], add_special=False))
            # Where the text is cut a word may fall into more tokens than it has.
            if count > most_tokens + most_tokens // 8 + 64:
                raise PromptTooLongError(
                    f"the first {length:,} of its {len(text):,} characters are {count:,} tokens", most_tokens
                )
            length *= 4

    def _make_ids(self, text: str, *, add_special: bool) -> list[int]:
        if self._backend is not None:
            # As the call below, but with the interpreter free for others, and without what nobody here asks for.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
        with self._lock:
            return list(self.tokenizer(text, add_special_tokens=add_special)["input_ids"])

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, spaces as they are."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text


def load_codec(folder: Path) -> TextCodec:
    """The tokenizer in `folder`; remote code is never run. Raises BadFileError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return TextCodec(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True))
    except Exception as error:
        # A tokenizer class that this transformers does not know still reads as a plain tokenizer.json.
        if (folder / "tokenizer.json").is_file():
            try:
                settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
                template = folder / "chat_template.jinja"
                plain = PreTrainedTokenizerFast(
                    tokenizer_file=str(folder / "tokenizer.json"),
                    chat_template=template.read_text("utf-8") if template.is_file() else settings.get("chat_template"),
                    **{key: settings[key] for key in ("bos_token", "eos_token") if isinstance(settings.get(key), str)},
                )
            except Exception:  # the first error tells more
                pass
            else:
                return TextCodec(plain)
        raise BadFileError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


def _count_bytes(text: str) -> int:
    """Bytes of `text` as UTF-8. Raises UsageError for half a surrogate pair, which JSON can carry and UTF-8 cannot."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x}"
        raise UsageError(
            f"the prompt is no Unicode text: character {error.start:,} is half a surrogate pair (`{found}`)"
        ) from error


def _prepare_message(message: dict[str, Any]) -> dict[str, Any]:
    """`message` as templates want it: content as one string, tool arguments as mappings, `developer` as `system`."""
    prepared = {key: value for key, value in message.items() if value is not None}
    prepared["content"] = join_parts(message.get("content"))
    if prepared.get("role") == "developer":
        prepared["role"] = "system"
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_prepare_call(call) for call in message["tool_calls"]]
    return prepared


def _prepare_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            parsed = json.loads(function["arguments"] or "{}")
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return call | {"function": function}


def join_parts(content: Any) -> str:
    """The text of a message's content: a string, or a list of text parts. Raises UsageError for images and sound."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"`content` is {_kind(content)}, expected a text or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise UsageError(f"content of type `{kind}` is not supported, this engine takes text")
    return "".join(texts)


def _kind(value: Any) -> str:
    """What JSON calls `value`."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        type(None): "null",
    }
    return names.get(type(value), "a number")


class Detokenizer:
    """Text of a growing list of ids, piece by piece; a piece never ends inside a UTF-8 character.

    Decoding starts a few tokens back, so that decoders which look at the token before (spaces, byte merges) give
    the same text as decoding all at once.
    """

    def __init__(self, codec: TextCodec, *, skip_special: bool = True) -> None:
        self._codec, self._skip_special = codec, skip_special
        self._ids: list[int] = []
        self._context = 0  # decoding starts here
        self._told = 0  # text of the ids before this has been handed out

    def add(self, ids: Iterable[int]) -> str:
        """The new text that `ids` complete."""
        return "".join(self._add(one) for one in ids)

    def flush(self) -> str:
        """What is still held back, broken bytes included."""
        text = self._new_text()
        self._context = self._told = len(self._ids)
        return text

    def _add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._ids) - self._told < _MAX_PENDING_TOKENS:
            return ""
        if text:
            self._context, self._told = self._told, len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._context : self._told])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._codec.decode(ids, skip_special=self._skip_special) if ids else ""


class StopScanner:
    """Passes text on until one of `stops` appears, across pieces; what might become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        #: The stop string that was found.
        self.matched: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.matched is not None

    def add(self, text: str) -> str:
        """What may be shown of the held text and `text`; nothing more once a stop string was found."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = [(place, stop) for stop in self._stops if (place := buffer.find(stop)) >= 0]
        if found:
            place, self.matched = min(found)
            self._held = ""
            return buffer[:place]
        kept = longest_partial(buffer, self._stops)
        self._held = buffer[len(buffer) - kept :]
        return buffer[: len(buffer) - kept]

    def flush(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def longest_partial(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of `text` could be the beginning of one of `marks`."""
    best = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), best, -1):
            if text.endswith(mark[:length]):
                best = length
                break
    return best
