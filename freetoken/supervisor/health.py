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


def read_work(host: str, port: int, *, api_key: str | None = None, timeout_s: float = 2.0) -> tuple[int, int] | None:
    """(requests being served, tokens counted so far) from `/v1/stats`; None where the engine does not say."""
    code, body, _ = get(host, port, "/v1/stats", api_key=api_key, timeout_s=timeout_s)
    try:
        requests = json.loads(body)["requests"] if code == 200 else None
        if not isinstance(requests, dict):
            return None
        done = _count(requests.get("prompt_tokens_total")) + _count(requests.get("completion_tokens_total"))
        return _count(requests.get("active")), done + _count(requests.get("completed"))
    except (ValueError, KeyError, TypeError):
        return None


def get(
    host: str, port: int, path: str, *, api_key: str | None = None, timeout_s: float = 2.0
) -> tuple[int | None, bytes, str]:
    """(HTTP code, body, "") of one GET, or (None, b"", reason).

    HTTP/1.0 by hand: the body then ends with the connection, and `http.client` (which loads the whole of TLS and
    email) would double what the keeper takes.
    """
    lines = [f"GET {path} HTTP/1.0", f"Host: {host}:{port}", "Connection: close"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    try:
        with socket.create_connection((connect_host(host), port), timeout=timeout_s) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            data = _read_whole(connection, time.monotonic() + timeout_s)
    except TimeoutError:
        return None, b"", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return None, b"", error.strerror or str(error)
    head, _, body = data.partition(b"\r\n\r\n")
    part = head.split(b" ", 2)
    if len(part) < 2 or not part[0].startswith(b"HTTP/") or not part[1].isdigit():
        return None, b"", "the answer is not HTTP"
    return int(part[1]), body, ""


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
