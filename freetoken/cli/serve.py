"""`ft serve`: the native engine in the foreground; what its adapter launches, and what a person can type."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from pydantic import ValidationError

from freetoken import paths
from freetoken.cli.output import examples, json_option, note, to_json
from freetoken.cli.params import TokenCount, read_api_key
from freetoken.cli.serve_defaults import fill_settings
from freetoken.engine.config import EngineConfig
from freetoken.errors import UsageError
from freetoken.server.listen import is_loopback, open_socket

if TYPE_CHECKING:
    import socket

    from freetoken.server.state import ServerOptions

PORT, MAX_OUTPUT_TOKENS = 1919, 2048


@click.command(
    "serve", epilog=examples("ft serve demo", "ft serve ./Qwen3-30B-A3B --expert-slots 1024 --kv-tokens 16k")
)
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; any but the loopback needs an API key.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 takes a free one.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Else `cuda` where there is a GPU for it.")
@click.option("--gpu", metavar="UUID", help="UUID or index of the GPU; else the fastest one.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
)
@click.option("--strategy", type=click.Choice(["fused", "offload", "cpu"]), help="Else `fused` where all experts fit.")
@click.option("--expert-slots", type=click.IntRange(0), help="Else as many as fit; 0 = the fewest possible.")
@click.option("--kv-tokens", type=TokenCount(), help="Tokens of KV, e.g. 8k; else what the plan's workload needs.")
@click.option("--max-running-requests", type=click.IntRange(1), help="Requests at once; else what the plan says.")
@click.option("--prefill-chunk-tokens", type=TokenCount(), help="Tokens of a prompt in one forward; else planned.")
@click.option("--cpu-threads", type=click.IntRange(0), help="Else the cores that may be used; 0 = torch's choice.")
@click.option("--embed-on-host/--no-embed-on-host", default=None, help="Embedding table in RAM.")
@click.option("--experts-from", type=click.Choice(["auto", "ram", "disk"]), help="Where experts without a slot lie.")
@click.option(
    "--decode-graphs", type=click.Choice(["auto", "on", "eager", "off"]), default="auto", show_default=True,
    help="On a GPU: `on` replays decode steps as CUDA graphs where that can be (60 MiB), `eager` has them of few"
    " launches alone, `off` leaves them to transformers; `auto` is `on`.",
)  # fmt: skip
@click.option("--prefix-cache/--no-prefix-cache", default=True, help="Keep finished requests' KV for their next turn.")
@click.option(
    "--max-output-tokens",
    type=TokenCount(),
    default=MAX_OUTPUT_TOKENS,
    show_default=True,
    help="Where a request names none.",
)
@click.option("--served-model-name", metavar="NAME", help="Name in /v1/models; else the folder's.")
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the API key clients must send.")
@click.option(
    "--trace", "trace_path", type=click.Path(path_type=Path), envvar="FT_TRACE", show_envvar=True,
    help="Record the routing of decode steps here.",
)  # fmt: skip
@json_option
def command(
    model: str, host: str, port: int, prefix_cache: bool, max_output_tokens: int, served_model_name: str | None,
    api_key_env: str | None, as_json: bool, **settings: Any,
) -> None:  # fmt: skip
    """Run the native engine on MODEL (a folder, or `demo`) in the foreground, until Ctrl-C.

    What no flag says is planned for this machine: the GPU where there is one, and as many experts resident as fit.
    With `--json` one document says where it listens as soon as it does; `/health` there tells when it is ready.
    """
    folder = find_folder(model)
    api_key = read_api_key(api_key_env)
    if api_key is None and not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines, and no API key is set",
            hint="`--api-key-env VAR` with the key in VAR, or `--host 127.0.0.1`",
        )
    make_config(folder, {name: value for name, value in settings.items() if value is not None})
    listener = open_socket(host, port)
    config = make_config(folder, fill_settings(folder, settings))
    note(f"loading {folder} ...")
    if as_json:
        bound, model_name = listener.getsockname()[1], served_model_name or folder.name
        click.echo(to_json({"host": host, "port": bound, "model": model_name, "pid": os.getpid()}))
        sys.stdout.flush()
    calm_threads()
    # From here on imports are heavy: the port is ours, and connections wait in its queue.
    from freetoken.server.state import ServerOptions

    options = ServerOptions(
        host=host, port=listener.getsockname()[1], served_model_name=served_model_name or folder.name,
        max_output_tokens=max_output_tokens, api_key=api_key,
    )  # fmt: skip
    _serve(options, listener, config, prefix_cache)


def find_folder(model: str) -> Path:
    """The checkpoint folder that MODEL names. Raises UsageError."""
    folder = paths.package_data("demo-moe") if model == "demo" else Path(model).expanduser().absolute()
    if not folder.is_dir():
        raise UsageError(
            f"no model folder {folder}", hint="`ft serve demo`, or `ft model fetch REPO` for a model of a hub"
        )
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json, so it is no model folder")
    return folder


def make_config(folder: Path, settings: dict[str, Any]) -> EngineConfig:
    """The engine's settings. Raises UsageError with every finding."""
    try:
        return EngineConfig(model_path=folder, **settings)
    except ValidationError as error:
        found = tuple(f"`--{str(one['loc'][0]).replace('_', '-')}`: {one['msg']}" for one in error.errors())
        raise UsageError(found[0], details=found[1:]) from error


def _serve(options: ServerOptions, listener: socket.socket, config: EngineConfig, prefix_cache: bool) -> NoReturn:
    from freetoken.server.run import make_loader, run_server

    code = run_server(options, listener, make_loader(config, reuse_prefixes=prefix_cache))
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name in ("ft-load", "ft-engine") and thread.is_alive() for thread in threading.enumerate()):
        # A load cannot be interrupted, and tearing the interpreter down under its native code would crash.
        os._exit(code)
    sys.exit(code)


def calm_threads() -> None:
    """Lets threads that wait for each other spin for a moment and then sleep, unless the user has said otherwise.

    libgomp reads it when it is loaded. Spinning for ever makes a small model crawl as soon as other processes take the
    cores, sleeping at once costs half of its speed on an idle machine: `benchmarks/native_threads.md`.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
