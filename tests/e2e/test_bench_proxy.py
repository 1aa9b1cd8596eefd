"""The recording proxy in front of a fake engine process: bytes pass as they are, keys pass and are not kept."""

import json
import socket
import time

import httpx
import pytest
from openai import OpenAI

from freetoken.bench.keep import RecordingWriter
from freetoken.bench.proxy import RecordingProxy
from freetoken.bench.recording import read_recording
from freetoken.errors import FtError, UsageError
from tests.fakes.precise import run_precise_engine

KEY = "sk-proj-THISisTHEcallersOWNkey123456"


@pytest.fixture(scope="module")
def engine():
    with run_precise_engine("--ttft-s", 0.05, "--itl-s", 0.02) as url:
        yield url


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_session_through_the_proxy_is_recorded_without_its_keys(engine, tmp_path):
    path = tmp_path / "r.jsonl"
    writer = RecordingWriter(path)
    with RecordingProxy(engine, 0, writer.keep) as proxy:
        client = OpenAI(base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key=KEY)
        messages = [{"role": "system", "content": f"mail joe@corp.example.org, key {KEY}"}]
        for turn in range(2):
            messages.append({"role": "user", "content": f"question {turn}"})
            stream = client.chat.completions.create(model="m", messages=messages, max_tokens=5, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            messages.append({"role": "assistant", "content": text})
        wait_for(lambda: writer.turns == 2)
    writer.close()
    ((first, second),) = read_recording(path)
    assert first.messages[0] == {"role": "system", "content": "mail <email>, key <secret>"}
    assert second.messages == ({"role": "user", "content": "question 1"},)
    assert second.answer == messages[-1]
    assert KEY not in path.read_text()
    assert first.completion_tokens == 5


def test_what_comes_through_is_byte_for_byte_what_the_engine_said(engine):
    kept = []
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    with RecordingProxy(engine, 0, kept.append) as proxy:
        direct = httpx.post(f"{engine}/v1/cache/nothing", json=body, trust_env=False)
        through = httpx.post(f"http://127.0.0.1:{proxy.port}/v1/cache/nothing", json=body, trust_env=False)
        assert (through.status_code, through.content, through.headers["content-type"]) == (
            direct.status_code, direct.content, direct.headers["content-type"],
        )  # fmt: skip
        assert httpx.get(f"http://127.0.0.1:{proxy.port}/health", trust_env=False).json()["status"] == "ok"
    assert kept == []


def test_pieces_are_passed_on_when_they_come(engine):
    with RecordingProxy(engine, 0, lambda _: None) as proxy:
        body, moments = {"prompt": "x", "max_tokens": 20}, []
        with httpx.stream("POST", f"http://127.0.0.1:{proxy.port}/v1/completions", json=body, trust_env=False) as reply:
            moments = [time.monotonic() for _ in reply.iter_raw()]
    assert moments[-1] - moments[0] > 0.2, "20 tokens that are 20 ms apart came at once"


def test_pages_of_other_names_are_refused(engine):
    with RecordingProxy(engine, 0, lambda _: None) as proxy:
        reply = httpx.get(f"http://127.0.0.1:{proxy.port}/health", headers={"Host": "evil.example"}, trust_env=False)
    assert reply.status_code == 403


def test_it_listens_on_the_loopback_alone(engine):
    with RecordingProxy(engine, 0, lambda _: None) as proxy:
        assert proxy._server.server_address[0] == "127.0.0.1"


def test_an_engine_that_is_gone_is_a_502_for_the_caller():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with RecordingProxy(address, 0, lambda _: None) as proxy:
        reply = httpx.post(f"http://127.0.0.1:{proxy.port}/v1/completions", json={}, trust_env=False)
    assert reply.status_code == 502
    assert json.loads(reply.content)["error"]["message"].startswith("the engine cannot be reached")


def test_a_request_in_chunks_reaches_the_engine_whole(engine):
    def parts():
        yield b'{"prompt": "abc'
        yield b'defgh", "max_tokens": 2}'

    kept = []
    with RecordingProxy(engine + "/v1", 0, kept.append) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/v1/completions"
        assert httpx.post(url, content=parts(), trust_env=False).status_code == 200
        wait_for(lambda: kept)
    assert kept[0].body == {"prompt": "abcdefgh", "max_tokens": 2}


def test_a_port_in_use_and_an_address_that_is_none_are_told():
    with socket.create_server(("127.0.0.1", 0)) as used, pytest.raises(FtError, match="cannot be listened on"):
        RecordingProxy("http://127.0.0.1:1", used.getsockname()[1], lambda _: None)
    with pytest.raises(UsageError, match="`ftp://x` is no `http://HOST:PORT`"):
        RecordingProxy("ftp://x", 0, lambda _: None)
