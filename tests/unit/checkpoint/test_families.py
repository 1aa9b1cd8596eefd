"""One pattern engine for all families: which part each tensor belongs to, and in which format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freetoken.checkpoint.header import read_shape
from freetoken.checkpoint.names import find_role, has_layer, split_name
from freetoken.checkpoint.shape import ModelShape
from freetoken.errors import BadFileError
from tests.fakes.checkpoints import qwen3_moe_config, qwen3_moe_tensors, write_checkpoint


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> ModelShape:
    return read_shape(write_checkpoint(folder / "model", config, tensors))


def test_a_name_is_split_at_its_numbers() -> None:
    assert split_name("model.layers.12.mlp.experts.7.w1.weight") == ("model.layers.#.mlp.experts.#.w1.weight", (12, 7))
    assert split_name("blk.3.ffn_up_exps.weight") == ("blk.#.ffn_up_exps.weight", (3,))
    assert split_name("lm_head.weight_scale_2") == ("lm_head.weight_scale_2", ())


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("model.layers.#.mlp.experts.#.gate_proj.weight", "expert"),
        ("model.layers.#.mlp.experts.gate_up_proj_blocks", "expert"),
        ("model.layers.#.block_sparse_moe.experts.#.w1.weight", "expert"),
        ("backbone.layers.#.mixer.experts.#.up_proj.weight", "expert"),
        ("layers.#.ffn.experts.#.w3.scale", "expert"),
        ("model.language_model.layers.#.experts.down_proj", "expert"),
        ("blk.#.ffn_gate_exps.weight", "expert"),
        ("model.layers.#.mlp.shared_experts.up_proj.weight", "shared"),
        ("model.layers.#.mlp.shared_expert.down_proj.weight", "shared"),
        ("backbone.layers.#.mixer.shared_experts.up_proj.weight", "shared"),
        ("blk.#.ffn_down_shexp.weight", "shared"),
        ("model.layers.#.mlp.shared_expert_gate.weight", "dense"),
        ("model.layers.#.mlp.gate.e_score_correction_bias", "dense"),
        ("model.layers.#.mlp.router.weight", "dense"),
        ("model.layers.#.self_attn.sinks", "dense"),
        ("model.language_model.layers.#.router.per_expert_scale", "dense"),
        ("model.language_model.layers.#.layer_scalar", "dense"),
        ("model.language_model.layers.#.attn_hyper_connection.input_mix_weight_up.weight", "dense"),
        ("layers.#.hc_attn_fn", "dense"),
        ("blk.#.ssm_conv1d.weight", "dense"),
        ("blk.#.exp_probs_b.bias", "dense"),
        ("backbone.layers.#.mixer.A_log", "dense"),
        ("backbone.norm_f.weight", "dense"),
        ("output_norm.weight", "dense"),
        ("model.language_model.embed_tokens.weight", "embedding"),
        ("backbone.embeddings.weight", "embedding"),
        ("token_embd.weight", "embedding"),
        ("embed.weight", "embedding"),
        ("lm_head.weight_scale", "head"),
        ("output.weight", "head"),
        ("head.weight", "head"),
        ("model.language_model.embed_tokens_per_layer.weight", "side"),
        ("model.language_model.layers.#.ple.ple_embedding.ngram_embedding.shard_0.weight", "side"),
        ("per_layer_token_embd.weight", "side"),
        ("model.visual.blocks.#.attn.qkv.weight", "vision"),
        ("model.vision_tower.encoder.layers.#.self_attn.q_proj.linear.weight", "vision"),
        ("multi_modal_projector.linear_1.weight", "vision"),
        ("model.embed_vision.embedding_projection.weight", "vision"),
        ("mtp.layers.#.mlp.experts.#.up_proj.weight", "draft"),
        ("blk.#.nextn.eh_proj.weight", "draft"),
        ("model.layers.#.flux_capacitor", "unknown"),
    ],
)
def test_the_role_of_a_tensor_follows_from_its_name(template: str, role: str) -> None:
    assert find_role(template) == role


def test_a_vision_layer_is_not_a_layer_of_the_text_model() -> None:
    assert has_layer("model.layers.#.mlp.gate.weight")
    assert not has_layer("model.foo.#.layers.#.weight")


def test_qwen3_moe_has_plain_experts_and_its_own_head(tmp_path: Path) -> None:
    shape = read(tmp_path, qwen3_moe_config(), qwen3_moe_tensors())
    assert (shape.experts.layers, shape.experts.per_layer, shape.experts.expert_bytes) == (2, 4, 3 * 32 * 64 * 2)
    assert (shape.embedding.bytes, shape.head.bytes, shape.tie_embeddings) == (12_800, 12_800, False)
    assert (shape.quantization, shape.dtype, shape.notes) == ("none", "bf16", ())
    assert shape.kv_bytes_per_token() == 2 * 2 * 16 * 2 * 2


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    tensors = {name: one for name, one in qwen3_moe_tensors().items() if ".experts." not in name}
    shape = read(tmp_path, qwen3_moe_config(num_experts=None, num_experts_per_tok=None, model_type="qwen3"), tensors)
    assert (shape.experts.count, shape.experts.bank_bytes, shape.experts.layer_ids) == (0, 0, ())


def test_mixtral_names_its_matrices_w1_w2_w3(tmp_path: Path) -> None:
    config = qwen3_moe_config(model_type="mixtral", num_experts=None, num_local_experts=8, moe_intermediate_size=None)
    config |= {"intermediate_size": 128, "sliding_window": None}
    tensors = {name: one for name, one in qwen3_moe_tensors().items() if ".mlp." not in name}
    for layer in range(2):
        base = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{base}.gate.weight"] = ("BF16", (8, 64))
        for expert in range(8):
            tensors |= {f"{base}.experts.{expert}.{name}.weight": ("BF16", (128, 64)) for name in ("w1", "w3")}
            tensors[f"{base}.experts.{expert}.w2.weight"] = ("BF16", (64, 128))
    experts = read(tmp_path, config, tensors).experts
    assert (experts.per_layer, experts.intermediate_size, experts.projections, experts.format) == (8, 128, 3, "bf16")
    assert experts.expert_bytes == 3 * 128 * 64 * 2


def test_gpt_oss_has_stacked_mxfp4_blocks_with_biases_and_a_sliding_window(tmp_path: Path) -> None:
    config = qwen3_moe_config(model_type="gpt_oss", num_experts=None, num_local_experts=4, moe_intermediate_size=None)
    config |= {"intermediate_size": 64, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    tensors = {name: one for name, one in qwen3_moe_tensors().items() if ".mlp." not in name}
    for layer in range(2):
        base = f"model.layers.{layer}"
        tensors |= {
            f"{base}.self_attn.sinks": ("BF16", (4,)),
            f"{base}.mlp.router.weight": ("BF16", (4, 64)),
            f"{base}.mlp.router.bias": ("BF16", (4,)),
            f"{base}.mlp.experts.gate_up_proj_blocks": ("U8", (4, 128, 2, 16)),
            f"{base}.mlp.experts.gate_up_proj_scales": ("U8", (4, 128, 2)),
            f"{base}.mlp.experts.gate_up_proj_bias": ("BF16", (4, 128)),
            f"{base}.mlp.experts.down_proj_blocks": ("U8", (4, 64, 2, 16)),
            f"{base}.mlp.experts.down_proj_scales": ("U8", (4, 64, 2)),
            f"{base}.mlp.experts.down_proj_bias": ("BF16", (4, 64)),
        }
    shape = read(tmp_path, config, tensors)
    experts = shape.experts
    assert (experts.format, experts.has_bias, experts.is_stacked, experts.intermediate_size) == (
        "mxfp4",
        True,
        True,
        64,
    )
    assert experts.expert_bytes == 128 * 34 + 128 * 2 + 64 * 34 + 64 * 2
    assert shape.attention.kinds == ("sliding", "full")
    assert shape.attention.sliding_window == 128


def test_deepseek_has_mla_shared_experts_dense_first_layers_and_a_draft_layer_behind_the_last(tmp_path: Path) -> None:
    config = qwen3_moe_config(model_type="deepseek_v3", num_experts=None, n_routed_experts=4, n_shared_experts=1)
    config |= {"num_hidden_layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "index_head_dim": 16}
    full = qwen3_moe_tensors(layers=3)
    tensors = {name: one for name, one in full.items() if "layers.0.mlp" not in name}
    tensors["model.layers.0.mlp.gate_proj.weight"] = ("BF16", (96, 64))
    tensors["model.layers.1.mlp.shared_experts.up_proj.weight"] = ("BF16", (32, 64))
    tensors["model.layers.2.eh_proj.weight"] = ("BF16", (64, 128))
    shape = read(tmp_path, config, tensors)
    assert (shape.experts.layer_ids, shape.experts.layers) == ((1,), 1)
    assert shape.shared_experts.bytes == 32 * 64 * 2
    assert shape.attention.kinds == ("mla", "mla")
    assert shape.kv_bytes_per_token() == 2 * 2 * (40 + 16)
    layer = sum(shape_bytes(one) for name, one in full.items() if "layers.2." in name)
    assert shape.draft.bytes == layer + 64 * 128 * 2


def shape_bytes(one: tuple[str, tuple[int, ...]]) -> int:
    size = 2
    for dim in one[1]:
        size *= dim
    return size


def test_gemma_4_has_two_kinds_of_attention_and_tied_embeddings(tmp_path: Path) -> None:
    config = qwen3_moe_config(model_type="gemma4_text", global_head_dim=32, num_global_key_value_heads=1)
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1024, "top_k_experts": 2}
    tensors = {name: one for name, one in qwen3_moe_tensors().items() if ".mlp." not in name and "lm_head" not in name}
    for layer in range(2):
        base = f"model.layers.{layer}"
        tensors |= {
            f"{base}.experts.gate_up_proj": ("BF16", (4, 64, 64)),
            f"{base}.experts.down_proj": ("BF16", (4, 64, 32)),
            f"{base}.router.proj.weight": ("BF16", (4, 64)),
            f"{base}.router.per_expert_scale": ("BF16", (4,)),
            f"{base}.mlp.gate_proj.weight": ("BF16", (48, 64)),
        }
    shape = read(tmp_path, config, tensors)
    assert (shape.tie_embeddings, shape.head.bytes, shape.notes) == (True, 0, ())
    assert shape.kv_bytes_per_token() == 2 * 2 * (1 * 32 + 2 * 16)
    assert (shape.experts.expert_bytes, shape.experts.is_stacked) == (3 * 32 * 64 * 2, True)


def test_nemotron_h_has_experts_of_two_matrices_and_mamba_state(tmp_path: Path) -> None:
    config = qwen3_moe_config(model_type="nemotron_h", num_experts=None, n_routed_experts=4)
    config |= {
        "num_hidden_layers": None, "hybrid_override_pattern": "ME*", "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4,
    }  # fmt: skip
    tensors: dict[str, Any] = {
        "backbone.embeddings.weight": ("BF16", (100, 64)),
        "backbone.norm_f.weight": ("BF16", (64,)),
        "lm_head.weight": ("BF16", (100, 64)),
        "backbone.layers.0.mixer.in_proj.weight": ("BF16", (200, 64)),
        "backbone.layers.1.mixer.gate.weight": ("F32", (4, 64)),
        "backbone.layers.1.mixer.shared_experts.up_proj.weight": ("BF16", (32, 64)),
        "backbone.layers.2.mixer.q_proj.weight": ("BF16", (64, 64)),
    }
    for expert in range(4):
        tensors[f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight"] = ("BF16", (32, 64))
        tensors[f"backbone.layers.1.mixer.experts.{expert}.down_proj.weight"] = ("BF16", (64, 32))
    shape = read(tmp_path, config, tensors)
    assert (shape.layers, shape.attention.kinds) == (3, ("mamba", "none", "full"))
    assert (shape.experts.projections, shape.experts.intermediate_size, shape.experts.layer_ids) == (2, 32, (1,))
    assert shape.state_bytes_per_sequence() == (64 + 2 * 2 * 8) * 3 * 2 + 64 * 8 * 4
    assert shape.kv_bytes_per_token() == 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("companions", "weight", "expected"),
    [
        ({".weight_scale_inv": ("BF16", (1, 1))}, "F8_E4M3", "fp8_block"),
        ({".weight_scale": ("F32", ())}, "F8_E4M3", "fp8"),
        ({".weight_scale": ("F32", (32, 1))}, "F8_E4M3", "fp8"),
        ({".weight_scale": ("U8", (32, 2))}, "F8_E4M3", "mxfp8"),
        ({".scale": ("F8_E8M0", (32, 2))}, "I8", "ds_fp4"),
        ({".weight_scale": ("F8_E4M3", (32, 4)), ".weight_scale_2": ("F32", ())}, "U8", "nvfp4"),
        ({".weight_scale": ("U8", (32, 2))}, "U8", "mxfp4"),
        ({}, "U8", "unknown"),
        ({}, "F16", "f16"),
    ],
)
def test_the_format_follows_from_dtype_and_companions(
    tmp_path: Path, companions: dict[str, Any], weight: str, expected: str
) -> None:
    tensors = {name: one for name, one in qwen3_moe_tensors().items() if ".experts." not in name}
    for layer in range(2):
        for expert in range(4):
            for part in ("gate", "up", "down"):
                base = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
                tensors[f"{base}.weight"] = (weight, (32, 64))
                tensors |= {base + suffix: one for suffix, one in companions.items()}
    assert read(tmp_path, qwen3_moe_config(hidden_size=64), tensors).experts.format == expected


def test_compressed_tensors_nvfp4_is_the_same_format(tmp_path: Path) -> None:
    tensors = {name: one for name, one in qwen3_moe_tensors().items() if ".experts." not in name}
    for layer in range(2):
        for expert in range(4):
            for part, (out, width) in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
                base = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
                tensors |= {
                    f"{base}.weight_packed": ("U8", (out, width // 2)),
                    f"{base}.weight_scale": ("F8_E4M3", (out, width // 16)),
                    f"{base}.weight_global_scale": ("F32", (1,)),
                    f"{base}.input_global_scale": ("F32", (1,)),
                }
    experts = read(tmp_path, qwen3_moe_config(), tensors).experts
    assert (experts.format, experts.has_input_scale, experts.intermediate_size) == ("nvfp4", True, 32)


def test_unknown_tensors_are_dense_and_listed(tmp_path: Path) -> None:
    tensors = qwen3_moe_tensors() | {"model.layers.1.flux_capacitor": ("F32", (10,))}
    shape = read(tmp_path, qwen3_moe_config(), tensors)
    assert shape.notes == (
        "1 tensors (40 bytes) of unknown purpose are counted as dense: `model.layers.#.flux_capacitor`",
    )
    assert shape.dense.by_format["f32"] == 40


def test_experts_that_config_does_not_expect_are_refused(tmp_path: Path) -> None:
    tensors = qwen3_moe_tensors()
    del tensors["model.layers.1.mlp.experts.3.gate_proj.weight"]
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    with pytest.raises(BadFileError, match=r"model: layer 1 has 3 routed experts in its tensors, expected 4"):
        read(tmp_path, qwen3_moe_config(), tensors)
    plain = {name: one for name, one in tensors.items() if ".experts." not in name}
    with pytest.raises(BadFileError, match=r"config.json says 4 experts, no tensor is named as one"):
        read(tmp_path / "b", qwen3_moe_config(), plain)


def test_linear_attention_is_told_from_the_tensors_and_needs_its_heads(tmp_path: Path) -> None:
    tensors = qwen3_moe_tensors() | {"model.layers.0.linear_attn.A_log": ("F32", (4,))}
    with pytest.raises(BadFileError, match=r"linear attention, but config.json does not give linear_num_key_heads"):
        read(tmp_path, qwen3_moe_config(), tensors)
