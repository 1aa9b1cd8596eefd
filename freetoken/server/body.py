"""The body of a request: read whole before anything is made of it, and never more of it than `MAX_BYTES`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from freetoken.server.errors import ApiError, make_response

#: A prompt of a million tokens, its characters escaped, is below that. What is larger is no prompt of any model here,
#: and reading it could take the memory that the experts live in.
MAX_BYTES = 16 << 20
#: Of a refused body so much is read and thrown away, because most clients look at no answer before they have sent all.
_DRAINED_BYTES = 1 << 30
_DRAINED_S = 10.0


class BodyLimit:
    """Answers 413 to a larger body, however its length was announced; hands any other on in one piece."""

    def __init__(self, app: Any, max_bytes: int = MAX_BYTES) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Reads the body and passes on; its size is in `scope["ft.body_bytes"]`."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self._max_bytes:
            # Who asks first whether to send it at all gets the answer instead of the go-ahead.
            if b"expect" not in headers:
                await _drain(receive, 0)
            await self._refuse(scope, receive, send, f"{int(announced):,}")
            return
        body, is_whole = bytearray(), False
        while not is_whole:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client went away: nobody waits for an answer
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
            if len(body) > self._max_bytes:
                size = len(body)
                body.clear()
                if not is_whole:
                    size = await _drain(receive, size)
                await self._refuse(scope, receive, send, f"at least {size:,}")
                return
        scope["ft.body_bytes"] = len(body)
        await self._app(scope, _Replay(bytes(body), receive), send)

    async def _refuse(self, scope: dict[str, Any], receive: Any, send: Any, size: str) -> None:
        message = f"the body is too large: {size} bytes, at most {self._max_bytes:,} are taken"
        error = ApiError(413, message, code="request_too_large")
        if (entry := scope.get("ft.entry")) is not None:
            entry.error = error.message
        response = make_response(error, scope["path"])
        response.headers["connection"] = "close"
        await response(scope, receive, send)


class _Replay:
    """`receive` as the application sees it: the body at once, then whatever comes (a client that goes away)."""

    def __init__(self, body: bytes, receive: Any) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> dict[str, Any]:
        if self._body is None:
            message: dict[str, Any] = await self._receive()
            return message
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _drain(receive: Any, size: int) -> int:
    """Reads on without keeping anything, for a while; the bytes seen so far, `size` included."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAINED_S):
            while size < _DRAINED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    return size
