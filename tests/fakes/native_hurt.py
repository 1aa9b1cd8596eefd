"""The native engine with an illness: `python -m tests.fakes.native_hurt KIND,KIND,… serve …`; a kind for each start.

`oom` dies at load as torch does without memory; `garbage` answers long requests with bytes that are no tokens; `hang`
answers the first long request and is silent in the second one. Short requests, such as the proof of a start and the
bench's warm-up, are answered as ever.

`python -m tests.fakes.native_hurt KIND,KIND,… tune …` is an `ft` that starts such engines. `FT_HURT_STARTS` is a folder
in which starts are counted; engines after the last kind are well.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
LONG_TOKENS = 256


class Ill:
    """The engine's application, with what is wrong with it."""

    def __init__(self, app: Any, kind: str) -> None:
        self.app, self.kind = app, kind
        self.long_requests = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/completions":
            return await self.app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if json.loads(body).get("max_tokens", 0) >= LONG_TOKENS:
            self.long_requests += 1
            if self.kind == "hang" and self.long_requests > 1:
                await asyncio.sleep(3600)
            if self.kind == "garbage":
                headers = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                return await send({"type": "http.response.body", "body": b"data: \x00\xff no tokens\n\n"})
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return parts.pop() if parts else await receive()

        return await self.app(scope, again, send)


def serve(kinds: list[str]) -> int:
    starts = Path(os.environ["FT_HURT_STARTS"])
    number = len(list(starts.iterdir()))
    (starts / str(number)).touch()
    kind = kinds[number] if number < len(kinds) else "well"
    if kind == "oom":
        print("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes.")
        return 1
    from freetoken.server import run

    healthy = run.make_app
    run.make_app = lambda state: Ill(healthy(state), kind)
    return start_ft()


def tune(kinds: str) -> int:
    from freetoken.adapters.native import NativeAdapter

    healthy = NativeAdapter.make_launch_spec

    def make_launch_spec(self: NativeAdapter, plan: Any, **options: Any) -> Any:
        spec = healthy(self, plan, **options)
        python, dash_m, package, *arguments = spec.argv
        assert (dash_m, package) == ("-m", "freetoken")
        argv = (python, dash_m, "tests.fakes.native_hurt", kinds, *arguments)
        env = {"PYTHONPATH": str(REPO), "FT_HURT_STARTS": os.environ["FT_HURT_STARTS"]}
        return spec.model_copy(update={"argv": argv, "env": {**spec.env, **env}})

    NativeAdapter.make_launch_spec = make_launch_spec  # type: ignore[method-assign]
    return start_ft()


def start_ft() -> int:
    from freetoken.cli.later import import_later
    from freetoken.cli.main import main

    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    import_later()
    return main() or 0


if __name__ == "__main__":
    what = sys.argv.pop(1)
    sys.exit(serve(what.split(",")) if sys.argv[1] == "serve" else tune(what))
