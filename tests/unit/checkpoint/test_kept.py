"""A kept shape stands for a checkpoint as long as nothing of it has changed."""

import json
import os

import pytest

from freetoken import paths
from freetoken.checkpoint import header, kept
from freetoken.errors import BadFileError
from tests.fakes.tiny_models import make_tiny_checkpoint


@pytest.fixture
def model(monkeypatch, tmp_path):
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(kept, "LEAST_S", -1.0)
    folder = tmp_path / "model"
    make_tiny_checkpoint(folder, "qwen3_moe")
    return folder


@pytest.fixture
def reads(monkeypatch):
    found, real = [], header.read_shape
    monkeypatch.setattr(header, "read_shape", lambda path: (found.append(path), real(path))[1])
    return found


def test_headers_are_read_once(model, reads):
    first = kept.read_shape(model)
    assert kept.read_shape(model) == first == header.read_shape(model)
    assert len(reads) == 2  # once for the first, once for the comparison


@pytest.mark.parametrize("change", ["config", "weights with their old time", "another file", "ft"])
def test_what_has_changed_is_read_again(model, reads, monkeypatch, change):
    kept.read_shape(model)
    (weights, *_) = sorted(model.glob("*.safetensors"))
    if change == "config":
        value = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(value | {"max_position_embeddings": 99}))
    elif change == "ft":
        monkeypatch.setattr(kept, "__version__", "0.0.1")
    elif change == "another file":
        (model / "hf_quant_config.json").write_text("{}")
    else:
        before = weights.stat()
        data = weights.read_bytes()
        weights.write_bytes(data)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    shape = kept.read_shape(model)
    assert len(reads) == 2
    if change == "config":
        assert shape.max_position_tokens == 99


def test_a_checkpoint_that_cannot_be_read_is_never_kept(model, reads):
    kept.read_shape(model)
    (weights, *_) = sorted(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(BadFileError):
            kept.read_shape(model)
    assert len(reads) == 3


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"key": 1}', b'{"shape": {}}', b"\xff" * 9, b"[" * 200_000])
def test_what_is_kept_and_broken_is_read_again(model, reads, text):
    shape = kept.read_shape(model)
    (place,) = (paths.state_dir() / "cache" / "shapes").iterdir()
    place.write_bytes(text)
    assert kept.read_shape(model) == shape
    assert len(reads) == 2


def test_a_state_folder_that_cannot_be_written_is_no_trouble(model, reads, tmp_path):
    (tmp_path / "state").write_text("a file")
    assert kept.read_shape(model) == kept.read_shape(model)
    assert len(reads) == 2


def test_what_is_read_in_no_time_is_not_kept(model, monkeypatch):
    monkeypatch.setattr(kept, "LEAST_S", 100.0)
    kept.read_shape(model)
    assert not (paths.state_dir() / "cache").exists()
