"""What a model hub holds of a repository, and ranged reads of its files: Hugging Face, its mirrors, and ModelScope.

Hugging Face is reached through huggingface_hub's own session, so proxies, tokens and its client settings count.
`HF_ENDPOINT`, `HF_HUB_OFFLINE` and `HF_TOKEN` are read when they are needed: huggingface_hub reads the first two at
import, which is too early for a value that `ft` was given later. ModelScope's client has no ranged read, so its two
HTTP calls are made here.
"""

from __future__ import annotations

import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from freetoken import paths
from freetoken.errors import BadFileError, FtError, UsageError
from freetoken.local import read_mapping

if TYPE_CHECKING:
    from freetoken.recipe.model import ModelRef

_TRUE = ("1", "on", "yes", "true")
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
RETRIES = 5
MAX_JSON_BYTES = 512 << 20


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository. `sha256` is known for large files; small ones have git's own hash."""

    name: str
    bytes: int
    sha256: str | None = None
    git_sha1: str | None = None


class HubError(FtError):
    """The hub cannot be reached, or does not give what was asked."""


class OfflineError(HubError):
    """`HF_HUB_OFFLINE` forbids what was asked."""


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) forbids the network now."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.lower() in _TRUE


def hub_cache_dir() -> Path:
    """Hugging Face's cache folder, from the same variables as huggingface_hub reads, in the same order."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return Path(os.path.expandvars(value)).expanduser()
    return hf_home() / "hub"


def hf_home() -> Path:
    """`HF_HOME`, else `huggingface` in the user's cache folder."""
    if value := os.environ.get("HF_HOME"):
        return Path(os.path.expandvars(value)).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"


class RemoteRepo(ABC):
    """A repository at one commit: its files, and ranged reads of them."""

    source: str = ""

    def __init__(self, repo: str, revision: str, commit: str, files: tuple[RemoteFile, ...]) -> None:
        self.repo, self.revision, self.commit, self.files = repo, revision, commit, files
        #: Bytes of files that `read_range` and `read_file` have moved.
        self.moved_bytes = 0

    @abstractmethod
    def make_url(self, name: str) -> str:
        """Where the file `name` is read from."""

    @abstractmethod
    def open_stream(self, name: str, begin: int, end: int | None) -> Any:
        """A context manager giving the response to a ranged GET of bytes [begin, end)."""

    def find_file(self, name: str) -> RemoteFile | None:
        """The file `name`, or None."""
        return next((file for file in self.files if file.name == name), None)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a file, which must have them; a connection cut in the middle is taken up again.

        Never takes more than it asked for, even from a server that ignores `Range`. Raises HubError.
        """
        data = bytearray()
        failures = 0
        while len(data) < end - begin:
            before = len(data)
            reason: Exception | None = None
            try:
                for chunk in self.iterate(name, begin + before, end):
                    data += chunk
            except network_errors() as error:
                reason = error
            self.moved_bytes += len(data) - before
            failures = 1 if len(data) > before else failures + 1
            if len(data) < end - begin:
                pause(failures, reason, self.make_url(name))
        return bytes(data)

    def iterate(self, name: str, begin: int, end: int | None) -> Iterator[bytes]:
        """The bytes [begin, end) of a file as they come. Raises HubError for an answer that is not the file."""
        with self.open_stream(name, begin, end) as response:
            skip = begin if response.status_code == 200 else 0
            if response.status_code == 416:
                return
            if response.status_code in (408, 429) or response.status_code >= 500:
                raise ConnectionError(f"the hub answered {response.status_code}")
            if response.status_code not in (200, 206):
                raise HubError(f"{self.make_url(name)}: the hub answered {response.status_code}")
            left = None if end is None else end - begin
            for chunk in response.iter_bytes():  # as it comes: a block half filled is lost with the connection
                if skip:
                    skip, chunk = max(0, skip - len(chunk)), chunk[skip:]
                if left is not None:
                    chunk = chunk[:left]
                    left -= len(chunk)
                if chunk:
                    yield chunk
                if left == 0:
                    return

    def read_file(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """A whole small file. Raises HubError where there is none, or it is larger than `max_bytes`."""
        file = self.find_file(name)
        if file is None:
            raise HubError(f"{self.repo}: has no {name}")
        if file.bytes > max_bytes:
            raise HubError(f"{self.repo}: {name} is {file.bytes:,} bytes, at most {max_bytes:,} are read")
        return self.read_range(name, 0, file.bytes)


class HuggingFaceRepo(RemoteRepo):
    """A repository on Hugging Face or a mirror of it."""

    source = "huggingface"

    def make_url(self, name: str) -> str:
        """The `resolve` URL at this commit."""
        return f"{hf_endpoint()}/{self.repo}/resolve/{quote(self.commit, safe='')}/{quote(name)}"

    @contextmanager
    def open_stream(self, name: str, begin: int, end: int | None) -> Iterator[Any]:
        """A ranged GET through huggingface_hub's session."""
        from huggingface_hub.utils import build_hf_headers, get_session

        headers = {
            **build_hf_headers(token=hf_token()),
            "Accept-Encoding": "identity",
            "Range": format_range(begin, end),
        }
        with get_session().stream("GET", self.make_url(name), headers=headers, timeout=READ_TIMEOUT_S) as response:
            yield response


class ModelScopeRepo(RemoteRepo):
    """A repository on ModelScope."""

    source = "modelscope"

    def make_url(self, name: str) -> str:
        """The download call of the API."""
        where = f"{modelscope_endpoint()}/api/v1/models/{self.repo}/repo"
        return f"{where}?Revision={quote(self.revision, safe='')}&FilePath={quote(name, safe='')}"

    @contextmanager
    def open_stream(self, name: str, begin: int, end: int | None) -> Iterator[Any]:
        """A ranged GET of our own."""
        import httpx

        headers = {**_modelscope_headers(), "Accept-Encoding": "identity", "Range": format_range(begin, end)}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        with httpx.stream(
            "GET", self.make_url(name), headers=headers, timeout=timeout, follow_redirects=True
        ) as response:
            yield response


def format_range(begin: int, end: int | None) -> str:
    """The `Range` header for bytes [begin, end); `end` None means to the end of the file."""
    return f"bytes={begin}-{'' if end is None else end - 1}"


def hf_endpoint() -> str:
    """Where Hugging Face is: `HF_ENDPOINT`, else the machine-local file's mirror, else the public hub."""
    return (os.environ.get("HF_ENDPOINT") or _read_local("endpoint") or "https://huggingface.co").rstrip("/")


def hf_token() -> str | None:
    """The token in the file that the machine-local file names; None where huggingface_hub finds its own."""
    if os.environ.get("HF_TOKEN") or not (named := _read_local("token_file")):
        return None
    path = Path(named).expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError) as error:
        raise BadFileError(f"{paths.local_file()}: `hub.token_file` {path} cannot be read: {error}") from error


def _read_local(key: str) -> str:
    value = read_mapping("hub", ("endpoint", "token_file")).get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or (key == "endpoint" and not value.startswith(("https://", "http://"))):
        example = "https://MIRROR" if key == "endpoint" else "a path"
        raise BadFileError(f"{paths.local_file()}: `hub.{key}` is `{value}`, expected {example}")
    return value


def modelscope_endpoint() -> str:
    """Where ModelScope is: `MODELSCOPE_DOMAIN` with or without a scheme, else the public site."""
    domain = (os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn").rstrip("/")
    return domain if "://" in domain else f"https://{domain}"


def _modelscope_headers() -> dict[str, str]:
    token = os.environ.get("MODELSCOPE_API_TOKEN")
    return {"User-Agent": "freetoken-deploy", **({"Authorization": f"Bearer {token}"} if token else {})}


def open_repo(ref: ModelRef) -> RemoteRepo:
    """The repository that `ref` names, with the commit and the list of its files.

    Raises OfflineError where the network is forbidden, UsageError (exit 2) for a repository or revision that is not
    there or not open to us, and HubError where the hub cannot be reached.
    """
    if ref.repo is None:
        raise UsageError("a local path has no hub repository; give `model.repo`")
    if is_offline():
        raise OfflineError(
            f"`{ref.repo}` is not on this machine, and HF_HUB_OFFLINE forbids asking the hub",
            hint="unset HF_HUB_OFFLINE",
        )
    return _open_modelscope(ref.repo, ref.revision) if ref.source == "modelscope" else _open_hf(ref.repo, ref.revision)


def _open_hf(repo: str, revision: str) -> HuggingFaceRepo:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    endpoint = hf_endpoint()
    try:
        info = HfApi(endpoint=endpoint, token=hf_token()).model_info(
            repo, revision=revision, files_metadata=True, timeout=READ_TIMEOUT_S
        )
    except GatedRepoError as error:
        raise UsageError(
            f"`{repo}` is gated", hint=f"ask for access at {endpoint}/{repo}, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"`{repo}` has no revision `{revision}` on {endpoint}") from error
    except RepositoryNotFoundError as error:
        hint = "check the spelling; a private repository needs HF_TOKEN"
        raise UsageError(f"no repository `{repo}` on {endpoint}, or it is private", hint=hint) from error
    except HfHubHTTPError as error:
        raise HubError(
            f"{endpoint} answered {getattr(error.response, 'status_code', 'an error')} for `{repo}`"
        ) from error
    except network_errors() as error:
        raise HubError(f"{endpoint} cannot be reached: {describe(error)}", hint="a mirror: HF_ENDPOINT=URL") from error
    files = tuple(read_sibling(one) for one in info.siblings or () if is_safe_name(one.rfilename))
    return HuggingFaceRepo(repo, revision, str(info.sha), files)


def read_sibling(one: Any) -> RemoteFile:
    """A file as huggingface_hub lists it."""
    lfs = one.lfs
    sha256 = (lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)) if lfs else None
    return RemoteFile(name=one.rfilename, bytes=int(one.size or 0), sha256=sha256, git_sha1=one.blob_id)


def _open_modelscope(repo: str, revision: str) -> ModelScopeRepo:
    import httpx

    revision = "master" if revision == "main" else revision
    endpoint = modelscope_endpoint()
    url = f"{endpoint}/api/v1/models/{repo}/repo/files"
    try:
        answer = httpx.get(
            url,
            params={"Revision": revision, "Recursive": "true"},
            headers=_modelscope_headers(),
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            follow_redirects=True,
        )
        document = answer.json() if answer.status_code in (200, 404) else {}
    except httpx.HTTPError as error:
        raise HubError(f"{endpoint} cannot be reached: {describe(error)}") from error
    except json.JSONDecodeError as error:
        raise HubError(f"{endpoint} did not answer in JSON for `{repo}`") from error
    if answer.status_code == 404 or document.get("Code") == 404:
        raise UsageError(f"no repository `{repo}` with revision `{revision}` on {endpoint}")
    if answer.status_code != 200 or not isinstance(document.get("Data"), dict):
        raise HubError(f"{endpoint} answered {answer.status_code} for `{repo}`")
    listed = [one for one in document["Data"].get("Files") or () if one.get("Type") != "tree"]
    files = tuple(
        RemoteFile(name=one["Path"], bytes=int(one["Size"]), sha256=one.get("Sha256") or None)
        for one in listed
        if is_safe_name(str(one.get("Path", "")))
    )
    commit = next((str(one["Revision"]) for one in listed if one.get("Revision")), revision)
    return ModelScopeRepo(repo, revision, commit, files)


def is_safe_name(name: str) -> bool:
    """Whether a name from a hub stays inside the folder it is put in."""
    return bool(name) and not name.startswith(("/", "\\")) and ".." not in re.split(r"[/\\]", name) and "\0" not in name


def pause(failures: int, reason: Exception | None, url: str) -> None:
    """Waits a little longer after each failure; raises HubError after `RETRIES` in a row without a byte between."""
    if failures > RETRIES:
        text = describe(reason) if reason else "the connection ends early"
        raise HubError(f"{url}: {text}, {RETRIES} times in a row") from reason
    time.sleep(min(4.0, 0.05 * 2**failures))


def network_errors() -> tuple[type[Exception], ...]:
    """What a broken connection raises: httpx for us and huggingface_hub 1, httpx2 for huggingface_hub 2."""
    import httpx

    found: list[type[Exception]] = [httpx.HTTPError, OSError]
    try:
        import httpx2

        found.append(httpx2.HTTPError)
    except ImportError:
        pass
    return tuple(found)


def describe(error: BaseException) -> str:
    """A connection error in a few words, on one line."""
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
