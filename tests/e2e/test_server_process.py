"""`ft serve` as a process of its own, on a tiny random checkpoint: from the first bind to its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetoken.adapters.control import ControlClient, EngineUnreachableError
from tests.fakes.ports import find_free_port
from tests.fakes.stock_engine import generate_alone, make_model
from tests.fakes.stock_text import make_codec

PROMPT = "def fibonacci(n):"
#: With all of these nothing is planned: as the adapter launches it.
EXPLICIT = (
    "--device", "cpu", "--strategy", "fused", "--kv-tokens", "64", "--max-running-requests", "1",
    "--prefill-chunk-tokens", "64", "--no-embed-on-host", "--experts-from", "auto",
)  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class Process:
    """A running `ft serve`, and what it has written so far."""

    popen: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_status(self, *wanted: str) -> dict[str, Any]:
        """The first `/health` with one of these statuses; what it said before is looked at on the way."""
        with ControlClient(self.url, timeout_s=5) as client:
            for _ in range(1200):
                try:
                    found = client.health()
                    if found.status in wanted:
                        return found.model_dump()
                except EngineUnreachableError:
                    assert self.popen.poll() is None, self.log.read_text()
                time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def end(self, number: int) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(120)


def start(folder: Path, log: Path, *arguments: str) -> Process:
    port = find_free_port()
    command = [
        sys.executable,
        "-m",
        "freetoken",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--cpu-threads",
        "1",
        *arguments,
    ]
    with log.open("w") as output:
        popen = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT, text=True)
    return Process(popen, port, log)


def make_checkpoint(folder: Path) -> Any:
    """A tiny Qwen3-MoE checkpoint with a byte tokenizer in `folder`; the model comes back."""
    model = make_model()
    model.save_pretrained(folder)
    make_codec().tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258]}))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return folder, make_checkpoint(folder)


@pytest.fixture(scope="module")
def served(checkpoint: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    process = start(
        checkpoint[0], log, "--strategy", "offload", "--expert-slots", "5", "--kv-tokens", "1k",
        "--max-running-requests", "2", "--prefill-chunk-tokens", "8", "--served-model-name", "tiny-moe",
    )  # fmt: skip
    first = process.wait_status("loading", "ok")
    process.first_health = first  # type: ignore[attr-defined]
    process.wait_status("ok")
    yield process
    if process.popen.poll() is None:
        process.popen.kill()
        process.popen.wait(120)


def test_health_answers_while_the_model_still_loads(served: Process) -> None:
    first = served.first_health  # type: ignore[attr-defined]
    assert (first["status"], first["model"]) == ("loading", "tiny-moe")
    assert first["progress"].keys() == {"done_bytes", "total_bytes"}


def test_one_line_tells_that_it_is_ready_and_one_how_to_try(served: Process) -> None:
    ready, attempt = served.log.read_text().splitlines()[-2:]
    assert ready.startswith(f"ready: {served.url} serves `tiny-moe` (offload, 5 expert slots, KV 1024 tokens) after ")
    assert attempt.startswith(f"try:   curl {served.url}/v1/completions")


def test_greedy_text_equals_the_models_own_and_a_live_resize_in_the_middle_leaves_it(
    served: Process, checkpoint: tuple[Path, Any]
) -> None:
    codec, model = make_codec(), checkpoint[1]
    ids = generate_alone(model, codec.encode(PROMPT), 120)
    expected = codec.decode(ids[: ids.index(258)] if 258 in ids else ids)
    pieces: list[str] = []

    def read() -> None:
        with ControlClient(served.url) as client:
            pieces.extend(client.generate(PROMPT, 120))

    with ControlClient(served.url) as client:
        reader = threading.Thread(target=read)
        reader.start()
        results = [client.rebuild(expert_slots=slots, kv_tokens=kv) for slots, kv in ((2, 2048), (18, 300), (7, 1024))]
        reader.join(60)
        assert [(one.status, one.moe_cache_size, one.num_pages) for one in results] == [
            ("ok", 2, 2048), ("ok", 18, 300), ("ok", 7, 1024),
        ]  # fmt: skip
        assert "".join(pieces) == expected
        stats = client.stats()
        assert stats.moe_hits is not None
        assert stats.moe_hits.hits > 0
        assert stats.moe_hits.misses > 0
        assert stats.model_extra is not None
        # 3 layers x 2 x 2 heads x 8 x 4 bytes for each token.
        assert stats.model_extra["memory"]["kv_cache"] == 1024 * 384


def test_a_busy_port_is_told_before_anything_is_loaded(served: Process, checkpoint: tuple[Path, Any]) -> None:
    started = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-m", "freetoken", "serve", str(checkpoint[0]), "--port", str(served.port)],
        capture_output=True, text=True, timeout=150, env=ENVIRONMENT,
    )  # fmt: skip
    assert found.returncode == 1
    assert found.stderr.splitlines() == [
        f"error: port {served.port} on 127.0.0.1 is already in use",
        f"hint: `--port {served.port + 2}`, or stop what listens there",
    ]
    assert time.monotonic() - started < 30


def test_sigterm_ends_open_streams_with_a_word_and_the_process_with_0(served: Process) -> None:
    lines: list[str] = []
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
    with httpx.stream("POST", served.url + "/generate", json=body, trust_env=False, timeout=120) as answer:
        stream = answer.iter_lines()
        lines.append(next(stream))
        started = time.monotonic()
        served.popen.send_signal(signal.SIGTERM)
        lines.extend(line for line in stream if line)
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"].startswith("the request was cancelled")
    assert served.popen.wait(120) == 0
    assert time.monotonic() - started < 15
    assert "Traceback" not in served.log.read_text()


def test_a_failed_load_can_be_read_in_health_and_ends_the_process_with_1(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    make_checkpoint(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    process = start(folder, tmp_path / "engine.log", *EXPLICIT)
    found = process.wait_status("error")
    assert "model.safetensors" in found["message"]
    assert process.popen.wait(120) == 1
    log = process.log.read_text()
    assert f"error: {found['message']}" in log
    assert "Traceback" not in log


def test_sigint_while_loading_ends_with_0(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny")
    process = start(tmp_path / "tiny", tmp_path / "engine.log")
    assert process.wait_status("loading", "ok")["status"] == "loading"
    assert process.end(signal.SIGINT) == 0
