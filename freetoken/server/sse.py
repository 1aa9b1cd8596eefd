"""Server-sent events: documents as `data:` lines, kept alive while nothing happens, errors told inside the stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from freetoken.server.errors import make_api_error, make_document

#: A comment is sent after this much silence, so that proxies and clients wait through a long prefill.
KEEP_ALIVE_S = 15.0


def format_event(document: Any, event: str | None = None) -> str:
    """One event; `event` names it, as Anthropic's streams do."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def make_stream(events: AsyncIterator[str], path: str, entry: Any = None) -> StreamingResponse:
    """A response that sends `events`; an exception in them becomes an error event, since the status is out already."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_keep_alive(_guard(events, path, entry)), media_type="text/event-stream", headers=headers)


async def _guard(events: AsyncIterator[str], path: str, entry: Any) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield event
    except Exception as error:
        told = make_api_error(error)
        if entry is not None:
            entry.error = told.message
        is_anthropic = path.startswith("/v1/messages")
        yield format_event(make_document(told, path), "error" if is_anthropic else None)
        if not is_anthropic:
            yield "data: [DONE]\n\n"


async def _keep_alive(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """`events` with comments in between; ends `events` properly when the client goes away."""
    pending: asyncio.Task[str] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({pending}, timeout=KEEP_ALIVE_S))[0]:
                yield ": keep-alive\n\n"
            try:
                event = pending.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await events.aclose()  # type: ignore[attr-defined]
