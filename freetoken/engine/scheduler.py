"""`Engine`: one thread that owns the model, and shares it among requests. Token ids in, token ids out.

Each round gives the oldest unfinished prompt one chunk and every decoding request one token, so a long prompt
delays the others by a chunk at most, and they delay it by a token each. Requests are admitted in order of arrival:
a large one that waits for KV is not overtaken, or it might wait for ever. Batching several requests into one
forward was set aside for now: with experts behind few slots, requests of one step fight for the same slots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from freetoken.engine.generation import GenerationDefaults, read_generation_defaults
from freetoken.engine.kv_cache import KvPool, state_bytes
from freetoken.engine.meter import Meter
from freetoken.engine.rebuild import RebuildResult, compute_limits, rebuild
from freetoken.engine.request import (
    ContextTooLongError,
    EngineBusyError,
    EngineClosedError,
    FinishReason,
    GenerationRequest,
    RequestHandle,
)
from freetoken.engine.sequence import ForwardPass, Sequence
from freetoken.engine.status import (
    CacheStatus,
    EngineStats,
    describe_cache,
    describe_oom,
    describe_request,
    describe_stats,
)
from freetoken.errors import FtError

if TYPE_CHECKING:
    from freetoken.engine.config import EngineConfig
    from freetoken.engine.loader import LoadedModel

log = logging.getLogger("freetoken.engine")

#: More requests than this may not wait: an answer in an hour is no answer.
MAX_WAITING = 1024
EngineState = Literal["serving", "rebuilding", "failed", "stopping"]


class Engine:
    """Serves `loaded` until `close()`. All methods may be called from any thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        defaults: GenerationDefaults | None = None,
        reuse_prefixes: bool = True,
    ) -> None:
        self.loaded, self.config = loaded, config
        self.defaults = defaults if defaults is not None else read_generation_defaults(Path(config.model_path))
        self.pool = KvPool(
            loaded.config, config.kv_tokens, dtype=loaded.dtype, device=loaded.device, reuse_prefixes=reuse_prefixes
        )
        self.meter = Meter()
        self.state: EngineState = "serving"
        self.failure: str | None = None
        self.last_rebuild: RebuildResult | None = None
        # Measured from the first request's states; until then what the headers say.
        self.state_bytes_per_sequence = (
            loaded.shape.state_bytes_per_sequence(conv_bytes=loaded.dtype.itemsize, has_whole_window=True)
            if self.pool.geometry.has_state
            else 0
        )
        self._forward = ForwardPass(loaded)
        self._waiting: deque[RequestHandle] = deque()
        self._running: list[Sequence] = []
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._rebuild_lock = threading.Lock()
        self._is_admitting, self._is_closed = True, False
        self._thread = threading.Thread(target=self._run, name="ft-engine", daemon=True)
        self._thread.start()

    # -- what others call

    @property
    def context_limit(self) -> int:
        """Tokens that one request may hold: the smaller of KV and the model's positions."""
        return min(self.pool.tokens, self.model_tokens)

    @property
    def model_tokens(self) -> int:
        """The model's own limit of positions."""
        return int(getattr(self.loaded.config, "max_position_embeddings", None) or self.pool.tokens)

    @property
    def active_count(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queues `request`. Raises ContextTooLongError where it can never fit, EngineBusyError, EngineClosedError."""
        handle = RequestHandle(request)
        handle.wake_engine = self._wake
        with self._changed:
            if not self._is_admitting:
                raise EngineClosedError(
                    f"the engine is {self.state} and takes no more requests"
                    + (f": {self.failure}" if self.failure else "")
                )
            if handle.prompt_tokens + request.max_tokens > self.context_limit:
                raise ContextTooLongError(handle.prompt_tokens, request.max_tokens, self.pool.tokens, self.model_tokens)
            if len(self._waiting) >= MAX_WAITING:
                raise EngineBusyError(f"{len(self._waiting)} requests wait already, at most {MAX_WAITING} may")
            self._waiting.append(handle)
            self._changed.notify_all()
        return handle

    def stats(self) -> EngineStats:
        """What was done and what is in use, now."""
        return describe_stats(self)

    def cache_status(self) -> CacheStatus:
        """Sizes, unit costs and limits of slots and KV."""
        return describe_cache(self, compute_limits(self.loaded, self.pool))

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by ledger key; recurrent states as if every place for a request were taken."""
        states = self.state_bytes_per_sequence * self.config.max_running_requests
        return dict(self.loaded.memory()) | {"kv_cache": self.pool.bytes} | ({"linear_state": states} if states else {})

    def rebuild(
        self, expert_slots: int | None = None, kv_tokens: int | None = None, *, timeout_s: float = 300.0
    ) -> RebuildResult:
        """Resizes live, between two steps; running requests go on where what they hold still fits."""
        if not self._rebuild_lock.acquire(blocking=False):
            return self._conflict("another rebuild is in progress")
        try:
            if self._is_closed or not self._is_admitting:
                self._rebuild_lock.release()
                return self._conflict(f"the engine is {self.state}")
            future = self._post(lambda: self._rebuild(expert_slots, kv_tokens))
            future.add_done_callback(lambda _: self._rebuild_lock.release())
        except BaseException:
            self._rebuild_lock.release()
            raise
        try:
            result: RebuildResult = future.result(timeout_s)
        except FutureTimeout:
            return RebuildResult(
                status="timeout", expert_slots=self.loaded.experts.expert_slots, kv_tokens=self.pool.tokens,
                error=f"still rebuilding after {timeout_s:g} s",
            )  # fmt: skip
        return result

    def flush(self, timeout_s: float = 30.0) -> int:
        """Drops all kept prefixes; the answer is how many tokens they held. Raises TimeoutError."""
        return int(self._post(self.pool.flush).result(timeout_s))

    def drain(self, timeout_s: float) -> bool:
        """Admits nothing more and waits for what is in hand; True when all is done."""
        with self._changed:
            self._stop_admitting()
            return self._changed.wait_for(lambda: self.active_count == 0, timeout_s)

    def resume(self) -> None:
        """Admits again after a `drain` that was not followed by `close`."""
        with self._changed:
            if self.state == "stopping" and not self._is_closed:
                self.state, self._is_admitting = "serving", True

    def abort_all(self) -> None:
        """Cancels every request."""
        with self._changed:
            for handle in [*self._waiting, *(one.handle for one in self._running)]:
                handle.is_cancelled = True
            self._changed.notify_all()

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends all requests and the thread, and gives memory back. A second call does nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._stop_admitting()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.loaded.close()

    # -- the engine's own thread

    def _run(self) -> None:
        if self.loaded.device.type == "cuda":
            torch.cuda.set_device(self.loaded.device)  # a thread's own, and 0 at first
        if self.config.cpu_threads:
            torch.set_num_threads(self.config.cpu_threads)
        try:
            with torch.inference_mode():
                self._loop()
        except Exception as error:
            log.exception("the engine's thread ended")
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._end_all(EngineClosedError("the engine was stopped"))

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._commands or self._waiting or self._running)
                if self._is_closed:
                    return
            self._step()

    def _step(self) -> None:
        """One round: commands, cancellations, admissions, one chunk of the oldest prompt, one token for all others."""
        self._run_commands()
        self._drop_cancelled()
        self._admit()
        prefilling = next((one for one in self._running if not one.is_prefilled), None)
        decoding = [one for one in self._running if one.is_prefilled]
        if prefilling is not None:
            self._advance(prefilling, self._prefill)
        for sequence in decoding:
            if not self._is_closed and not sequence.handle.is_cancelled:
                self._advance(sequence, self._decode)

    def _prefill(self, sequence: Sequence) -> None:
        started = time.perf_counter()
        tokens = sequence.prefill(self._forward, self.config.prefill_chunk_tokens)
        self.meter.prefill.add(tokens, time.perf_counter() - started)
        if sequence.is_prefilled:
            self.meter.prompt_tokens_total += sequence.handle.prompt_tokens
            self.meter.cached_tokens_total += sequence.handle.cached_tokens
            self.meter.completion_tokens_total += 1
        if self.pool.geometry.has_state:
            self.state_bytes_per_sequence = state_bytes(sequence.reservation.cache)

    def _decode(self, sequence: Sequence) -> None:
        started = time.perf_counter()
        sequence.decode(self._forward)
        self.meter.decode.add(1, time.perf_counter() - started)
        self.meter.completion_tokens_total += 1

    def _advance(self, sequence: Sequence, step: Callable[[Sequence], None]) -> None:
        """Runs `step`; what goes wrong in it ends this request alone."""
        try:
            step(sequence)
        except FtError as error:
            self._finish(sequence, "error", error)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            self._finish(sequence, "error", describe_oom(error, sequence))
        except Exception as error:
            log.exception("request %d failed", sequence.handle.number)
            self._finish(sequence, "error", FtError(f"{type(error).__name__}: {error}"))
            if isinstance(error, getattr(torch, "AcceleratorError", ())):
                # The CUDA context is lost: every later call would fail in the same way.
                self._fail(f"{type(error).__name__}: {error}")
        else:
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: FtError | None = None) -> None:
        self._running.remove(sequence)
        self.pool.release(sequence.reservation, None if error is not None else sequence.written_ids)
        self.meter.completed += reason in ("stop", "length")
        self.meter.cancelled += reason == "cancelled"
        self.meter.failed += reason == "error"
        if self.config.trace_path is not None:
            self.loaded.experts.flush_trace()
        sequence.handle.finish(reason, error)
        log.info(describe_request(sequence.handle))
        with self._changed:
            self._changed.notify_all()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_running_requests:
            handle = self._waiting[0]
            reservation = self.pool.reserve(handle.request.prompt_ids, _size(handle))
            if reservation is None:
                return
            stops = handle.request.stop_token_ids
            stops = (
                frozenset() if handle.request.ignore_eos else self.defaults.stop_token_ids if stops is None else stops
            )
            # Running first, waiting second: at no moment is the request in neither list.
            self._running.append(Sequence(handle, reservation, stops))
            self._waiting.popleft()

    def _drop_cancelled(self) -> None:
        for sequence in [one for one in self._running if one.handle.is_cancelled]:
            self._finish(sequence, "stop" if sequence.handle.is_enough else "cancelled")
        with self._changed:
            for handle in [one for one in self._waiting if one.is_cancelled]:
                self._waiting.remove(handle)
                self.meter.cancelled += 1
                handle.finish("cancelled")
            self._changed.notify_all()

    def _rebuild(self, expert_slots: int | None, kv_tokens: int | None) -> RebuildResult:
        self.state = "rebuilding"
        with self._changed:
            largest = max((_size(one) for one in self._waiting), default=0)
        result = rebuild(self.loaded, self.pool, expert_slots=expert_slots, kv_tokens=kv_tokens, waiting_tokens=largest)
        self.last_rebuild = result
        self.state = "serving" if self._is_admitting else "stopping"
        if result.status == "failed":
            self._fail(result.error or "rebuild failed")
        self._refuse_too_long()
        return result

    def _refuse_too_long(self) -> None:
        """Refuses what was queued while the KV shrank and fits it no more."""
        with self._changed:
            for handle in [one for one in self._waiting if _size(one) > self.context_limit]:
                self._waiting.remove(handle)
                tokens = (handle.prompt_tokens, handle.request.max_tokens, self.pool.tokens, self.model_tokens)
                handle.finish("error", ContextTooLongError(*tokens))

    def _fail(self, reason: str) -> None:
        """Latches the state `failed`: what runs ends, nothing more is admitted."""
        self.state, self.failure, self._is_admitting = "failed", reason, False
        self._end_all(EngineClosedError(f"the engine failed and needs a restart: {reason}"))

    def _end_all(self, error: FtError) -> None:
        for sequence in list(self._running):
            self._finish(sequence, "error", error)
        with self._changed:
            while self._waiting:
                self._waiting.popleft().finish("error", error)
            while self._commands:
                self._commands.popleft()[1].set_exception(error)
            self._changed.notify_all()

    def _run_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

    def _post(self, command: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the engine was stopped")
            self._commands.append((command, future))
            self._changed.notify_all()
        return future

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _stop_admitting(self) -> None:
        self._is_admitting = False
        if self.state != "failed":
            self.state = "stopping"

    def _conflict(self, reason: str) -> RebuildResult:
        return RebuildResult(
            status="busy",
            error=reason,
            is_conflict=True,
            expert_slots=self.loaded.experts.expert_slots,
            kv_tokens=self.pool.tokens,
        )


def _size(handle: RequestHandle) -> int:
    """Tokens that the request reserves."""
    return handle.prompt_tokens + handle.request.max_tokens
