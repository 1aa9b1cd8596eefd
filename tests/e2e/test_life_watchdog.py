"""The keeper's watchdog against a fake engine: an idle GPU, a dead port, requests too large, and the restart cap."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

from freetoken.supervisor import register
from freetoken.supervisor.files import Event, read_events
from freetoken.supervisor.launch import read_launch
from freetoken.supervisor.process import ProcessId
from tests.e2e.life import REPO, Lab, is_alive, make_lab, wait_for  # noqa: F401
from tests.fakes.fake_adapter import make_tools

POLICY = replace(
    make_tools().keeper_policy,
    look_s=0.1,
    idle_s=0.6,
    confirm_s=0.3,
    dead_s=0.5,
    port_wait_s=0.5,
    max_restarts=1,
    window_s=600.0,
)


def test_a_gpu_that_idles_while_a_request_spins_is_named_and_the_engine_comes_back(lab: Lab) -> None:
    run_dir = lab.write_launch("--stuck-requests", "--burn-cpu", "--once", str(lab.folder / "once"), policy=POLICY)
    keeper = start_keeper_with_gpu(lab, run_dir, busy=0.0)
    lab.wait_state(run_dir, "ready")
    client = start_client(lab)
    again = wait_for(lambda: ready_after(lab, run_dir, 1))
    (event,) = find_events(run_dir, "engine_idle")
    assert event.message.startswith("1 requests wait, no token came and the GPU was idle for ")
    assert event.message.endswith(" s; one more token was not generated either")
    assert event.data == {"reaction": "restart"}
    assert again.last_restart.endswith(f": {event.message}")
    assert lab.view().last_restart == again.last_restart
    assert again.problems == ()
    end(keeper, client)


def test_a_gpu_that_works_is_left_alone_however_long_a_request_takes(lab: Lab) -> None:
    run_dir = lab.write_launch("--stuck-requests", "--burn-cpu", policy=POLICY)
    keeper = start_keeper_with_gpu(lab, run_dir, busy=0.9)
    lab.wait_state(run_dir, "ready")
    client = start_client(lab)
    with_client = wait_for(lambda: lab.keeper_state(run_dir))
    subprocess.run(["sleep", "1.5"], check=True)
    assert find_events(run_dir, "engine_idle") == []
    assert lab.keeper_state(run_dir).engine == with_client.engine  # type: ignore[union-attr]
    end(keeper, client)


def test_with_the_policy_warn_an_idle_gpu_is_said_once_and_the_engine_stays(lab: Lab) -> None:
    run_dir = lab.write_launch("--stuck-requests", "--burn-cpu", policy=replace(POLICY, on_idle="warn"))
    keeper = start_keeper_with_gpu(lab, run_dir, busy=0.0)
    before = lab.wait_state(run_dir, "ready")
    client = start_client(lab)
    state = wait_for(lambda: with_problems(lab, run_dir))
    subprocess.run(["sleep", "0.8"], check=True)
    (event,) = find_events(run_dir, "engine_idle")
    assert state.problems == (event.message,)
    assert lab.view().problems == (event.message,)
    assert (state.state, state.engine, event.data) == ("ready", before.engine, {"reaction": "warn"})
    end(keeper, client)


def test_a_deaf_engine_whose_process_lives_is_ended_and_started_again_within_the_cap(lab: Lab) -> None:
    run_dir = lab.write_launch("--deaf-after-s", "0.8", policy=POLICY)
    keeper = lab.start_keeper(run_dir)
    failed = lab.wait_state(run_dir, "failed", 60)
    assert keeper.wait(60) == 1
    engines = [ProcessId.from_dict(event.data["engine"]) for event in find_events(run_dir, "engine_started")]
    alarms = find_events(run_dir, "port_dead")
    for engine, alarm in zip(engines, alarms, strict=True):
        assert engine is not None
        assert alarm.message.startswith(f"process {engine.pid} lives, but port {lab.port} has not answered for ")
        assert alarm.message.endswith(" s (connection refused)")
        assert not is_alive(engine)
    assert (failed.kind, failed.restarts, len(alarms)) == ("restart_cap", 1, 2)
    assert failed.cause == f"{alarms[1].message}; not restarted again after 1 restarts in 600 s"


def test_a_stranger_that_answers_in_place_of_the_engine_is_named_and_no_restart_is_wasted(lab: Lab) -> None:
    run_dir = lab.write_launch("--deaf-after-s", "0.8", policy=replace(POLICY, dead_s=60.0))
    keeper = lab.start_keeper(run_dir)
    engine = lab.wait_state(run_dir, "ready").engine
    stranger = start_stranger(lab.port)
    try:
        failed = lab.wait_state(run_dir, "failed")
        assert keeper.wait(60) == 1
        said = f"process {engine.pid} lives, but port {lab.port} is answered by `python"  # type: ignore[union-attr]
        (event,) = find_events(run_dir, "port_dead")
        assert event.message.startswith(said)
        assert f"(process {stranger.pid}), not by this engine" in event.message
        assert failed.kind == "foreign_port"
        assert failed.cause.startswith(f"{event.message}; not started again: port {lab.port} is taken by `python")
    finally:
        stranger.kill()
        stranger.wait()


def test_an_engine_killed_behind_a_port_that_a_stranger_takes_is_not_started_into_it(lab: Lab) -> None:
    run_dir = lab.write_launch(policy=replace(POLICY, backoff_s=1.0, port_wait_s=0.3))
    keeper = lab.start_keeper(run_dir)
    engine = lab.wait_state(run_dir, "ready").engine
    stranger = start_stranger(lab.port)
    lab.kill(engine)
    try:
        failed = lab.wait_state(run_dir, "failed")
        assert keeper.wait(60) == 1
        assert failed.kind == "foreign_port"
        assert failed.cause.startswith("engine ended with SIGKILL (-9); not started again: port ")
        assert failed.cause.endswith(f"(process {stranger.pid})")
    finally:
        stranger.kill()
        stranger.wait()


def test_requests_larger_than_the_kv_pool_are_counted_and_the_engine_stays(lab: Lab) -> None:
    run_dir = lab.write_launch("--kv-tokens", "100", policy=POLICY)
    keeper = lab.start_keeper(run_dir)
    before = lab.wait_state(run_dir, "ready")
    wait_for(lambda: refuse(lab, tokens=500) and find_events(run_dir, "request_too_large"))
    state = wait_for(lambda: with_problems(lab, run_dir))
    (problem,) = state.problems
    assert "asked for more tokens than the KV pool holds (the last: 500 tokens, 99 at most)" in problem
    assert problem.endswith("; raise `settings.kv_tokens`, or ask for less")
    assert (state.engine, state.restarts) == (before.engine, 0)
    end(keeper)


def test_requests_that_the_engine_cuts_short_in_silence_are_seen_in_its_log(lab: Lab) -> None:
    run_dir = lab.write_launch(
        "--kv-tokens", "100", "--shortens", policy=POLICY, shortened_log=r"Adjust max_tokens to \d+"
    )
    keeper = lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    wait_for(lambda: complete(lab, tokens=20, count=500) == 200 and find_events(run_dir, "request_too_large"))
    assert "(the last: Adjust max_tokens to 80)" in find_events(run_dir, "request_too_large")[0].message
    end(keeper)


def start_keeper_with_gpu(lab: Lab, run_dir: Path, *, busy: float) -> subprocess.Popen[bytes]:
    gauge = lab.folder / "busy"
    gauge.write_text(str(busy))
    register.write_record(register.make_record(read_launch(run_dir), run_dir))  # type: ignore[arg-type]
    argv = [sys.executable, "-m", "tests.fakes.keeper_with_gpu", str(run_dir), str(gauge)]
    return subprocess.Popen(argv, cwd=REPO, start_new_session=True)


def start_client(lab: Lab) -> subprocess.Popen[bytes]:
    body = '{"prompt": "x", "max_tokens": 1}'
    url = f"http://127.0.0.1:{lab.port}/v1/completions"
    script = f"import urllib.request as u; u.urlopen(u.Request({url!r}, {body!r}.encode()))"
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)


def start_stranger(port: int) -> subprocess.Popen[bytes]:
    """Somebody else's server, which takes `port` as soon as that is free."""
    script = (
        "import http.server as h, time\n"
        "class A(h.BaseHTTPRequestHandler):\n"
        '    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b\'{"status": "ok"}\')\n'
        "    def log_message(self, *_): pass\n"
        "print('waits', flush=True)\n"
        "for _ in range(6000):\n"
        "    try:\n"
        f"        h.ThreadingHTTPServer(('127.0.0.1', {port}), A).serve_forever()\n"
        "    except OSError:\n"
        "        time.sleep(0.005)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"waits\n"  # type: ignore[union-attr]
    return process


def complete(lab: Lab, *, tokens: int, count: int = 1) -> int:
    body = json.dumps({"prompt": "word" * tokens, "max_tokens": count, "stream": False}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{lab.port}/v1/completions", body)
    try:
        return int(urllib.request.urlopen(request, timeout=5).status)
    except urllib.error.HTTPError as error:
        return error.code


def refuse(lab: Lab, *, tokens: int) -> bool:
    return complete(lab, tokens=tokens) == 400


def find_events(run_dir: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run_dir / "events.jsonl") if event.kind == kind]


def ready_after(lab: Lab, run_dir: Path, restarts: int):  # type: ignore[no-untyped-def]
    state = lab.keeper_state(run_dir)
    return state if state and state.state == "ready" and state.restarts == restarts else None


def with_problems(lab: Lab, run_dir: Path):  # type: ignore[no-untyped-def]
    state = lab.keeper_state(run_dir)
    return state if state and state.problems else None


def end(keeper: subprocess.Popen[bytes], client: subprocess.Popen[bytes] | None = None) -> None:
    keeper.terminate()
    assert keeper.wait(60) == 0
    if client is not None:
        client.kill()
        client.wait(60)
