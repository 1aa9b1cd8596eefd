"""One server process from bind to exit: HTTP answers at once, the model loads in a thread, signals end it in order.

Exit codes: 0 after SIGINT or SIGTERM, 1 after a failed load or a failed engine. A failure stays readable in
`/health` for `LINGER_S` seconds before the process ends: whoever launched it learns more there than from a code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from freetoken.errors import FtError
from freetoken.server.app import make_app
from freetoken.server.state import ServerOptions, ServerState

if TYPE_CHECKING:
    from freetoken.engine.config import EngineConfig
    from freetoken.engine.scheduler import Engine
    from freetoken.server.text import TextCodec

log = logging.getLogger("freetoken.server")

LINGER_S = 5.0
#: Seconds that open connections get to end after a signal; their requests are cancelled at once.
_GRACE_S = 4

#: The engine's words for the phases of a load -> those of `/health`, which the upstream engine uses too.
_PHASES = {"dense": "weights", "experts": "expert_banks"}

Loader = Callable[[ServerState], "tuple[Engine, TextCodec]"]


def make_loader(config: EngineConfig, *, reuse_prefixes: bool = True) -> Loader:
    """What loads `config`'s model: the tokenizer first, because it is the cheaper one to find broken."""

    def load(state: ServerState) -> tuple[Engine, TextCodec]:
        from freetoken.engine.loader import load_model
        from freetoken.engine.scheduler import Engine
        from freetoken.server.text import load_codec

        codec = load_codec(config.model_path)

        def tell(phase: str, done_bytes: int, total_bytes: int) -> None:
            state.set_progress(_PHASES.get(phase, phase), done_bytes, total_bytes)

        loaded = load_model(config, progress=tell)
        for sentence in loaded.notes:
            log.info(sentence)
        state.set_progress("warmup", 0, 0)
        return Engine(loaded, config, reuse_prefixes=reuse_prefixes), codec

    return load


def run_server(options: ServerOptions, listener: socket.socket, load: Loader, *, linger_s: float = LINGER_S) -> int:
    """Serves until a signal or a failure; the answer is the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("freetoken").setLevel(logging.INFO)
    process = _Process(options, load, linger_s)
    asyncio.run(process.serve(listener))
    return process.exit_code


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `_Process`."""
        yield


class _Process:
    def __init__(self, options: ServerOptions, load: Loader, linger_s: float) -> None:
        self.exit_code = 0
        self._state, self._load, self._linger_s = ServerState(options), load, linger_s
        self._is_stopping = False
        self._server = _Server(
            uvicorn.Config(
                make_app(self._state), log_level="warning", access_log=False, lifespan="off", ws="none",
                timeout_keep_alive=75, timeout_graceful_shutdown=_GRACE_S, log_config=None,
            )
        )  # fmt: skip

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        thread = threading.Thread(target=self._run_loader, name="ft-load", daemon=True)
        thread.start()
        watch = asyncio.ensure_future(self._watch())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            watch.cancel()
        if self._state.is_ready:
            # Together with the connections' grace this stays under the ten seconds that a keeper gives a signal.
            await asyncio.to_thread(self._state.engine.close, 5.0)

    def _stop(self) -> None:
        """A signal: nothing more is taken, what runs is cancelled. A second one does not wait for connections."""
        if self._is_stopping:
            self._server.force_exit = True
        self._is_stopping = True
        if self._state.is_ready and self._state.error is None:
            self._state.engine.drain(0)
            self._state.engine.abort_all()
        self._server.should_exit = True

    def _run_loader(self) -> None:
        started = time.monotonic()
        try:
            engine, codec = self._load(self._state)
        except BaseException as error:
            self._tell_failure(error)
            return
        if self._is_stopping:
            engine.close()
            return
        self._state.set_ready(engine, codec)
        _print(_describe_ready(self._state, engine, time.monotonic() - started))

    def _tell_failure(self, error: BaseException) -> None:
        if isinstance(error, FtError):
            self._state.error = "; ".join((error.message, *error.details))
            _print(f"error: {self._state.error}" + (f"\nhint: {error.hint}" if error.hint else ""))
        else:
            self._state.error = f"{type(error).__name__}: {error}"
            _print("".join(traceback.format_exception(error)).rstrip())
            _print(f"error: the model could not be loaded: {self._state.error}")

    async def _watch(self) -> None:
        """Ends the process when the load or the engine has failed, after a while in which `/health` tells it."""
        while not self._has_failed():
            await asyncio.sleep(0.1)
        self.exit_code = 1
        await asyncio.sleep(self._linger_s)
        self._server.should_exit = True

    def _has_failed(self) -> bool:
        state = self._state
        if state.error is not None:
            return True
        if state.is_ready and state.engine.state == "failed":
            _print(f"error: the engine failed: {state.engine.failure}")
            return True
        return False


def _describe_ready(state: ServerState, engine: Engine, seconds: float) -> str:
    options, slots = state.options, engine.loaded.experts.expert_slots
    url = f"http://{options.host}:{options.port}"
    key = ' -H "Authorization: Bearer $KEY"' if options.api_key else ""
    body = '{"prompt": "def fibonacci(n):\\n", "max_tokens": 64}'
    return (
        f"ready: {url} serves `{options.served_model_name}` ({engine.config.strategy}, {slots} expert slots,"
        f" KV {engine.pool.tokens} tokens) after {seconds:.1f} s\n"
        f"try:   curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
