"""What one server process knows: its options, how far the load is, the engine once it is there, the last requests."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from freetoken import __version__
from freetoken.server.errors import ApiError

if TYPE_CHECKING:
    from freetoken.engine.scheduler import Engine
    from freetoken.server.text import TextCodec

T = TypeVar("T")

RING_SIZE = 512
#: Bytes of a request from which on its text is put into tokens behind the others of its size.
LARGE_BYTES = 1 << 17


class ServerOptions(BaseModel):
    """How the server presents itself. The key is held in memory alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=1919, ge=0, le=65535)
    served_model_name: str = "model"
    #: Cap of a request that names none.
    max_output_tokens: int = Field(default=2048, ge=1)
    api_key: str | None = Field(default=None, repr=False, exclude=True)


@dataclass
class RequestEntry:
    """One row of the request ring; times in ms, `ts` in seconds since the epoch."""

    method: str
    path: str
    ts: float = field(default_factory=time.time)
    status: int | None = None
    model: str | None = None
    duration_ms: float | None = None
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    stream: bool | None = None
    error: str | None = None


class RequestRing:
    """The last `RING_SIZE` requests, numbered from 1 on: a cursor is the number of the last one seen."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, RequestEntry]] = deque(maxlen=RING_SIZE)
        self._last = 0
        self._lock = threading.Lock()

    def add(self, entry: RequestEntry) -> None:
        """Appends a finished request."""
        with self._lock:
            self._last += 1
            self._entries.append((self._last, entry))

    def read(self, since: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """(the oldest `limit` entries after `since`, the cursor for the next call)."""
        with self._lock:
            found = [(number, entry) for number, entry in self._entries if number > since][:limit]
        return [asdict(entry) for _, entry in found], found[-1][0] if found else since

    def summarise(self) -> dict[str, float]:
        """`p95_ms` of the durations and `ttft_mean_ms` over the ring; 0 where there is none."""
        with self._lock:
            entries = [entry for _, entry in self._entries]
        durations = sorted(entry.duration_ms for entry in entries if entry.duration_ms is not None)
        return {
            "p95_ms": round(durations[int(0.95 * (len(durations) - 1))], 1) if durations else 0,
            "ttft_mean_ms": round(_mean(entry.ttft_ms for entry in entries if entry.ttft_ms is not None), 1),
        }


class ServerState:
    """Shared by all handlers. The loading thread writes it, the event loop reads it."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.instance_id = str(uuid.uuid4())
        self.started_at = time.monotonic()
        self.created = int(time.time())
        self.phase, self.done_bytes, self.total_bytes = "other", 0, 0
        self.error: str | None = None
        self.ring = RequestRing()
        self._large = ThreadPoolExecutor(1, "ft-encode")
        self._ready_at: float | None = None
        self._engine: Engine | None = None
        self._codec: TextCodec | None = None

    def set_progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """How far the load is; a total of 0 = not known."""
        self.phase, self.done_bytes, self.total_bytes = phase, done_bytes, total_bytes

    def set_ready(self, engine: Engine, codec: TextCodec) -> None:
        """From now on it serves."""
        self._codec, self._ready_at = codec, time.monotonic()
        self._engine = engine

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError (503) while there is none."""
        if self.error is not None:
            raise ApiError(503, f"server unavailable: {self.error}", code="failed")
        if self._engine is None:
            raise ApiError(503, "model is still loading", code="loading")
        return self._engine

    @property
    def serving_engine(self) -> Engine:
        """The engine, for requests that generate. Raises ApiError (503) while it is failed or stopping."""
        engine = self.engine
        if engine.state == "failed":
            raise ApiError(503, f"server unavailable: {engine.failure}; a restart is required", code="failed")
        if engine.state == "stopping":
            raise ApiError(503, "server unavailable: it is stopping", code="stopping")
        return engine

    @property
    def codec(self) -> TextCodec:
        """The tokenizer. Raises ApiError (503) while there is none."""
        if self._codec is None:
            raise ApiError(503, "model is still loading", code="loading")
        return self._codec

    @property
    def serving_codec(self) -> TextCodec:
        """The tokenizer, for requests that generate. Raises ApiError (503) like `serving_engine`."""
        _ = self.serving_engine
        return self.codec

    async def run_aside(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on `size` bytes of text, off the event loop.

        Large texts wait for each other: their memory is needed once, and threads are left for the small ones.
        """
        if size < LARGE_BYTES:
            return await asyncio.to_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._large, work)

    @property
    def uptime_s(self) -> int:
        """Whole seconds since it was ready."""
        return int(time.monotonic() - self._ready_at) if self._ready_at is not None else 0

    def health(self) -> dict[str, Any]:
        """The document of `/health`."""
        if self.error is not None:
            return {"status": "error", "message": self.error, "instance_id": self.instance_id, "version": __version__}
        named = {"model": self.options.served_model_name, "instance_id": self.instance_id, "version": __version__}
        if self._engine is None:
            progress = {"done_bytes": self.done_bytes, "total_bytes": self.total_bytes}
            return {"status": "loading", "phase": self.phase, "progress": progress} | named
        if self._engine.state == "failed":
            message = f"{self._engine.failure}; a restart is required"
            return {"status": "error", "message": message, "maintenance": "failed"} | named
        return {"status": "ok", "uptime_s": self.uptime_s, "maintenance": self._engine.state} | named


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
