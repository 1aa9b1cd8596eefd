"""A loaded model without our experts: a tiny stock `transformers` model, and an expert runtime that only counts.

The scheduler, the KV store and the server are tested on it, whatever the expert machinery does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig

SHARED: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHARED, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SHARED, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, intermediate_size=16,
        sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **SHARED, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    ),
}  # fmt: skip


@dataclass
class CountingExperts:
    """An expert runtime with slots that are only a number."""

    expert_slots: int = 8
    slot_bytes: int = 1024
    min_slots: int = 2
    max_slots: int = 18
    experts_per_layer: int = 6
    layouts: tuple[str, ...] = ("layer 0", "layer 1", "layer 2")
    phases: list[str] = field(default_factory=list)
    fail_resize_to: int | None = None

    @contextmanager
    def prefill(self) -> Iterator[None]:
        self.phases.append("prefill")
        yield

    @contextmanager
    def decode(self) -> Iterator[None]:
        self.phases.append("decode")
        yield

    def resize(self, expert_slots: int) -> int:
        if expert_slots == self.fail_resize_to:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        self.expert_slots = expert_slots
        return expert_slots

    def counters(self) -> SimpleNamespace:
        lookups = 6 * self.phases.count("decode")
        return SimpleNamespace(
            lookups=lookups, hits=lookups // 2, misses=lookups - lookups // 2, miss_bytes=1024 * (lookups // 2)
        )

    def close(self) -> None:
        self.phases.append("closed")


def make_model(family: str = "qwen3_moe", seed: int = 0) -> Any:
    """A tiny random causal LM in fp32 whose greedy texts differ from prompt to prompt."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0, 0.4)
    return model


def make_loaded(family: str = "qwen3_moe", *, model: Any = None) -> SimpleNamespace:
    """What `engine.loader.load_model` would return."""
    model = make_model(family) if model is None else model
    shape = SimpleNamespace(state_bytes_per_sequence=lambda **_: 0)
    return SimpleNamespace(
        model=model, config=model.config, shape=shape, device=torch.device("cpu"), dtype=torch.float32,
        experts=CountingExperts(), memory=lambda: {"dense_weights": 1000}, close=lambda: None,
        engine_config=SimpleNamespace(strategy="offload"), graphs=None,
    )  # fmt: skip


def make_config(**changes: Any) -> SimpleNamespace:
    """What `engine.config.EngineConfig` holds, as far as serving reads it."""
    values: dict[str, Any] = {
        "model_path": "/nowhere", "kv_tokens": 512, "max_running_requests": 2, "prefill_chunk_tokens": 16,
        "cpu_threads": 1, "trace_path": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def generate_alone(model: Any, prompt_ids: list[int], count: int) -> list[int]:
    """The greedy continuation by a full forward for every token, without any cache."""
    ids = list(prompt_ids)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]
