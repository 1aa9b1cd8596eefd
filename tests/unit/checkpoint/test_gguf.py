"""GGUF headers: the shape of a model from metadata and tensor table, and the lies that are refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from freetoken.checkpoint.gguf import count_ggml_bytes
from freetoken.checkpoint.header import read_shape
from freetoken.errors import BadFileError
from tests.fakes.checkpoints import write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "qwen35moe", "qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1,
    "qwen35moe.embedding_length": 256, "qwen35moe.attention.head_count": 4, "qwen35moe.attention.head_count_kv": 2,
    "qwen35moe.attention.key_length": 64, "qwen35moe.context_length": 4096, "qwen35moe.expert_count": 8,
    "qwen35moe.expert_used_count": 2, "qwen35moe.expert_feed_forward_length": 512, "qwen35moe.ssm.group_count": 2,
    "qwen35moe.ssm.time_step_rank": 4, "qwen35moe.ssm.state_size": 64, "qwen35moe.ssm.inner_size": 256,
    "qwen35moe.ssm.conv_kernel": 4, "qwen35moe.rope.dimension_count": 16,
    "tokenizer.ggml.tokens": [f"token {n}" for n in range(6000)],
}  # fmt: skip


def tensors() -> dict[str, Any]:
    """Four layers, the last of which has full attention, and a draft layer behind them."""
    found: dict[str, Any] = {
        "token_embd.weight": ("q4_k", (6000, 256)),
        "output.weight": ("q6_k", (6000, 256)),
        "output_norm.weight": ("f32", (256,)),
    }
    for layer in range(5):
        base = f"blk.{layer}"
        mixer = {f"{base}.attn_k.weight": ("q8_0", (128, 256))} if layer >= 3 else {f"{base}.ssm_a": ("f32", (4,))}
        found |= {
            **mixer,
            f"{base}.ffn_gate_inp.weight": ("f32", (8, 256)),
            f"{base}.ffn_gate_exps.weight": ("q4_k", (8, 512, 256)),
            f"{base}.ffn_up_exps.weight": ("q4_k", (8, 512, 256)),
            f"{base}.ffn_down_exps.weight": ("q6_k", (8, 256, 512)),
            f"{base}.ffn_up_shexp.weight": ("q4_k", (512, 256)),
        }
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny-Q4_K_M.gguf", METADATA, tensors())


def test_parts_have_the_bytes_of_their_ggml_types(path: Path) -> None:
    shape = read_shape(path)
    matrix = 512 * 256
    assert (shape.name, shape.family, shape.file_format) == ("tiny-Q4_K_M", "qwen35moe", "gguf")
    assert shape.experts.expert_bytes == 2 * matrix // 256 * 144 + matrix // 256 * 210
    assert (shape.experts.layers, shape.experts.per_layer, shape.experts.intermediate_size) == (4, 8, 512)
    assert shape.experts.format == "gguf"
    assert shape.embedding.by_format == {"q4_k": 6000 * 144}
    assert shape.head.by_format == {"q6_k": 6000 * 210}
    assert shape.shared_experts.bytes == 4 * matrix // 256 * 144
    assert shape.draft.tensors == 6
    assert shape.disk_bytes == path.stat().st_size
    assert (shape.vocab_size, shape.max_position_tokens, shape.rotary_dim) == (6000, 4096, 16)
    assert shape.quantization == "GGUF (q4_k, q6_k, q8_0)"


def test_attention_is_told_from_the_tensors(path: Path) -> None:
    shape = read_shape(path)
    assert shape.attention.kinds == ("linear", "linear", "linear", "full")
    assert shape.kv_bytes_per_token() == 2 * 2 * 64 * 2
    assert shape.state_bytes_per_sequence() == 3 * ((2 * 2 * 64 + 4 * 64) * 3 * 2 + 4 * 64 * 64 * 4)


def test_a_folder_with_one_model_is_read_and_one_with_two_is_not(path: Path) -> None:
    (path.parent / "mmproj-F16.gguf").write_bytes(b"")
    assert read_shape(path.parent).name == "tiny-Q4_K_M"
    write_gguf(path.parent / "tiny-Q8_0.gguf", METADATA, tensors())
    with pytest.raises(BadFileError) as caught:
        read_shape(path.parent)
    assert caught.value.message == (
        f"{path.parent}: holds 2 GGUF models (tiny-Q4_K_M.gguf, tiny-Q8_0.gguf); give the file itself"
    )


def test_a_model_in_parts_is_read_whole(tmp_path: Path) -> None:
    whole = tensors()
    names = list(whole)
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", METADATA, {name: whole[name] for name in names[::2]})
    write_gguf(tmp_path / "m-00002-of-00002.gguf", {"split.no": 1}, {name: whole[name] for name in names[1::2]})
    (tmp_path / "one").mkdir()
    shape = read_shape(tmp_path)
    single = read_shape(write_gguf(tmp_path / "one" / "m.gguf", METADATA, whole))
    assert shape.model_copy(update={"shards": ()}) == single.model_copy(update={"shards": ()})
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(BadFileError, match=r"1 of 2 GGUF parts are missing: m-00002-of-00002.gguf"):
        read_shape(first)


def test_gpt_oss_slides_in_every_other_layer(tmp_path: Path) -> None:
    metadata = {key.replace("qwen35moe", "gpt-oss"): one for key, one in METADATA.items()}
    metadata |= {"general.architecture": "gpt-oss", "gpt-oss.attention.sliding_window": 128}
    plain = {name: one for name, one in tensors().items() if "ssm" not in name}
    plain |= {f"blk.{layer}.attn_k.weight": ("q8_0", (128, 256)) for layer in range(4)}
    shape = read_shape(write_gguf(tmp_path / "m.gguf", metadata, plain))
    assert shape.attention.kinds == ("sliding", "full", "sliding", "full")
    assert shape.attention.sliding_window == 128


def refused(path: Path) -> str:
    with pytest.raises(BadFileError) as caught:
        read_shape(path)
    return caught.value.message


def test_truncated_data_and_truncated_header_are_refused(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)
    assert "truncated: tensor `" in refused(path)
    os.truncate(path, 50_000)
    assert "truncated: its header needs byte" in refused(path)
    os.truncate(path, 10)
    assert refused(path) == f"{path}: truncated: 10 bytes are no GGUF file"


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "does not begin with `GGUF`"),
        (4, struct.pack("<I", 1), "GGUF version 1 is not read, expected 2 or 3 in little-endian order"),
        (8, struct.pack("<Q", 1 << 40), "claims 1,099,511,627,776 tensors and 18 metadata keys"),
        (16, struct.pack("<Q", 1 << 60), "claims 33 tensors and 1,152,921,504,606,846,976 metadata keys"),
        (24, struct.pack("<Q", 1 << 62), "truncated: its header needs byte 4,611,686,018,427,387,936, the file has"),
    ],
)
def test_lies_in_the_header_are_refused(path: Path, offset: int, value: bytes, message: str) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)
    assert refused(path).startswith(f"{path}: {message}")


def test_absurd_metadata_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {**METADATA, "qwen35moe.block_count": 0}, tensors())
    assert refused(path) == "m: `qwen35moe.block_count` is `0`, expected a whole number from 1"
    write_gguf(path, {key: one for key, one in METADATA.items() if "embedding_length" not in key}, tensors())
    assert refused(path) == "m: `qwen35moe.embedding_length` is missing from the GGUF metadata"
    write_gguf(path, {**METADATA, "qwen35moe.block_count": "many"}, tensors())
    assert refused(path) == "m: `qwen35moe.block_count` is `many`, expected a whole number from 1"


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(BadFileError, match="rows of 100 values, not a multiple of 256"):
        count_ggml_bytes("t", (2, 100), 12, "m")
    with pytest.raises(BadFileError, match="unknown ggml type 99"):
        count_ggml_bytes("t", (2, 256), 99, "m")
