from __future__ import annotations

import socket

import pytest

from freetoken.errors import FtError, UsageError
from freetoken.server.listen import is_loopback, open_socket
from freetoken.server.state import RING_SIZE, RequestEntry, RequestRing, ServerOptions, ServerState


def test_the_ring_keeps_the_last_entries_and_a_cursor_reads_on_from_where_it_was() -> None:
    ring = RequestRing()
    for number in range(RING_SIZE + 10):
        ring.add(RequestEntry("POST", "/generate", ts=float(number), duration_ms=float(number), ttft_ms=1.0))
    entries, cursor = ring.read(0, 3)
    assert [(entry["ts"], entry["path"]) for entry in entries] == [(one, "/generate") for one in (10.0, 11.0, 12.0)]
    following, last = ring.read(cursor, RING_SIZE)
    assert (following[0]["ts"], len(following), last) == (13.0, RING_SIZE - 3, RING_SIZE + 10)
    assert ring.read(last, 10) == ([], last)
    assert ring.summarise() == {"p95_ms": 10.0 + int(0.95 * (RING_SIZE - 1)), "ttft_mean_ms": 1.0}
    assert RequestRing().summarise() == {"p95_ms": 0, "ttft_mean_ms": 0.0}


def test_health_tells_the_phase_while_loading_and_the_error_when_it_failed() -> None:
    state = ServerState(ServerOptions(served_model_name="m"))
    state.set_progress("expert_banks", 5, 10)
    shared = {"instance_id": state.instance_id, "version": state.health()["version"]}
    assert state.health() == {
        "status": "loading", "phase": "expert_banks", "progress": {"done_bytes": 5, "total_bytes": 10}, "model": "m",
    } | shared  # fmt: skip
    state.error = "no tensors in model.safetensors"
    assert state.health() == {"status": "error", "message": "no tensors in model.safetensors"} | shared


def test_the_key_is_in_no_dump_and_no_repr() -> None:
    options = ServerOptions(api_key="sesame")
    assert "sesame" not in repr(options) + options.model_dump_json()


def test_a_busy_port_is_told_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FtError, match=f"port {port} on 127.0.0.1 is already in use"):
            open_socket("127.0.0.1", port)


def test_an_address_that_is_not_here_is_told() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.1:1919"):
        open_socket("203.0.113.1", 1919)


@pytest.mark.parametrize(("host", "is_local"), [
    ("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True),
    ("0.0.0.0", False), ("::", False), ("192.168.1.5", False), ("box", False),
])  # fmt: skip
def test_only_loopback_addresses_are_this_machine(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local
