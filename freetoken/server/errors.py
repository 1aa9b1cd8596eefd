"""Errors as the HTTP API tells them: in OpenAI's shape, or Anthropic's on its paths, with sentence and numbers."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from freetoken.errors import FtError, UsageError

log = logging.getLogger("freetoken.server")

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 422: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status_code: int, message: str, *, code: str | None = None) -> None:
        # What a request says may be told back, and half a surrogate pair in it cannot be sent as UTF-8.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(self.message)
        self.status_code, self.code = status_code, code


def make_api_error(error: Exception) -> ApiError:
    """How an exception of the engine or of reading a request is told."""
    if isinstance(error, ApiError):
        return error
    # By name: the engine's module brings torch, which must not be imported before the port is bound.
    name, text = type(error).__name__, str(error)
    hint = f" (hint: {error.hint})" if isinstance(error, FtError) and error.hint else ""
    if name in ("ContextTooLongError", "PromptTooLongError"):
        return ApiError(400, text + hint, code="context_length_exceeded")
    if name == "EngineBusyError":
        return ApiError(429, text, code="too_many_requests")
    if name == "EngineClosedError":
        return ApiError(503, text, code="stopping")
    if isinstance(error, UsageError):
        return ApiError(400, text + hint)
    if isinstance(error, FtError):
        return ApiError(500, text + hint, code="generation_failed")
    return ApiError(500, f"{name}: {text}", code="internal_error")


def make_document(error: ApiError, path: str) -> dict[str, Any]:
    """The body that tells `error` to a client of `path`."""
    kind = _TYPES.get(error.status_code, "api_error")
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def make_response(error: ApiError, path: str) -> JSONResponse:
    """`error` as a response."""
    return JSONResponse(make_document(error, path), status_code=error.status_code)


def add_handlers(app: FastAPI) -> None:
    """Every error of a handler gets our shape."""

    @app.exception_handler(ApiError)
    @app.exception_handler(FtError)
    async def _tell(request: Request, error: Exception) -> JSONResponse:
        return _respond(request, make_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def _tell_body(request: Request, error: RequestValidationError) -> JSONResponse:
        return _respond(request, _explain_body(request, error))

    @app.exception_handler(HTTPException)
    async def _tell_http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(cause := error.__cause__, (UnicodeDecodeError, RecursionError)):
            reason = "it is nested too deep"
            if isinstance(cause, UnicodeDecodeError):
                reason = f"it is no UTF-8 text at byte {cause.start:,}"
            return _respond(request, ApiError(400, f"the body is no JSON that can be read: {reason}"))
        return _respond(request, ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}"))

    @app.exception_handler(Exception)
    async def _tell_rest(request: Request, error: Exception) -> JSONResponse:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return _respond(request, make_api_error(error))


def _explain_body(request: Request, error: RequestValidationError) -> ApiError:
    found = list(error.errors())
    kind = request.headers.get("content-type", "")
    if found and found[0]["type"] == "json_invalid":
        place, text = found[0]["loc"][-1], error.body
        # The parser counts characters.
        byte = len(text[:place].encode("utf-8", "surrogatepass")) if isinstance(text, str) else place
        reason = str(found[0].get("ctx", {}).get("error", found[0]["msg"]))
        return ApiError(400, f"the body is no JSON: {reason[:1].lower()}{reason[1:]} at byte {byte:,}")
    if any(one["loc"] == ("body",) for one in found) and "json" not in kind:
        return ApiError(422, f"the body is sent as `{kind}`; send it with `Content-Type: application/json`")
    return ApiError(422, "; ".join(
        f"`{'.'.join(str(part) for part in one['loc'][1:]) or 'body'}`: {one['msg']}" for one in found
    ))  # fmt: skip


def _respond(request: Request, error: ApiError) -> JSONResponse:
    if (entry := request.scope.get("ft.entry")) is not None:
        entry.error = error.message
    return make_response(error, request.url.path)
