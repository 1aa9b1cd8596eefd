"""Small checkpoints of real layouts, written as sparse files: true headers, no data."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BITS = {"BF16": 16, "F16": 16, "F32": 32, "U8": 8, "I8": 8, "I64": 64, "F8_E4M3": 8, "F8_E8M0": 8}
Tensors = Mapping[str, tuple[str, Sequence[int]]]


def make_header(tensors: Tensors) -> tuple[bytes, int]:
    """The 8-byte length and JSON header of a safetensors file, and the bytes of data behind it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text, offset


def write_shard(path: Path, tensors: Tensors, *, fill: bytes = b"") -> None:
    """A safetensors file; its data is a hole unless `fill` repeats over it."""
    header, size = make_header(tensors)
    with path.open("wb") as file:
        file.write(header)
        if fill:
            file.write((fill * (size // len(fill) + 1))[:size])
        file.truncate(len(header) + size)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, *, shards: int = 1, fill: bytes = b""
) -> Path:
    """A folder with config.json and `shards` safetensors files, with an index where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_shard(folder / "model.safetensors", tensors, fill=fill)
        return folder
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        mine = {one: tensors[one] for one in names[index::shards]}
        write_shard(folder / name, mine, fill=fill)
        weight_map |= dict.fromkeys(mine, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def qwen3_moe_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE configuration of 2 layers with 4 experts of 32 x 64."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 512, "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    return {**config, **changes}


def qwen3_moe_tensors(
    layers: int = 2, experts: int = 4, hidden: int = 64, inner: int = 32, vocab: int = 100
) -> dict[str, Any]:
    """The tensors of `qwen3_moe_config`."""
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": ("BF16", (vocab, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
        "lm_head.weight": ("BF16", (vocab, hidden)),
    }
    for layer in range(layers):
        base = f"model.layers.{layer}"
        tensors |= {
            f"{base}.input_layernorm.weight": ("BF16", (hidden,)),
            f"{base}.post_attention_layernorm.weight": ("BF16", (hidden,)),
            f"{base}.self_attn.q_proj.weight": ("BF16", (64, hidden)),
            f"{base}.self_attn.k_proj.weight": ("BF16", (32, hidden)),
            f"{base}.self_attn.v_proj.weight": ("BF16", (32, hidden)),
            f"{base}.self_attn.o_proj.weight": ("BF16", (hidden, 64)),
            f"{base}.mlp.gate.weight": ("BF16", (experts, hidden)),
        }
        for expert in range(experts):
            tensors |= {
                f"{base}.mlp.experts.{expert}.gate_proj.weight": ("BF16", (inner, hidden)),
                f"{base}.mlp.experts.{expert}.up_proj.weight": ("BF16", (inner, hidden)),
                f"{base}.mlp.experts.{expert}.down_proj.weight": ("BF16", (hidden, inner)),
            }
    return tensors


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, 4, len(value)) + b"".join(struct.pack("<I", one) for one in value)


GGML = {"f32": (0, 1, 4), "q4_k": (12, 256, 144), "q6_k": (14, 256, 210), "q8_0": (8, 32, 34)}


def make_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[bytes, int]:
    """The header of a GGUF file (shapes with the fastest dimension last), padded, and the bytes of data behind it."""
    table, offset = b"", 0
    for name, (kind, shape) in tensors.items():
        number, block, size = GGML[kind]
        table += _text(name) + struct.pack("<I", len(shape))
        table += b"".join(struct.pack("<Q", dim) for dim in reversed(shape)) + struct.pack("<IQ", number, offset)
        offset += -(-(math.prod(shape) // block * size) // 32) * 32
    keys = b"".join(_text(key) + _value(value) for key, value in metadata.items())
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + keys + table
    return header + b"\0" * (-len(header) % 32), offset


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Path:
    """A GGUF file whose data is a hole."""
    header, size = make_gguf(metadata, tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return path


QWEN36_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
        "rope_parameters": {"partial_rotary_factor": 0.25}, "dtype": "bfloat16",
    },
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
}  # fmt: skip


def _nvfp4(name: str, out: int, width: int) -> dict[str, Any]:
    return {
        f"{name}.weight": ("U8", (out, width // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (out, width // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
    }


def _fp8(name: str, out: int, width: int) -> dict[str, Any]:
    scalars = {f"{name}.weight_scale": ("F32", ()), f"{name}.input_scale": ("F32", ())}
    return {f"{name}.weight": ("F8_E4M3", (out, width)), **scalars}


def qwen36_nvfp4_tensors(layers: int = 40, experts: int = 256, *, dense: str = "fp8") -> dict[str, Any]:
    """Qwen3.6-35B-A3B as ModelOpt stores it: 93,275 tensors with 40 layers of 256 experts.

    `dense` is `fp8` (attention FP8; shared experts and head NVFP4), `bf16` (experts alone quantised) or `nvfp4` (all).
    """
    hidden, inner, vocab, root = 2048, 512, 248320, "model.language_model"

    def matrix(name: str, out: int, width: int, kind: str) -> dict[str, Any]:
        if kind == "bf16":
            return {f"{name}.weight": ("BF16", (out, width))}
        return _fp8(name, out, width) if kind == "fp8" else _nvfp4(name, out, width)

    other = "bf16" if dense == "bf16" else "nvfp4"
    tensors: dict[str, Any] = {
        f"{root}.embed_tokens.weight": ("BF16", (vocab, hidden)),
        f"{root}.norm.weight": ("BF16", (hidden,)),
        **matrix("lm_head", vocab, hidden, "bf16" if dense == "nvfp4" else other),
    }
    for layer in range(layers):
        base = f"{root}.layers.{layer}"
        tensors[f"{base}.input_layernorm.weight"] = ("BF16", (hidden,))
        tensors[f"{base}.post_attention_layernorm.weight"] = ("BF16", (hidden,))
        if layer % 4 == 3:
            for name, out, width in (("q", 8192, hidden), ("k", 512, hidden), ("v", 512, hidden), ("o", hidden, 4096)):
                tensors |= matrix(f"{base}.self_attn.{name}_proj", out, width, dense)
            tensors[f"{base}.self_attn.q_norm.weight"] = ("BF16", (256,))
            tensors[f"{base}.self_attn.k_norm.weight"] = ("BF16", (256,))
        else:
            gdn = f"{base}.linear_attn"
            tensors |= matrix(f"{gdn}.in_proj_qkv", 8192, hidden, dense)
            tensors |= matrix(f"{gdn}.in_proj_z", 4096, hidden, dense)
            tensors |= matrix(f"{gdn}.out_proj", hidden, 4096, dense)
            tensors |= {
                f"{gdn}.in_proj_a.weight": ("BF16", (32, hidden)),
                f"{gdn}.in_proj_b.weight": ("BF16", (32, hidden)),
                f"{gdn}.conv1d.weight": ("BF16", (8192, 1, 4)),
                f"{gdn}.A_log": ("F32", (32,)),
                f"{gdn}.dt_bias": ("BF16", (32,)),
                f"{gdn}.norm.weight": ("BF16", (128,)),
            }
        tensors[f"{base}.mlp.gate.weight"] = ("BF16", (experts, hidden))
        tensors[f"{base}.mlp.shared_expert_gate.weight"] = ("BF16", (1, hidden))
        for name, out, width in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors |= matrix(f"{base}.mlp.shared_expert.{name}_proj", out, width, other)
            for expert in range(experts):
                tensors |= _nvfp4(f"{base}.mlp.experts.{expert}.{name}_proj", out, width)
    return tensors
