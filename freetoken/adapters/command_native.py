"""The embedded engine's own `ft serve MODEL` as recipe values."""

from __future__ import annotations

from freetoken.adapters.command_table import CommandTable, Flag, device, number

NATIVE = CommandTable(
    engine="native",
    program=("ft", "serve"),
    has_positional_model=True,
    flags={
        "--host": Flag("serve.host"),
        "--port": Flag("serve.port", number),
        "--gpu": Flag("settings.gpu", device),
        "--device": Flag(note="follows from the machine; {} is left out"),
        "--strategy": Flag("settings.strategy"),
        "--expert-slots": Flag("settings.expert_slots", number),
        "--kv-tokens": Flag("settings.kv_tokens", number),
        "--max-running-requests": Flag("settings.max_running_requests", number),
        "--prefill-chunk-tokens": Flag("settings.prefill_chunk_tokens", number),
        "--cpu-threads": Flag("settings.cpu_threads", number),
        "--embed-on-host": Flag("settings.embed_on_host", has_value=False, constant=True),
        "--no-embed-on-host": Flag("settings.embed_on_host", has_value=False, constant=False),
        "--prefix-cache": Flag("settings.prefix_cache", has_value=False, constant=True),
        "--no-prefix-cache": Flag("settings.prefix_cache", has_value=False, constant=False),
        "--experts-from": Flag(note="follows from the machine; {} is left out"),
        "--decode-graphs": Flag(note="a plan leaves it to the engine; {} is left out"),
        "--max-output-tokens": Flag("serve.max_output_tokens", number),
        "--served-model-name": Flag(note="a plan names the model by its own name; {} is left out"),
        "--api-key-env": Flag("serve.api_key_env"),
        "--trace": Flag(note="routing is recorded by `ft serve` alone; {} is left out"),
    },
)
