"""From a text request to the engine and back: an async stream of text with stop strings, and its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request

from freetoken.server.errors import ApiError
from freetoken.server.schemas import SamplingFields
from freetoken.server.state import RequestEntry, ServerState
from freetoken.server.text import Detokenizer, StopScanner

if TYPE_CHECKING:
    from freetoken.engine.request import GenerationRequest, RequestHandle
    from freetoken.engine.sampler import SamplingParams

T = TypeVar("T")


class TextStream:
    """One generation as text. Iterate it once; then `finish_reason` and the counts are final.

    Leaving the iteration early, or the task's cancellation, cancels the request and so frees its KV.
    """

    def __init__(
        self, state: ServerState, request: GenerationRequest, stops: Sequence[str] = (), *,
        skip_special: bool = True, entry: RequestEntry | None = None,
    ) -> None:  # fmt: skip
        self._detokenizer = Detokenizer(state.codec, skip_special=skip_special)
        self._scanner = StopScanner(stops)
        self._entry = entry
        self.finish_reason = "stop"
        self.handle: RequestHandle = state.serving_engine.submit(request)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._scanner.matched

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape."""
        prompt, completion = self.handle.prompt_tokens, self.handle.completion_tokens
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.handle.cached_tokens},
        }  # fmt: skip

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self.handle.listener = lambda: _call_soon(loop, changed)
        try:
            while True:
                ids, is_finished = self.handle.take()
                text = self._scanner.add(self._detokenizer.add(ids))
                if self._scanner.is_stopped:
                    self.handle.end()
                if text:
                    yield text
                if self._scanner.is_stopped:
                    return
                if is_finished:
                    break
                await changed.wait()
                changed.clear()
            if self.handle.error is not None:
                raise self.handle.error
            if self.handle.finish_reason == "cancelled":
                raise ApiError(503, "the request was cancelled: the server is stopping", code="cancelled")
            self.finish_reason = str(self.handle.finish_reason)
            if rest := self._scanner.add(self._detokenizer.flush()) + self._scanner.flush():
                yield rest
            if self._scanner.is_stopped:
                self.finish_reason = "stop"
        finally:
            self.handle.cancel()
            self._fill_entry()

    async def read_all(self) -> str:
        """The whole text."""
        return "".join([piece async for piece in self.__aiter__()])

    def _fill_entry(self) -> None:
        if self._entry is None:
            return
        handle, entry = self.handle, self._entry
        entry.prompt_tokens = (entry.prompt_tokens or 0) + handle.prompt_tokens
        entry.completion_tokens = (entry.completion_tokens or 0) + handle.completion_tokens
        if handle.first_token_at is not None and entry.ttft_ms is None:
            entry.ttft_ms = round(1000 * (handle.first_token_at - handle.submitted_at), 1)


def _call_soon(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(changed.set)
    except RuntimeError:  # the loop has ended: nobody listens any more
        pass


def make_sampling(state: ServerState, body: SamplingFields) -> SamplingParams:
    """The request's fields, else the checkpoint's defaults, else OpenAI's (temperature 1)."""
    from freetoken.engine.sampler import SamplingParams

    names = SamplingParams.model_fields
    given = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    values = {"temperature": 1.0} | state.engine.defaults.sampling | given
    values["top_k"] = max(0, int(values.get("top_k", 0)))
    return SamplingParams.model_validate(values)


def make_request(
    state: ServerState, prompt_ids: Sequence[int], max_tokens: int | None, sampling: SamplingParams, *,
    ignore_eos: bool = False, stop_token_ids: Sequence[int] | None = None,
) -> GenerationRequest:  # fmt: skip
    """A request of the engine. Without `max_tokens` it gets the server's default, as far as the context has room."""
    from freetoken.engine.request import GenerationRequest

    engine = state.serving_engine
    if max_tokens is None:
        max_tokens = max(1, min(state.options.max_output_tokens, engine.context_limit - len(prompt_ids)))
    stops = None if not stop_token_ids else engine.defaults.stop_token_ids | frozenset(stop_token_ids)
    return GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        sampling=sampling,
        ignore_eos=ignore_eos,
        stop_token_ids=stops,
    )


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away (a plain response would not notice)."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=0.2))[0]:
            if await request.is_disconnected():
                task.cancel()
                raise ApiError(499, "the client went away")
        return task.result()
    finally:
        task.cancel()
