"""Ports for servers of the tests, out of the range from which the kernel takes ports for outgoing connections.

A port that `bind(0)` gave can be taken by any client between that answer and the server's own bind.
"""

from __future__ import annotations

import random
import socket

_PORTS = random.SystemRandom()


def find_free_port() -> int:
    """A port that is free now, with the one after it free too (some engines take both)."""
    for _ in range(500):
        port = _PORTS.randrange(12000, 32000)
        if all(_can_bind(one) for one in (port, port + 1)):
            return port
    raise AssertionError("no two free ports between 12000 and 32000")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
