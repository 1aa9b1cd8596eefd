"""`config.json` → `ConfigFacts`: the few figures of a model's configuration that its shape needs, checked.

Knows the many names under which families keep the same figure; knows nothing of tensors. A figure that is missing,
not a number, negative or absurd is refused by name, so that nothing downstream divides by it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freetoken.checkpoint.shape import AttentionKind
from freetoken.errors import BadFileError

#: Far above any real file: a `quantized_layers` list of 100,000 modules takes about 20 MB.
MAX_CONFIG_BYTES = 64 << 20
MAX_LAYERS = 4096
MAX_DIM = 1 << 24

_LAYER_KINDS: dict[str, AttentionKind] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "local": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "sliding",
    "compressed_sparse_attention": "mla",
    "heavily_compressed_attention": "mla",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "moe": "none",
    "mlp": "none",
}
#: One letter a layer in Nemotron-H's `hybrid_override_pattern`.
_PATTERN_KINDS: dict[str, AttentionKind] = {"M": "mamba", "*": "full", "-": "none", "E": "none"}
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model_config")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class ConfigFacts:
    """What `config.json` says, in our words. Counts and dimensions are 0 where the model has no such part."""

    name: str
    family: str
    architecture: str
    dtype: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_position_tokens: int
    rotary_dim: int
    tie_embeddings: bool
    experts: int
    top_k: int
    expert_intermediate_size: int
    kinds: tuple[AttentionKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    sliding_kv_heads: int | None = None
    sliding_head_dim: int | None = None
    latent_dim: int | None = None
    index_head_dim: int | None = None
    index_layers: int = 0
    index_ratio: int = 1
    compress_ratios: tuple[int, ...] = ()
    linear: dict[str, int] = field(default_factory=dict)
    mamba_state_bytes: int = 0
    quantization: dict[str, Any] = field(default_factory=dict)


class ConfigReader:
    """Looks figures up under several names, first in the text model's part, then at the top level."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        text = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), dict)), config)
        self.top, self.text, self.where = config, text, where

    def find(self, *names: str) -> tuple[str, Any]:
        """The first of `names` whose value is there and not null, and that value; the first name and None for none."""
        for source in (self.text, self.top):
            for name in names:
                if source.get(name) is not None:
                    return name, source[name]
        return names[0], None

    def get(self, *names: str) -> Any:
        """The first value that is there and not null, else None."""
        return self.find(*names)[1]

    def get_int(self, *names: str, default: int | None = None, low: int = 0, high: int = MAX_DIM) -> int:
        """A whole number within [low, high]; raises BadFileError with the name, the value and the range."""
        name, value = self.find(*names)
        if value is None:
            if default is None:
                raise BadFileError(f"{self.where}: `{name}` is missing; the model's shape cannot be told without it")
            return default
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            value = max(value)  # a list with one entry a layer: the largest is what must fit
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value in _INFINITIES:
            raise BadFileError(f"{self.where}: `{name}` is `{value}`, expected a whole number")
        if value != int(value) or not low <= value <= high:
            raise BadFileError(f"{self.where}: `{name}` is `{value}`, expected a whole number from {low} to {high}")
        return int(value)


_INFINITIES = (float("inf"), float("-inf"))


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Any:
    """The JSON document in `path`; raises BadFileError where it is missing, too large or not JSON."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise BadFileError(f"{path}: {size:,} bytes, at most {max_bytes:,} are read as JSON")
        text = path.read_bytes()
    except OSError as error:
        raise BadFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json(text, str(path))


def parse_json(text: bytes, where: str) -> Any:
    """`text` as JSON; raises BadFileError with the place of the first fault. NaN and Infinity are refused."""

    def refuse(constant: str) -> Any:
        raise BadFileError(f"{where}: `{constant}` is not a number that a model can have")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise BadFileError(f"{where}:{error.lineno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{where}: not valid JSON: {type(error).__name__}") from error


def parse_config(config: Any, *, name: str, where: str = "config.json") -> ConfigFacts:
    """The facts of a parsed `config.json`. Raises BadFileError, naming the key, for what cannot be a model."""
    if not isinstance(config, dict):
        raise BadFileError(f"{where}: expected a JSON object with the model's configuration")
    read = ConfigReader(config, where)
    layers = _read_layers(read)
    hidden = read.get_int("hidden_size", "n_embd", "d_model", "dim", low=1)
    heads = read.get_int("num_attention_heads", "n_head", "n_heads", default=0)
    kinds = _read_kinds(read, layers)
    latent = _read_latent(read)
    head_dim = read.get_int("global_head_dim", "head_dim", default=hidden // heads if heads else 0)
    kv_heads = read.get_int("num_global_key_value_heads", "num_key_value_heads", "n_kv_heads", default=heads)
    is_split = read.get("global_head_dim", "num_global_key_value_heads") is not None
    index_dim = read.get_int("index_head_dim", "indexer_head_dim", default=0)
    ratios = _read_ratios(read, layers)
    if ratios:
        # DeepSeek-V4 keeps one shared key-value row of `head_dim` a token, thinned out by the ratio.
        kinds, latent = tuple(["mla"] * layers), head_dim
    return ConfigFacts(
        name=name,
        family=str(read.text.get("model_type") or config.get("model_type") or "unknown"),
        architecture=_first_architecture(config),
        dtype=_read_dtype(read),
        layers=layers,
        hidden_size=hidden,
        vocab_size=read.get_int("vocab_size", "padded_vocab_size", low=1, default=0),
        max_position_tokens=read.get_int(
            "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=0, high=1 << 31
        ),
        rotary_dim=_read_rotary_dim(read, head_dim),
        tie_embeddings=bool(read.get("tie_word_embeddings")),
        experts=read.get_int(*_EXPERT_COUNTS, default=0, high=1 << 16),
        top_k=read.get_int(*_TOP_KS, default=0, high=1 << 16),
        expert_intermediate_size=read.get_int(*_EXPERT_SIZES, default=0),
        kinds=kinds,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=_read_window(read, kinds),
        sliding_kv_heads=read.get_int("num_key_value_heads", default=heads) if is_split else None,
        sliding_head_dim=read.get_int("head_dim", default=head_dim) if is_split else None,
        latent_dim=latent,
        index_head_dim=index_dim or None,
        index_layers=_count_index_layers(read, kinds, ratios) if index_dim else 0,
        index_ratio=max(1, read.get_int("indexer_compress_ratio", "index_kpool", default=4 if ratios else 1)),
        compress_ratios=ratios,
        linear=_read_linear(read, kinds),
        mamba_state_bytes=_read_mamba_bytes(read, kinds),
        quantization=_read_quantization(config),
    )


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_TOP_KS = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_top_k", "experts_per_token", "moe_k")
_EXPERT_SIZES = ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


def _read_layers(read: ConfigReader) -> int:
    pattern = read.get("hybrid_override_pattern")
    if isinstance(pattern, str) and read.get("num_hidden_layers") is None:
        return len(pattern)
    listed = read.get("layers_block_type")
    default = len(listed) if isinstance(listed, list) else None
    return read.get_int(
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=default, low=1, high=MAX_LAYERS
    )


def _read_kinds(read: ConfigReader, layers: int) -> tuple[AttentionKind, ...]:
    """What each layer keeps of past tokens, in layer order."""
    default: AttentionKind = "mla" if _read_latent(read) else "full"
    listed = read.get("layer_types", "layers_block_type", "attn_type_list", "hybrid_override_pattern")
    if isinstance(listed, str):
        return _check_length(read, tuple(_PATTERN_KINDS.get(letter, default) for letter in listed), layers)
    if isinstance(listed, list) and all(isinstance(one, str) for one in listed):
        kinds = tuple(_LAYER_KINDS.get(one, default) for one in listed)
        kinds = tuple(default if kind == "full" else kind for kind in kinds)
        return _check_length(read, kinds, layers)
    if interval := read.get_int("full_attention_interval", default=0):
        return tuple(default if (layer + 1) % interval == 0 else "linear" for layer in range(layers))
    if interval := read.get_int("sliding_window_pattern", default=0):
        return tuple("full" if (layer + 1) % interval == 0 else "sliding" for layer in range(layers))
    if read.get("sliding_window") and read.get("use_sliding_window") is not False and default == "full":
        default = "sliding"
    return tuple([default] * layers)


def _check_length(read: ConfigReader, kinds: tuple[AttentionKind, ...], layers: int) -> tuple[AttentionKind, ...]:
    if len(kinds) < layers:
        raise BadFileError(
            f"{read.where}: the list of layer kinds has {len(kinds)} entries, `num_hidden_layers` is {layers}"
        )
    return kinds[:layers]  # some families list their draft layers too


def _read_window(read: ConfigReader, kinds: tuple[AttentionKind, ...]) -> int | None:
    if "sliding" not in kinds:
        return None
    return read.get_int("sliding_window", "attention_chunk_size", default=0, high=1 << 31) or None


def _read_latent(read: ConfigReader) -> int | None:
    """Width of the MLA latent that a token leaves in each layer, rope part included."""
    rank = read.get_int("kv_lora_rank", default=0)
    return rank + read.get_int("qk_rope_head_dim", default=0) if rank else None


def _read_ratios(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """DeepSeek-V4: tokens that share one kept row, a layer; empty for every other family."""
    listed = read.get("compress_ratios")
    if isinstance(listed, list) and all(type(one) is int and 0 <= one <= MAX_DIM for one in listed):
        return tuple(listed[:layers])
    types = read.get("layer_types")
    if not isinstance(types, list) or not any(one in _COMPRESS_RATIOS for one in types):
        return ()
    rates = read.get("compress_rates")
    rates = {**_COMPRESS_RATIOS, **(rates if isinstance(rates, dict) else {})}
    return tuple(int(rates.get(one, 0)) for one in types[:layers])


_COMPRESS_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _count_index_layers(read: ConfigReader, kinds: tuple[AttentionKind, ...], ratios: tuple[int, ...]) -> int:
    if ratios:
        return sum(1 for ratio in ratios if 0 < ratio < 128)
    listed = read.get("indexer_types")
    has_own = [one == "full" for one in listed] if isinstance(listed, list) else []
    has_own += [True] * (len(kinds) - len(has_own))
    return sum(own and kind in ("mla", "full") for own, kind in zip(has_own, kinds, strict=False))


def _read_rotary_dim(read: ConfigReader, head_dim: int) -> int:
    rope = read.get("rope_parameters", "rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    if isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    if dim := read.get_int("qk_rope_head_dim", "rotary_dim", default=0):
        return dim
    share = rope.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1.0
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise BadFileError(f"{read.where}: `partial_rotary_factor` is `{share}`, expected a number from 0 to 1")
    return int(head_dim * share)


def _read_linear(read: ConfigReader, kinds: tuple[AttentionKind, ...]) -> dict[str, int]:
    """The gated delta net's heads and dims, under the names of `shape.Attention`."""
    if "linear" not in kinds:
        return {}
    nested = read.get("linear_attn_config")
    if isinstance(nested, dict):
        read = ConfigReader({"linear_num_heads": nested.get("num_heads"), "linear_head_dim": nested.get("head_dim"),
                             "linear_conv_kernel_dim": nested.get("short_conv_kernel_size")}, read.where)  # fmt: skip
    return {
        "linear_key_heads": read.get_int("linear_num_key_heads", "linear_num_heads", default=0),
        "linear_value_heads": read.get_int("linear_num_value_heads", "linear_num_heads", default=0),
        "linear_key_head_dim": read.get_int("linear_key_head_dim", "linear_head_dim", default=0),
        "linear_value_head_dim": read.get_int("linear_value_head_dim", "linear_head_dim", default=0),
        "linear_conv_kernel": read.get_int("linear_conv_kernel_dim", default=0),
    }


def _read_mamba_bytes(read: ConfigReader, kinds: tuple[AttentionKind, ...]) -> int:
    """Bytes of Mamba-2 state that one sequence keeps: conv window (16-bit) and SSM state (32-bit), all layers."""
    heads = read.get_int("mamba_num_heads", "mamba_n_heads", default=0)
    if not heads:
        return 0
    inner = heads * read.get_int("mamba_head_dim", "mamba_d_head", default=0)
    state = read.get_int("ssm_state_size", "mamba_d_state", default=0)
    groups = read.get_int("n_groups", "mamba_n_groups", default=1)
    kernel = read.get_int("conv_kernel", "mamba_d_conv", default=4)
    layer = (inner + 2 * groups * state) * max(0, kernel - 1) * 2 + inner * state * 4
    return layer * sum(1 for kind in kinds if kind == "mamba")


def _read_dtype(read: ConfigReader) -> str:
    return str(read.get("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")


def _first_architecture(config: dict[str, Any]) -> str:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else "unknown"


def _read_quantization(config: dict[str, Any]) -> dict[str, Any]:
    sources = [config, *(config[key] for key in _TEXT_KEYS if isinstance(config.get(key), dict))]
    found = (source[key] for source in sources for key in _QUANTIZATION_KEYS if isinstance(source.get(key), dict))
    return next(found, {})
