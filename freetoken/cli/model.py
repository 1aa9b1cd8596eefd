"""`ft model`: what is on this machine and on the cards; fetch, verify, inspect and remove a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table, progress
from freetoken.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.checkpoint.shape import ModelShape, TensorGroup
    from freetoken.checkpoint.transfer import FetchProgress
    from freetoken.recipe.model import ModelRef


@click.group("model", epilog=examples("ft model list", "ft model inspect nvidia/Qwen3.6-35B-A3B-NVFP4"))
def command() -> None:
    """Fetch, list, verify, inspect and remove models."""


def _source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option("--revision", default="main", show_default=True, help="Branch, tag or commit.")(function)
    return click.option(
        "--source", type=click.Choice(["huggingface", "modelscope"]), default="huggingface", show_default=True
    )(function)


def _make_ref(name: str, revision: str, source: str) -> ModelRef:
    """A repository for `org/name` or a card's name; a path where one is there. Raises UsageError."""
    from pydantic import ValidationError

    from freetoken.checkpoint.cards import find_card_info
    from freetoken.errors import UsageError
    from freetoken.recipe.model import ModelRef

    if name in ("demo", "demo-moe") or name.startswith((".", "/", "~")) or Path(name).exists():
        return ModelRef(path=name)
    info = find_card_info(name)
    repo = info.repo if info else name
    if "/" not in repo:
        raise UsageError(f"no model `{name}`: not a path, and on no card{_suggest(name)}")
    try:
        return ModelRef.model_validate({"repo": repo, "revision": revision, "source": source})
    except ValidationError as error:
        raise UsageError(f"`{name}` is no repository id, expected `org/name`") from error


def _suggest(name: str) -> str:
    from freetoken.checkpoint.cards import suggest_cards

    near = suggest_cards(name)
    return (
        f"; did you mean {' or '.join(f'`{one}`' for one in near)}?"
        if near
        else "; `ft model list --cards` has the names"
    )


# list ---------------------------------------------------------------------------------------------------------------


@command.command("list", epilog=examples("ft model list", "ft model list --cards --json"))
@click.option("--cards", "only_cards", is_flag=True, help="Only the bundled cards, which need no download to plan.")
@json_option
def list_command(only_cards: bool, as_json: bool) -> None:
    """List the models on this machine, and those that a bundled card describes."""
    from freetoken.checkpoint.cards import list_cards
    from freetoken.checkpoint.library import list_local

    local = () if only_cards else list_local()
    cards = list_cards()
    value = {"local": list(local), "cards": [card.model_dump(mode="json", exclude={"path"}) for card in cards]}

    def render(console: Console) -> None:
        if not only_cards:
            rows = [(one.repo, format_bytes(one.bytes), one.problem or one.quantization, one.path) for one in local]
            print_table(
                console, ("on this machine", "size", "state", "folder"), rows, align=("left", "right"),
                notes=() if rows else ("none; `ft model fetch REPO` brings one",),
            )  # fmt: skip
        described = [(card.name, card.repo, card.description) for card in cards]
        print_table(console, ("card", "repository", "description"), described)

    emit(value, as_json=as_json, render=render)


# inspect ------------------------------------------------------------------------------------------------------------


@command.command(
    "inspect",
    epilog=examples(
        "ft model inspect qwen3.6-35b-a3b", "ft model inspect ./checkpoint --json", "ft model inspect org/name --remote"
    ),
)
@click.argument("name", metavar="PATH|REPO|CARD")
@click.option("--remote", "prefer_hub", is_flag=True, help="Read the hub's headers even where there is a card.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Which GGUF of several, e.g. `*Q4_K_M*`.")
@_source_options
@json_option
def inspect_command(
    name: str, prefer_hub: bool, include: tuple[str, ...], revision: str, source: str, as_json: bool
) -> None:
    """Show what a model is made of, from its headers: bytes of each part, their format, KV and state.

    Works on a folder, a file, a repository (a few MB of headers are read, no weights) or a bundled card.
    """
    from freetoken.checkpoint.fetch import locate_model
    from freetoken.errors import BadFileError

    located = locate_model(_make_ref(name, revision, source), Path.cwd(), include=include, prefer_hub=prefer_hub)
    if located.shape is None:
        raise BadFileError(f"`{name}`: {located.note}")
    shape = located.shape
    value = {
        "shape": shape.model_dump(mode="json"),
        "path": str(located.path) if located.path else None,
        "download_bytes": located.download_bytes,
        "note": located.note,
    }
    emit(value, as_json=as_json, render=lambda console: _render_shape(shape, located.note, console))


def _render_shape(shape: ModelShape, origin: str, console: Console) -> None:
    rows: list[tuple[str, str, str, str]] = []
    if shape.experts.count:
        experts = shape.experts
        rows.append(
            (
                "routed experts",
                format_bytes(experts.bank_bytes),
                f"{format_count(experts.count)} experts",
                experts.format,
            )
        )
    rows += [_group_row(label, group) for label, group in _list_groups(shape) if group.bytes]
    rows.append(("all files", format_bytes(shape.disk_bytes), "", shape.file_format))
    title = f"{shape.name}: {shape.architecture}, {shape.quantization}"
    notes = [*_facts(shape), f"from: {origin}", *(f"unverified: {one}" for one in shape.unverified), *shape.notes]
    heads = ("part", "bytes", "tensors", "format")
    print_table(console, heads, rows, align=("left", "right", "right"), title=title, notes=notes)


def _list_groups(shape: ModelShape) -> tuple[tuple[str, TensorGroup], ...]:
    return (
        ("dense (attention, norms, routers)", shape.dense),
        ("shared experts", shape.shared_experts),
        ("embedding", shape.embedding),
        ("head", shape.head),
        ("per-layer tables", shape.side_tables),
        ("vision and audio", shape.vision),
        ("draft layers (MTP)", shape.draft),
    )


def _group_row(label: str, group: TensorGroup) -> tuple[str, str, str, str]:
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in group.by_format.items())
    return label, format_bytes(group.bytes), format_count(group.tensors), parts or group.format


def _facts(shape: ModelShape) -> list[str]:
    experts, attention = shape.experts, shape.attention
    lines = []
    if experts.count:
        lines.append(
            f"experts: {experts.layers} layers x {experts.per_layer}, {experts.top_k} a token, "
            f"{format_count(experts.expert_bytes)} B each ({experts.intermediate_size} x {experts.hidden_size})"
        )
    kinds = ", ".join(f"{attention.count(kind)} {kind}" for kind in dict.fromkeys(attention.kinds))
    lines.append(
        f"layers: {shape.layers} ({kinds}), hidden {shape.hidden_size}, vocabulary {format_count(shape.vocab_size)}"
    )
    lines.append(
        f"KV cache: {format_count(shape.kv_bytes_per_token())} B a token (16-bit), "
        f"up to {format_count(shape.max_position_tokens)} tokens"
    )
    if state := shape.state_bytes_per_sequence():
        lines.append(f"recurrent state: {format_count(state)} B a sequence")
    return lines


# fetch --------------------------------------------------------------------------------------------------------------


@command.command(
    "fetch",
    epilog=examples(
        "ft model fetch nvidia/Qwen3.6-35B-A3B-NVFP4 --dry-run", "ft model fetch org/name-GGUF --include '*Q4_K_M*'"
    ),
)
@click.argument("name", metavar="REPO|CARD")
@click.option("--include", multiple=True, metavar="PATTERN", help="Which GGUF of several, e.g. `*Q4_K_M*`.")
@click.option("--dry-run", is_flag=True, help="Say what would be moved, and where to; move nothing.")
@_source_options
@json_option
def fetch_command(
    name: str, include: tuple[str, ...], dry_run: bool, revision: str, source: str, as_json: bool
) -> None:
    """Fetch a model, going on where an earlier fetch stopped; every file is checked against its hash.

    Hugging Face models go into its own cache (HF_HOME), ModelScope's into the state folder. Only safetensors or
    GGUF, configuration and tokenizer files are taken, never a pickle or code.
    """
    from freetoken.checkpoint.fetch import fetch_model, make_fetch_plan

    ref = _make_ref(name, revision, source)
    if ref.path is not None:
        here = fetch_model(ref, include=include, base_dir=Path.cwd())
        note(f"`{name}` is on this machine: there is nothing to fetch")
        emit({"path": str(here)}, as_json=as_json, render=lambda _: click.echo(here))
        return
    if dry_run:
        plan = make_fetch_plan(ref, include=include)
        files = [
            {"name": one.file.name, "bytes": one.file.bytes, "held_bytes": one.count_held()} for one in plan.transfers
        ]
        value: dict[str, Any] = {
            "repo": plan.repo.repo,
            "commit": plan.repo.commit,
            "folder": str(plan.root),
            "files": files,
        }
        value |= {"total_bytes": plan.total_bytes, "held_bytes": plan.held_bytes, "needed_bytes": plan.needed_bytes}
        value["free_bytes"] = plan.check_disk()
        emit(value, as_json=as_json, render=lambda console: _render_plan(value, console))
        return
    with _progress(f"fetching {name}", as_json) as report:
        folder = fetch_model(ref, progress=report, include=include, base_dir=Path.cwd())
    emit({"path": str(folder)}, as_json=as_json, render=lambda _: click.echo(folder))


def _render_plan(value: dict[str, Any], console: Console) -> None:
    rows = [(one["name"], format_bytes(one["bytes"]), format_bytes(one["held_bytes"])) for one in value["files"]]
    print_table(
        console, ("file", "size", "here"), rows, align=("left", "right", "right"),
        title=f"{value['repo']} at {value['commit'][:12]} → {value['folder']}",
        notes=(f"to move: {format_bytes(value['needed_bytes'])}, free: {format_bytes(value['free_bytes'])}",),
    )  # fmt: skip


@contextmanager
def _progress(label: str, as_json: bool) -> Iterator[Callable[[FetchProgress], None]]:
    """Bytes, rate and time left on stderr; with `--json` one event a line there, at most one a second."""
    if as_json:
        yield _make_event_writer()
        return
    state: dict[str, Any] = {}
    with _LateBar(label) as bar:

        def report(one: FetchProgress) -> None:
            state["last"] = one
            bar.update(one.done_bytes, one.total_bytes)

        yield report
    last = state.get("last")
    if last is not None:
        note(f"{label}: {format_bytes(last.done_bytes)} in {last.files_done} files")


class _LateBar:
    """A progress bar that begins when its total is known."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._manager: Any = None
        self._update: Callable[[int], None] | None = None

    def __enter__(self) -> _LateBar:
        return self

    def update(self, done: int, total: int) -> None:
        """Moves the bar to `done` of `total` bytes."""
        if self._update is None:
            self._manager = progress(self.label, total_bytes=total)
            self._update = self._manager.__enter__()
        self._update(done)

    def __exit__(self, *details: Any) -> None:
        if self._manager is not None:
            self._manager.__exit__(*details)


def _make_event_writer() -> Callable[[FetchProgress], None]:
    import json
    import time

    last = 0.0

    def write(one: FetchProgress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1 or one.done_bytes == one.total_bytes:
            last = now
            note(json.dumps({"event": "progress", **one.model_dump(mode="json")}))

    return write


# verify -------------------------------------------------------------------------------------------------------------


@command.command(
    "verify",
    epilog=examples(
        "ft model verify nvidia/Qwen3.6-35B-A3B-NVFP4",
        "ft model verify ./checkpoint --lock recipes/mine.lock",
    ),
)
@click.argument("name", metavar="PATH|REPO|CARD", required=False)
@_source_options
@click.option("--lock", "lock_file", metavar="FILE", help="Hold the files against this lock; names the model too.")
@json_option
def verify_command(name: str | None, revision: str, source: str, lock_file: str | None, as_json: bool) -> None:
    """Hash every file of a model and hold it against its lock, or what the hub or the download recorded.

    Exits with 2 where a file is not what it should be. A file whose hash nobody recorded is shown as unknown.
    """
    from freetoken.checkpoint.fetch import locate_model
    from freetoken.checkpoint.verify import verify_model
    from freetoken.errors import UsageError

    expected = None
    if lock_file is not None:
        from freetoken.deploy.lock import read_lock

        locked = read_lock(Path(lock_file)).model
        expected = {file: one.sha256 for file, one in locked.files.items()}
        if name is None:
            name, source = locked.repo or locked.name, locked.source
            revision = locked.commit or revision
    if name is None:
        raise UsageError("name a model, or a lock: `--lock FILE`")
    ref = _make_ref(name, revision, source)
    located = locate_model(ref, Path.cwd())
    if located.path is None:
        raise UsageError(f"`{name}` is not on this machine: {located.note}", hint=f"`ft model fetch {name}`")
    with _progress(f"hashing {name}", as_json) as report:
        checked = verify_model(located.path, expected=expected, ref=ref if ref.repo else None, progress=report)
    value = {**checked.model_dump(mode="json"), "is_ok": checked.is_ok}
    rows = [(one.name, format_bytes(one.bytes), one.status, one.expected_from or "nobody") for one in checked.files]
    heads = ("file", "size", "status", "hash known from")
    emit(value, as_json=as_json, render=lambda c: print_table(c, heads, rows, align=("left", "right")))
    checked.raise_for_mismatch()


# remove -------------------------------------------------------------------------------------------------------------


@command.command(
    "remove",
    epilog=examples("ft model remove nvidia/Qwen3.6-35B-A3B-NVFP4 --dry-run", "ft model remove org/name --yes"),
)
@click.argument("name", metavar="REPO")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed; touch nothing.")
@json_option
def remove_command(name: str, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Remove a fetched model from the cache, with every revision of it; asks first."""
    from freetoken.checkpoint.library import find_local, remove_local
    from freetoken.errors import UsageError

    model = find_local(name)
    if not model.is_removable:
        raise UsageError(f"`{model.repo}` lies in {model.root}, which `ft` did not fill; remove it by hand")
    value = {"repo": model.repo, "root": model.root, "bytes": model.bytes, "is_removed": not dry_run}
    text = f"{model.repo}: {format_bytes(model.bytes)} in {model.root}"
    if dry_run:
        emit(value, as_json=as_json, render=lambda _: click.echo(f"would remove {text}"))
        return
    if not yes:
        click.confirm(f"remove {text}?", abort=True, err=True)
    remove_local(model)
    emit(value, as_json=as_json, render=lambda _: click.echo(f"removed {text}"))
