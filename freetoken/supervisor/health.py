"""One look at an engine's `/health`, as the keeper takes it: loopback, no proxy, no dependency, never an exception.

The keeper knows no engine. It reads what most of them share: HTTP 200 with `status` ok (and `maintenance` serving
where that is said) is ready; 503 or `loading` is not yet; `error` is the end.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

HealthStatus = Literal["unreachable", "loading", "ready", "busy", "error"]
_MAX_REPLY_BYTES = 1 << 20
_READY_WORDS = ("ok", "ready", "healthy", "up")


@dataclass(frozen=True)
class HealthLook:
    """What `/health` said, in common words."""

    status: HealthStatus
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""
    instance_id: str = ""

    @property
    def progress(self) -> tuple[str, str, int, int]:
        """What must change for the engine to count as getting on while it loads."""
        return (self.status, self.phase, self.done_bytes, self.total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """As written to `keeper.json`."""
        return asdict(self)


def connect_host(host: str) -> str:
    """The address under which a server that listens on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def probe_health(host: str, port: int, path: str = "/health", *, timeout_s: float = 2.0) -> HealthLook:
    """Asks the engine once; every failure to answer is `unreachable` with the reason."""
    code, body, problem = get(host, port, path, timeout_s=timeout_s)
    if code is None:
        return HealthLook("unreachable", message=problem)
    return read_health(code, body)


def read_health(code: int, body: bytes) -> HealthLook:
    """What an answer means."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return HealthLook("ready" if code == 200 else "loading")
    progress = value.get("progress")
    progress = progress if isinstance(progress, dict) else {}
    return HealthLook(
        status=_read_status(code, value),
        phase=str(value.get("phase") or ""),
        done_bytes=_count(progress.get("done_bytes")),
        total_bytes=_count(progress.get("total_bytes")),
        message=str(value.get("message") or ""),
        instance_id=str(value.get("instance_id") or ""),
    )


def _read_status(code: int, value: dict[str, Any]) -> HealthStatus:
    word = str(value.get("status", "")).lower()
    maintenance = str(value.get("maintenance", "serving")).lower()
    if word == "error" or maintenance == "failed":
        return "error"
    if word == "loading" or code == 503:
        return "loading"
    if code == 200 and (word in _READY_WORDS or not word):
        return "ready" if maintenance == "serving" else "busy"
    return "loading"


@dataclass(frozen=True)
class Work:
    """What an engine has to do, and how far it is, as `/v1/stats` tells it."""

    active_count: int
    #: Grows with every token and every finished request.
    done_count: int
    #: The engine says that tokens are flowing now: some count them only once a request has ended.
    is_flowing: bool = False

    @property
    def progress(self) -> tuple[int, int, bool]:
        """What must change for the engine to count as getting on."""
        return (self.active_count, self.done_count, self.is_flowing)


def read_work(host: str, port: int, *, api_key: str | None = None, timeout_s: float = 2.0) -> Work | None:
    """Requests and tokens from `/v1/stats`; None where the engine does not say."""
    code, body, _ = get(host, port, "/v1/stats", api_key=api_key, timeout_s=timeout_s)
    value = _parse(code, body)
    requests, rates = value.get("requests"), value.get("throughput")
    if not isinstance(requests, dict):
        return None
    done = _count(requests.get("prompt_tokens_total")) + _count(requests.get("completion_tokens_total"))
    flow = [rates.get("decode_tps"), rates.get("prefill_tps")] if isinstance(rates, dict) else []
    return Work(
        _count(requests.get("active")),
        done + _count(requests.get("completed")),
        any(isinstance(one, (int, float)) and one > 0 for one in flow),
    )


def read_requests(
    host: str, port: int, since: int, *, api_key: str | None = None, timeout_s: float = 2.0
) -> tuple[tuple[str, ...], int]:
    """(errors of the requests after the cursor `since` that were refused as wrong, the next cursor)."""
    path = f"/v1/requests?since={since}&limit=512"
    value = _parse(*get(host, port, path, api_key=api_key, timeout_s=timeout_s)[:2])
    entries = value.get("entries")
    rows = [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    errors = tuple(str(one["error"]) for one in rows if one.get("error") and _count(one.get("status")) in (0, 400, 413))
    cursor = value.get("next_cursor")
    return errors, _count(cursor) if cursor is not None else since


def can_generate(
    host: str, port: int, model: str, *, api_key: str | None = None, timeout_s: float = 10.0
) -> bool:  # fmt: skip
    """Whether the engine serves a request of one token within `timeout_s`."""
    body = json.dumps({"model": model, "prompt": "1", "max_tokens": 1, "stream": False}).encode()
    code, _, _ = get(host, port, "/v1/completions", api_key=api_key, timeout_s=timeout_s, body=body)
    return code == 200


def _parse(code: int | None, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body) if code == 200 else None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def get(
    host: str,
    port: int,
    path: str,
    *,
    api_key: str | None = None,
    timeout_s: float = 2.0,
    body: bytes | None = None,
) -> tuple[int | None, bytes, str]:
    """(HTTP code, body, "") of one GET, or (None, b"", reason). With `body`, a JSON document, it is a POST.

    HTTP/1.0 by hand: the body then ends with the connection, and `http.client` (which loads the whole of TLS and
    email) would double what the keeper takes.
    """
    verb = "GET" if body is None else "POST"
    lines = [f"{verb} {path} HTTP/1.0", f"Host: {host}:{port}", "Connection: close"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    try:
        with socket.create_connection((connect_host(host), port), timeout=timeout_s) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + (body or b""))
            data = _read_whole(connection, time.monotonic() + timeout_s)
    except TimeoutError:
        return None, b"", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return None, b"", error.strerror or str(error)
    head, _, reply = data.partition(b"\r\n\r\n")
    part = head.split(b" ", 2)
    if len(part) < 2 or not part[0].startswith(b"HTTP/") or not part[1].isdigit():
        return None, b"", "the answer is not HTTP"
    return int(part[1]), reply, ""


def _read_whole(connection: socket.socket, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < _MAX_REPLY_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        piece = connection.recv(1 << 16)
        if not piece:
            break
        data += piece
    return bytes(data)


def _count(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
