from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from freetoken.engine.files import CheckpointFiles, Piece, byte_view
from freetoken.errors import BadFileError


def write_raw(path: Path, header: dict[str, object] | bytes, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((length if length is not None else len(text)).to_bytes(8, "little") + text + data)


def test_tensors_read_back_with_type_and_shape(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "c": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "codes": torch.randn(4, 4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    for name, value in tensors.items():
        got = files.read(files.entries[name])
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert got.view(torch.uint8 if value.dtype.itemsize == 1 else value.dtype).equal(
            value.view(torch.uint8) if value.dtype.itemsize == 1 else value
        )
    assert torch.equal(files.read_slice(files.entries["a"], 2), tensors["a"][2])
    files.close()


def test_scattered_pieces_of_several_files_land_where_they_belong(tmp_path: Path) -> None:
    one, two = torch.arange(64, dtype=torch.uint8), torch.arange(64, 128, dtype=torch.uint8)
    save_file({"one": one}, tmp_path / "a.safetensors")
    save_file({"two": two}, tmp_path / "b.safetensors")
    files = CheckpointFiles(tmp_path)
    target = torch.zeros(12, dtype=torch.uint8)
    memory = byte_view(target)
    a, b = files.entries["one"], files.entries["two"]
    files.read_pieces(
        [
            Piece(b.file, b.offset + 8, memory[8:12]),
            Piece(a.file, a.offset + 4, memory[4:8]),
            Piece(a.file, a.offset, memory[0:4]),
        ]
    )
    assert target.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 72, 73, 74, 75]


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        ({}, b"", 10**12, "the header claims 1000000000000 bytes, the file has 10"),
        (b"{oops", b"", None, "the header cannot be read"),
        (b"[]", b"", None, "the header cannot be read"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"1234", None, "it is truncated"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}, b"1234", None, r"F32 of \[4\] needs others"),
        ({"w": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}, b"x" * 16, None, "needs others"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}, b"x" * 16, None, "needs others"),
        (
            {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 4]}},
            b"1234",
            None,
            "stored as F4, which is not known",
        ),
        ({"w": {"dtype": "F32"}}, b"1234", None, "the header cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_read(
    tmp_path: Path, header: dict[str, object] | bytes, data: bytes, length: int | None, words: str
) -> None:
    write_raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(BadFileError, match=words):
        CheckpointFiles(tmp_path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(BadFileError, match="the file has 0"):
        CheckpointFiles(tmp_path)


def test_a_file_that_shrinks_after_the_check_is_reported_by_name(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1000)}, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(BadFileError, match=r"model.safetensors ended \d+ bytes early"):
        files.read(files.entries["w"])


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    with pytest.raises(BadFileError, match=r"lacks 1 of 2 weight files, first `b.safetensors`"):
        CheckpointFiles(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}))
    with pytest.raises(BadFileError, match="names 1 tensors that no file holds, first `v`"):
        CheckpointFiles(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "../a.safetensors"}}))
    with pytest.raises(BadFileError, match="which is not a plain file name"):
        CheckpointFiles(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BadFileError, match=r"only `pytorch_model.bin`, and pickles are never loaded"):
        CheckpointFiles(tmp_path)
