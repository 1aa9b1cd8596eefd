"""Which process listens on a TCP port of this machine, read from /proc. Standard library only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from freetoken.supervisor.process import read_stat

#: What is said of a listener whose process /proc does not show.
UNSEEN = "a process that cannot be seen from here (of another user or container)"

_LISTEN = "0A"


@dataclass(frozen=True)
class PortHolder:
    """Who listens on a port: pid and name where they can be seen, else None (another user's or container's)."""

    port: int
    pid: int | None
    name: str | None

    def describe(self) -> str:
        """`port 1919 is taken by python3 (process 42)`."""
        if self.pid is None:
            return f"port {self.port} is taken by {UNSEEN}"
        return f"port {self.port} is taken by `{self.name}` (process {self.pid})"


def can_bind(host: str, port: int) -> bool:
    """True when a server could listen on `port` now; connections of the past in TIME_WAIT do not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def find_port_holder(host: str, port: int) -> PortHolder | None:
    """Who keeps `port` from being bound on `host`; None when it is free."""
    if can_bind(host, port):
        return None
    pid = find_listener(port)
    stat = read_stat(pid) if pid is not None else None
    return PortHolder(port, pid, stat.name if stat else None)


def find_listener(port: int, pids: Iterable[int] | None = None) -> int | None:
    """The process that listens on `port`, looked for among `pids` (default: all); None where it cannot be seen."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    candidates = pids if pids is not None else (int(one) for one in os.listdir("/proc") if one.isdigit())
    return next((pid for pid in candidates if inodes & _socket_inodes(pid)), None)


def is_listening(port: int) -> bool | None:
    """True while anybody listens on `port`; None where the kernel does not say."""
    return bool(_listening_inodes(port)) if Path("/proc/net/tcp").exists() else None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            part = row.split()
            if part[3] == _LISTEN and int(part[1].rpartition(":")[2], 16) == port:
                inodes.add(part[9])
    return inodes


def _socket_inodes(pid: int) -> set[str]:
    found: set[str] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue  # closed since: the others still count
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found
