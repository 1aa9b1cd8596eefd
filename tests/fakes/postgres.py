"""A PostgreSQL server of a test's own: real, in a folder of its own, on a port of its own, ended with the test."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.ports import find_free_port

PASSWORD = "correct-horse"


def find_binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: on PATH, or where Debian puts them, the newest version first."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    folders = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = sorted(folders, key=lambda path: int(re.sub(r"\D", "", path.parent.parent.name) or 0))
    return newest[-1].parent if newest else None


@contextlib.contextmanager
def serve_postgres() -> Iterator[str]:
    """The SQLAlchemy URL of an empty database; skips the test, with the reason, where there is no server to start."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server here: neither `initdb` on PATH nor /usr/lib/postgresql")
    # Not under pytest's folder: the server's user could not enter it.
    folder = Path(tempfile.mkdtemp(prefix="ft-postgres-", dir="/tmp"))
    owner = pick_owner()
    try:
        if owner:
            os.chown(folder, int(owner["user"]), int(owner["group"]))
        yield from _serve(binaries, folder, owner)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pick_owner() -> dict[str, int | list[int]]:
    """What `subprocess` needs to run the server, which refuses to run as root; {} for a user who is not root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            found = pwd.getpwnam(name)
            return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL does not run as root, and there is no other user")


def _serve(binaries: Path, folder: Path, owner: dict[str, int | list[int]]) -> Iterator[str]:
    data, secret, port = folder / "data", folder / "password", find_free_port()
    secret.write_text(PASSWORD + "\n")
    secret.chmod(0o644)
    base = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", "HOME": str(folder)}
    made = subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "ft", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync",
         "--locale=C", "--encoding=UTF8"],
        capture_output=True, text=True, timeout=120, cwd=folder, env=base, **owner,  # type: ignore[call-overload]
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-k", folder, "-p", str(port), "-h", "127.0.0.1",
             "-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "dynamic_shared_memory_type=mmap"],
            stdout=log, stderr=log, cwd=folder, env=base, **owner,  # type: ignore[call-overload]
        )  # fmt: skip
    try:
        url = f"postgresql+psycopg://ft:{PASSWORD}@127.0.0.1:{port}/postgres"
        _wait(server, url.replace("+psycopg", ""), folder / "server.log")
        yield url
    finally:
        # "Fast": connections are cut, the data are written.
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    import psycopg

    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(log.read_text(errors="replace")) from None
            time.sleep(0.1)
