"""Qwen3-MoE as a function that trains fast: same parameters, same answers, another order of arithmetic.

With 32 small experts side by side it is cheaper to compute all of them as one wide SwiGLU and to weigh its
inner columns by the router than to sort tokens by expert: three large matrix products a layer, no loop, no
capacity, nothing dropped. The columns of experts that the router left out are multiplied by 0, so the result
is that of `transformers`' Qwen3-MoE (`train.py` compares them before it trains).

Each parameter is one tensor over all layers, which keeps the optimizer to a handful of calls.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

RMS_EPS = 1e-6
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; `head_dim` and `expert_width` suit matrix units."""

    vocab_size: int
    layers: int
    expert_width: int
    kv_heads: int
    heads: int = 4
    head_dim: int = 64
    width: int = 256
    experts: int = 32
    top_k: int = 4
    context_tokens: int = 8192


SHAPES = {
    "wide": Shape(vocab_size=3968, layers=4, expert_width=64, kv_heads=1),
    "deep": Shape(vocab_size=7936, layers=6, expert_width=32, kv_heads=2),
}


class DemoModel(nn.Module):
    """All parameters, float32, and the training forward."""

    def __init__(self, shape: Shape, seed: int, dropout: float = 0.0):
        super().__init__()
        self.shape, self.dropout = shape, dropout
        generator = torch.Generator().manual_seed(seed)

        def normal(*sizes: int, std: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(*sizes, generator=generator) * std)

        s, layers = shape, shape.layers
        # Branches add up over the depth, so what they add starts smaller.
        out_std = 0.02 / (2 * layers) ** 0.5
        self.embed = normal(s.vocab_size, s.width)
        self.q = normal(layers, s.heads * s.head_dim, s.width)
        self.k = normal(layers, s.kv_heads * s.head_dim, s.width)
        self.v = normal(layers, s.kv_heads * s.head_dim, s.width)
        self.o = normal(layers, s.width, s.heads * s.head_dim, std=out_std)
        self.router = normal(layers, s.experts, s.width)
        self.gate = normal(layers, s.experts, s.expert_width, s.width)
        self.up = normal(layers, s.experts, s.expert_width, s.width)
        self.down = normal(layers, s.experts, s.width, s.expert_width, std=out_std)
        self.q_norm = nn.Parameter(torch.ones(layers, s.head_dim))
        self.k_norm = nn.Parameter(torch.ones(layers, s.head_dim))
        self.norm_1 = nn.Parameter(torch.ones(layers, s.width))
        self.norm_2 = nn.Parameter(torch.ones(layers, s.width))
        self.norm = nn.Parameter(torch.ones(s.width))
        angles = torch.arange(s.context_tokens)[:, None] / ROPE_THETA ** (torch.arange(0, s.head_dim, 2) / s.head_dim)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the load-balancing loss summed over layers (1 a layer when all experts are used alike)."""
        hidden = F.dropout(F.embedding(tokens, self.embed), self.dropout, self.training)
        names = ("q", "k", "v", "o", "q_norm", "k_norm", "norm_1", "norm_2", "router", "gate", "up", "down")
        balance = hidden.new_zeros(())
        for parts in zip(*(getattr(self, name).unbind(0) for name in names), strict=True):
            layer = dict(zip(names, parts, strict=True))
            attended = self._attend(normalize(hidden, layer["norm_1"]), layer)
            hidden = hidden + F.dropout(attended, self.dropout, self.training)
            mixed, layer_balance = self._mix_experts(normalize(hidden, layer["norm_2"]), layer)
            hidden = hidden + F.dropout(mixed, self.dropout, self.training)
            balance = balance + layer_balance
        return F.linear(normalize(hidden, self.norm), self.embed), balance

    def _attend(self, x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        s = self.shape
        batch, length, _ = x.shape
        q = F.linear(x, layer["q"]).view(batch, length, s.heads, s.head_dim)
        k = F.linear(x, layer["k"]).view(batch, length, s.kv_heads, s.head_dim)
        v = F.linear(x, layer["v"]).view(batch, length, s.kv_heads, s.head_dim)
        q = self._rotate(normalize(q, layer["q_norm"])).to(v.dtype).transpose(1, 2)
        k = self._rotate(normalize(k, layer["k_norm"])).to(v.dtype).transpose(1, 2)
        k = k.repeat_interleave(s.heads // s.kv_heads, dim=1)
        v = v.transpose(1, 2).repeat_interleave(s.heads // s.kv_heads, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(out.transpose(1, 2).reshape(batch, length, -1), layer["o"])

    def _rotate(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        cos, sin = self.cos[:length, None], self.sin[:length, None]
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    def _mix_experts(self, x: Tensor, layer: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        s = self.shape
        probabilities = F.linear(x, layer["router"]).softmax(dim=-1, dtype=torch.float32)
        best, chosen = probabilities.topk(s.top_k, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        gate = F.linear(x, layer["gate"].flatten(0, 1))
        inner = F.silu(gate) * F.linear(x, layer["up"].flatten(0, 1))
        inner = inner.unflatten(-1, (s.experts, s.expert_width)) * weights[..., None].to(inner.dtype)
        mixed = F.linear(inner.flatten(-2), layer["down"].transpose(0, 1).flatten(1))
        # Over the whole batch, not over each text: an expert may well belong to one kind of text.
        share = (weights > 0).float().mean(dim=(0, 1)) / s.top_k
        return mixed, s.experts * (share * probabilities.mean(dim=(0, 1))).sum()


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm in float32, times `weight`."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + RMS_EPS) * weight


def make_state_dict(model: DemoModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Tensors under the names that released Qwen3-MoE checkpoints use, one tensor for each expert."""
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    per_layer = {
        "input_layernorm": model.norm_1,
        "post_attention_layernorm": model.norm_2,
        "mlp.gate": model.router,
        "self_attn.q_proj": model.q,
        "self_attn.k_proj": model.k,
        "self_attn.v_proj": model.v,
        "self_attn.o_proj": model.o,
        "self_attn.q_norm": model.q_norm,
        "self_attn.k_norm": model.k_norm,
    }
    for layer in range(model.shape.layers):
        for name, tensor in per_layer.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor[layer]
        for expert in range(model.shape.experts):
            for name in ("gate", "up", "down"):
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                tensors[key] = getattr(model, name)[layer, expert]
    return {name: tensor.detach().to("cpu", dtype).contiguous().clone() for name, tensor in tensors.items()}


def make_config(shape: Shape, end_id: int, pad_id: int) -> dict:
    """config.json in the form that released Qwen3-MoE checkpoints have."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.expert_width * shape.top_k,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
        "max_position_embeddings": shape.context_tokens,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "rms_norm_eps": RMS_EPS,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": shape.layers,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def write_checkpoint(model: DemoModel, folder: Path, end_id: int, pad_id: int) -> None:
    """Write model.safetensors (bf16) and config.json, the weights in one step so that a reader never sees half."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(make_state_dict(model), str(partial), metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    config = make_config(model.shape, end_id, pad_id)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
