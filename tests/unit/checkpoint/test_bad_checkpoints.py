"""What a stranger's checkpoint can get wrong, each refused in a sentence with exit code 2."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from freetoken.checkpoint.header import pick_shards, read_shape
from freetoken.errors import BadFileError
from tests.fakes.checkpoints import qwen3_moe_config, qwen3_moe_tensors, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", qwen3_moe_config(), qwen3_moe_tensors())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", qwen3_moe_config(), qwen3_moe_tensors(), shards=3)


def refused(folder: Path) -> BadFileError:
    with pytest.raises(BadFileError) as caught:
        read_shape(folder)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    return caught.value


def rewrite(path: Path, change: Any) -> None:
    """Writes a safetensors file anew with its header changed by `change`."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    change(table)
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    error = refused(folder)
    assert error.message.startswith(f"{path}: truncated: tensor `")
    assert error.hint == "fetch it again: `ft model fetch REPO`"


@pytest.mark.parametrize("size", [0, 5, 7])
def test_file_too_short_for_a_header_length(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)
    assert refused(folder).message.endswith(f"truncated: {size} bytes, a safetensors file has at least 8")


def test_header_length_past_the_end_of_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 90_000_000) + data[8:])
    assert refused(folder).message == f"{path}: claims a header of 90,000,000 bytes, the file has {len(data):,} in all"


def test_header_of_two_gigabytes_is_not_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", 2 << 30))
        file.truncate(4 << 30)  # sparse: the claim would fit the file
    assert refused(folder).message == (
        f"{path}: claims a header of 2,147,483,648 bytes, at most 100,000,000 are allowed: not a safetensors file"
    )


def test_header_that_is_no_json(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 4) + b"oops")
    assert refused(folder).message == f"{path} (header):1: not valid JSON: Expecting value"


def test_header_nested_beyond_reason(folder: Path) -> None:
    path = folder / "model.safetensors"
    text = b"[" * 200_000
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    assert refused(folder).message == f"{path} (header): not valid JSON: RecursionError"


def test_overlapping_tensors(folder: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        begin, end = table["lm_head.weight"]["data_offsets"]
        table["lm_head.weight"]["data_offsets"] = [begin - 128, end - 128]

    rewrite(folder / "model.safetensors", change)
    assert "overlap at byte" in refused(folder).message


def test_offsets_that_do_not_match_the_shape(folder: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        table["lm_head.weight"]["shape"] = [100, 65]

    rewrite(folder / "model.safetensors", change)
    assert "tensor `lm_head.weight` of BF16 [100, 65] needs 13,000 bytes, its offsets are" in refused(folder).message


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [100, 64]},
        {"dtype": "BF16", "shape": [100, 64], "data_offsets": [0]},
        {"dtype": "BF16", "shape": "100x64", "data_offsets": [0, 12800]},
        {"dtype": "BF16", "shape": [100, -64], "data_offsets": [0, 12800]},
        {"dtype": "BF17", "shape": [100, 64], "data_offsets": [0, 12800]},
        {"dtype": "BF16", "shape": [100, 64], "data_offsets": [-5, 12795]},
        {"dtype": "BF16", "shape": [100, 64], "data_offsets": ["0", "12800"]},
        [1, 2],
        None,
    ],
)
def test_entry_that_is_no_tensor(folder: Path, entry: Any) -> None:
    rewrite(folder / "model.safetensors", lambda table: table.update({"lm_head.weight": entry}))
    assert "lm_head.weight" in refused(folder).message


def test_bytes_that_belong_to_no_tensor(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda table: table.pop("model.norm.weight"))
    assert "128 bytes before tensor" in refused(folder).message
    path = folder / "model.safetensors"
    write_checkpoint(folder, qwen3_moe_config(), qwen3_moe_tensors())
    with path.open("ab") as file:
        file.write(b"tail")
    assert refused(folder).message == f"{path}: 4 bytes after the last tensor belong to no tensor"


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    error = refused(sharded)
    assert error.message == f"{sharded}: 1 of 3 shards are missing: model-00002-of-00003.safetensors"
    assert error.hint == "fetch again: `ft model fetch REPO`"
    (sharded / "model.safetensors.index.json").unlink()
    assert refused(sharded).message == error.message


def test_index_that_points_out_of_the_folder(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd.safetensors"}}))
    assert refused(sharded).message == (
        f"{path}: `../../etc/passwd.safetensors` is not the name of a safetensors file in this folder"
    )


def test_index_that_disagrees_with_the_headers(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    assert refused(sharded).message == (
        f"{path}: says that tensor `model.norm.weight` is in model-00001-of-00003.safetensors, "
        "but it is in model-00002-of-00003.safetensors"
    )
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    assert refused(sharded).message.endswith(
        "`model.ghost.weight` is in model-00001-of-00003.safetensors, but no shard has it"
    )


def test_tensors_beside_the_index_are_noted(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    assert read_shape(sharded).notes == ("1 tensors are not listed in model.safetensors.index.json",)


def test_tensor_in_two_shards(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").write_bytes(
        (sharded / "model-00001-of-00003.safetensors").read_bytes()
    )
    assert (
        "is in both model-00001-of-00003.safetensors and model-00003-of-00003.safetensors" in refused(sharded).message
    )


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refused(folder).message == f"{folder}: has safetensors, but no config.json to say what model they are"


def test_pickles_alone(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refused(folder).message == (
        f"{folder}: its weights are pickles (`pytorch_model.bin`), which can run code; "
        "only safetensors and GGUF are loaded"
    )


def test_nothing_there(tmp_path: Path, folder: Path) -> None:
    assert refused(tmp_path / "nowhere").message == f"{tmp_path / 'nowhere'}: no such folder"
    (folder / "model.safetensors").unlink()
    assert refused(folder).message == f"{folder}: has config.json, but no safetensors"
    (folder / "config.json").unlink()
    assert refused(folder).message == f"{folder}: has neither config.json nor a .gguf file: not a model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is `0`, expected a whole number from 1 to 4096"),
        ({"num_hidden_layers": -1}, "`num_hidden_layers` is `-1`, expected a whole number from 1 to 4096"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is `1000000000`, expected a whole number from 1 to 4096"),
        ({"num_hidden_layers": None}, "`num_hidden_layers` is missing; the model's shape cannot be told without it"),
        ({"hidden_size": "big"}, "`hidden_size` is `big`, expected a whole number"),
        ({"hidden_size": 64.5}, "`hidden_size` is `64.5`, expected a whole number from 1 to 16777216"),
        ({"hidden_size": True}, "`hidden_size` is `True`, expected a whole number"),
        ({"hidden_size": float("nan")}, "`NaN` is not a number that a model can have"),
        ({"vocab_size": float("inf")}, "`Infinity` is not a number that a model can have"),
        ({"head_dim": -16}, "`head_dim` is `-16`, expected a whole number from 0 to 16777216"),
        ({"partial_rotary_factor": 7}, "`partial_rotary_factor` is `7`, expected a number from 0 to 1"),
        ({"layer_types": ["full_attention"]}, "the list of layer kinds has 1 entries, `num_hidden_layers` is 2"),
    ],
)
def test_absurd_configuration(folder: Path, changes: dict[str, Any], message: str) -> None:
    (folder / "config.json").write_text(json.dumps(qwen3_moe_config(**changes)))
    assert refused(folder).message == f"{folder / 'config.json'}: {message}"


def test_configuration_that_is_no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    assert refused(folder).message == f"{folder / 'config.json'}: expected a JSON object with the model's configuration"
    (folder / "config.json").write_text('{"hidden_size": 1,\n oops')
    assert refused(folder).message.startswith(f"{folder / 'config.json'}:2: not valid JSON: ")


def test_top_k_beyond_the_experts(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(qwen3_moe_config(num_experts_per_tok=9)))
    assert refused(folder).message == "model: `num_experts_per_tok` is 9, expected 1 to 4"


def test_second_copies_of_the_weights_are_left_alone() -> None:
    assert pick_shards(["consolidated.safetensors", "model.safetensors"]) == ["model.safetensors"]
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert pick_shards(["consolidated.safetensors", *parts, "adapter_model.safetensors"]) == parts
