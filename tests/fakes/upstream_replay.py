"""The upstream engine's process, replayed without a GPU: its flags, HTTP API, log lines and ways to die.

`install_upstream(folder)` makes a tiny package `freetoken` of it, so that `<python> -m freetoken.cli serve ...` with
`PYTHONPATH=folder` is this file. What it plays stands in `scenario.json`, a list with one entry a start (the last one
is used again); every start appends its argv, environment and working folder to `starts.jsonl`. Replies and log lines
are those recorded from 0.2.1 on an H200; standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
CHARACTERS_PER_TOKEN = 4
MIB, GIB = 1 << 20, 1 << 30
SLOT_BYTES, KV_BYTES, STATE_BYTES = 1781760, 20480, 64389120
#: Qwen3.6-35B-A3B's dense part, its embedding, the rope table; context, allocator, graphs and tables as planned.
DENSE_BYTES, EMBEDDING_BYTES, ROPE_BYTES = 2709175616, 1017118720, 67108864
CONTEXT_BYTES, ALLOCATOR_BYTES, GRAPH_BYTES, TABLE_BYTES = 295 * MIB, 160 * MIB, 104 * MIB, 5 * MIB
DEFAULTS = {
    # (phase, done bytes, total bytes, seconds) of the start, one after the other.
    "load": [["other", 0, 0, 0.05], ["expert_banks", 10 << 30, 18 << 30, 0.05], ["warmup", 0, 0, 0.05]],
    "exit": None,  # {"code": 2, "say": "..."}: ends at once
    "die": None,  # {"message": "...", "say": [...]}: /health says `error`, then SIGTERM to itself
    "kill_self": False,  # as the out-of-memory killer would: SIGKILL while it loads
    "free_gib": 7.6,  # of the card, before the start
    "ballast_gib": 0.0,  # taken by others behind the planner's back: a start beyond what is left is out of memory
    "most_slots": None,  # more slots than this are out of memory at the start alone
    "itl_s": 0.0,  # between two tokens
    "most_tokens": None,  # a longer prompt is out of memory in the prefill
    "rebuilds": [],  # answers of the next rebuilds, whatever is asked
    "rebuild_s": 0.0,  # a `timeout` is over after this
    "hang": False,  # loads for ever, without I/O
    "busy_child_s": 0.0,  # a child works that long while the phase stays `other` 0/0
    "compile_s": 0.0,  # seconds that the log's clock spends on kernels
    "linger_s": 0.2,  # from the error to the end (10 s in the real engine)
    "lie": {},  # geometry that is not what was asked for
    "attention": None,
    "hit": "hit 71.8%, per layer-step miss 2.25 fetch 2.25 cpu 0.00",
}


def install_upstream(folder: Path, *scenarios: dict, version: str = "0.2.1", flags: object = None) -> Path:
    """Makes the package in `folder`; `flags` are those it knows (None: any). Back comes `folder`."""
    package, info = folder / "freetoken", folder / f"freetoken-{version}.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: freetoken\nVersion: {version}\n")
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    shutil.copy(__file__, package / "cli.py")
    (folder / "flags.json").write_text(json.dumps(sorted(flags) if flags else None))
    write_scenarios(folder, *scenarios)
    return folder


def write_scenarios(folder: Path, *scenarios: dict) -> None:
    """Replaces what the next starts play, and forgets the starts so far."""
    (folder / "scenario.json").write_text(json.dumps(list(scenarios) or [{}]))
    (folder / "starts.jsonl").unlink(missing_ok=True)


def read_starts(folder: Path) -> list[dict]:
    """Every start since the scenarios were written: `argv`, `cwd`, `pythonpath`."""
    path = folder / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Options:
    """The command line, read as the real parser does where it matters here."""

    def __init__(self, arguments: list[str], known: list[str] | None) -> None:
        self.values: dict[str, str] = {}
        rest = list(arguments)
        while rest:
            flag = rest.pop(0)
            if known is not None and flag.split("=")[0] not in known:
                print(f"usage: ft serve\nft serve: error: unrecognized arguments: {flag}", file=sys.stderr)
                sys.exit(2)
            self.values[flag] = "" if not rest or rest[0].startswith("--") else rest.pop(0)

    def get(self, *names: str, default: str = "") -> str:
        return next((self.values[name] for name in names if name in self.values), default)

    def has(self, name: str) -> bool:
        return name in self.values


class Engine:
    """The state that the handlers share."""

    def __init__(self, options: Options, scenario: dict) -> None:
        self.options, self.scenario = options, {**DEFAULTS, **scenario}
        self.instance_id = str(uuid.uuid4())
        self.strategy = options.get("--moe-strategy", "--moe-backend", default="offload")
        self.attention = self.scenario["attention"] or options.get("--attention-backend", default="triton")
        self.slots = int(options.get("--moe-cache-size", default="512" if self.strategy == "cpu" else "0"))
        self.pages = int(options.get("--num-tokens", default="8192"))
        self.state, self.error = "loading", ""
        self.phase, self.done, self.total = "other", 0, 0
        self.active = self.completed = self.prompt_tokens = self.completion_tokens = 0
        self.last_rebuild: dict | None = None
        self.rebuilds = list(self.scenario["rebuilds"])
        self.rebuilding_until = 0.0
        self.requests: list[dict] = []
        self.clock_skew_s = 0.0
        self.ready_at = 0.0
        self.is_generating, self.words = False, 1
        self.server: ThreadingHTTPServer | None = None

    # -- the log

    def log(self, text: str, where: str = "|core|rank=0", level: str = "INFO    ") -> None:
        stamp = time.strftime("%Y-%m-%d|%H:%M:%S", time.localtime(time.time() + self.clock_skew_s))
        print(f"\x1b[1m[{stamp}{where}]\x1b[0m \x1b[32m{level}\x1b[0m {text}", flush=True)

    def load(self) -> None:
        """The start, as the log and /health tell it; runs beside the server."""
        s = self.scenario
        self.log("Parsed arguments:", where="")
        self.log(
            f"Resolved config: moe_strategy='{self.strategy}', attention_backend='{self.attention}', "
            f"cache_type='hybrid_radix', page_size=1"
        )
        self.log(f"Free memory before loading model: {(s['free_gib'] * GIB - CONTEXT_BYTES) / GIB:.2f} GiB")
        if s["busy_child_s"]:
            subprocess.run([sys.executable, "-c", BUSY, str(s["busy_child_s"])], check=True)
        while s["hang"]:
            time.sleep(3600)
        for phase, done, total, seconds in s["load"]:
            self.phase, self.done, self.total = phase, done, total
            time.sleep(seconds)
        if s["kill_self"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if s["die"]:
            for line in s["die"].get("say", ()):
                self.log(line)
            return self.die(s["die"]["message"])
        if (missing := -self.left_bytes(self.slots, self.pages)) > 0:
            return self.run_out(missing, "MoE slot pools: one pool")
        if s["most_slots"] is not None and self.slots > s["most_slots"]:
            return self.run_out((self.slots - s["most_slots"]) * SLOT_BYTES, "MoE slot pools: one pool")
        self.log(f"Allocating {self.pages} tokens for KV cache, K + V = {self.pages * KV_BYTES / 2**30:.2f} GiB")
        free = (self.left_bytes(self.slots, self.pages) + s["ballast_gib"] * GIB + GRAPH_BYTES) / GIB
        self.log(f"Free memory after initialization: {free:.2f} GiB")
        self.log("Start capturing CUDA graphs with sizes: [1]")
        self.log(f"Free GPU memory before capturing CUDA graphs: {free:.2f} GiB")
        self.clock_skew_s += s["compile_s"] / 2
        self.log(f"Free GPU memory after capturing CUDA graphs: {free - GRAPH_BYTES / GIB:.2f} GiB")
        self.clock_skew_s += s["compile_s"] / 2
        self.log(f"Prefill warmup complete for lengths [80, 128] in {1.0 + s['compile_s'] / 2:.3f} s")
        self.state, self.ready_at = "serving", time.monotonic()
        self.log(f"API server is ready to serve on {self.options.get('--host')}:{self.options.get('--port')}",
                 where="|FrontendAPI")  # fmt: skip
        return None

    def reserved_bytes(self, slots: int, pages: int) -> int:
        """What torch holds with these sizes, a prefill chunk aside."""
        dense = DENSE_BYTES - (EMBEDDING_BYTES if self.options.get("--embed-weights") == "host" else 0)
        states = 2 if self.options.get("--cache-type") == "naive" else 9
        state = STATE_BYTES * states // (2 if os.environ.get("FREETOKEN_MAMBA_SSM_DTYPE") == "bfloat16" else 1)
        return dense + ROPE_BYTES + state + slots * SLOT_BYTES + (pages + 1) * KV_BYTES + GRAPH_BYTES + TABLE_BYTES

    def left_bytes(self, slots: int, pages: int) -> int:
        free = int((self.scenario["free_gib"] - self.scenario["ballast_gib"]) * GIB)
        return free - CONTEXT_BYTES - ALLOCATOR_BYTES - self.reserved_bytes(slots, pages)

    def run_out(self, missing_bytes: int, *said: str) -> None:
        """Out of VRAM by exactly `missing_bytes`, in PyTorch's words."""
        for line in said:
            self.log(line)
        asked, free = missing_bytes / MIB + 64, 64.0
        self.die(
            f"OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2f} MiB. GPU 0 has a total capacity of "
            f"7.99 GiB of which {free:.2f} MiB is free. Including non-PyTorch memory, this process has 7.90 GiB memory "
            "in use."
        )

    def die(self, message: str) -> None:
        """`/health` says `error`; a little later the server ends itself by SIGTERM (returncode -15)."""
        self.error, self.state = message, "failed"
        self.log(f"Backend supervisor: {message}", where="|FrontendAPI", level="ERROR   ")
        print(
            f'Traceback (most recent call last):\n  File "freetoken/server/launch.py", line 81\n{message}', flush=True
        )

        def end() -> None:
            time.sleep(self.scenario["linger_s"])
            self.log("Backend worker is gone and cannot be restarted; stopping the API server", where="|FrontendAPI",
                     level="ERROR   ")  # fmt: skip
            if self.is_generating:
                # The real one waits for its clients, who wait for an answer: it lives on behind a closed port.
                print("INFO:     Shutting down\nINFO:     Waiting for connections to close. (CTRL+C to force quit)",
                      flush=True)  # fmt: skip
                self.server.socket.close()
                while self.is_generating:
                    time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=end, daemon=True).start()

    # -- replies

    def health(self) -> dict:
        if self.error:
            return {"status": "error", "message": self.error, "instance_id": self.instance_id}
        if self.state == "loading":
            progress = {"done_bytes": self.done, "total_bytes": self.total}
            return {"status": "loading", "phase": self.phase, "progress": progress, "model": self.name,
                    "instance_id": self.instance_id}  # fmt: skip
        return {"status": "ok", "model": self.name, "instance_id": self.instance_id, "uptime_s": self.uptime_s,
                "maintenance": self.maintenance, "version": VERSION}  # fmt: skip

    @property
    def name(self) -> str:
        return self.options.get("--served-model-name", default="model")

    @property
    def uptime_s(self) -> int:
        return int(time.monotonic() - self.ready_at)

    @property
    def maintenance(self) -> str:
        if self.rebuilding_until and time.monotonic() >= self.rebuilding_until:
            self.rebuilding_until, self.state = 0.0, "serving"
            self.slots, self.pages = self.pending
            self.last_rebuild = self.result("ok", None)
        return self.state

    def stats(self) -> dict:
        return {
            "instance_id": self.instance_id,
            "model": {"id": self.name, "ctx": 262144, "attn": "hybrid_linear", "moe": True,
                      "input_modalities": ["text"], "sampling": {"temperature": 1.0, "top_k": 20, "top_p": 0.95}},
            "uptime_s": self.uptime_s, "kv": {"used_pages": 0, "total_pages": self.pages, "page_size": 1},
            "mamba": {"used_slots": 0, "total_slots": 8}, "swa": None,
            "vram_bytes": self.reserved_bytes(self.slots, self.pages) + 256 * MIB,
            "gpus": [{"index": 0, "name": "NVIDIA H200", "uuid": "GPU-0", "total_bytes": 150109880320}],
            "throughput": {"decode_tps": 128.6, "prefill_tps": 1693.6},
            "requests": {"active": self.active, "completed": self.completed, "p95_ms": 12, "ttft_mean_ms": 0,
                         "prompt_tokens_total": self.prompt_tokens, "completion_tokens_total": self.completion_tokens},
        }  # fmt: skip

    def cache_status(self) -> dict:
        geometry = {
            "num_pages": self.pages, "page_size": 1, "moe_cache_size": self.slots, "num_mamba_slots": 8,
            "num_experts": 256, "num_moe_layers": 40, "moe_cache_policy": "lru",
            "unit_bytes": {"kv_per_token": KV_BYTES, "moe_per_expert": SLOT_BYTES, "mamba_per_slot": STATE_BYTES,
                           "swa_per_token": 0},
            "swa_full_tokens_ratio": 0.0, "swa_page_size": 0, "num_swa_pages": 0, "cache_budget_bytes": 4212765491,
            "reasoning": None,
            "limits": {"kv_tokens": {"min": 1, "max": 205701},
                       "moe_experts": {"min": 256, "max": 10240},
                       "mamba_slots": {"min": 4, "max": 65}, "swa_tokens": {"min": 0, "max": 0}},
        }  # fmt: skip
        state = self.maintenance
        return {"state": state, "last_rebuild": self.last_rebuild, "geometry": {**geometry, **self.scenario["lie"]}}

    def result(self, status: str, error: str | None) -> dict:
        return {"request_id": str(uuid.uuid4()), "status": status, "moe_cache_size": self.slots,
                "num_pages": self.pages, "mamba_slots": 8, "num_swa_pages": 0, "error": error}  # fmt: skip

    def rebuild(self, body: dict) -> tuple[int, dict]:
        slots, pages = body.get("moe_cache_size") or self.slots, body.get("num_pages") or self.pages
        missing = max(0, -self.left_bytes(slots, pages))
        status = self.rebuilds.pop(0) if self.rebuilds else "rejected" if missing else "ok"
        if status == "busy":
            return 503, self.result("busy", "scheduler is not idle")
        if status == "busy409":
            return 409, self.result("busy", "another rebuild is in progress")
        if status == "timeout":
            self.pending, self.state = (slots, pages), "rebuilding"
            self.rebuilding_until = time.monotonic() + self.scenario["rebuild_s"]
            return 504, self.result("timeout", "still rebuilding")
        if status == "ok":
            self.slots, self.pages = slots, pages
            self.log(f"Cache rebuilt: KV {pages} pages, mamba 8 slots, MoE cache {slots}/10240")
        if status == "failed":
            self.state = "failed"
        self.last_rebuild = self.result(status, None if status == "ok" else self.say_rejected(slots, pages, missing))
        return (200 if status == "ok" else 503), self.last_rebuild

    def say_rejected(self, slots: int, pages: int, missing: int) -> str:
        needed = slots * SLOT_BYTES + pages * KV_BYTES
        budget = needed - missing
        return (
            f"requested cache (moe={slots} slots, kv={pages} pages, mamba=8 slots) needs {needed / 2**30:.2f} GiB > "
            f"budget {budget / 2**30:.2f} GiB; old cache kept, still serving"
        )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        path, engine = self.path.partition("?")[0], self.engine
        if path == "/health":
            return self.reply(200, engine.health())
        if not self.is_allowed():
            return self.reply(401, {"error": "Unauthorized"})
        if path == "/v1/models":
            return self.reply(200, {"object": "list", "data": [{"id": engine.name, "max_model_len": 262144}]})
        answers = {"/v1/stats": engine.stats, "/v1/cache/status": engine.cache_status}
        if path in answers:
            return self.reply(503, LOADING) if engine.state == "loading" else self.reply(200, answers[path]())
        if path == "/v1/requests":
            return self.reply(200, {"entries": engine.requests, "next_cursor": len(engine.requests)})
        return self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        engine = self.engine
        if not self.is_allowed():
            return self.reply(401, {"error": "Unauthorized"})
        if engine.state == "loading":
            return self.reply(503, LOADING)
        if self.path == "/v1/cache/rebuild":
            return self.reply(*engine.rebuild(body))
        if engine.maintenance != "serving":
            return self.reply(503, {"error": f"server unavailable: {engine.state}; a restart is required"})
        if self.path.startswith("/v1/cache/flush"):
            return self.reply(200, {"status": "ok"})
        if self.path == "/v1/admin/prepare-stop":
            return self.reply(200, {"drain_complete": True, "instance_id": engine.instance_id})
        if self.path in ("/v1/completions", "/generate"):
            return self.complete(body)
        return self.reply(404, {"detail": "Not Found"})

    def is_allowed(self):
        key = os.environ.get("FREETOKEN_API_KEY")
        return not key or self.headers.get("Authorization") == f"Bearer {key}"

    def complete(self, body):
        engine = self.engine
        tokens, count = max(1, len(body["prompt"]) // CHARACTERS_PER_TOKEN), int(body.get("max_tokens", 16))
        if tokens >= engine.pages:
            message = f"prompt is too long: {tokens} tokens > {engine.pages} maximum (prompt + generation)"
            error = {"error": {"message": message, "type": "invalid_request_error", "code": "context_length_exceeded"}}
            if not body.get("stream"):
                return self.reply(400, error)
            self.begin_stream()  # the real one finds out when the answer has begun, with HTTP 200
            self.send_chunk(error)
            return self.end_stream()
        if tokens + count > engine.pages:
            count = engine.pages - tokens
            engine.log(f"Adjust max_tokens to {count}", level="WARNING ")
        engine.log(f"Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, token usage: 0.24")
        if engine.scenario["most_tokens"] is not None and tokens > engine.scenario["most_tokens"]:
            engine.is_generating = True
            engine.run_out(512 * MIB)
            time.sleep(60)
            engine.is_generating = False
        self.stream(body, tokens, count)
        engine.log(f"Decode batch, #running-req: 1, #token: {tokens + count}, gen throughput (token/s): 163.60")
        if engine.options.has("--moe-collect-stats"):
            layers = "cpu-only 40 layers" if engine.strategy == "cpu" else f"pinned 40 layers: {engine.scenario['hit']}"
            engine.log(f"MoE decode, {layers}")
        engine.completed += 1
        engine.prompt_tokens += tokens
        engine.completion_tokens += count
        engine.requests.append({"path": self.path, "status": 200, "duration_ms": 12})
        return None

    def stream(self, body, tokens, count):
        usage = {"prompt_tokens": tokens, "completion_tokens": count, "total_tokens": tokens + count}
        is_plain = self.path == "/generate"
        if not body.get("stream", is_plain):
            choice = {"index": 0, "text": "word " * count, "finish_reason": "length"}
            return self.reply(200, {"id": "1", "object": "text_completion", "choices": [choice], "usage": usage})
        self.begin_stream()
        for index in range(count):
            finish = "length" if index == count - 1 else None
            word = f"w{self.engine.words:x} "  # no two are alike: a measurement of a stuck model does not count
            self.engine.words = (self.engine.words * 48271 + 11) % 2147483647
            choice = {"index": 0, "text": word, "finish_reason": finish}
            time.sleep(self.engine.scenario["itl_s"])
            self.send_chunk({"text": word} if is_plain else {"id": "1", "choices": [choice]})
        if body.get("stream_options", {}).get("include_usage"):
            self.send_chunk({"id": "1", "choices": [], "usage": usage})
        return self.end_stream()

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def end_stream(self):
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def send_chunk(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def reply(self, code, value):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


LOADING = {"error": "model is still loading"}
VERSION = "0.2.1"
BUSY = "import os, sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end:\n    os.urandom(4096)\n"


def main() -> int:
    if sys.argv[1:2] == ["--version"]:
        print(f"freetoken version {VERSION}")
        return 0
    scenarios = json.loads((HOME / "scenario.json").read_text())
    index = len(read_starts(HOME))
    start = {"argv": sys.argv, "cwd": os.getcwd(), "pythonpath": os.environ.get("PYTHONPATH"), "env": dict(os.environ)}
    with (HOME / "starts.jsonl").open("a") as stream:
        stream.write(json.dumps(start) + "\n")
    options = Options(sys.argv[2:], json.loads((HOME / "flags.json").read_text()))
    engine = Engine(options, scenarios[min(index, len(scenarios) - 1)])
    if engine.scenario["exit"]:
        print(engine.scenario["exit"]["say"], flush=True)
        return int(engine.scenario["exit"]["code"])
    host, port = options.get("--host", default="127.0.0.1"), int(options.get("--port", default="1919"))
    rendezvous = socket.socket()
    rendezvous.bind((host, port + 1))
    rendezvous.listen()
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer((host, port), type("BoundHandler", (Handler,), {"engine": engine}))
    engine.server = server
    threading.Thread(target=engine.load, daemon=True).start()
    try:
        server.serve_forever(poll_interval=0.05)
    except KeyboardInterrupt:
        engine.log("Scheduler exiting gracefully...")
    return 0


if __name__ == "__main__":
    sys.exit(main())
