"""Model cards: found by any of their names, fast, and true to what headers say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from freetoken.checkpoint.cards import (
    compress_shape,
    expand_shape,
    find_card,
    find_card_info,
    list_cards,
    read_card,
    suggest_cards,
)
from freetoken.checkpoint.header import read_shape
from freetoken.checkpoint.locate import locate_model
from freetoken.checkpoint.shape import ModelShape
from freetoken.errors import BadFileError
from freetoken.recipe.model import ModelRef

NAMES = [card.name for card in list_cards()]


def test_the_promised_models_have_cards() -> None:
    promised = (
        "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B-FP8", "nvidia/Qwen3.6-35B-A3B-NVFP4", "qwen3.6-35b-a3b-q4_k_m",
        "Qwen/Qwen3-30B-A3B", "qwen3.8-flash-next", "ornith-1.5-35b", "openai/gpt-oss-20b", "openai/gpt-oss-120b",
        "glm-4.7", "glm-5.2", "deepseek-v4-flash", "gemma-4-26b-a4b", "nemotron-30b-a3b", "mixtral-8x7b",
    )  # fmt: skip
    assert [name for name in promised if find_card(name) is None] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_card_is_whole(name: str) -> None:
    shape = find_card(name)
    assert shape is not None
    assert (shape.source, shape.shards) == ("card", ())
    assert len(shape.attention.kinds) == shape.layers
    assert len(shape.experts.bytes_by_layer) == len(shape.experts.layer_ids) == shape.experts.layers > 0
    assert shape.experts.expert_bytes * shape.experts.per_layer == max(shape.experts.bytes_by_layer)
    assert shape.dense.bytes > 0
    assert shape.embedding.bytes > 0
    assert (shape.head.bytes == 0) == shape.tie_embeddings
    assert sum(shape.dense_bytes_by_layer) <= shape.dense.bytes + shape.shared_experts.bytes
    assert shape.source_note.startswith(f"model card `{name}`: ")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_card_leaves_out_is_put_back(name: str) -> None:
    shape = find_card(name)
    assert shape is not None
    again = ModelShape.model_validate({"name": shape.name, **expand_shape(compress_shape(shape))})
    same = {"source", "source_note", "unverified"}
    assert again.model_dump(exclude=same) == shape.model_dump(exclude=same)


def test_the_card_of_qwen36_says_what_its_headers_say(qwen36_folder: Path) -> None:
    card = find_card("nvidia/qwen3.6-35b-a3b-nvfp4")
    assert card is not None
    read = read_shape(qwen36_folder)
    for part in ("experts", "attention", "dense", "shared_experts", "embedding", "head", "dense_bytes_by_layer"):
        assert getattr(card, part) == getattr(read, part), part


def test_names_are_found_whatever_their_case_and_a_name_wins_over_a_tail() -> None:
    found = {
        name: info.name
        for name in ("NVIDIA/qwen3.6-35b-a3b-nvfp4", "Qwen/Qwen3.6-35B-A3B", "qwen3.6-35b-a3b", "GPT-OSS-20B")
        if (info := find_card_info(name))
    }
    assert found == {
        "NVIDIA/qwen3.6-35b-a3b-nvfp4": "qwen3.6-35b-a3b-nvfp4",
        "Qwen/Qwen3.6-35B-A3B": "qwen3.6-35b-a3b-bf16",
        "qwen3.6-35b-a3b": "qwen3.6-35b-a3b-nvfp4",
        "GPT-OSS-20B": "gpt-oss-20b",
    }
    assert find_card_info("llama-7") is None


def test_a_misspelt_name_has_suggestions() -> None:
    assert suggest_cards("gpt-os-20b")[0] == "gpt-oss-20b"
    assert suggest_cards("xyzzy") == ()


def test_known_sizes_come_out() -> None:
    sizes = {"qwen3.6-35b-a3b-nvfp4": 23.4, "qwen3.6-35b-a3b-q4_k_m": 22.0, "gpt-oss-20b": 13.8, "mixtral-8x7b": 93.4}
    for name, size in sizes.items():
        shape = find_card(name)
        assert shape is not None
        assert shape.disk_bytes / 1e9 == pytest.approx(size, rel=0.005), name
    gemma = find_card("gemma-4-26b-a4b")
    assert gemma is not None
    assert gemma.kv_bytes_per_token() == 225_280


def test_a_model_that_is_not_here_is_planned_from_its_card_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    located = locate_model(ModelRef(repo="nvidia/Qwen3.6-35B-A3B-NVFP4"))
    assert located.path is None
    assert located.shape is not None
    assert located.download_bytes == located.shape.disk_bytes
    assert located.note == "not on this machine; figures from the model card `qwen3.6-35b-a3b-nvfp4`"


def test_a_broken_card_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: c\nrepo: a/c\nshape: {layers: 3}\n")
    with pytest.raises(BadFileError, match="not a model card"):
        read_card(path)


def test_a_card_is_found_in_a_tenth_of_a_second() -> None:
    begin = time.process_time()
    find_card("openai/gpt-oss-120b")
    assert time.process_time() - begin < 0.1


def test_finding_a_card_imports_no_hub_client() -> None:
    heavy = ("huggingface_hub", "httpx", "torch", "transformers", "tqdm")
    code = (
        "import sys\nfrom freetoken.checkpoint.fetch import locate_model\n"
        "from freetoken.checkpoint.cards import find_card\nfind_card('gpt-oss-20b')\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
