"""The ASGI application: all endpoints, the API key, the limit of bodies, the ring of requests."""

from __future__ import annotations

import hmac
import time
from typing import Any

from fastapi import FastAPI

from freetoken import __version__
from freetoken.server import anthropic_api, control_api, openai_api
from freetoken.server.body import BodyLimit
from freetoken.server.errors import ApiError, add_handlers, make_response
from freetoken.server.state import RequestEntry, ServerState

#: What is listed in `/v1/requests`; the control calls of monitors would push everything else out.
_LOGGED = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages")


def make_app(state: ServerState) -> Any:
    """The application bound to `state`; it answers at once, also while the model loads."""
    app = FastAPI(title="FreeToken native engine", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_handlers(app)
    for module in (control_api, openai_api, anthropic_api):
        app.include_router(module.make_router(state))
    return RequestLog(KeyCheck(BodyLimit(app), state), state)


class KeyCheck:
    """Lets a request pass that brings the key, as bearer or `x-api-key`; `/health` needs none."""

    def __init__(self, app: Any, state: ServerState) -> None:
        self._app = app
        key = state.options.api_key
        self._key = key.encode() if key is not None else None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answers 401, or passes on."""
        if scope["type"] != "http" or self._key is None or scope["path"] == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "Unauthorized: the API key is missing or wrong", code="invalid_api_key")
        if (entry := scope.get("ft.entry")) is not None:
            entry.error = error.message
        await make_response(error, scope["path"])(scope, receive, send)

    def _has_key(self, scope: dict[str, Any]) -> bool:
        headers = dict(scope["headers"])
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        return self._key is not None and hmac.compare_digest(given, self._key)


class RequestLog:
    """Writes generation requests into the ring when they end, however they end."""

    def __init__(self, app: Any, state: ServerState) -> None:
        self._app, self._ring = app, state.ring

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes on, and writes down what came of it."""
        if scope["type"] != "http" or scope["path"] not in _LOGGED:
            await self._app(scope, receive, send)
            return
        entry, started = RequestEntry(scope["method"], scope["path"]), time.monotonic()
        scope["ft.entry"] = entry

        async def note_status(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            entry.duration_ms = round(1000 * (time.monotonic() - started), 1)
            self._ring.add(entry)
