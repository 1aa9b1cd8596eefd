"""`vllm serve`'s flags as recipe values; no adapter drives it yet, so such a recipe plans on another engine only."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.adapters.command_table import CommandTable, Fields, Flag, finish_kv, number, ratio, show_ratio


def _read_kv(text: str) -> str:
    return "fp8" if text.startswith("fp8") else {"bfloat16": "bf16", "auto": "model"}.get(text, text)


def _write_kv(dtype: str) -> str:
    return {"bf16": "bfloat16"}.get(dtype, dtype)


_FLAGS: dict[str, Flag] = {
    "--model": Flag("model", is_canonical=False),
    "--revision": Flag("model.revision"),
    "--gpu-memory-utilization": Flag("settings.memory_ratio", ratio, show_ratio),
    "--max-model-len": Flag("context", number),
    "--max-num-seqs": Flag("settings.max_running_requests", number),
    "--max-num-batched-tokens": Flag("settings.prefill_chunk_tokens", number),
    "--kv-cache-dtype": Flag("settings.kv_dtype", _read_kv, _write_kv),
    "--enable-prefix-caching": Flag("settings.prefix_cache", has_value=False, constant=True),
    "--no-enable-prefix-caching": Flag("settings.prefix_cache", has_value=False, constant=False),
    "--host": Flag("serve.host"),
    "--port": Flag("serve.port", number),
    "--served-model-name": Flag(note="a plan names the model by its own name; {} is left out"),
    "--api-key": Flag(note="a key does not belong into a file: `serve.api_key_env: NAME` names where it is"),
    "--quantization": Flag(note="follows from the checkpoint; {} is left out"),
    "-q": Flag(note="follows from the checkpoint; {} is left out"),
    "--tensor-parallel-size": Flag(note="one GPU serves a recipe; {} is left out"),
    "-tp": Flag(note="one GPU serves a recipe; {} is left out"),
    "--trust-remote-code": Flag(has_value=False, note="no engine runs code out of a model's folder here"),
    "--cpu-offload-gb": Flag(note="the planner decides what lies in host memory; {} is left out"),
}
_PASSED = {
    "--enforce-eager": False, "--dtype": True, "--reasoning-parser": True, "--tool-call-parser": True,
    "--enable-auto-tool-choice": False, "--seed": True, "--swap-space": True, "--block-size": True,
}  # fmt: skip


def _finish(fields: Fields) -> Sequence[str]:
    return finish_kv(fields)


VLLM = CommandTable(
    engine="vllm", program=("vllm", "serve"), flags=_FLAGS, passed=_PASSED, has_positional_model=True,
    defaults={"serve.port": 8000}, finish=_finish,
)  # fmt: skip
