"""`ft recipe from-yaml`: a plain engine configuration as recipe values.

Known are `model_path`, `device`, `quantization.weight_bits`, `kv_cache_bits`, `expert_offload.{enabled,strategy}`,
`gpu_memory_utilization`, `max_seq_len` and `batch_size`; every other key is named as not understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from freetoken.adapters.command_table import Fields, ParsedCommand
from freetoken.errors import UsageError
from freetoken.units import parse_tokens

_STRATEGIES = {"offload": "offload", "lru": "offload", "cpu": "cpu", "hybrid": "hybrid", "none": "fused"}


def parse_config(values: Mapping[str, Any]) -> ParsedCommand:
    """The recipe values of a configuration. Raises UsageError where it names no model or a value means nothing."""
    rest = dict(_flatten(values))
    fields: Fields = {}
    notes: list[str] = []
    if "model_path" not in rest:
        raise UsageError("the configuration has no `model_path`")
    model = rest.pop("model_path")
    if not isinstance(model, str) or not model:
        raise UsageError(f"`model_path: {model}` is neither a folder nor a repository")
    fields["model"] = model
    _read_device(str(rest.pop("device", "cuda")), fields)
    if (bits := rest.pop("quantization.weight_bits", None)) is not None:
        notes.append(
            f"`quantization.weight_bits: {bits}` follows from the checkpoint: take one with {bits}-bit weights"
        )
    if (bits := rest.pop("kv_cache_bits", None)) is not None:
        _read_kv_bits(_int("kv_cache_bits", bits), fields, notes)
    _read_offload(rest, fields, notes)
    if (ratio := rest.pop("gpu_memory_utilization", None)) is not None:
        if fields["engine.name"] == "native":
            notes.append(f"`gpu_memory_utilization: {ratio}` means nothing without a GPU; left out")
        else:
            fields["settings.memory_ratio"] = _share("gpu_memory_utilization", ratio)
    if (context := rest.pop("max_seq_len", None)) is not None:
        fields["context"] = _int("max_seq_len", context)
    if (batch := rest.pop("batch_size", None)) is not None:
        fields["settings.max_running_requests"] = _int("batch_size", batch)
    return ParsedCommand(str(fields["engine.name"]), fields, tuple(notes), tuple(rest))


def _read_device(device: str, fields: Fields) -> None:
    kind, _, index = device.partition(":")
    if kind not in ("cuda", "gpu", "cpu", "auto"):
        raise UsageError(f"`device: {device}` is none that an engine runs on here", hint="`cuda`, `cuda:0`, or `cpu`")
    fields["engine.name"] = "native" if kind == "cpu" else "freetoken"
    if index and kind != "cpu":
        fields["settings.gpu"] = _int("device", index, least=0)


def _read_kv_bits(bits: int, fields: Fields, notes: list[str]) -> None:
    if bits == 8:
        fields["settings.kv_dtype"] = "fp8"
        fields["allow_quality_changes"] = ["kv_dtype"]
    elif bits != 16:
        notes.append(f"`kv_cache_bits: {bits}` is not something a recipe can say; the model's own type is taken")


def _read_offload(rest: dict[str, Any], fields: Fields, notes: list[str]) -> None:
    enabled, strategy = rest.pop("expert_offload.enabled", None), rest.pop("expert_offload.strategy", None)
    if isinstance(rest.get("expert_offload"), bool):
        enabled = rest.pop("expert_offload")
    if enabled is False:
        fields["settings.strategy"] = "fused"
    elif strategy is not None and str(strategy).lower() in _STRATEGIES:
        fields["settings.strategy"] = _STRATEGIES[str(strategy).lower()]
    elif enabled:
        fields["settings.strategy"] = "offload"
        if strategy not in (None, "auto"):
            notes.append(f"`expert_offload.strategy: {strategy}`: slots are kept by least recent use")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _int(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number of at least `least`; `8k` is one too."""
    try:
        found = parse_tokens(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"`{name}: {value}` is not a whole number") from error
    if found < least:
        raise UsageError(f"`{name}: {value}` is less than {least}")
    return found


def _share(name: str, value: Any) -> float:
    """A number between 0 and 1."""
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"`{name}: {value}` is not a number") from error
    if not 0 < found <= 1:
        raise UsageError(f"`{name}: {value}` is not a share between 0 and 1")
    return found
