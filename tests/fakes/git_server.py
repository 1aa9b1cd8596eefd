"""A git server over https on a loopback port: git's own `http-backend` behind a certificate made on the spot.

Answers can be cut after any number of bytes, and a password can be asked for, as a real host does.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


@dataclass
class GitServer:
    """What is served, how it misbehaves, and what was asked of it."""

    root: Path
    url: str = ""
    certificate: Path = Path()
    #: Each is of one answer: cut after so many bytes of its body, None for whole.
    cuts: list[int | None] = field(default_factory=list)
    #: Statuses given instead of an answer, each once.
    statuses: list[int] = field(default_factory=list)
    password: str | None = None
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve_git(root: Path, folder: Path) -> Iterator[GitServer]:
    """A server of the bare repositories under `root` while the block runs; its certificate goes into `folder`."""
    server = GitServer(root)
    key, server.certificate = make_certificate(folder)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(server))
    http.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, key)
    http.socket = context.wrap_socket(http.socket, server_side=True)
    server.url = f"https://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(5)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Key and self-signed certificate of 127.0.0.1, as PEM files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "server.key", folder / "server.pem"
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    paths[0].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    paths[1].write_bytes(made.public_bytes(pem))
    return paths


def _make_handler(server: GitServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(b"")

        def do_POST(self) -> None:
            self.answer(self.read_body())

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def answer(self, body: bytes) -> None:
            server.requests.append(f"{self.command} {self.path}")
            if server.statuses:
                self.send_error(server.statuses.pop(0))
                return
            wanted = f"Basic {b64encode(f'me:{server.password}'.encode()).decode()}"
            if server.password is not None and self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic realm=x")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            head, _, data = self.run_backend(body).partition(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
            self.send_response(int(fields.pop("Status", "200").split()[0]))
            for name, value in fields.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            cut = server.cuts.pop(0) if server.cuts else None
            self.wfile.write(data[:cut])
            self.close_connection = True

        def run_backend(self, body: bytes) -> bytes:
            parts = urlsplit(self.path)
            env = {
                "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(server.root), "GIT_HTTP_EXPORT_ALL": "1",
                "REQUEST_METHOD": self.command, "PATH_INFO": parts.path, "QUERY_STRING": parts.query,
                "CONTENT_TYPE": self.headers.get("Content-Type") or "", "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding") or "", "REMOTE_USER": "me",
                "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol") or "", "HOME": str(server.root),
            }  # fmt: skip
            safe = ["-c", "safe.directory=*", "-c", "http.receivepack=true"]
            return subprocess.run(["git", *safe, "http-backend"], input=body, env=env, capture_output=True).stdout

    return Handler
