"""The client that is timed: streamed requests over httpx, many at once on one event loop.

One loop rather than threads: eight threads that wake 2,400 times a second wait for each other's interpreter lock, a
loop takes each read as it comes. Connections are kept, proxies are never asked, and garbage is collected before a
run instead of within it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from freetoken.bench.stream import Answer, BadAnswerError, read_answer
from freetoken.bench.transport import StampedStream, make_transport
from freetoken.errors import FtError

#: Bytes of one streamed answer that are kept: 64k tokens of 400 bytes are 26 MB.
MOST_ANSWER_BYTES = 256 << 20
CONNECT_TIMEOUT_S = 10.0


class RequestFailedError(FtError):
    """A request was refused or broke off. `status_code` is HTTP's, None where there was no answer."""

    def __init__(
        self, message: str, *, status_code: int | None = None, code: str | None = None, hint: str | None = None
    ):
        super().__init__(message, hint=hint)
        self.status_code = status_code
        #: The engine's own word, e.g. `context_length_exceeded`.
        self.code = code


@dataclass(frozen=True)
class Timed:
    """An answer, and when its request was sent and its stream ended."""

    sent_s: float
    ended_s: float
    answer: Answer


class StreamClient:
    """Sends requests to `base_url` and takes the times. Belongs to one event loop."""

    def __init__(
        self, base_url: str, api_key: str | None = None, *, request_timeout_s: float = 1800.0,
        stall_timeout_s: float = 900.0, transport: httpx.AsyncBaseTransport | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._now, self._request_timeout_s = now, request_timeout_s
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/"), headers=headers, trust_env=False,
            transport=transport or make_transport(base_url, now),
            timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=stall_timeout_s),
        )  # fmt: skip

    async def __aenter__(self) -> StreamClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(self, path: str, body: dict[str, Any]) -> Timed:
        """The timed answer to `body`. Raises RequestFailedError and BadAnswerError."""
        content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        request = self._http.build_request("POST", path, content=content)
        reads: list[tuple[float, bytes]] = []
        try:
            async with asyncio.timeout(self._request_timeout_s):
                sent = self._now()
                response = await self._http.send(request, stream=True)
                # When its last byte left: until then eight requests that start at once wait for each other.
                stream = response.extensions.get("network_stream")
                sent = stream.written_s if isinstance(stream, StampedStream) else sent
                try:
                    await self._read(response, reads)
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise RequestFailedError(f"no whole answer within {self._request_timeout_s:g} s") from error
        except httpx.TimeoutException as error:
            raise RequestFailedError(f"the engine fell silent ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise RequestFailedError(f"the connection broke: {str(error) or type(error).__name__}") from error
        ended = self._now()
        if response.status_code != 200:
            raise _make_error(response.status_code, b"".join(data for _, data in reads))
        return Timed(sent, ended, read_answer(reads))

    async def _read(self, response: httpx.Response, reads: list[tuple[float, bytes]]) -> None:
        now, size = self._now, 0
        stream = response.extensions.get("network_stream")
        is_stamped = isinstance(stream, StampedStream)
        async for data in response.aiter_raw():
            reads.append((stream.stamp_s if is_stamped else now(), data))  # type: ignore[union-attr]
            size += len(data)
            if size > MOST_ANSWER_BYTES:
                raise BadAnswerError(f"the engine's answer is larger than {MOST_ANSWER_BYTES >> 20} MiB")

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a chat message of `text` with what the template adds; None where the engine does not count."""
        body = {"model": "default", "messages": [{"role": "user", "content": text}]}
        try:
            response = await self._http.post("/v1/messages/count_tokens", json=body, timeout=CONNECT_TIMEOUT_S)
            found = response.json().get("input_tokens") if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return found if isinstance(found, int) else None


def _make_error(status_code: int, data: bytes) -> RequestFailedError:
    text, code = data[:300].decode(errors="replace"), None
    try:
        found = json.loads(data).get("error")
    except (ValueError, AttributeError):
        found = None
    if isinstance(found, dict):
        text, code = str(found.get("message", found)), found.get("code")
    elif found:
        text = str(found)
    return RequestFailedError(f"the engine answered {status_code}: {text}", status_code=status_code, code=code)


@contextmanager
def calm() -> Iterator[None]:
    """No garbage collection inside: a pass over a large heap would stop every stream for milliseconds."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
