"""`llama-server`'s flags as recipe values."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.adapters.command_table import CommandTable, Fields, Flag, finish_kv, number

#: From here on `-ngl` means every layer of any model.
_ALL_LAYERS = 99
_TYPES = {"q8_0": "fp8", "f16": "model"}


def _same(key: str, *names: str, **options: object) -> dict[str, Flag]:
    """One meaning under several spellings, of which the first is written."""
    return {name: Flag(key, is_canonical=index == 0, **options) for index, name in enumerate(names)}  # type: ignore[arg-type]


def _read_kv(text: str) -> str:
    return _TYPES.get(text, text)


def _write_kv(dtype: str) -> str:
    return "q8_0" if dtype == "fp8" else dtype


def _layers(text: str) -> int:
    return 999 if text in ("all", "auto") else number(text)


_FLAGS: dict[str, Flag] = {
    **_same("model", "-m", "--model"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), Flag("hf", is_canonical=False)),
    **dict.fromkeys(("-hff", "--hf-file"), Flag("model.file", is_canonical=False)),
    **_same("layers", "-ngl", "--n-gpu-layers", "--gpu-layers", read=_layers),
    **_same("settings.kv_tokens", "-c", "--ctx-size", read=number),
    **_same("settings.cpu_threads", "-t", "--threads", read=number),
    **_same("settings.cpu_layers", "--n-cpu-moe", "-ncmoe", read=number),
    **_same("settings.prefill_chunk_tokens", "-ub", "--ubatch-size", read=number),
    **_same("settings.max_running_requests", "-np", "--parallel", read=number),
    **dict.fromkeys(("-n", "--predict", "--n-predict"), Flag("serve.max_output_tokens", number, is_canonical=False)),
    **_same("settings.kv_dtype", "-ctk", "--cache-type-k", read=_read_kv, write=_write_kv),
    **_same("settings.kv_dtype", "-ctv", "--cache-type-v", read=_read_kv, write=_write_kv),
    "--host": Flag("serve.host"),
    "--port": Flag("serve.port", number),
    "--main-gpu": Flag("settings.gpu", number),
    "-mg": Flag("settings.gpu", number, is_canonical=False),
    **{
        name: Flag(note="where tensors lie is the planner's to decide (`settings.cpu_layers`); {} is left out")
        for name in ("-ot", "--override-tensor")
    },
    "--cpu-moe": Flag("settings.cpu_layers", has_value=False, constant="auto", is_canonical=False,
                      note="all experts on the CPU; the planner says how many layers' experts need to be"),
    "--alias": Flag(note="a plan names the model by its own name; {} is left out"),
    **dict.fromkeys(("-sm", "--split-mode", "-ts", "--tensor-split", "-dev", "--device"),
                    Flag(note="one GPU serves a recipe; {} is left out")),
    "-a": Flag(note="a plan names the model by its own name; {} is left out"),
    "--api-key": Flag(note="a key does not belong into a file: `serve.api_key_env: NAME` names where it is"),
}  # fmt: skip
_PASSED: dict[str, bool | str] = {
    "--no-mmap": False, "--mlock": False, "--jinja": False, "--no-warmup": False, "--cont-batching": False,
    "-cb": False, "-fa": "on", "--flash-attn": "on", "-b": True, "--batch-size": True, "-tb": True,
    "--threads-batch": True,
    "--numa": True, "--cache-reuse": True, "--prio": True, "--metrics": False,
    "--chat-template": True, "--reasoning-format": True, "--temp": True, "--top-p": True, "--top-k": True,
    "--min-p": True, "--seed": True, "-s": True, "--mmproj": True,
}  # fmt: skip


def _finish(fields: Fields) -> Sequence[str]:
    notes = []
    if (named := fields.pop("hf", None)) is not None and "model" not in fields:
        fields["model"], _, quant = named.partition(":")
        if quant:
            fields.setdefault("model.file", quant)
    layers = fields.pop("layers", None)
    if layers is not None and layers >= _ALL_LAYERS:
        notes.append(f"`-ngl {layers}`: every layer on the GPU, which is what a plan does but for the experts it moves")
    elif layers is not None:
        notes.append(f"`-ngl {layers}` leaves whole layers on the CPU; a plan leaves experts there, which is faster")
    notes += finish_kv(fields)
    if fields.get("settings.cpu_threads", 1) < 1:
        del fields["settings.cpu_threads"]
    if fields.get("settings.kv_tokens") == 0:
        del fields["settings.kv_tokens"]
        notes.append("`-c 0` takes the model's whole context; the planner takes what the workload needs")
    if fields.get("serve.max_output_tokens", 1) < 1:
        del fields["serve.max_output_tokens"]
    return notes


LLAMACPP = CommandTable(
    engine="llamacpp", program=("llama-server",), flags=_FLAGS, passed=_PASSED, model_flag="-m",
    repo_flags=("-hf", "--hf-file"), always=("-ngl", "999"), defaults={"serve.port": 8080}, finish=_finish,
)  # fmt: skip
