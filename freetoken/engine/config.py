"""`EngineConfig`: everything the native engine is told at start. Torch-free, so that a command line can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Strategy = Literal["fused", "offload", "cpu"]


class EngineConfig(BaseModel):
    """Settings of one engine; frozen, unknown keys rejected. Zero or None leave a choice to the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    #: Folder with config.json and safetensors files.
    model_path: Path
    device: Literal["cpu", "cuda"] = "cpu"
    #: UUID or index of the GPU; None = the first one visible.
    gpu: str | None = None
    #: `auto` = the checkpoint's own type on a GPU, float32 on the CPU.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    strategy: Strategy = "offload"
    #: Experts resident at once under `offload`; 0 = as few as one request needs (top_k).
    expert_slots: int = Field(default=0, ge=0)
    kv_tokens: int = Field(default=4096, ge=1)
    max_running_requests: int = Field(default=1, ge=1)
    prefill_chunk_tokens: int = Field(default=2048, ge=1)
    #: Threads of CPU work; 0 = torch's own choice.
    cpu_threads: int = Field(default=0, ge=0)
    embed_on_host: bool = False
    #: On a GPU: `on` replays decode steps as CUDA graphs where that can be, `eager` has them of few launches alone,
    #: `off` leaves them to transformers. `auto` = `on`: 6.4 times the speed of `eager` (benchmarks/gpu/README.md).
    decode_graphs: Literal["auto", "on", "eager", "off"] = "auto"
    #: Where experts that are in no slot are read from; `auto` = RAM where the bank fits, else the checkpoint.
    experts_from: Literal["auto", "ram", "disk"] = "auto"
    #: Routing of decode steps is recorded here (`residency.trace`).
    trace_path: Path | None = None
