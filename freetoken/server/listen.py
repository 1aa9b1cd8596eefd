"""The port, taken before anything heavy is imported: a busy one is told in a sentence and costs no load."""

from __future__ import annotations

import errno
import ipaddress
import socket

from freetoken.errors import FtError, UsageError


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket on `host:port`; port 0 takes a free one. Raises FtError where it is taken, else UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its loopback address or name."""
    if host in ("localhost", "testclient"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _explain(error: OSError, host: str, port: int) -> FtError:
    if error.errno == errno.EADDRINUSE:
        hint = f"`--port {port + 2}`, or stop what listens there"
        return FtError(f"port {port} on {host} is already in use", hint=hint)
    if error.errno == errno.EACCES:
        return UsageError(f"port {port} needs more rights than this user has", hint="a port above 1023 needs none")
    return UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}")
