"""One generation: what is asked (`GenerationRequest`), and the end of it that the asker holds (`RequestHandle`)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from freetoken.engine.sampler import SamplingParams
from freetoken.errors import DoesNotFitError, FtError

#: `stop` = a stop token or `RequestHandle.end`, `length` = max_tokens reached, `cancelled` = the asker gave up,
#: `error` = see `handle.error`.
FinishReason = Literal["stop", "length", "cancelled", "error"]


class ContextTooLongError(DoesNotFitError):
    """A request that can never fit: more tokens than the KV store or the model's positions."""

    def __init__(self, prompt_tokens: int, max_tokens: int, kv_tokens: int, model_tokens: int) -> None:
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        self.limit_tokens = min(kv_tokens, model_tokens)
        total, limit = prompt_tokens + max_tokens, self.limit_tokens
        super().__init__(
            f"prompt is too long: {total} tokens > {limit} maximum (prompt + generation): {prompt_tokens} prompt tokens"
            f" and max_tokens {max_tokens}; the KV cache holds {kv_tokens}, the model {model_tokens} positions",
            hint=f"ask for at most {limit - prompt_tokens} tokens, or give the engine more KV"
            if prompt_tokens < limit
            else "shorten the prompt, or give the engine more KV",
        )


class EngineBusyError(FtError):
    """Too many requests wait already."""


class EngineClosedError(FtError):
    """The engine is stopping and admits nothing."""


class GenerationRequest(BaseModel):
    """Token ids in; how many tokens out at most, how they are sampled, and what ends them early."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_ids: tuple[int, ...] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    sampling: SamplingParams = SamplingParams()
    #: Token ids that end the generation; None = the checkpoint's own.
    stop_token_ids: frozenset[int] | None = None
    ignore_eos: bool = False


class RequestHandle:
    """The asker's end: iterate it for token ids, `cancel()` it, read times and counts. Thread-safe.

    A stop token ends the generation, is counted in `completion_tokens`, and is not among the ids.
    """

    _numbers = itertools.count(1)

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.number = next(self._numbers)
        self.prompt_tokens = len(request.prompt_ids)
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.error: FtError | None = None
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.is_cancelled = False
        #: The asker has what it wanted: what is cancelled then was completed.
        self.is_enough = False
        #: Called from the engine's thread after every change; must not block.
        self.listener: Callable[[], None] | None = None
        #: Called by `cancel`, so that the engine need not be in the middle of a wait to notice.
        self.wake_engine: Callable[[], None] = lambda: None
        self._ids: list[int] = []
        self._taken = 0
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[int]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._taken < len(self._ids) or self.finish_reason is not None)
                ids, is_finished = self._take()
            yield from ids
            if is_finished:
                if self.error is not None:
                    raise self.error
                return

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids so far."""
        with self._changed:
            return tuple(self._ids)

    def take(self) -> tuple[list[int], bool]:
        """(ids not taken before, whether the generation is over and all are taken); never blocks."""
        with self._changed:
            return self._take()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the generation is over; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finish_reason is not None, timeout_s)

    def cancel(self) -> None:
        """Ends the generation at the next step and gives its KV back; harmless when it is over."""
        self.is_cancelled = True
        self.wake_engine()

    def end(self) -> None:
        """As `cancel`, for an asker that has all it wanted, as after a stop string: it ends with `stop`."""
        self.is_enough = True
        self.cancel()

    def push(self, token_id: int, *, is_visible: bool) -> None:
        """The engine's side: one more token."""
        with self._changed:
            if self.first_token_at is None:
                self.first_token_at = time.monotonic()
            self.completion_tokens += 1
            if is_visible:
                self._ids.append(token_id)
            self._changed.notify_all()
        self._tell()

    def finish(self, reason: FinishReason, error: FtError | None = None) -> None:
        """The engine's side: no more tokens."""
        with self._changed:
            if self.finish_reason is None:
                self.finish_reason, self.error, self.finished_at = reason, error, time.monotonic()
            self._changed.notify_all()
        self._tell()

    def _take(self) -> tuple[list[int], bool]:
        ids = self._ids[self._taken :]
        self._taken += len(ids)
        return ids, self.finish_reason is not None

    def _tell(self) -> None:
        if self.listener is not None:
            self.listener()
