"""A small process that speaks the engine's HTTP API and misbehaves as told: for tests of supervisor and deploy.

Standard library only, so that it listens after about 100 ms. It counts four characters as one token.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHARACTERS_PER_TOKEN = 4


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--strategy", default="offload")
    parser.add_argument("--expert-slots", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=2048)
    parser.add_argument("--prefill-chunk-tokens", type=int, default=256)
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--api-key-env")
    # How it misbehaves.
    parser.add_argument("--load-s", type=float, default=0.0, help="seconds of loading, with progress")
    parser.add_argument("--silent-load", action="store_true", help="loads for ever without progress")
    parser.add_argument("--exit-at-start", type=int, help="exits at once with this code")
    parser.add_argument("--say", default="", help="a line for the log before anything else")
    parser.add_argument("--load-error", help="/health turns to `error` with this text, then SIGTERM to itself")
    parser.add_argument("--most-slots", type=int, help="more slots than this are an out-of-memory error at load")
    parser.add_argument("--most-live-slots", type=int, help="a live resize beyond this is rejected")
    parser.add_argument("--lie-slots", type=int, help="slots that /v1/cache/status claims")
    parser.add_argument("--lie-strategy", help="strategy that /v1/stats claims")
    parser.add_argument("--longest-prompt", type=int, help="dies of a longer prompt (tokens)")
    parser.add_argument("--crash-after-s", type=float)
    parser.add_argument("--once", help="a file: the misbehaviour happens only while it does not exist")
    parser.add_argument("--stuck-requests", action="store_true", help="requests are accepted and never answered")
    parser.add_argument("--burn-cpu", action="store_true", help="a request that is stuck burns a core")
    parser.add_argument(
        "--deaf-after-s", type=float, help="stops listening so long after the first /health, and lives on"
    )
    parser.add_argument("--shortens", action="store_true", help="a request that is too large is cut short silently")
    parser.add_argument("--ignore-sigint", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--children", type=int, default=0, help="child processes; every second one leaves the session")
    parser.add_argument("--flood-bytes", type=int, default=0, help="bytes written to the log every 20 ms")
    parser.add_argument("--ttft-s", type=float, default=0.0)
    parser.add_argument("--itl-s", type=float, default=0.0)
    return parser


class Engine:
    """The state that the handlers share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.instance_id = str(uuid.uuid4())
        self.slots = options.expert_slots
        self.kv_tokens = options.kv_tokens
        self.started = time.monotonic()
        self.error: str | None = None
        self.active = 0
        self.completed = self.prompt_tokens = self.completion_tokens = 0
        self.last_rebuild: dict[str, Any] | None = None
        self.requests: list[dict[str, Any]] = []
        self.on_health: Callable[[], None] | None = None
        self.misbehaves = not (options.once and Path(options.once).exists())
        if options.once and self.misbehaves:
            Path(options.once).touch()

    @property
    def is_loading(self) -> bool:
        return self.options.silent_load or time.monotonic() - self.started < self.options.load_s

    def health(self) -> dict[str, Any]:
        if self.on_health is not None:
            self.on_health()
            self.on_health = None
        if self.error:
            return {"status": "error", "message": self.error, "instance_id": self.instance_id}
        if self.is_loading:
            share = 0 if self.options.silent_load else (time.monotonic() - self.started) / self.options.load_s
            progress = {"done_bytes": int(share * 1000) * 1000, "total_bytes": 1_000_000}
            return {"status": "loading", "phase": "expert_banks", "progress": progress, "instance_id": self.instance_id}
        return {
            "status": "ok", "model": self.options.served_model_name, "instance_id": self.instance_id,
            "uptime_s": int(time.monotonic() - self.started), "maintenance": "serving", "version": "fake-1",
        }  # fmt: skip

    def stats(self) -> dict[str, Any]:
        return {
            "instance_id": self.instance_id, "uptime_s": int(time.monotonic() - self.started),
            "model": {"id": self.options.served_model_name, "ctx": 8192, "attn": "mha", "moe": True},
            "strategy": self.options.lie_strategy or self.options.strategy,
            "kv": {"used_pages": 0, "total_pages": self.kv_tokens, "page_size": 1}, "mamba": None, "swa": None,
            "vram_bytes": 0, "gpus": [], "throughput": {"decode_tps": 0.0, "prefill_tps": 0.0},
            "requests": {"active": self.active, "completed": self.completed, "p95_ms": 0, "ttft_mean_ms": 0,
                         "prompt_tokens_total": self.prompt_tokens, "completion_tokens_total": self.completion_tokens},
        }  # fmt: skip

    def cache_status(self) -> dict[str, Any]:
        slots = self.options.lie_slots if self.options.lie_slots is not None else self.slots
        return {
            "state": "serving", "last_rebuild": self.last_rebuild,
            "geometry": {
                "num_pages": self.kv_tokens, "page_size": 1, "moe_cache_size": slots, "num_mamba_slots": 0,
                "num_experts": 32, "num_moe_layers": 4, "moe_cache_policy": "lru",
                "unit_bytes": {"kv_per_token": 1024, "moe_per_expert": 4096, "mamba_per_slot": 0, "swa_per_token": 0},
                "swa_full_tokens_ratio": 0.0, "swa_page_size": 0, "num_swa_pages": 0, "cache_budget_bytes": 1 << 24,
                "reasoning": None,
                "limits": {"kv_tokens": {"min": 1, "max": 16384}, "moe_experts": {"min": 4, "max": 128},
                           "mamba_slots": {"min": 0, "max": 0}, "swa_tokens": {"min": 0, "max": 0}},
            },
        }  # fmt: skip

    def rebuild(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        slots = body.get("moe_cache_size") or self.slots
        pages = body.get("num_pages") or self.kv_tokens
        most = self.options.most_live_slots
        status = "rejected" if most is not None and slots > most else "ok"
        if status == "ok":
            self.slots, self.kv_tokens = slots, pages
        self.last_rebuild = {
            "request_id": str(uuid.uuid4()), "status": status, "moe_cache_size": self.slots,
            "num_pages": self.kv_tokens, "mamba_slots": 0, "num_swa_pages": 0,
            "error": None if status == "ok" else f"requested cache (moe={slots} slots) needs more; old cache kept",
        }  # fmt: skip
        return (200 if status == "ok" else 503), self.last_rebuild


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            return self.reply(200, self.engine.health())
        if not self.is_allowed():
            return self.reply(401, {"error": "Unauthorized"})
        answers = {"/v1/stats": self.engine.stats, "/v1/cache/status": self.engine.cache_status}
        if path in answers:
            return self.reply(200, answers[path]())
        if path == "/v1/models":
            return self.reply(200, {"object": "list", "data": [{"id": self.engine.options.served_model_name}]})
        if path == "/v1/requests":
            since = int(self.path.partition("since=")[2].partition("&")[0] or 0)
            entries = self.engine.requests
            return self.reply(200, {"entries": entries[since:], "next_cursor": len(entries)})
        return self.reply(404, {"error": "not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not self.is_allowed():
            return self.reply(401, {"error": "Unauthorized"})
        if self.engine.is_loading:
            return self.reply(503, {"error": "model is still loading"})
        if self.path == "/v1/cache/rebuild":
            return self.reply(*self.engine.rebuild(body))
        if self.path.startswith("/v1/cache/flush"):
            return self.reply(200, {"status": "ok"})
        if self.path in ("/v1/completions", "/generate"):
            return self.complete(body)
        return self.reply(404, {"error": "not found"})

    def is_allowed(self) -> bool:
        name = self.engine.options.api_key_env
        return not name or self.headers.get("Authorization") == f"Bearer {os.environ[name]}"

    def complete(self, body: dict[str, Any]) -> None:
        engine, options = self.engine, self.engine.options
        prompt_tokens = max(1, len(body["prompt"]) // CHARACTERS_PER_TOKEN)
        count = int(body.get("max_tokens", 16))
        if prompt_tokens + count > engine.kv_tokens and options.shortens and prompt_tokens < engine.kv_tokens:
            count = engine.kv_tokens - prompt_tokens
            print(f"WARNING  Adjust max_tokens to {count} for request 7.", flush=True)
        if prompt_tokens + count > engine.kv_tokens:
            message = f"prompt is too long: {prompt_tokens} tokens > {engine.kv_tokens - count} maximum"
            engine.requests.append({"path": self.path, "status": 400, "error": message})
            return self.reply(400, {"error": {"code": "context_length_exceeded", "message": message}})
        if options.longest_prompt is not None and prompt_tokens > options.longest_prompt:
            die(engine, "OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB", linger_s=0.05)
            time.sleep(60)
        engine.active += 1
        try:
            while options.stuck_requests and engine.misbehaves:
                if not options.burn_cpu:
                    time.sleep(3600)
            self.stream(body, prompt_tokens, count)
        finally:
            engine.active -= 1
        engine.completed += 1
        engine.prompt_tokens += prompt_tokens
        engine.completion_tokens += count
        engine.requests.append({"path": self.path, "prompt_tokens": prompt_tokens, "completion_tokens": count})
        return None

    def stream(self, body: dict[str, Any], prompt_tokens: int, count: int) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
        if not body.get("stream", self.path == "/generate"):
            choice = {"index": 0, "text": "word " * count, "finish_reason": "length"}
            return self.reply(200, {"id": "1", "object": "text_completion", "choices": [choice], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        time.sleep(self.engine.options.ttft_s)
        for index in range(count):
            if index:
                time.sleep(self.engine.options.itl_s)
            self.send_chunk(self.make_chunk("word ", None))
        self.send_chunk(self.make_chunk("", "length"))
        if body.get("stream_options", {}).get("include_usage"):
            self.send_chunk({"id": "1", "object": "text_completion", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        return None

    def make_chunk(self, text: str, finish: str | None) -> dict[str, Any]:
        if self.path == "/generate":
            return {"text": text}
        return {
            "id": "1",
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "finish_reason": finish}],
        }

    def send_chunk(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def reply(self, code: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def die(engine: Engine, message: str, *, linger_s: float) -> None:
    """As the upstream engine does: `/health` says `error`, and a little later it ends itself by SIGTERM."""
    engine.error = message
    print(f"Backend supervisor: {message}", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Timer(linger_s, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()


def start_children(count: int) -> None:
    for index in range(count):
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        subprocess.Popen(command, start_new_session=index % 2 == 1)


def go_deaf(server: ThreadingHTTPServer) -> None:
    """Closes the port and leaves the process running, as an engine does whose HTTP part has died."""
    server.socket.close()
    server._BaseServer__shutdown_request = True  # type: ignore[attr-defined]


def misbehave(engine: Engine) -> None:
    options = engine.options
    if options.load_error and engine.misbehaves:
        die(engine, options.load_error, linger_s=1.5)
    if options.most_slots is not None and options.expert_slots > options.most_slots:
        missing = (options.expert_slots - options.most_slots) * 4096
        die(engine, f"FakeOutOfMemory: {options.expert_slots} slots need {missing} B more than there is", linger_s=0.1)
    if options.crash_after_s is not None and engine.misbehaves:
        threading.Timer(options.crash_after_s, lambda: os._exit(7)).start()
    if options.flood_bytes:
        threading.Thread(target=flood, args=(options.flood_bytes,), daemon=True).start()


def flood(count: int) -> None:
    line = "x" * 99
    try:
        while True:
            for _ in range(max(1, count // 100)):
                print(line)
            sys.stdout.flush()
            time.sleep(0.02)
    except OSError:  # an engine that cannot live without its log
        os._exit(74)


def main() -> int:
    options = make_parser().parse_args()
    print(f"fake engine: {options.strategy}, {options.expert_slots} slots", flush=True)
    if options.say:
        print(options.say, flush=True)
    engine = Engine(options)
    if options.exit_at_start is not None and engine.misbehaves:
        return int(options.exit_at_start)
    if options.ignore_sigint:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_children(options.children)
    handler = type("BoundHandler", (Handler,), {"engine": engine})
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer((options.host, options.port), handler)
    misbehave(engine)
    if options.deaf_after_s is not None and engine.misbehaves:
        engine.on_health = lambda: threading.Timer(options.deaf_after_s, go_deaf, (server,)).start()
    try:
        server.serve_forever(poll_interval=0.05)
    except KeyboardInterrupt:
        print("stopped by SIGINT", flush=True)
        return 0
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
