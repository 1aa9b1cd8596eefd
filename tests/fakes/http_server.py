"""Our HTTP application on a loopback port, in a thread of the test process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from freetoken.engine.scheduler import Engine
from freetoken.server.app import make_app
from freetoken.server.listen import open_socket
from freetoken.server.state import ServerOptions, ServerState
from freetoken.server.text import TextCodec


@contextmanager
def serve(engine: Engine | None, codec: TextCodec, **options: object) -> Iterator[tuple[str, ServerState]]:
    """(base URL, state) of a server around `engine`; None = it never finishes loading."""
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    state = ServerState(
        ServerOptions.model_validate({"port": port, "served_model_name": "parrot", "max_output_tokens": 64} | options)
    )
    if engine is not None:
        state.set_ready(engine, codec)
    server = uvicorn.Server(
        uvicorn.Config(make_app(state), log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", state
    finally:
        if engine is not None:
            engine.close()
        server.should_exit = True
        thread.join(10)
