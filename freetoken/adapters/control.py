"""The client of the control API: one for the upstream engine and for ours (DESIGN section 5).

Blocking, over httpx without proxies: an engine on the loopback must not be asked through a company proxy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from freetoken.adapters.replies import (
    CacheStatus,
    Completion,
    Health,
    MoeHits,
    RebuildResult,
    Reply,
    RequestPage,
    Stats,
)
from freetoken.errors import FtError

R = TypeVar("R", bound=Reply)

#: Pause between two tries of a rebuild that found the engine busy, and between two looks at one in progress.
POLL_S = 0.5


class EngineUnreachableError(FtError):
    """Nothing answers at the address, or the connection broke."""


class EngineReplyError(FtError):
    """The engine answered with an error, or with something that is not its API. `status_code` is HTTP's."""

    def __init__(self, message: str, *, status_code: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        #: The engine's own word for it, e.g. `context_length_exceeded`.
        self.code = code


class ControlClient:
    """Talks to the engine at `base_url`. Raises EngineUnreachableError and EngineReplyError."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
        read_hits: Callable[[int], MoeHits | None] | None = None,
    ) -> None:
        #: Where hit counters come from if the API has none: called with the bytes of one slot (a log, see `deploy`).
        self._read_hits = read_hits
        self.base_url = base_url.rstrip("/")
        self._sleep, self._now = sleep, now
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.base_url, headers=headers, timeout=timeout_s, trust_env=False, transport=transport
        )

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()

    def health(self) -> Health:
        """Whether it loads, serves or has failed."""
        return self._get("/health", Health)

    def stats(self) -> Stats:
        """Counters, rates, pool use; expert hits from the API, else from `read_hits`."""
        found = self._get("/v1/stats", Stats)
        if found.moe_hits is not None or self._read_hits is None:
            return found
        slot_bytes = self.cache_status().geometry.unit_bytes.moe_per_expert
        return found.model_copy(update={"moe_hits": self._read_hits(slot_bytes)})

    def cache_status(self) -> CacheStatus:
        """Sizes of the caches, unit costs, limits."""
        return self._get("/v1/cache/status", CacheStatus)

    def requests(self, since: int = 0, limit: int = 100) -> RequestPage:
        """The last requests after the cursor `since`, at most `limit` (1 to 512)."""
        return self._get("/v1/requests", RequestPage, params={"since": since, "limit": limit})

    def flush(self, timeout_s: float = 30.0) -> None:
        """Drops the prefix cache. Raises EngineReplyError where the engine is too busy for `timeout_s`."""
        deadline = self._now() + timeout_s
        while True:
            response = self._send("POST", "/v1/cache/flush", params={"timeout": timeout_s}, timeout=timeout_s + 5)
            if response.status_code == 200:
                return
            if response.status_code not in (409, 503, 504) or self._now() >= deadline:
                raise _make_error(response)
            self._sleep(POLL_S)

    def rebuild(
        self, expert_slots: int | None = None, kv_tokens: int | None = None, timeout_s: float = 300.0
    ) -> RebuildResult:
        """Resizes the caches live. A busy engine is asked again, a long rebuild is waited for, until `timeout_s`.

        KV is rounded up to whole pages. The answer says how it ended; only a broken connection or a reply that is
        not the API's raises.
        """
        started = self._now()
        body: dict[str, Any] = {"mode": "if_idle", "timeout": timeout_s}
        if expert_slots is not None:
            body["moe_cache_size"] = expert_slots
        if kv_tokens is not None:
            body["num_pages"] = -(-kv_tokens // max(1, self.cache_status().geometry.page_size))
        while True:
            result = self._rebuild_once(body, timeout_s)
            if result.status == "timeout":
                result = self._await_rebuild(result, started + timeout_s)
            if result.status != "busy" or self._now() - started >= timeout_s:
                return result.model_copy(update={"duration_s": self._now() - started})
            self._sleep(POLL_S)

    def _rebuild_once(self, body: dict[str, Any], timeout_s: float) -> RebuildResult:
        response = self._send("POST", "/v1/cache/rebuild", json=body, timeout=timeout_s + 10)
        if response.status_code not in (200, 409, 422, 503, 504):
            raise _make_error(response)
        document = _as_document(response)
        if "status" not in document:
            raise _make_error(response)
        return _parse(response, RebuildResult)

    def _await_rebuild(self, result: RebuildResult, deadline: float) -> RebuildResult:
        """Looks until the engine is no longer rebuilding; the last rebuild's own result where it tells one."""
        while self._now() < deadline:
            status = self.cache_status()
            if status.state != "rebuilding":
                return RebuildResult.model_validate(status.last_rebuild) if status.last_rebuild else result
            self._sleep(POLL_S)
        return result

    def generate(self, prompt: str, max_tokens: int = 16, ignore_eos: bool = False) -> Generator[str, None, None]:
        """Greedy text pieces of `/generate`, as they come."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        for document in self._stream("/generate", body):
            yield str(document.get("text", ""))

    def complete(
        self,
        prompt: str,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        model: str | None = None,
        extra: dict[str, Any] | None = None,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> Completion:
        """One streamed completion, timed, its tokens counted by the engine's `usage` (EngineReplyError without one).

        `on_text` is given each piece as it comes.
        """
        body = {
            "model": model or self.health().model or "default", "prompt": prompt, "max_tokens": max_tokens,
            "temperature": temperature, "ignore_eos": ignore_eos, "stream": True,
            "stream_options": {"include_usage": True},
        } | (extra or {})  # fmt: skip
        started = self._now()
        first = last = None
        pieces: list[str] = []
        usage: dict[str, Any] | None = None
        finish_reason = None
        for document in self._stream("/v1/completions", body):
            usage = document.get("usage") or usage
            for choice in document.get("choices") or ():
                finish_reason = choice.get("finish_reason") or finish_reason
                if choice.get("text"):
                    last = self._now()
                    first = last if first is None else first
                    pieces.append(choice["text"])
                    on_text(choice["text"])
        ended = self._now()
        if usage is None:
            raise EngineReplyError("the engine streamed a completion without `usage`", status_code=200)
        tokens = int(usage["completion_tokens"])
        first, last = (ended, ended) if first is None or last is None else (first, last)
        return Completion(
            text="".join(pieces), ttft_s=first - started, duration_s=ended - started,
            prompt_tokens=int(usage["prompt_tokens"]), completion_tokens=tokens, finish_reason=finish_reason,
            decode_tps=(tokens - 1) / (last - first) if tokens > 1 and last > first else None,
        )  # fmt: skip

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Generator[dict[str, Any], None, None]:
        """The `delta`s of a streamed chat answer; usage comes last as `{"usage": …}`."""
        body = {
            "model": "default",
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | options
        for document in self._stream("/v1/chat/completions", body):
            for choice in document.get("choices") or ():
                yield choice.get("delta") or {}
            if document.get("usage"):
                yield {"usage": document["usage"]}

    def prepare_stop(self, drain_timeout_s: float = 5.0) -> bool:
        """Closes admission and drains; True when nothing is left running."""
        response = self._send(
            "POST", "/v1/admin/prepare-stop", json={"drain_timeout_s": drain_timeout_s}, timeout=drain_timeout_s + 10
        )
        return response.status_code == 200

    def _get(self, path: str, reply: type[R], params: dict[str, Any] | None = None) -> R:
        response = self._send("GET", path, params=params)
        if response.status_code != 200:
            raise _make_error(response)
        return _parse(response, reply)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._translate():
            return self._http.request(method, path, **options)

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON documents of a server-sent stream, up to `[DONE]`."""
        # No read time-out: a long prompt is silent until its first token.
        with (
            self._translate(),
            self._http.stream("POST", path, json=body, timeout=httpx.Timeout(10.0, read=None)) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise _make_error(response)
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                text = line.removeprefix("data:").strip()
                if text == "[DONE]":
                    return
                document = json.loads(text)
                if "error" in document:
                    found = document["error"]
                    code = found.get("code") if isinstance(found, dict) else None
                    raise EngineReplyError(_error_text(found), status_code=response.status_code, code=code)
                yield document

    @contextmanager
    def _translate(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise EngineUnreachableError(f"{self.base_url} did not answer in time ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise EngineUnreachableError(f"{self.base_url} cannot be reached: {error}") from error


def _parse(response: httpx.Response, reply: type[R]) -> R:
    try:
        return reply.model_validate(response.json())
    except (ValueError, ValidationError) as error:
        raise EngineReplyError(
            f"{response.url} answered {response.status_code}, and not as the control API does: {response.text[:200]!r}",
            status_code=response.status_code,
        ) from error


def _as_document(response: httpx.Response) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _make_error(response: httpx.Response) -> EngineReplyError:
    found = _as_document(response).get("error")
    code = found.get("code") if isinstance(found, dict) else None
    text = _error_text(found) if found else response.text[:300]
    return EngineReplyError(
        f"{response.url.path} answered {response.status_code}: {text}", status_code=response.status_code, code=code
    )


def _error_text(found: Any) -> str:
    return str(found.get("message", found)) if isinstance(found, dict) else str(found)
