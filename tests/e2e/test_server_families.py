"""Every family through loader, experts, KV store and scheduler at once: greedy texts equal the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freetoken.engine.config import EngineConfig
from freetoken.engine.loader import load_model
from freetoken.engine.request import GenerationRequest
from freetoken.engine.scheduler import Engine
from tests.fakes.tiny_models import FAMILIES, TOP_K, make_tiny_checkpoint

PROMPTS = [
    tuple((7 * place * place + 13 * number + place) % 300 for place in range(length))
    for number, length in enumerate((1, 20, 45))
]


@pytest.mark.parametrize("family", FAMILIES)
def test_concurrent_answers_with_the_fewest_slots_equal_the_models_own(family: str, tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, family)
    config = EngineConfig(
        model_path=tmp_path, cpu_threads=1, strategy="offload", expert_slots=TOP_K, kv_tokens=256,
        max_running_requests=2, prefill_chunk_tokens=16,
    )  # fmt: skip
    loaded = load_model(config)
    expected = []
    with torch.inference_mode(), loaded.experts.prefill():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(6):
                logits = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                ids.append(int(logits.argmax()))
            expected.append(ids[len(prompt) :])
    engine = Engine(loaded, config)
    try:
        handles = [engine.submit(GenerationRequest(prompt_ids=one, max_tokens=6, ignore_eos=True)) for one in PROMPTS]
        assert [list(handle) for handle in handles] == expected
        assert engine.memory()["kv_cache"] == 256 * loaded.shape.kv_bytes_per_token(element_bytes=4)
        assert engine.stats().hits.lookups == engine.stats().hits.hits + engine.stats().hits.misses > 0
    finally:
        engine.close()
