"""A loopback proxy in front of an engine that hands on what was asked and answered, byte for byte as it comes.

Headers are passed through and never handed on: an API key reaches the engine and nothing else. Standard library
only, one thread for each connection: it stands between a person's tools and their model for an afternoon, and what
counts is that nothing is held back. The first byte of an answer is sent on when it comes.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

from freetoken.bench.stream import BadAnswerError, read_answer
from freetoken.errors import FtError, UsageError

MOST_BODY_BYTES = 64 << 20
#: An answer is kept up to here; what is longer is passed on and not recorded.
MOST_KEPT_BYTES = 32 << 20
READ_TIMEOUT_S = 3600.0
_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "host", "content-length", "expect", "accept-encoding",
})  # fmt: skip
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_PATHS: dict[str, Literal["chat", "completion"]] = {"/chat/completions": "chat", "/completions": "completion"}


@dataclass(frozen=True)
class Exchange:
    """One request with its answer. Times are seconds since the proxy was started."""

    kind: Literal["chat", "completion"]
    body: dict[str, Any]
    answer: dict[str, Any] | None
    usage: dict[str, Any] | None
    sent_s: float
    ended_s: float


class RecordingProxy:
    """Listens on the loopback `port` (0 = any free one), passes everything to `base_url`.

    `keep` gets each answered completion, from the thread that served it.
    """

    def __init__(self, base_url: str, port: int, keep: Callable[[Exchange], None]) -> None:
        target = urlsplit(base_url)
        if target.scheme != "http" or target.hostname is None:
            raise UsageError(f"`{base_url}` is no `http://HOST:PORT`, which is all that can be recorded")
        # People give the address with the `/v1` that their tools want; requests bring their own.
        prefix = target.path.rstrip("/").removesuffix("/v1")
        facts = {"upstream": (target.hostname, target.port or 80), "prefix": prefix, "keep": staticmethod(keep)}
        handler = type("BoundHandler", (_Handler,), facts | {"started_s": time.monotonic()})
        try:
            self._server = _Server(("127.0.0.1", port), handler)
        except OSError as error:
            raise FtError(f"port {port} cannot be listened on: {error.strerror}", hint="`--listen 0`") from error
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def __enter__(self) -> RecordingProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: a caller that went away is no failure of the recording."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: tuple[str, int]
    prefix: str
    keep: Callable[[Exchange], None]
    started_s: float

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: what is asked is nobody's business on a terminal."""

    def _pass(self) -> None:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if host not in _LOOPBACK:  # a page in a browser that was led here by its own name
            return self._refuse(403, f"this proxy answers to 127.0.0.1 and localhost, not to `{host[:80]}`")
        body = self._read_body()
        if body is None:
            return None
        sent = time.monotonic() - self.started_s
        connection = http.client.HTTPConnection(*self.upstream, timeout=READ_TIMEOUT_S)
        try:
            headers = {key: value for key, value in self.headers.items() if key.lower() not in _HOP_BY_HOP}
            headers |= {"Accept-Encoding": "identity", "Content-Length": str(len(body))}
            connection.request(self.command, self.prefix + self.path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return self._refuse(502, f"the engine cannot be reached: {error}")
        try:
            kept = self._send_on(response)
        except (OSError, http.client.HTTPException):  # one of the two went away
            self.close_connection = True
            return None
        finally:
            connection.close()
        if response.status == 200 and kept is not None:
            self._hand_on(body, kept, response.headers.get_content_type(), sent)
        return None

    do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = do_PATCH = _pass

    def _read_body(self) -> bytes | None:
        """The body of the request; None where it was refused."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            return self._read_chunks()
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if not 0 <= length <= MOST_BODY_BYTES:
            self._refuse(413, f"a request may have {MOST_BODY_BYTES >> 20} MiB")
            return None
        return self.rfile.read(length)

    def _read_chunks(self) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            try:
                length = int(self.rfile.readline(64).split(b";")[0], 16)
            except ValueError:
                length = -1
            size += length
            if length < 0 or size > MOST_BODY_BYTES:
                self._refuse(400, "a chunk that cannot be read, or too many of them")
                return None
            if length == 0:
                while self.rfile.readline(1 << 16).strip():
                    pass
                return b"".join(parts)
            parts.append(self.rfile.read(length))
            self.rfile.readline(8)

    def _send_on(self, response: http.client.HTTPResponse) -> bytes | None:
        """Sends the answer as it comes; what it was, or None where it is too large to keep."""
        length = response.headers.get("Content-Length")
        has_body = self.command != "HEAD" and response.status not in (204, 304)
        is_chunked = length is None and has_body and self.request_version != "HTTP/1.0"
        self.send_response_only(response.status, response.reason)
        for key, value in response.headers.items():
            if key.lower() not in _HOP_BY_HOP:
                self.send_header(key, value)
        if length is not None:
            self.send_header("Content-Length", length)
        elif is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        kept, size = [], 0
        while has_body and (data := response.read1(1 << 16)):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if is_chunked else data)
            size += len(data)
            if size <= MOST_KEPT_BYTES:
                kept.append(data)
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")
        return b"".join(kept) if size <= MOST_KEPT_BYTES else None

    def _hand_on(self, body: bytes, answer: bytes, content_type: str, sent_s: float) -> None:
        path = self.path.partition("?")[0]
        kind = next((_PATHS[end] for end in _PATHS if path.endswith(end)), None)
        if self.command != "POST" or kind is None:
            return
        try:
            asked = json.loads(body)
            said, usage = _read_stream(answer) if content_type == "text/event-stream" else _read_whole(answer)
        except (ValueError, BadAnswerError, KeyError, IndexError, TypeError):
            return
        if isinstance(asked, dict):
            ended = time.monotonic() - self.started_s
            type(self).keep(Exchange(kind, asked, said, usage, sent_s, ended))

    def _refuse(self, status: int, text: str) -> None:
        data = json.dumps({"error": {"message": text, "type": "proxy_error"}}).encode()
        self.close_connection = True
        self.send_response_only(status)
        for key, value in (("Content-Type", "application/json"), ("Content-Length", str(len(data))),
                           ("Connection", "close")):  # fmt: skip
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


def _read_stream(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = read_answer([(0.0, data)])
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["tool_calls"] = list(answer.tool_calls)
    return message, {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}


def _read_whole(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    document = json.loads(data)
    choice = document["choices"][0]
    message = choice.get("message") or {"role": "assistant", "content": choice.get("text") or ""}
    return dict(message), dict(document.get("usage") or {})
