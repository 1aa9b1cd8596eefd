"""A fake engine whose TTFT and ITL are known: every token is due at an absolute moment, so no error adds up.

Its own process, one event loop with microsecond timers. What it really did (received, first and last token sent) is
told by `/truth`, so that a busy machine's lateness of this process is not laid at the client's door.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import time
from typing import Any


class Engine:
    """Options and what happened so far. One token is four characters."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.truth: list[dict[str, float]] = []
        self.prompts: list[str] = []
        self.seen = 0
        self.lookups = self.hits = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and await self.answer(head, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        lines = head.decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        received = time.perf_counter()
        path = path.partition("?")[0]
        if path in ("/v1/completions", "/v1/chat/completions"):
            await self.stream(json.loads(body), received, writer, is_chat="chat" in path)
        else:
            reply_json(writer, *self.control(method, path, body))
            await writer.drain()
        return True

    def control(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/health":
            return 200, {"status": "ok", "maintenance": "serving", "model": "precise", "instance_id": "one"}
        if path == "/v1/stats":
            moe = {"lookups": self.lookups, "hits": self.hits, "misses": self.lookups - self.hits, "miss_bytes": 0}
            return 200, {"instance_id": "one", "model": {"id": "precise"}, "moe_hits": moe}
        if path == "/v1/cache/flush":
            return 200, {"status": "ok"}
        if path == "/v1/messages/count_tokens" and self.options.counts:
            text = json.loads(body)["messages"][0]["content"]
            return 200, {"input_tokens": len(text) // self.options.characters + 7}
        if path == "/truth":
            return 200, self.truth
        if path == "/prompts":
            return 200, self.prompts
        return 404, {"error": {"message": f"no {method} {path}"}}

    async def stream(self, body: dict[str, Any], received: float, writer: asyncio.StreamWriter, is_chat: bool) -> None:
        options, count = self.options, int(body.get("max_tokens", 16))
        prompt = body["prompt"] if not is_chat else "\n".join(str(one.get("content")) for one in body["messages"])
        tokens = len(prompt) // options.characters
        self.prompts.append(prompt)
        if options.context and tokens + count > options.context:
            message = f"prompt is too long: {tokens} tokens > {options.context - count} maximum"
            return reply_json(writer, 400, {"error": {"message": message, "code": "context_length_exceeded"}})
        self.seen += 1
        if options.fail_at and self.seen >= options.fail_at:
            return reply_json(writer, 500, {"error": {"message": "the fake broke"}})
        count = min(count, options.most_tokens or count)
        write_head(writer)
        sent: list[float] = []
        for index in range(0, count, options.tokens_per_chunk):
            due = received + options.ttft_s + index * options.itl_s
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            write_chunk(writer, event(make_text(self.seen, index, options), is_chat))
            sent.append(time.perf_counter())
        self.lookups += 8 * count
        self.hits += 6 * count
        write_chunk(writer, event("", is_chat, "length"))
        if not options.no_usage:
            usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": count}
            if options.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": options.cached}
            write_chunk(writer, {"choices": [], "usage": usage})
        write_chunk(writer, None)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.truth.append({"received": received, "first": sent[0], "last": sent[-1], "tokens": count})
        return None


def make_text(seen: int, index: int, options: argparse.Namespace) -> str:
    return "blah" if options.repeats_itself else f"{(seen * 7919 + index * 104729) % 9973:4d}"


def event(text: str, is_chat: bool, finish: str | None = None) -> dict[str, Any]:
    inner = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"id": "x", "object": "chunk", "choices": [{"index": 0, **inner, "finish_reason": finish}]}


def write_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")


def write_chunk(writer: asyncio.StreamWriter, value: dict[str, Any] | None) -> None:
    data = b"data: " + (json.dumps(value).encode() if value is not None else b"[DONE]") + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def reply_json(writer: asyncio.StreamWriter, code: int, value: Any) -> None:
    data = json.dumps(value).encode()
    head = f"HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ttft-s", type=float, default=0.05)
    parser.add_argument("--itl-s", type=float, default=1 / 300)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--counts", action="store_true", help="answers /v1/messages/count_tokens")
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--characters", type=int, default=4, help="of one token")
    parser.add_argument("--cached", type=int)
    parser.add_argument("--most-tokens", type=int, default=0)
    parser.add_argument("--fail-at", type=int, default=0, help="from this completion on it answers 500")
    parser.add_argument("--repeats-itself", action="store_true")
    return parser


async def main() -> None:
    engine = Engine(make_parser().parse_args())
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    # epoll waits in whole milliseconds, select in microseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    asyncio.set_event_loop(loop)
    loop.run_until_complete(main())
