"""Which models get a card, the facts of their config.json, and how their published checkpoints store each tensor."""

# A table of facts reads better in long lines than in broken ones.
# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from freetoken.checkpoint.shape import ModelShape, TensorGroup

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Card:
    """One card: who it is, the configuration, and `scheme(name)`, the storage format of a tensor."""

    name: str
    repo: str
    description: str
    architecture: str
    config: dict[str, Any]
    scheme: Callable[[str], str]
    aliases: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    extra: tuple[tuple[str, Shape], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    is_stacked: bool = False
    is_transposed: bool = False
    input_scales: bool = True
    expert_input_scales: bool = False
    block_scale_dtype: str = "BF16"
    #: Parts of names that the checkpoint leaves out.
    left_out: tuple[str, ...] = ()
    finish: Callable[[ModelShape], ModelShape] | None = None


def all_bf16(name: str) -> str:
    return "f32" if name.endswith(("A_log", "e_score_correction_bias")) else "bf16"


def is_expert(name: str) -> bool:
    return ".experts." in name


# Qwen3.5 / 3.6 MoE -------------------------------------------------------------------------------------------------

QWEN36 = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "tie_word_embeddings": False, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
                      "out_hidden_size": 2048, "num_position_embeddings": 2304},
    "tie_word_embeddings": False,
}  # fmt: skip


def qwen36_draft(experts: int = 256, hidden: int = 2048, inner: int = 512) -> tuple[tuple[str, Shape], ...]:
    """The multi-token-prediction layer: 785 tensors in the published checkpoint, a full-attention MoE layer and its join."""
    layer = "mtp.layers.0"
    return (
        ("mtp.fc.weight", (hidden, 2 * hidden)), ("mtp.norm.weight", (hidden,)),
        ("mtp.pre_fc_norm_embedding.weight", (hidden,)), ("mtp.pre_fc_norm_hidden.weight", (hidden,)),
        (f"{layer}.input_layernorm.weight", (hidden,)), (f"{layer}.post_attention_layernorm.weight", (hidden,)),
        (f"{layer}.self_attn.q_proj.weight", (8192, hidden)), (f"{layer}.self_attn.k_proj.weight", (512, hidden)),
        (f"{layer}.self_attn.v_proj.weight", (512, hidden)), (f"{layer}.self_attn.o_proj.weight", (hidden, 4096)),
        (f"{layer}.self_attn.q_norm.weight", (256,)), (f"{layer}.self_attn.k_norm.weight", (256,)),
        (f"{layer}.mlp.gate.weight", (experts, hidden)), (f"{layer}.mlp.shared_expert_gate.weight", (1, hidden)),
        (f"{layer}.mlp.shared_expert.gate_proj.weight", (inner, hidden)),
        (f"{layer}.mlp.shared_expert.up_proj.weight", (inner, hidden)),
        (f"{layer}.mlp.shared_expert.down_proj.weight", (hidden, inner)),
        (f"{layer}.mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)),
        (f"{layer}.mlp.experts.down_proj", (experts, hidden, inner)),
    )  # fmt: skip


def is_qwen_projection(name: str) -> bool:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
    return "language_model" in name and name.endswith(tuple(f"{part}.weight" for part in parts))


def qwen36_nvfp4(name: str) -> str:
    """FP8 attention and delta-net projections; NVFP4 experts, shared experts and head; the rest 16-bit."""
    if name.startswith("mtp") or "visual" in name:
        return "bf16"
    if is_expert(name) or ("shared_expert." in name) or name.startswith("lm_head"):
        return "nvfp4"
    return "fp8" if is_qwen_projection(name) else all_bf16(name)


def qwen36_fp8(name: str) -> str:
    """128 x 128 blocks on every language projection and expert, the draft layer's too; head and embedding 16-bit."""
    if "visual" in name or name.startswith("lm_head") or "gate.weight" in name:
        return "bf16"
    is_draft = name.startswith("mtp.layers") and "norm" not in name
    return (
        "fp8_block"
        if is_expert(name) or "shared_expert." in name or is_qwen_projection(name) or is_draft
        else all_bf16(name)
    )


def experts_only(scheme: str) -> Callable[[str], str]:
    def find(name: str) -> str:
        return scheme if is_expert(name) and not name.startswith("mtp") else all_bf16(name)

    return find


def qwen36_q4_k_m(name: str) -> str:
    """The usual K-quant mix: Q4_K experts with half of the down matrices in Q6_K, the rest Q8_0, routers 32-bit."""
    layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else -1
    if is_expert(name):
        has_more_bits = layer < 5 or layer >= 35 or (layer - 5) % 3 == 2
        return "ggml:q6_k" if "down_proj" in name and has_more_bits else "ggml:q4_k"
    if "embed_tokens" in name or name.startswith("lm_head"):
        return "ggml:q6_k"
    return "ggml:q8_0" if is_qwen_projection(name) or "shared_expert." in name else "f32"


def as_gguf(shape: ModelShape) -> ModelShape:
    return shape.model_copy(update={"file_format": "gguf", "family": "qwen35moe"})


ENGINE_SPEC = "config.json facts and tensor layout as read by the freetoken 0.2.1 loader"
HF_CLASSES = "tensor shapes of the transformers 5.24 model class"
QWEN36_UNVERIFIED = (
    "the vision tower (depth 27, hidden 1152) is the Qwen3.5 family's",
    "the MTP layer is 16-bit and of 785 tensors",
)

QWEN_CARDS = (
    Card(
        name="qwen3.6-35b-a3b-nvfp4", repo="nvidia/Qwen3.6-35B-A3B-NVFP4", aliases=("qwen3.6-35b-a3b", "qwen3.6"),
        description="Qwen3.6 35B with 3B active, NVFP4 experts and FP8 attention, 23 GB; for cards of 6 to 24 GB",
        architecture="Qwen3_5MoeForConditionalGeneration", config=QWEN36, scheme=qwen36_nvfp4, extra=qwen36_draft(),
        sources=(ENGINE_SPEC, HF_CLASSES, "mixed recipe (FP8 attention, NVFP4 experts and head) from public threads"),
        unverified=(*QWEN36_UNVERIFIED, "which linears are FP8 and which NVFP4 in the published file (about 23 GB)"),
    ),
    Card(
        name="qwen3.6-35b-a3b-bf16", repo="Qwen/Qwen3.6-35B-A3B",
        description="Qwen3.6 35B with 3B active as published, 16-bit, 72 GB",
        architecture="Qwen3_5MoeForConditionalGeneration", config=QWEN36, scheme=all_bf16, extra=qwen36_draft(),
        is_stacked=True, sources=(ENGINE_SPEC, HF_CLASSES), unverified=QWEN36_UNVERIFIED,
    ),
    Card(
        name="qwen3.6-35b-a3b-fp8", repo="Qwen/Qwen3.6-35B-A3B-FP8",
        description="Qwen3.6 35B with 3B active, FP8 in 128 x 128 blocks",
        architecture="Qwen3_5MoeForConditionalGeneration", config=QWEN36, scheme=qwen36_fp8, extra=qwen36_draft(),
        sources=(ENGINE_SPEC, HF_CLASSES, "block FP8 of the Qwen3 family: scales 16-bit, head and routers unquantised"),
        unverified=(*QWEN36_UNVERIFIED, "which linears are left in 16 bits"),
    ),
    Card(
        name="qwen3.6-35b-a3b-q4_k_m", repo="unsloth/Qwen3.6-35B-A3B-GGUF", aliases=("qwen3.6-35b-a3b-gguf",),
        description="Qwen3.6 35B with 3B active as GGUF Q4_K_M, 22 GB, for llama.cpp",
        architecture="qwen35moe (GGUF)", config=QWEN36, scheme=qwen36_q4_k_m, left_out=("visual", "mtp"), is_stacked=True,
        sources=(ENGINE_SPEC, HF_CLASSES, "published file size of 22.0 GB"), finish=as_gguf,
        unverified=("which tensors have which ggml type: the usual mix, which adds up to the published size within 1 %",),
    ),
    Card(
        name="ornith-1.5-35b-nvfp4", repo="ornith-ai/Ornith-1.5-35B-A3B-NVFP4", aliases=("ornith-1.5-35b-a3b-nvfp4",),
        description="Ornith 1.5 35B with 3B active (Qwen3.5 architecture), NVFP4 experts",
        architecture="Qwen3_5MoeForConditionalGeneration", config=QWEN36, scheme=qwen36_nvfp4,
        extra=qwen36_draft(), sources=(HF_CLASSES, "same architecture and dimensions as Qwen3.6-35B-A3B by public comparison"),
        unverified=(
            *QWEN36_UNVERIFIED,
            "which linears beside the experts are quantised: as in Qwen3.6's NVFP4, since public reports of it starting "
            "on 6 GB cards (one with 358 slots beside 65,606 tokens) leave room for nothing larger",
        ),
    ),
    Card(
        name="ornith-1.5-35b", repo="ornith-ai/Ornith-1.5-35B-A3B", aliases=("ornith-1.5-35b-a3b",),
        description="Ornith 1.5 35B with 3B active (Qwen3.5 architecture), 16-bit",
        architecture="Qwen3_5MoeForConditionalGeneration", config=QWEN36, scheme=all_bf16, extra=qwen36_draft(),
        is_stacked=True, sources=(HF_CLASSES, "same architecture and dimensions as Qwen3.6-35B-A3B by public comparison"),
        unverified=QWEN36_UNVERIFIED,
    ),
    Card(
        name="qwen3-30b-a3b", repo="Qwen/Qwen3-30B-A3B", aliases=("qwen3-30b-a3b-bf16",),
        description="Qwen3 30B with 3B active, 16-bit, 61 GB",
        architecture="Qwen3MoeForCausalLM", scheme=all_bf16, sources=("config.json of the repository", HF_CLASSES),
        config={
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
            "tie_word_embeddings": False, "dtype": "bfloat16", "rope_theta": 1e6, "use_sliding_window": False,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
    ),
)  # fmt: skip

# Qwen3.8-Flash-Next -------------------------------------------------------------------------------------------------

QWEN38 = {
    "model_type": "qwen4_exp",
    "text_config": {
        "model_type": "qwen4_exp_text", "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
        "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4,
        "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
        "tie_word_embeddings": False, "dtype": "bfloat16", "output_gate_type": "sigmoid", "eos_token_id": 248044,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
                      "out_hidden_size": 2560, "num_position_embeddings": 2304},
    "tie_word_embeddings": False,
}  # fmt: skip


def qwen38_nvfp4(name: str) -> str:
    if "ngram_embedding" in name:
        return "fp8_table"
    return experts_only("nvfp4")(name)


def qwen38_draft(shape: ModelShape) -> ModelShape:
    """The draft layer is what the published 16-bit files (14.91 GiB) hold beside the parts that are known."""
    known = sum(group.bytes for group in (shape.dense, shape.shared_experts, shape.embedding, shape.head, shape.vision))
    left = int(14.91 * 2**30) - known
    group = TensorGroup(bytes=left, elements=left // 2, tensors=1, by_format={"bf16": left})
    return shape.model_copy(update={"draft": group})


# gpt-oss, Mixtral ---------------------------------------------------------------------------------------------------


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "num_hidden_layers": layers, "num_local_experts": experts, "vocab_size": 201088,
        "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "tie_word_embeddings": False,
        "attention_bias": True, "dtype": "bfloat16",
    }  # fmt: skip


OTHER_CARDS = (
    Card(
        name="gpt-oss-20b", repo="openai/gpt-oss-20b", description="gpt-oss 20B with 3.6B active, MXFP4 experts, 13.8 GB",
        architecture="GptOssForCausalLM", config=gpt_oss(24, 32), scheme=experts_only("mxfp4"), is_stacked=True,
        is_transposed=True, sources=("config.json of the repository", HF_CLASSES),
    ),
    Card(
        name="gpt-oss-120b", repo="openai/gpt-oss-120b", description="gpt-oss 120B with 5.1B active, MXFP4 experts, 65 GB",
        architecture="GptOssForCausalLM", config=gpt_oss(36, 128), scheme=experts_only("mxfp4"), is_stacked=True,
        is_transposed=True, sources=("config.json of the repository", HF_CLASSES),
    ),
    Card(
        name="mixtral-8x7b", repo="mistralai/Mixtral-8x7B-Instruct-v0.1", aliases=("mixtral-8x7b-v0.1", "mistralai/mixtral-8x7b-v0.1"),
        description="Mixtral 8x7B, 16-bit, 93 GB", architecture="MixtralForCausalLM", scheme=all_bf16,
        sources=("config.json of the repository", HF_CLASSES),
        config={
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None,
            "tie_word_embeddings": False, "dtype": "bfloat16",
        },
    ),
    Card(
        name="gemma-4-26b-a4b", repo="google/gemma-4-26B-A4B-it", aliases=("gemma-4-26b", "google/gemma-4-26b-a4b"),
        description="Gemma 4 26B with 4B active, 16-bit", architecture="Gemma4ForConditionalGeneration", scheme=all_bf16,
        is_stacked=True, sources=("config.json facts in public test suites", HF_CLASSES),
        unverified=("the vision tower: 27 layers of 1152", "stacked experts in the published file"),
        config={
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704,
                "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
                "num_global_key_value_heads": 2, "global_head_dim": 512, "attention_k_eq_v": True, "vocab_size": 262144,
                "max_position_embeddings": 262144, "num_experts": 128, "top_k_experts": 8, "enable_moe_block": True,
                "sliding_window": 1024, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "tie_word_embeddings": True,
                "dtype": "bfloat16",
            },
            "vision_config": {
                "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72,
            },
            "tie_word_embeddings": True,
        },
    ),
    Card(
        name="nemotron-3-nano-30b-a3b", repo="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        aliases=("nemotron-30b-a3b", "nemotron-3-nano", "nvidia/nemotron-3-nano-30b-a3b"),
        description="Nemotron 3 Nano 30B with 3B active, 23 Mamba-2, 6 attention and 23 MoE layers, 16-bit",
        architecture="NemotronHForCausalLM", scheme=all_bf16,
        sources=("config.json facts in public test suites", HF_CLASSES),
        config={
            "model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
            "head_dim": 128, "vocab_size": 131072, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
            "n_groups": 8, "conv_kernel": 4, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856,
            "max_position_embeddings": 262144, "tie_word_embeddings": False, "dtype": "bfloat16",
            "layers_block_type": [
                {"M": "mamba", "E": "moe", "*": "full_attention"}[one]
                for one in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
            ],
        },
    ),
)  # fmt: skip

# GLM ----------------------------------------------------------------------------------------------------------------


def glm_draft(
    layer: int, hidden: int, inner: int, experts: int, vocab: int, attention: tuple[tuple[str, Shape], ...]
) -> tuple[tuple[str, Shape], ...]:
    """The layer behind the last one: a full MoE layer with a join, an embedding and a head of its own."""
    base = f"model.layers.{layer}"
    return (
        (f"{base}.embed_tokens.weight", (vocab, hidden)), (f"{base}.shared_head.head.weight", (vocab, hidden)),
        (f"{base}.eh_proj.weight", (hidden, 2 * hidden)), (f"{base}.mlp.gate.weight", (experts, hidden)),
        (f"{base}.mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)),
        (f"{base}.mlp.experts.down_proj", (experts, hidden, inner)),
        (f"{base}.mlp.shared_experts.gate_proj.weight", (inner, hidden)),
        (f"{base}.mlp.shared_experts.up_proj.weight", (inner, hidden)),
        (f"{base}.mlp.shared_experts.down_proj.weight", (hidden, inner)),
        *((f"{base}.self_attn.{name}.weight", shape) for name, shape in attention),
    )  # fmt: skip


GLM47 = {
    "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
    "max_position_embeddings": 202752, "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False,
    "dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
GLM47_ATTENTION = (
    ("q_proj", (12288, 5120)),
    ("k_proj", (1024, 5120)),
    ("v_proj", (1024, 5120)),
    ("o_proj", (5120, 12288)),
)
GLM52 = {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 154880,
    "max_position_embeddings": 202752, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "qk_nope_head_dim": 192, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
GLM53 = {
    "model_type": "glm5_next",
    "text_config": {
        "model_type": "glm5_next_text", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 154880,
        "max_position_embeddings": 1048576, "n_routed_experts": 288, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 0, "v_head_dim": 256, "qk_nope_head_dim": 256,
        "linear_head_dim": 128, "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "index_head_dim": 128,
        "index_n_heads": 32, "index_kpool": 16, "tie_word_embeddings": False, "dtype": "bfloat16",
        "layer_types": [*(["linear_attention"] * 3 + ["indexed_attention"]) * 11, "linear_attention"],
    },
    "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 4096},
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "vocab_size": 129280,
    "max_position_embeddings": 1048576, "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512, "tie_word_embeddings": False, "dtype": "bfloat16",
    "layer_types": ["heavily_compressed_attention"] * 2
    + ["compressed_sparse_attention" if one % 2 else "heavily_compressed_attention" for one in range(41)],
}  # fmt: skip


def deepseek_v4(name: str) -> str:
    """FP4 experts with e8m0 scales per 32; FP8 blocks of 128 x 128 on attention and shared experts; the rest 16-bit."""
    if is_expert(name):
        return "ds_fp4"
    parts = ("q_a_proj", "q_b_proj", "self_attn.kv_proj", "o_a_proj", "o_b_proj")
    is_block = "shared_experts." in name or name.endswith(tuple(f"{part}.weight" for part in parts))
    return "ds_fp8" if is_block else all_bf16(name)


BIG_CARDS = (
    Card(
        name="qwen3.8-flash-next-nvfp4", repo="RadixArk/Qwen3.8-Flash-Next-NVFP4",
        aliases=("qwen3.8-flash-next", "qwen3.8-flash", "nvidia/qwen3.8-flash-next-nvfp4"),
        description="Qwen3.8-Flash-Next 125B with 6B active, NVFP4 experts, and a 48 GiB n-gram table in FP8",
        architecture="Qwen4ExpForConditionalGeneration", config=QWEN38, scheme=qwen38_nvfp4,
        sources=("config.json facts in a public test suite", HF_CLASSES, "parts' sizes as read from the published headers"),
        unverified=("the vision tower is the Qwen3.5 family's", "the draft layer: what is left of the published 16-bit files"),
        finish=qwen38_draft,
    ),
    Card(
        name="glm-4.7", repo="zai-org/GLM-4.7", description="GLM-4.7 355B with 32B active, 16-bit",
        architecture="Glm4MoeForCausalLM", config=GLM47, scheme=all_bf16, sources=(HF_CLASSES, "GLM-4.6's configuration"),
        unverified=("dimensions beside the experts' 1536 x 5120 are those of GLM-4.6",),
        extra=glm_draft(92, 5120, 1536, 160, 151552, GLM47_ATTENTION),
    ),
    Card(
        name="glm-4.7-nvfp4", repo="nvidia/GLM-4.7-NVFP4", description="GLM-4.7 355B with 32B active, NVFP4 experts",
        architecture="Glm4MoeForCausalLM", config=GLM47, scheme=experts_only("nvfp4"),
        sources=(HF_CLASSES, "GLM-4.6's configuration"), expert_input_scales=True,
        unverified=("dimensions beside the experts' 1536 x 5120 are those of GLM-4.6", "which linears are quantised",
                    "whether the draft layer is in the file"),
    ),
    Card(
        name="glm-5.2-nvfp4", repo="nv-community/GLM-5.2-NVFP4", aliases=("glm-5.2",),
        description="GLM-5.2 744B with 40B active, sparse attention, NVFP4 experts",
        architecture="GlmMoeDsaForCausalLM", config=GLM52, scheme=experts_only("nvfp4"),
        sources=("defaults of the transformers 5.24 configuration class", HF_CLASSES),
        unverified=("all dimensions are the class's defaults", "which linears are quantised"),
    ),
    Card(
        name="glm-5.3-flash-nvfp4", repo="RedHatAI/GLM-5.3-Flash-NVFP4", aliases=("glm-5.3-flash",),
        description="GLM-5.3-Flash, linear and sparse attention, NVFP4 experts",
        architecture="Glm5NextForConditionalGeneration", config=GLM53, scheme=experts_only("nvfp4"),
        sources=("defaults of the transformers 5.24 configuration class", "expert size in the freetoken 0.2.1 slot table"),
        unverified=("all dimensions beside the experts' 2048 x 4096 are the class's defaults", "which linears are quantised"),
    ),
    Card(
        name="deepseek-v4-flash", repo="deepseek-ai/DeepSeek-V4-Flash", aliases=("deepseek-ai/deepseek-v4-flash-0731",),
        description="DeepSeek-V4-Flash, FP4 experts and FP8 attention, compressed KV",
        architecture="DeepseekV4ForCausalLM", config=DEEPSEEK_V4, scheme=deepseek_v4,
        sources=("defaults of the transformers 5.24 configuration class", "expert size in the freetoken 0.2.1 slot table"),
        unverified=("dimensions beside the experts' 2048 x 4096 are the class's defaults", "which linears are FP8",
                    "the draft layer is left out"),
    ),
)  # fmt: skip

CARDS = (*QWEN_CARDS, *OTHER_CARDS, *BIG_CARDS)
