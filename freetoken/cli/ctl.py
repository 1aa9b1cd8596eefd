"""`ft ctl`: talk to a running engine, ours or the upstream one, as users of the latter know it.

Exit codes: 0 fine, 1 the engine said no or cannot be reached, 2 wrong usage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.output import Align, emit, examples, json_option, note, print_table, to_json
from freetoken.cli.params import TokenCount, WaitTime, target_options
from freetoken.cli.target import connect
from freetoken.units import format_seconds, format_significant

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from freetoken.adapters.control import ControlClient
    from freetoken.adapters.replies import Completion, RebuildResult


@click.group("ctl", epilog=examples("ft ctl stats", "ft ctl cache rebuild --moe 1024 --kv 8k"))
@target_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.pass_context
def command(
    ctx: click.Context, name: str | None, base_url: str | None, api_key_env: str | None, timeout_s: float, as_json: bool
) -> None:
    """Talk to a running engine: health, stats, cache, requests, generate.

    The engine is the one deployment that runs, unless `--name` or `--base-url` says otherwise.
    """
    ctx.obj = {"target": (name, base_url, api_key_env, timeout_s), "as_json": as_json}


@command.command("health", epilog=examples("ft ctl health", "ft ctl --base-url http://127.0.0.1:1919 health --json"))
@json_option
@click.pass_obj
def health(obj: dict[str, Any], as_json: bool) -> int:
    """Whether it loads, serves or has failed."""
    found = _connect(obj).health()
    _show(found, obj, as_json)
    return 1 if found.status == "error" else 0


@command.command("stats", epilog=examples("ft ctl stats", "ft ctl stats --json"))
@json_option
@click.pass_obj
def stats(obj: dict[str, Any], as_json: bool) -> None:
    """Counters, rates, memory and hit rate since the start."""
    _show(_connect(obj).stats(), obj, as_json)


@command.group("cache", epilog=examples("ft ctl cache status", "ft ctl cache rebuild --moe 1k"))
def cache() -> None:
    """Expert slots and KV cache: show, resize live, drop kept prefixes."""


@cache.command("status", epilog=examples("ft ctl cache status", "ft ctl cache status --json"))
@json_option
@click.pass_obj
def cache_status(obj: dict[str, Any], as_json: bool) -> None:
    """Sizes in force, what a unit costs, and what they can be resized to."""
    _show(_connect(obj).cache_status(), obj, as_json)


@cache.command("rebuild", epilog=examples("ft ctl cache rebuild --moe 1024", "ft ctl cache rebuild --kv 8k --wait 60"))
@click.option("--moe", type=TokenCount(), metavar="N", help="Expert slots.")
@click.option("--kv", type=TokenCount(), metavar="TOKENS", help="Tokens of KV, rounded up to whole pages.")
@click.option(
    "--wait",
    "wait_s",
    type=WaitTime(),
    default=300.0,
    show_default=True,
    metavar="TIME",
    help="Seconds to wait for a busy engine.",
)
@json_option
@click.pass_obj
def cache_rebuild(obj: dict[str, Any], moe: int | None, kv: int | None, wait_s: float, as_json: bool) -> int:
    """Resize live, without a restart."""
    if moe is None and kv is None:
        raise click.UsageError("nothing to resize: give `--moe N`, `--kv TOKENS` or both")
    result = _connect(obj).rebuild(expert_slots=moe, kv_tokens=kv, timeout_s=wait_s)
    emit(result, as_json=as_json or obj["as_json"], render=lambda _: _show_rebuild(result))
    return 0 if result.is_ok else 1


@cache.command("flush", epilog=examples("ft ctl cache flush", "ft ctl cache flush --json"))
@json_option
@click.pass_obj
def cache_flush(obj: dict[str, Any], as_json: bool) -> None:
    """Drop the prefix cache, so that the next prompt is computed in full."""
    _connect(obj).flush()
    click.echo(to_json({"status": "ok"}) if as_json or obj["as_json"] else "prefix cache dropped")


@command.command("requests", epilog=examples("ft ctl requests", "ft ctl requests --limit 10 --json"))
@click.option("--since", type=click.IntRange(0), default=0, show_default=True, help="Cursor of the last call.")
@click.option("--limit", type=click.IntRange(1, 512), default=100, show_default=True)
@json_option
@click.pass_obj
def requests(obj: dict[str, Any], since: int, limit: int, as_json: bool) -> None:
    """The last requests: status, times, tokens."""
    page = _connect(obj).requests(since, limit)
    headings = ("path", "status", "duration ms", "ttft ms", "prompt", "output", "error")
    rows = [
        tuple(
            "" if one is None else str(one)
            for one in (e.path, e.status, e.duration_ms, e.ttft_ms, e.prompt_tokens, e.completion_tokens, e.error)
        )
        for e in page.entries
    ]

    def render(console: Console) -> None:
        align: tuple[Align, ...] = ("left", "right", "right", "right", "right", "right")
        print_table(console, headings, rows, align=align, notes=(f"next: --since {page.next_cursor}",))

    emit(page, as_json=as_json or obj["as_json"], render=render)


@command.command(
    "generate",
    epilog=examples("ft ctl generate --echo $'def main():\\n'", "ft ctl generate --max-tokens 64 - < prompt.txt"),
)
@click.argument("prompt", default="Hello")
@click.option("--max-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--stop", "stops", metavar="TEXT", multiple=True, help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after a stop token.")
@click.option("--echo", is_flag=True, help="Print the prompt before what follows it.")
@json_option
@click.pass_obj
def generate(
    obj: dict[str, Any], prompt: str, max_tokens: int, stops: tuple[str, ...], ignore_eos: bool, echo: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Generate greedily from a raw prompt, without chat template; `-` reads it from stdin.

    The text goes to stdout, tokens and times to stderr.
    """
    prompt = sys.stdin.read() if prompt == "-" else prompt
    is_json, client = as_json or obj["as_json"], _connect(obj)

    def show(piece: str) -> None:
        if not is_json:
            click.echo(piece, nl=False)

    if echo:
        show(prompt)
    extra = {"stop": list(stops)} if stops else None
    found = client.complete(prompt, max_tokens, ignore_eos=ignore_eos, extra=extra, on_text=show)
    if is_json:
        click.echo(to_json({"text": (prompt if echo else "") + found.text, **_measured(found)}))
        return
    if not found.text.endswith("\n"):
        click.echo("")
    note(_describe_speed(found))


def _measured(found: Completion) -> dict[str, Any]:
    return {
        "finish_reason": found.finish_reason,
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens,
        "ttft_ms": round(found.ttft_s * 1000, 1),
        "decode_tps": found.decode_tps,
    }


def _describe_speed(found: Completion) -> str:
    if not found.text:
        return "[nothing: the model ended at once; `--ignore-eos` goes on after its stop token]"
    speed = f", {format_significant(found.decode_tps)} tok/s" if found.decode_tps else ""
    plural = "" if found.completion_tokens == 1 else "s"
    return f"[{found.completion_tokens} token{plural}, first after {format_seconds(found.ttft_s)}{speed}]"


def _connect(obj: dict[str, Any]) -> ControlClient:
    return connect(*obj["target"])


def _show(value: BaseModel, obj: dict[str, Any], as_json: bool) -> None:
    """The document, or its leaves as `name  value` lines."""

    def render(_: Console) -> None:
        leaves = list(_flatten(value.model_dump(mode="json")))
        width = max(len(name) for name, _ in leaves)
        for name, leaf in leaves:
            click.echo(f"{name:<{width}}  {leaf}")

    emit(value, as_json=as_json or obj["as_json"], render=render)


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flatten(one, f"{prefix}.{key}" if prefix else key)
    elif value not in (None, [], {}):
        yield prefix, value


def _show_rebuild(result: RebuildResult) -> None:
    sizes = f"{result.moe_cache_size} expert slots, {result.num_pages} KV pages"
    click.echo(f"{result.status}: {sizes} ({result.duration_s:.2f} s)")
    if result.error:
        note(result.error)
