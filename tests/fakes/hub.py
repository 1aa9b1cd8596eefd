"""A model hub on a loopback port: the parts of Hugging Face's and ModelScope's HTTP that `ft` uses.

It serves a folder of repositories. Large files (safetensors, GGUF) are LFS: their resolve URL redirects to a CDN path,
as on the real hub. Connections can be cut after any number of bytes, hashes can be wrong, `Range` can be ignored.
"""

from __future__ import annotations

import json
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")


@dataclass
class FakeHub:
    """The hub's state: what it serves, how it misbehaves, and what was asked of it."""

    root: Path
    url: str = ""
    cdn_url: str = ""
    #: File name → byte counts: each cuts one connection after that many bytes of the file's answer.
    cuts: dict[str, list[int]] = field(default_factory=dict)
    #: Files whose bytes are damaged on the way.
    damaged: set[str] = field(default_factory=set)
    #: Answers before the real one: file name → status codes, each given once.
    statuses: dict[str, list[int]] = field(default_factory=dict)
    #: Seconds to wait before each 64 KiB of a file.
    slow: dict[str, float] = field(default_factory=dict)
    ignores_range: bool = False
    is_gated: bool = False
    token: str | None = None
    #: Writing requests (POST) that get no answer, their connection cut instead.
    cut_posts: int = 0
    #: Commits that are refused because somebody else's came first.
    stale_commits: int = 0
    #: Repositories that were made, and what was committed: repository → file names of each commit.
    commits: dict[str, list[list[str]]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    _hashes: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, repo: str, name: str, content: bytes) -> Path:
        """Puts a file into a repository."""
        path = self.root / repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def list_files(self, repo: str) -> dict[str, Path]:
        """The files of a repository by name."""
        folder = self.root / repo
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path for path in found}

    def find_hash(self, path: Path, *, is_lfs: bool) -> str:
        """SHA-256 of a large file, git's SHA-1 of a small one; a sparse giant has a made-up one."""
        key = (str(path), path.stat().st_size)
        if key not in self._hashes:
            if path.stat().st_size > 1 << 28:
                self._hashes[key] = sha256(str(path).encode()).hexdigest()
            elif is_lfs:
                self._hashes[key] = sha256(path.read_bytes()).hexdigest()
            else:
                data = path.read_bytes()
                self._hashes[key] = sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        return self._hashes[key]

    def count(self, text: str) -> int:
        """How many requests had `text` in them."""
        return sum(text in request for request in self.requests)


@contextmanager
def serve_hub(root: Path) -> Iterator[FakeHub]:
    """A hub that serves `root` while the block runs."""
    hub = FakeHub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.cdn_url = f"http://localhost:{server.server_address[1]}"  # another host, as a real CDN is
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _make_handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.route()

        def do_GET(self) -> None:
            self.route()

        def do_POST(self) -> None:
            """The API that makes repositories and commits: what `create_repo` and `create_commit` send."""
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"POST {self.path}")
            path = unquote(urlsplit(self.path).path)
            if hub.cut_posts > 0:
                hub.cut_posts -= 1
                self.close_connection = True
                self.connection.close()
            elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, b"{}")
            elif path == "/api/repos/create":
                self.create_repo(json.loads(body))
            elif "/preupload/" in path:
                files = [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]
                self.answer_json({"files": [{k: v for k, v in one.items() if k != "sample"} for one in files]})
            elif "/commit/" in path and hub.stale_commits:
                hub.stale_commits -= 1
                self.answer(412, b"{}")
            elif "/commit/" in path:
                self.commit(path.removeprefix("/api/").partition("/commit/")[0], body)
            else:
                self.answer(404, b"{}")

        def create_repo(self, wanted: dict[str, str]) -> None:
            kind = f"{wanted.get('type', 'model')}s"
            owner, name = wanted.get("organization") or "me", wanted["name"]
            folder = hub.root / (f"{owner}/{name}" if kind == "models" else f"{kind}/{owner}/{name}")
            status = 409 if folder.exists() else 200
            folder.mkdir(parents=True, exist_ok=True)
            self.answer_json({"url": f"{hub.url}/{kind}/{owner}/{name}", "name": f"{owner}/{name}"}, status)

        def commit(self, repo: str, body: bytes) -> None:
            repo = repo.removeprefix("models/")
            names = []
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    names.append(entry["value"]["path"])
                    hub.add(repo, names[-1], b64decode(entry["value"]["content"]))
            hub.commits.setdefault(repo, []).append(names)
            self.answer_json({"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.url}/{repo}/commit/{COMMIT}"})

        def route(self) -> None:
            parts = urlsplit(self.path)
            path, query = unquote(parts.path), parse_qs(parts.query)
            hub.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}" and "/cdn/" not in path:
                self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif path.startswith("/api/models/"):
                self.answer_api(path.removeprefix("/api/models/"))
            elif path.startswith("/api/datasets/"):
                self.answer_api(path.removeprefix("/api/"))
            elif path.startswith("/api/v1/models/"):
                self.answer_modelscope(path.removeprefix("/api/v1/models/"), query)
            elif path.startswith("/cdn/"):
                self.send_file(hub.root / path.removeprefix("/cdn/"))
            elif "/resolve/" in path:
                self.resolve(*path.lstrip("/").split("/resolve/"))
            else:
                self.answer(404, b"{}")

        def answer_api(self, rest: str) -> None:
            repo, _, action = rest.partition("/revision/")
            repo, _, tree = repo.partition("/tree/")
            if hub.is_gated:
                self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
                return
            if not hub.list_files(repo) and not (hub.root / repo).is_dir():
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            if (action or tree).split("/")[0] not in ("main", COMMIT):
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            self.answer_json(self.make_tree(repo) if tree else self.make_info(repo))

        def make_info(self, repo: str) -> object:
            siblings = []
            for name, path in hub.list_files(repo).items():
                size, is_lfs = path.stat().st_size, name.endswith(LFS_SUFFIXES)
                entry: dict[str, object] = {"rfilename": name, "size": size, "blobId": "0" * 40}
                if is_lfs:
                    digest = hub.find_hash(path, is_lfs=True)
                    entry["lfs"] = {"size": size, "sha256": digest, "pointerSize": 130}
                else:
                    entry["blobId"] = hub.find_hash(path, is_lfs=False)
                siblings.append(entry)
            return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}

        def make_tree(self, repo: str) -> object:
            entries = []
            for name, path in hub.list_files(repo).items():
                size, is_lfs = path.stat().st_size, name.endswith(LFS_SUFFIXES)
                entry: dict[str, object] = {"type": "file", "path": name, "size": size}
                entry["oid"] = "0" * 40 if is_lfs else hub.find_hash(path, is_lfs=False)
                if is_lfs:
                    entry["lfs"] = {"oid": hub.find_hash(path, is_lfs=True), "size": size, "pointerSize": 130}
                entries.append(entry)
            return entries

        def answer_modelscope(self, rest: str, query: dict[str, list[str]]) -> None:
            repo, _, action = rest.partition("/repo")
            files = hub.list_files(repo)
            if not files or query.get("Revision", ["master"])[0] != "master":
                self.answer_json({"Code": 404, "Success": False, "Message": "not found"}, status=404)
            elif action == "/files":
                listed = [
                    {
                        "Name": Path(name).name,
                        "Path": name,
                        "Type": "blob",
                        "Size": path.stat().st_size,
                        "Sha256": hub.find_hash(path, is_lfs=True),
                        "Revision": COMMIT,
                    }
                    for name, path in files.items()
                ]
                self.answer_json({"Code": 200, "Success": True, "Data": {"Files": listed}})
            elif (name := query.get("FilePath", [""])[0]) in files:
                self.send_file(files[name])
            else:
                self.answer(404, b"{}")

        def resolve(self, repo: str, rest: str) -> None:
            revision, _, name = rest.partition("/")
            path = hub.list_files(repo).get(name)
            if path is None or revision not in ("main", COMMIT):
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                return
            is_lfs = name.endswith(LFS_SUFFIXES)
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hub.find_hash(path, is_lfs=is_lfs)}"'}
            if is_lfs:
                linked = {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(path.stat().st_size)}
                self.answer(302, b"", {**headers, **linked, "Location": f"{hub.cdn_url}/cdn/{repo}/{name}"})
            else:
                self.send_file(path, headers)

        def send_file(self, path: Path, headers: dict[str, str] | None = None) -> None:
            if waiting := hub.statuses.get(path.name):
                self.answer(waiting.pop(0), b"")
                return
            size = path.stat().st_size
            begin, end, status = 0, size, 200
            wanted = self.headers.get("Range", "")
            if wanted.startswith("bytes=") and not hub.ignores_range:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                begin, end, status = int(first), min(size, int(last) + 1 if last else size), 206
                if begin >= size:
                    self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
                    return
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(end - begin))
            if status == 206:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.end_headers()
            if self.command == "GET":
                self.send_bytes(path, begin, end)

        def send_bytes(self, path: Path, begin: int, end: int) -> None:
            waiting = hub.cuts.get(path.name)
            cut = waiting.pop(0) if waiting else None
            left = end - begin if cut is None else min(cut, end - begin)
            with path.open("rb") as file:
                file.seek(begin)
                while left and (chunk := file.read(min(left, 1 << 16))):
                    left -= len(chunk)
                    time.sleep(hub.slow.get(path.name, 0))
                    if path.name in hub.damaged:
                        chunk = bytes(byte ^ 1 for byte in chunk)
                    try:
                        self.wfile.write(chunk)
                    except OSError:
                        self.close_connection = True
                        return
                    hub.sent_bytes += len(chunk)
            if cut is not None:
                self.close_connection = True
                self.connection.close()

        def answer_json(self, value: object, status: int = 200) -> None:
            self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler
