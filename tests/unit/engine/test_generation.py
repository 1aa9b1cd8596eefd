from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freetoken.engine.generation import GenerationDefaults, read_generation_defaults
from freetoken.errors import BadFileError


def write(folder: Path, **files: dict[str, Any]) -> Path:
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_generation_config_wins_over_config(tmp_path: Path) -> None:
    folder = write(
        tmp_path, config={"eos_token_id": 1},
        generation_config={"eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True},
    )  # fmt: skip
    found = read_generation_defaults(folder)
    assert found == GenerationDefaults(stop_token_ids=frozenset({2, 3}), temperature=0.7, top_k=20, top_p=0.8)
    assert found.sampling == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


@pytest.mark.parametrize(("config", "stops"), [
    ({"eos_token_id": 1}, {1}), ({"text_config": {"eos_token_id": 4}}, {4}), ({}, set()),
])  # fmt: skip
def test_config_gives_the_stop_tokens_where_there_is_no_generation_config(
    tmp_path: Path, config: dict[str, Any], stops: set[int]
) -> None:
    assert read_generation_defaults(write(tmp_path, config=config)) == GenerationDefaults(
        stop_token_ids=frozenset(stops)
    )


def test_do_sample_false_means_greedy(tmp_path: Path) -> None:
    assert read_generation_defaults(write(tmp_path, generation_config={"do_sample": False})).temperature == 0.0


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(BadFileError, match=r"generation_config\.json: cannot be read as JSON"):
        read_generation_defaults(tmp_path)
