"""`ft workload`: what is asked of the server, shipped or recorded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.complete import complete_workload
from freetoken.cli.output import Align, emit, examples, json_option, note, print_table
from freetoken.cli.params import EngineUrl
from freetoken.errors import UsageError
from freetoken.units import format_tokens

if TYPE_CHECKING:
    from rich.console import Console


@click.group("workload", epilog=examples("ft workload list", "ft workload record --listen 1920 --out mine.jsonl"))
def command() -> None:
    """List, show and record workloads: what is asked of the server."""


@command.command("list", epilog=examples("ft workload list", "ft workload list --json"))
@json_option
def list_command(as_json: bool) -> None:
    """List every workload that can be named, with its sizes in tokens."""
    from freetoken.errors import FtError
    from freetoken.recipe.load import list_workloads, load_workload
    from freetoken.recipe.lookup import show_path

    entries: list[dict[str, Any]] = []
    for name, path in list_workloads():
        entry: dict[str, Any] = {"name": name, "path": show_path(path), "workload": None, "problem": ""}
        try:
            entry["workload"] = load_workload(str(path.absolute())).model_dump(mode="json")
        except FtError as error:
            entry["problem"] = f"not usable: {error.message}"
        entries.append(entry)
    emit(entries, as_json=as_json, render=lambda console: _render_list(console, entries))


def _render_list(console: Console, entries: list[dict[str, Any]]) -> None:
    sizes = ("turns", "shared_prefix_tokens", "prompt_tokens", "output_tokens", "concurrency", "context_tokens")
    rows = []
    for entry in entries:
        found = entry["workload"] or {}
        cells = (_cell(name, found.get(name)) for name in sizes)
        rows.append((entry["name"], *cells, entry["problem"] or found["description"]))
    headings = ("workload", "turns", "prefix", "new prompt", "output", "at once", "context", "description")
    align: list[Align] = ["left", "right", "right", "right", "right", "right", "right"]
    print_table(console, headings, rows, align=align)


def _cell(name: str, value: int | None) -> str:
    if value is None:
        return ""
    return format_tokens(value) if name.endswith("_tokens") else str(value)


@command.command("show", epilog=examples("ft workload show agent-8k", "ft workload show mine.yaml --json"))
@click.argument("name", metavar="NAME_OR_FILE", shell_complete=complete_workload)
@json_option
def show_command(name: str, as_json: bool) -> None:
    """Show a workload: its sizes, what KV cache it needs, and how one of its prompts begins."""
    from freetoken.recipe.load import load_workload
    from freetoken.recipe.lookup import find_workload

    workload = load_workload(name)
    path = find_workload(name, Path.cwd())
    sample = _read_sample(workload, path.parent if path is not None else None)
    facts = {"kv_tokens": workload.kv_tokens, "largest_prompt_tokens": workload.largest_prompt_tokens}
    document = {"workload": workload.model_dump(mode="json"), **facts, "sample": sample}

    def render(_: Console) -> None:
        lines = {**workload.model_dump(mode="json", exclude_none=True), **facts}
        for key, value in lines.items():
            click.echo(f"{key:<22} {value}")
        click.echo("\n" + "\n".join(f"  | {line}" for line in sample.splitlines()[:12]))

    emit(document, as_json=as_json, render=render)


def _read_sample(workload: Any, base_dir: Path | None) -> str:
    from freetoken.bench.script import Script
    from freetoken.bench.sizing import Sizer

    script = Script(workload, Sizer(), seed=0, is_unseen=False, model="", base_dir=base_dir)
    request = script.make_conversations(0)[0].make_request(0)
    if request.text is not None:
        return request.text[:1000]
    return "\n".join(f"{one['role']}: {one.get('content')}" for one in request.body["messages"])[:1000]


@command.command(
    "record",
    epilog=examples(
        "ft workload record --listen 1920 --out mine.jsonl", "ft workload record --import log.jsonl --out mine.jsonl"
    ),
)
@click.option("--listen", "port", type=click.IntRange(0, 65535), metavar="PORT", help="Loopback port; 0 = a free one.")
@click.option("--import", "source", type=click.Path(path_type=Path), metavar="FILE", help="OpenAI-style JSONL instead.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The new recording.")
@click.option("--requests", "most", type=click.IntRange(1), metavar="N", help="End after N requests; else by Ctrl-C.")
@click.option("--name", metavar="NAME", help="Which deployment; needed where several run.")
@click.option("--base-url", type=EngineUrl(), metavar="URL", help="Address of an engine, instead of a deployment's.")
@json_option
def record_command(
    port: int | None, source: Path | None, out: Path, most: int | None, name: str | None, base_url: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Record your own requests, or import them, and write the workload that replays them.

    `--listen` starts a proxy in front of the running engine: point your tools at it, and end with Ctrl-C. Headers
    are never kept; keys, tokens, e-mails and home folders are taken out of the texts.
    """
    from freetoken.bench.keep import write_workload
    from freetoken.outfile import check_output

    if (port is None) == (source is None):
        raise UsageError("give either `--listen PORT` or `--import FILE`")
    if out.suffix != ".jsonl":
        raise UsageError(f"`--out {out}` should end in `.jsonl`: the workload beside it takes `.yaml`")
    check_output(out)
    left_out: tuple[str, ...] = ()
    if source is not None:
        from freetoken.bench.keep import import_requests

        turns, left_out = import_requests(source, out)
    else:
        turns = _record(port or 0, out, most, name, base_url)
        if not turns:
            raise UsageError("nothing was recorded: no completion was asked for")
    for text in left_out[:10]:
        note(f"left out: {text}")
    path, workload = write_workload(out)
    document = {
        "recording": str(out), "workload_file": str(path), "workload": workload.model_dump(mode="json"),
        "requests": turns, "left_out": list(left_out),
    }  # fmt: skip

    def render(_: Console) -> None:
        click.echo(f"{workload.description}, at most {workload.concurrency} at once; {out}")
        click.echo(f"measure with it: ft bench run --workload {path}")

    emit(document, as_json=as_json, render=render)


def _record(port: int, out: Path, most: int | None, name: str | None, base_url: str | None) -> int:
    """Turns kept until Ctrl-C, or until there are `most`."""
    from freetoken.bench.keep import RecordingWriter
    from freetoken.bench.proxy import Exchange, RecordingProxy
    from freetoken.deploy.connect import find_one

    address = base_url or find_one(name).record.base_url
    writer, is_done = RecordingWriter(out, note), threading.Event()

    def keep(exchange: Exchange) -> None:
        if not is_done.is_set():
            writer.keep(exchange)
        if most is not None and writer.turns >= most:
            is_done.set()

    try:
        with RecordingProxy(address, port, keep) as proxy:
            note(f"recording what is asked of http://127.0.0.1:{proxy.port}/v1 for {address}; Ctrl-C ends it")
            while not is_done.wait(0.5):
                pass
    except KeyboardInterrupt:  # the orderly end
        pass
    finally:
        is_done.set()
        writer.close()
    return writer.turns
