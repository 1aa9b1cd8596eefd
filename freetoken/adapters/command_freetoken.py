"""The upstream engine's `serve` flags as recipe values."""

from __future__ import annotations

import re
from collections.abc import Sequence

from freetoken.adapters.command_table import (
    CommandTable,
    Fields,
    Flag,
    device,
    number,
    number_or_auto,
    ratio,
    show_ratio,
)
from freetoken.adapters.freetoken_flags import ADDED, ALWAYS

#: Flags of the engine without a value.
_BARE = frozenset(
    {
        "--disable-pynccl", "--dummy-weight", "--enable-cache-report", "--enable-special-token-ckpt",
        "--moe-prefill-hit-d2d", "--shell-mode",
    }
)  # fmt: skip
_MODEL = Flag("model")


def _read_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(b|[kmg](?:b|ib)?)", text.lower(), re.ASCII)
    if found is None:
        raise ValueError("expected a size with a unit, such as `3g`")
    # The engine counts in powers of 1024, whatever the unit looks like.
    return int(float(found[1]) * 1024 ** "bkmg".index(found[2][0]))


def _write_size(size: int) -> str:
    power = next(power for power in (3, 2, 1, 0) if size % 1024**power == 0)
    return f"{size // 1024**power}{'bkmg'[power]}"


_FLAGS: dict[str, Flag] = {
    "--model": _MODEL,
    "--model-path": Flag("model", is_canonical=False),
    "--model-source": Flag("model.source"),
    "--served-model-name": Flag(note="a plan names the model by its own name; {} is left out"),
    "--gpu": Flag("settings.gpu", device),
    "--attn": Flag("settings.attention"),
    "--attention-backend": Flag("settings.attention", is_canonical=False),
    "--moe-strategy": Flag("settings.strategy"),
    "--moe-backend": Flag("settings.strategy", is_canonical=False),
    "--memory-ratio": Flag("settings.memory_ratio", ratio, show_ratio),
    "--max-running-requests": Flag("settings.max_running_requests", number),
    "--max-prefill-length": Flag("settings.prefill_chunk_tokens", number),
    "--max-extend-length": Flag("settings.prefill_chunk_tokens", number, is_canonical=False),
    "--moe-cache-size": Flag("settings.expert_slots", number),
    "--moe-cache-mem": Flag("settings.expert_slots_bytes", _read_size, _write_size),
    "--moe-cache-auto": Flag("settings.expert_slots", has_value=False, constant="auto", is_canonical=False),
    "--num-tokens": Flag("settings.kv_tokens", number),
    "--num-pages": Flag("settings.kv_tokens", number, is_canonical=False, note="read as tokens: pages of one"),
    "--kv-reserve-tokens": Flag("reserve", number, is_canonical=False),
    "--max-seq-len-override": Flag("context", number, is_canonical=False),
    "--moe-cpu-layers": Flag("settings.cpu_layers", number_or_auto),
    "--moe-cpu-threads": Flag("settings.cpu_threads", number),
    "--expert-load": Flag("settings.expert_load"),
    "--embed-weights": Flag("settings.embed_on_host", lambda text: text == "host", lambda on: "host" if on else "gpu"),
    "--cache-type": Flag("settings.prefix_cache", lambda text: text != "naive", lambda on: "radix" if on else "naive"),
    "--disable-moe-prefill-overlap": Flag("settings.prefill_overlap", has_value=False, constant=False),
    "--text-model-only": Flag("serve.text_only", has_value=False, constant=True),
    "--moe-collect-stats": Flag(has_value=False, note="always on where experts are offloaded"),
    "--host": Flag("serve.host"),
    "--port": Flag("serve.port", number),
    "--max-output-tokens": Flag("serve.max_output_tokens", number),
    "--api-key": Flag(note="a key belongs into no file: `serve.api_key_env: FREETOKEN_API_KEY` says where it is"),
    "--tensor-parallel-size": Flag(note="one GPU serves a recipe; {} is left out"),
    "--tp-size": Flag(note="one GPU serves a recipe; {} is left out"),
}


def _finish(fields: Fields) -> Sequence[str]:
    notes = []
    reserve = fields.pop("reserve", None)
    if reserve is not None and "settings.kv_tokens" in fields:
        kept = fields["settings.kv_tokens"]
        notes.append(f"`--kv-reserve-tokens {reserve}` has no effect beside `--num-tokens {kept}`; {kept} is taken")
    elif reserve is not None:
        fields["settings.kv_tokens"] = reserve
    slots = fields.get("settings.expert_slots")
    is_open = "settings.prefill_overlap" not in fields
    if isinstance(slots, int) and is_open and _has_too_few_for_overlap(slots, str(fields.get("model", ""))):
        notes.append(
            f"{slots} slots: FreeToken 0.2.1 starts with fewer slots than two layers have experts only with "
            f"`--disable-moe-prefill-overlap` (a layer of 256 experts needs 512); the plan turns the overlap off there"
        )
    size = fields.pop("settings.expert_slots_bytes", None)
    if size is not None:
        fields["settings.expert_slots"] = f"{size // 1024}KiB"
    return notes


def _has_too_few_for_overlap(slots: int, model: str) -> bool:
    """Fewer slots than two layers have experts; of a model without a card that is not known."""
    from freetoken.checkpoint.cards import find_card

    card = find_card(model)
    return card is None or slots < 2 * card.experts.per_layer


FREETOKEN = CommandTable(
    engine="freetoken",
    program=("python", "-m", "freetoken.cli", "serve"),
    flags=_FLAGS,
    passed={flag: flag not in _BARE for flag in sorted((ALWAYS | ADDED.keys()) - _FLAGS.keys() - {"--help"})},
    model_flag="--model",
    defaults={"serve.max_output_tokens": None},
    finish=_finish,
)
