"""httpx's network, with the time of every read taken the moment the event loop hands the bytes over.

httpx and httpcore stay what they are; only the lowest layer is ours, because a time that is taken above it includes
the parsing of what came on all other streams. Plain TCP only: over TLS the client falls back to httpx's own layer.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import httpcore
import httpx


class _Receiver(asyncio.Protocol):
    """Queues what is received, each read with its time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.reads: deque[tuple[float, bytes]] = deque()
        self.is_closed = False
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        self.reads.append((self.now(), data))
        self.wake()

    def eof_received(self) -> None:
        self.is_closed = True
        self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed, self.error = True, exc
        self.wake()

    def wake(self) -> None:
        """Lets the reader go on."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class StampedStream(httpcore.AsyncNetworkStream):
    """A TCP connection; `stamp_s` is when what was last read had come, `written_s` when the last write was done."""

    def __init__(self, transport: asyncio.Transport, receiver: _Receiver) -> None:
        self._transport, self._receiver = transport, receiver
        self._now = receiver.now
        self.stamp_s = self.written_s = 0.0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """One read as it came; empty at the end of the stream."""
        receiver = self._receiver
        while not receiver.reads:
            if receiver.is_closed:
                if receiver.error is not None:
                    raise httpcore.ReadError(str(receiver.error))
                return b""
            receiver.waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await receiver.waiter
            except TimeoutError as error:
                raise httpcore.ReadTimeout(f"nothing came for {timeout:g} s") from error
            finally:
                receiver.waiter = None
        self.stamp_s, data = receiver.reads.popleft()
        if len(data) > max_bytes:
            receiver.reads.appendleft((self.stamp_s, data[max_bytes:]))
        return data[:max_bytes]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Hands `buffer` to the kernel, or to the loop where the kernel's is full."""
        if self._receiver.error is not None or self._transport.is_closing():
            raise httpcore.WriteError(str(self._receiver.error or "the connection is closed"))
        if buffer:
            self._transport.write(buffer)
            self.written_s = self._now()

    async def aclose(self) -> None:
        """Closes the connection."""
        self._transport.abort()

    def get_extra_info(self, info: str) -> Any:
        """What httpcore asks: whether an idle connection has become readable, which means that it was closed."""
        if info == "is_readable":
            return self._receiver.is_closed or bool(self._receiver.reads)
        return self._transport.get_extra_info("socket") if info == "socket" else None


class StampedBackend(httpcore.AsyncNetworkBackend):
    """Opens `StampedStream`s on the running loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:  # fmt: skip
        """A connection to `host`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                transport, receiver = await loop.create_connection(lambda: _Receiver(self._now), host, port)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"no connection within {timeout:g} s") from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return StampedStream(transport, receiver)

    async def sleep(self, seconds: float) -> None:
        """Waits between two tries to connect."""
        await asyncio.sleep(seconds)


def make_transport(base_url: str, now: Callable[[], float] = time.perf_counter) -> httpx.AsyncBaseTransport:
    """A transport for `base_url` whose responses' `network_stream` carries `stamp_s` (not so over TLS)."""
    transport = httpx.AsyncHTTPTransport(trust_env=False, limits=httpx.Limits(max_connections=None))
    if not base_url.startswith("https:"):
        # httpx has no public place for a network backend; the pool is what its transport consists of.
        transport._pool = httpcore.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=None, network_backend=StampedBackend(now)
        )
    return transport
