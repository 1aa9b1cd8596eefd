"""`ModelShape`: the bytes of each part of a model, without its weights.

Comes from local headers, from ranged reads of a hub, or from a bundled card (`cards.py`); `source` says which.
All sizes are bytes as stored in the checkpoint unless a field says otherwise.
"""

# No `from __future__ import annotations`: pydantic would compile each field's annotation again, 5 % of `ft plan`.
import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

#: Storage formats of a tensor group. `nvfp4` = packed e2m1 with e4m3 scales per 16, `fp8` = e4m3 with a scale
#: per tensor, `fp8_block` = e4m3 with scales per 128 x 128, `mxfp4` = e2m1 with e8m0 scales per 32.
Format = Literal[
    "f32", "bf16", "f16", "fp8", "fp8_block", "nvfp4", "mxfp4", "mxfp8", "ds_fp4", "gguf", "mixed", "unknown"
]
AttentionKind = Literal["full", "sliding", "linear", "mamba", "mla", "none"]


class ShapeModel(BaseModel):
    """Base of the shape's parts: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorGroup(ShapeModel):
    """Tensors that are placed together: their bytes as stored, their elements, their formats."""

    bytes: int = Field(default=0, ge=0)
    elements: int = Field(default=0, ge=0)
    tensors: int = Field(default=0, ge=0)
    format: Format = "bf16"
    #: Bytes by storage format, where the group is mixed.
    by_format: dict[str, int] = {}
    #: Quantised matrices (fp8, nvfp4, ...) and their output rows: engines keep a scale a row where the file has one.
    quantized_tensors: int = Field(default=0, ge=0)
    quantized_rows: int = Field(default=0, ge=0)


class Experts(ShapeModel):
    """The routed experts. One expert = gate, up and down of one layer, scales and biases included."""

    layers: int = Field(ge=0)
    per_layer: int = Field(ge=0)
    top_k: int = Field(ge=0)
    hidden_size: int = Field(ge=0)
    intermediate_size: int = Field(ge=0)
    format: Format = "bf16"
    #: Stored bytes of the largest expert, all its tensors with scales and biases.
    expert_bytes: int = Field(ge=0)
    #: Stored bytes of all experts of each MoE layer, in layer order.
    bytes_by_layer: tuple[int, ...] = ()
    #: Model layer index of each MoE layer.
    layer_ids: tuple[int, ...] = ()
    has_bias: bool = False
    has_input_scale: bool = False
    is_stacked: bool = False
    #: Weight matrices of one expert: 3 with a gate (gate, up, down), 2 without (up, down).
    projections: int = Field(default=3, ge=2, le=3)

    @property
    def count(self) -> int:
        """All routed experts of the model."""
        return self.layers * self.per_layer

    @property
    def bank_bytes(self) -> int:
        """Stored bytes of all routed experts."""
        return sum(self.bytes_by_layer) if self.bytes_by_layer else self.count * self.expert_bytes


class Attention(ShapeModel):
    """How past tokens are kept."""

    kinds: tuple[AttentionKind, ...]  # one a layer
    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    #: Heads of the sliding layers where they differ from those of the full layers (Gemma 4); None = the same.
    sliding_kv_heads: int | None = None
    sliding_head_dim: int | None = None
    #: MLA: bytes of the latent per token and layer (16-bit).
    latent_dim: int | None = None
    index_head_dim: int | None = None
    #: Layers that keep an index of `index_head_dim` per token beside the latent; 0 = none.
    index_layers: int = 0
    #: Tokens that share one index entry (Qwen3.8 4, GLM-5.3 16).
    index_ratio: int = Field(default=1, ge=1)
    #: MLA: tokens that share one kept latent, a layer (DeepSeek-V4: 4 or 128; 0 = window only); empty = 1 everywhere.
    compress_ratios: tuple[int, ...] = ()
    # gated delta net / mamba state
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel: int = 0
    mamba_state_bytes_per_sequence: int = 0

    def count(self, kind: AttentionKind) -> int:
        """How many layers are of `kind`."""
        return sum(1 for one in self.kinds if one == kind)


class Shard(ShapeModel):
    """One file of the checkpoint."""

    name: str
    bytes: int = Field(ge=0)


class ModelShape(ShapeModel):
    """Everything that the planner knows of a model."""

    name: str
    family: str  # config.json `model_type` of the text model, e.g. `qwen3_5_moe_text`
    architecture: str  # config.json `architectures[0]`
    layers: int
    hidden_size: int
    vocab_size: int
    max_position_tokens: int
    dtype: Format = "bf16"
    rotary_dim: int = 0
    tie_embeddings: bool = False
    quantization: str = "none"  # a word for people: `NVFP4 (mixed: fp8 attention)`
    experts: Experts
    attention: Attention
    dense: TensorGroup  # attention, norms, routers, linear attention, dense MLPs
    shared_experts: TensorGroup = TensorGroup()
    embedding: TensorGroup
    head: TensorGroup = TensorGroup()  # zero bytes when tied
    vision: TensorGroup = TensorGroup()
    draft: TensorGroup = TensorGroup()  # MTP layers: on disk, not loaded unless asked for
    side_tables: TensorGroup = TensorGroup()  # per-layer embedding tables: looked up by token id, not multiplied
    #: Stored bytes of the dense part and the shared experts of each layer, in layer order; empty where not known.
    dense_bytes_by_layer: tuple[int, ...] = ()
    shards: tuple[Shard, ...] = ()
    file_format: Literal["safetensors", "gguf"] = "safetensors"
    #: Where this comes from.
    source: Literal["headers", "remote_headers", "card"] = "headers"
    source_note: str = ""
    #: Facts that a card could not verify, in words.
    unverified: tuple[str, ...] = ()
    #: What a reader of the figures should know: tensors of unknown purpose, experts under another format, ...
    notes: tuple[str, ...] = ()

    @property
    def disk_bytes(self) -> int:
        """Bytes of the checkpoint on disk."""
        if self.shards:
            return sum(shard.bytes for shard in self.shards)
        groups = (
            self.dense, self.shared_experts, self.embedding, self.head, self.vision, self.draft, self.side_tables,
        )  # fmt: skip
        return self.experts.bank_bytes + sum(group.bytes for group in groups)

    @property
    def dense_bytes(self) -> int:
        """Stored bytes of everything a token always passes: dense parts, shared experts, embedding, head."""
        return self.dense.bytes + self.shared_experts.bytes + self.embedding.bytes + self.head.bytes

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes that one token adds to the KV cache of all layers, sliding ones included.

        2 x KV heads x head dim x element bytes for each full or sliding layer; the latent alone for each MLA layer,
        and the index where a layer keeps one.
        """
        a = self.attention
        full = 2 * a.kv_heads * a.head_dim * a.count("full")
        sliding = 2 * (a.sliding_kv_heads or a.kv_heads) * (a.sliding_head_dim or a.head_dim) * a.count("sliding")
        shares = [1 / ratio for ratio in a.compress_ratios if ratio] if a.compress_ratios else [1.0] * a.count("mla")
        latent = (a.latent_dim or 0) * sum(shares) + (a.index_head_dim or 0) * a.index_layers / a.index_ratio
        return math.ceil((full + sliding + latent) * element_bytes)

    def state_bytes_per_sequence(
        self, state_bytes: int = 4, conv_bytes: int = 2, *, has_whole_window: bool = False
    ) -> int:
        """Bytes of recurrent state that one sequence keeps (gated delta net: conv window + state matrix).

        A step needs kernel - 1 columns of the window; `has_whole_window` counts the kernel's, as `transformers` keeps.
        """
        a = self.attention
        kh, vh, kd, vd = a.linear_key_heads, a.linear_value_heads, a.linear_key_head_dim, a.linear_value_head_dim
        columns = a.linear_conv_kernel if has_whole_window else max(0, a.linear_conv_kernel - 1)
        conv = (2 * kh * kd + vh * vd) * columns * conv_bytes
        return a.count("linear") * (conv + vh * kd * vd * state_bytes) + a.mamba_state_bytes_per_sequence
