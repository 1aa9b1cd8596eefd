"""Laws of reading checkpoints: nothing is lost, nothing is counted twice, and no header brings the reader down."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.checkpoint.cards import _expand, _fold
from freetoken.checkpoint.files import pick_files
from freetoken.checkpoint.gguf import Cursor, GgufPart
from freetoken.checkpoint.header import read_shape
from freetoken.checkpoint.hub import is_safe_name
from freetoken.checkpoint.names import split_name
from freetoken.checkpoint.table import TensorTable
from freetoken.errors import BadFileError
from tests.fakes.checkpoints import make_gguf, make_header, qwen3_moe_config, qwen3_moe_tensors, write_checkpoint

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GROUPS = ("dense", "shared_experts", "embedding", "head", "vision", "draft", "side_tables")


@QUICK
@given(
    layers=st.integers(1, 5), experts=st.integers(1, 9), hidden=st.integers(1, 40), inner=st.integers(1, 30),
    vocab=st.integers(1, 99), shards=st.integers(1, 4),
)  # fmt: skip
def test_the_parts_add_up_to_the_tensors_of_all_files(
    tmp_path_factory: Any, layers: int, experts: int, hidden: int, inner: int, vocab: int, shards: int
) -> None:
    tensors = qwen3_moe_tensors(layers, experts, hidden, inner, vocab)
    config = qwen3_moe_config(
        num_hidden_layers=layers, num_experts=experts, num_experts_per_tok=1, hidden_size=hidden,
        moe_intermediate_size=inner, vocab_size=vocab,
    )  # fmt: skip
    folder = write_checkpoint(tmp_path_factory.mktemp("m"), config, tensors, shards=shards)
    shape = read_shape(folder)
    total = make_header(tensors)[1]
    parts = sum(getattr(shape, name).bytes for name in GROUPS)
    assert shape.experts.bank_bytes + parts == total
    assert shape.experts.bank_bytes == layers * experts * shape.experts.expert_bytes
    assert shape.experts.intermediate_size == inner
    for name in GROUPS:
        group = getattr(shape, name)
        assert sum(group.by_format.values()) == group.bytes


@QUICK
@given(data=st.data())
def test_a_header_with_changed_bytes_is_read_or_refused(data: st.DataObject) -> None:
    header, size = make_header(qwen3_moe_tensors())
    text = bytearray(header[8:])
    for _ in range(data.draw(st.integers(1, 6))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    table = TensorTable(2)
    with suppress(BadFileError):
        table.add_safetensors(bytes(text), size, "m")
        assert sum(one.bytes for one in table.classes.values()) == size


@QUICK
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
        max_leaves=12,
    )
)
def test_any_json_as_configuration_is_read_or_refused(tmp_path_factory: Any, document: Any) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("m"), {}, {"lm_head.weight": ("BF16", (2, 2))})
    config = {
        **qwen3_moe_config(num_experts=0, num_experts_per_tok=0),
        **(document if isinstance(document, dict) else {}),
    }
    for key in list(config)[::3]:
        config[key] = document
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(BadFileError):
        read_shape(folder)


@QUICK
@given(data=st.data())
def test_a_gguf_header_with_changed_bytes_is_read_or_refused(data: st.DataObject) -> None:
    metadata = {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "b"]}
    header, size = make_gguf(metadata, {"token_embd.weight": ("q4_k", (4, 256)), "output.weight": ("f32", (4, 8))})
    changed = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    whole = bytes(changed) + bytes(size)
    with suppress(BadFileError):
        GgufPart(Cursor("m", len(whole), lambda _: whole))


@QUICK
@given(length=st.integers(0, 2**64 - 1), body=st.binary(max_size=200))
def test_any_length_before_any_body_is_read_or_refused(tmp_path_factory: Any, length: int, body: bytes) -> None:
    folder: Path = tmp_path_factory.mktemp("m")
    (folder / "config.json").write_text(json.dumps(qwen3_moe_config()))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + body)
    with suppress(BadFileError):
        read_shape(folder)


@given(values=st.lists(st.sampled_from(["full", "linear", "sliding"]) | st.integers(0, 99), max_size=60))
def test_folding_a_list_for_a_card_loses_nothing(values: list[Any]) -> None:
    assert _expand(_fold(tuple(values))) == tuple(values)


@given(
    words=st.lists(st.sampled_from(["model", "layers", "experts", "w1"]) | st.integers(0, 999), min_size=1, max_size=8)
)
def test_a_split_name_can_be_put_together_again(words: list[Any]) -> None:
    name = ".".join(map(str, words))
    template, numbers = split_name(name)
    for number in numbers:
        template = template.replace("#", str(number), 1)
    assert template == name


@given(
    names=st.lists(st.text(alphabet="abc./_-\\", min_size=1, max_size=12).map(lambda one: one + ".json"), max_size=6)
)
def test_no_name_from_a_hub_leaves_its_folder(names: list[str]) -> None:
    for name in pick_files([one for one in names if is_safe_name(one)], []):
        assert Path("/models/here", name).resolve().is_relative_to("/models/here")
