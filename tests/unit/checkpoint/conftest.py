"""What several test files of this room look at, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.checkpoints import QWEN36_CONFIG, qwen36_nvfp4_tensors, write_checkpoint


@pytest.fixture(scope="session")
def qwen36_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of Qwen3.6-35B-A3B in NVFP4: 93,275 tensors in 10 sparse shards."""
    tensors = qwen36_nvfp4_tensors()
    assert len(tensors) == 93_275
    return write_checkpoint(tmp_path_factory.mktemp("q36") / "qwen3.6", QWEN36_CONFIG, tensors, shards=10)
