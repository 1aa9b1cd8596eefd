"""Shapes, machines and requests that planner tests share: small builders, every figure given by the test."""

from __future__ import annotations

from typing import Any

from freetoken.checkpoint.shape import Attention, Experts, ModelShape, Shard, TensorGroup
from freetoken.hardware.model import Bandwidth, Cpu, Disk, Gpu, Hardware, Os, PcieLink, Ram, Software
from freetoken.planner.plan import Calibration, PlanRequest
from freetoken.recipe.model import Recipe
from freetoken.units import GIB

QWEN_KINDS = tuple("full" if (index + 1) % 4 == 0 else "linear" for index in range(40))
SMALL_WORKLOAD = {"name": "small", "prompt_tokens": 3584, "output_tokens": 512, "context_tokens": 4096}
AGENT_WORKLOAD = {
    "name": "agent", "turns": 6, "shared_prefix_tokens": 2048, "prompt_tokens": 768, "output_tokens": 256,
    "context_tokens": 8192,
}  # fmt: skip


def make_qwen_shape(**changes: Any) -> ModelShape:
    """Qwen3.6-35B-A3B NVFP4 as in the upstream engine's worked example: 2,709,175,616 dense bytes in all."""
    fields: dict[str, Any] = {
        "name": "Qwen3.6-35B-A3B-NVFP4", "family": "qwen3_5_moe_text",
        "architecture": "Qwen3_5MoeForConditionalGeneration", "layers": 40, "hidden_size": 2048,
        "vocab_size": 248320, "max_position_tokens": 262144, "rotary_dim": 64,
        "experts": Experts(
            layers=40, per_layer=256, top_k=8, hidden_size=2048, intermediate_size=512, format="nvfp4",
            expert_bytes=1769484,
        ),
        "attention": Attention(
            kinds=QWEN_KINDS, heads=16, kv_heads=2, head_dim=256, linear_key_heads=16, linear_value_heads=32,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel=4,
        ),
        "dense": TensorGroup(bytes=1333727436, elements=1305408128, format="fp8"),
        "shared_experts": TensorGroup(bytes=71270880, elements=125829120, format="nvfp4"),
        "embedding": TensorGroup(bytes=1017118720, elements=508559360),
        "head": TensorGroup(bytes=287058580, elements=508559360, format="nvfp4"),
        "shards": tuple(Shard(name=f"model-{index}.safetensors", bytes=2_082_000_000) for index in range(10)),
    }  # fmt: skip
    return ModelShape(**(fields | changes))


def make_tiny_shape(**changes: Any) -> ModelShape:
    """A Qwen3-MoE of 4 layers x 32 experts in bf16: the size of the demo model."""
    experts = Experts(layers=4, per_layer=32, top_k=4, hidden_size=128, intermediate_size=64, expert_bytes=49152)
    fields: dict[str, Any] = {
        "name": "tiny", "family": "qwen3_moe", "architecture": "Qwen3MoeForCausalLM", "layers": 4,
        "hidden_size": 128, "vocab_size": 4096, "max_position_tokens": 8192, "rotary_dim": 32, "experts": experts,
        "attention": Attention(kinds=("full",) * 4, heads=4, kv_heads=2, head_dim=32),
        "dense": TensorGroup(bytes=600_000, elements=300_000),
        "embedding": TensorGroup(bytes=1_048_576, elements=524_288),
        "head": TensorGroup(bytes=1_048_576, elements=524_288),
    }  # fmt: skip
    return ModelShape(**(fields | changes))


def make_gpu(total_gib: float, free_gib: float, **changes: Any) -> Gpu:
    """An Ampere card of 30 SMs on PCIe 4.0 x8 unless a change says otherwise."""
    fields: dict[str, Any] = {
        "name": f"card of {total_gib:g} GiB", "compute_capability": "8.6", "sm_count": 30,
        "vram_total_bytes": int(total_gib * GIB), "vram_free_bytes": int(free_gib * GIB),
        "pcie": PcieLink(max_generation=4, max_width=8),
    }  # fmt: skip
    return Gpu(**(fields | changes))


def make_machine(
    gpu: Gpu | None = None, *, ram_gib: float = 32, ram_free_gib: float | None = None, **changes: Any
) -> Hardware:
    """A Linux machine with measured rates of a small laptop, driver r580 and a CUDA 13 toolchain."""
    free = ram_free_gib if ram_free_gib is not None else ram_gib - 3
    fields: dict[str, Any] = {
        "name": "a machine", "gpus": (gpu,) if gpu is not None else (),
        "cpu": Cpu(physical_cores=8, logical_cores=16, usable_cores=8, isa=("avx2",)),
        "ram": Ram(total_bytes=int(ram_gib * GIB), available_bytes=int(free * GIB)),
        "disk": Disk(free_bytes=500 * GIB, kind="nvme"),
        "bandwidth": Bandwidth(
            h2d_bytes_per_s=11.8e9, vram_bytes_per_s=336e9, dram_bytes_per_s=32e9, disk_bytes_per_s=2.5e9,
        ),
        "software": Software(
            driver="580.95.05", cuda_driver="13.0", cuda_toolkit="13.0", nvcc="nvcc", gxx="g++", ninja="ninja",
        ),
    }  # fmt: skip
    return Hardware(**(fields | changes))


def make_wsl_machine(gpu: Gpu, **changes: Any) -> Hardware:
    """The same machine under WSL2."""
    return make_machine(gpu, os=Os(is_wsl=True, wsl_version="2.7.13"), **changes)


def make_recipe(engine: str | dict[str, Any] = "freetoken", **changes: Any) -> Recipe:
    """A recipe of the agent workload on a server; `changes` are top-level fields."""
    document: dict[str, Any] = {
        "name": "case", "model": {"repo": "owner/model"}, "workload": AGENT_WORKLOAD, "headroom": "server",
        "engine": {"name": engine} if isinstance(engine, str) else engine,
    }  # fmt: skip
    return Recipe.model_validate(document | changes)


def make_request(recipe: Recipe, hardware: Hardware, shape: ModelShape | None = None, **changes: Any) -> PlanRequest:
    """A request without calibration unless a change has one."""
    fields: dict[str, Any] = {"recipe": recipe, "hardware": hardware, "shape": shape or make_qwen_shape(),
                              "calibration": Calibration()}  # fmt: skip
    return PlanRequest(**(fields | changes))
