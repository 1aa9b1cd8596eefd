"""Tiny random checkpoints, laid out on disk as the real ones of their families are, with a byte tokenizer.

`make_tiny_checkpoint(folder, family)` writes config.json, safetensors (two files and an index), a tokenizer with a
chat template and generation_config.json. Weights are large enough that routing and logits are not degenerate.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FAMILIES = ("qwen3_moe", "qwen3_5_moe", "mixtral", "olmoe", "gpt_oss", "qwen3_5_moe_nvfp4", "gpt_oss_mxfp4")
VOCAB = 320
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": VOCAB - len(SPECIALS) + 2,
    "pad_token_id": VOCAB - len(SPECIALS),
    "tie_word_embeddings": False,
}
EXPERTS, TOP_K, INTERMEDIATE = 8, 2, 32
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content is string %}{{- m.content }}{%- elif m.content %}"
    "{%- for c in m.content %}{%- if c.type == 'text' %}{{- c.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tiny_checkpoint(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, tie: bool = False
) -> Path:
    """Write a checkpoint of `family` (one of `FAMILIES`) into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = _MAKERS[family](torch.Generator().manual_seed(seed), dtype, tie)
    config["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", config)
    _write_shards(folder, tensors)
    write_tokenizer(folder)
    eos = [_COMMON["eos_token_id"], _COMMON["pad_token_id"]]
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos[1], "do_sample": False})
    return folder


# ---------------------------------------------------------------------- tensors


class Weights:
    """Named random tensors. Matrices keep a signal's size: their entries have a deviation of inputs ** -0.5."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype) -> None:
        self._generator, self._dtype = generator, dtype
        self.tensors: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, *shape: int, inputs: int | None = None, gain: float = 1.0) -> None:
        std = gain * (inputs or shape[-1]) ** -0.5
        self.tensors[name] = (torch.randn(shape, generator=self._generator) * std).to(self._dtype)

    def vector(self, name: str, size: int, mean: float, std: float = 0.1, dtype: torch.dtype | None = None) -> None:
        self.tensors[name] = (mean + torch.randn(size, generator=self._generator) * std).to(dtype or self._dtype)

    def fp8(self, name: str, rows: int, cols: int) -> None:
        codes = torch.randn(rows, cols, generator=self._generator).to(torch.float8_e4m3fn)
        self.tensors |= {
            f"{name}.weight": codes,
            f"{name}.weight_scale": torch.tensor(cols**-0.5),
            f"{name}.input_scale": torch.tensor(0.02),
        }

    def nvfp4(self, name: str, rows: int, cols: int) -> None:
        scales = torch.rand(rows, cols // 16, generator=self._generator) * 300 + 128
        self.tensors |= {
            f"{name}.weight": torch.randint(0, 256, (rows, cols // 2), generator=self._generator, dtype=torch.uint8),
            f"{name}.weight_scale": scales.to(torch.float8_e4m3fn),
            f"{name}.weight_scale_2": (cols**-0.5 / 800) * (1 + torch.rand((), generator=self._generator)),
        }

    def mxfp4(self, name: str, experts: int, rows: int, cols: int) -> None:
        shape = (experts, rows, cols // 32, 16)
        self.tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=self._generator, dtype=torch.uint8)
        exponents = torch.randint(122, 125, shape[:3], generator=self._generator, dtype=torch.uint8)
        self.tensors[f"{name}_scales"] = exponents


def _attention(w: Weights, name: str, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
    w.matrix(f"{name}.q_proj.weight", heads * head_dim, hidden)
    w.matrix(f"{name}.k_proj.weight", kv_heads * head_dim, hidden)
    w.matrix(f"{name}.v_proj.weight", kv_heads * head_dim, hidden)
    w.matrix(f"{name}.o_proj.weight", hidden, heads * head_dim)


def _ends(w: Weights, root: str, hidden: int, tie: bool, mean: float) -> None:
    w.matrix(f"{root}.embed_tokens.weight", VOCAB, hidden, gain=1.0 if tie else 4.0)
    w.vector(f"{root}.norm.weight", hidden, mean)
    if not tie:
        w.matrix("lm_head.weight", VOCAB, hidden)


def _expert_mlps(
    w: Weights, name: str, hidden: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> None:
    for expert in range(EXPERTS):
        for part in names[:2]:
            w.matrix(f"{name}.{expert}.{part}.weight", INTERMEDIATE, hidden)
        w.matrix(f"{name}.{expert}.{names[2]}.weight", hidden, INTERMEDIATE)


def _qwen3_moe(
    generator: torch.Generator, dtype: torch.dtype, tie: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    w, hidden = Weights(generator, dtype), 64
    _ends(w, "model", hidden, tie, 1.0)
    for layer in range(4):
        b = f"model.layers.{layer}"
        _attention(w, f"{b}.self_attn", hidden, 4, 2, 16)
        for norm in ("q_norm", "k_norm"):
            w.vector(f"{b}.self_attn.{norm}.weight", 16, 1.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w.vector(f"{b}.{norm}.weight", hidden, 1.0)
        w.matrix(f"{b}.mlp.gate.weight", EXPERTS, hidden, gain=2.0)
        _expert_mlps(w, f"{b}.mlp.experts", hidden)
    config = _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, "intermediate_size": 128,
        "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 10000.0,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": tie,
    }  # fmt: skip
    return config, w.tensors


def _olmoe(generator: torch.Generator, dtype: torch.dtype, tie: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    w, hidden = Weights(generator, dtype), 64
    _ends(w, "model", hidden, tie, 1.0)
    for layer in range(4):
        b = f"model.layers.{layer}"
        _attention(w, f"{b}.self_attn", hidden, 4, 4, 16)
        for norm in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            w.vector(f"{b}.{norm}.weight", hidden, 1.0)
        w.matrix(f"{b}.mlp.gate.weight", EXPERTS, hidden, gain=2.0)
        _expert_mlps(w, f"{b}.mlp.experts", hidden)
    config = _COMMON | {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "intermediate_size": INTERMEDIATE,
        "num_key_value_heads": 4, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "clip_qkv": None, "tie_word_embeddings": tie,
    }  # fmt: skip
    return config, w.tensors


def _mixtral(
    generator: torch.Generator, dtype: torch.dtype, tie: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    w, hidden = Weights(generator, dtype), 64
    _ends(w, "model", hidden, tie, 1.0)
    for layer in range(4):
        b = f"model.layers.{layer}"
        _attention(w, f"{b}.self_attn", hidden, 4, 2, 16)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w.vector(f"{b}.{norm}.weight", hidden, 1.0)
        w.matrix(f"{b}.block_sparse_moe.gate.weight", EXPERTS, hidden, gain=2.0)
        _expert_mlps(w, f"{b}.block_sparse_moe.experts", hidden, ("w1", "w3", "w2"))
    config = _COMMON | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": None, "head_dim": 16, "tie_word_embeddings": tie,
    }  # fmt: skip
    return config, w.tensors


def _gpt_oss(
    generator: torch.Generator, dtype: torch.dtype, tie: bool, packed: bool = False
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    w, hidden = Weights(generator, dtype), 64
    _ends(w, "model", hidden, tie, 1.0)
    for layer in range(4):
        b = f"model.layers.{layer}"
        _attention(w, f"{b}.self_attn", hidden, 4, 2, 16)
        for part, size in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", hidden)):
            w.vector(f"{b}.self_attn.{part}.bias", size, 0.0)
        w.vector(f"{b}.self_attn.sinks", 4, 0.0, 1.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w.vector(f"{b}.{norm}.weight", hidden, 1.0)
        w.matrix(f"{b}.mlp.router.weight", EXPERTS, hidden, gain=2.0)
        w.vector(f"{b}.mlp.router.bias", EXPERTS, 0.0)
        experts = f"{b}.mlp.experts"
        if packed:
            w.mxfp4(f"{experts}.gate_up_proj", EXPERTS, 2 * INTERMEDIATE, hidden)
            w.mxfp4(f"{experts}.down_proj", EXPERTS, hidden, INTERMEDIATE)
        else:
            w.matrix(f"{experts}.gate_up_proj", EXPERTS, hidden, 2 * INTERMEDIATE, inputs=hidden)
            w.matrix(f"{experts}.down_proj", EXPERTS, INTERMEDIATE, hidden, inputs=INTERMEDIATE)
        w.matrix(f"{experts}.gate_up_proj_bias", EXPERTS, 2 * INTERMEDIATE)
        w.matrix(f"{experts}.down_proj_bias", EXPERTS, hidden)
    config = _COMMON | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "experts_per_token": TOP_K, "head_dim": 16,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 16, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "swiglu_limit": 7.0, "tie_word_embeddings": tie,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 512},
    }  # fmt: skip
    if packed:
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn"],
        }
    return config, w.tensors


def _qwen3_5_moe(
    generator: torch.Generator, dtype: torch.dtype, tie: bool, packed: bool = False
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    w, hidden, root = Weights(generator, dtype), 64, "model.language_model"
    kinds = ["linear_attention", "full_attention"] * 2
    matrix: Callable[[str, int, int], None] = w.fp8 if packed else lambda n, o, i: w.matrix(f"{n}.weight", o, i)
    mlp: Callable[[str, int, int], None] = w.nvfp4 if packed else lambda n, o, i: w.matrix(f"{n}.weight", o, i)
    w.matrix(f"{root}.embed_tokens.weight", VOCAB, hidden, gain=1.0 if tie else 4.0)
    w.vector(f"{root}.norm.weight", hidden, 0.0)
    if not tie:
        mlp("lm_head", VOCAB, hidden)
    for layer, kind in enumerate(kinds):
        b = f"{root}.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w.vector(f"{b}.{norm}.weight", hidden, 0.0)
        if kind == "full_attention":
            for part, rows, cols in (("q_proj", 128, 64), ("k_proj", 32, 64), ("v_proj", 32, 64), ("o_proj", 64, 64)):
                matrix(f"{b}.self_attn.{part}", rows, cols)
            for norm in ("q_norm", "k_norm"):
                w.vector(f"{b}.self_attn.{norm}.weight", 16, 0.0)
        else:
            t = f"{b}.linear_attn"  # 2 key heads and 4 value heads of 16
            for part, rows in (("in_proj_qkv", 128), ("in_proj_z", 64)):
                matrix(f"{t}.{part}", rows, hidden)
            for part in ("in_proj_b", "in_proj_a"):
                w.matrix(f"{t}.{part}.weight", 4, hidden)
            w.matrix(f"{t}.conv1d.weight", 128, 1, 4)
            w.vector(f"{t}.A_log", 4, -2.0, 0.3, torch.float32)
            w.vector(f"{t}.dt_bias", 4, 1.0)
            w.vector(f"{t}.norm.weight", 16, 1.0)
            matrix(f"{t}.out_proj", hidden, 64)
        m = f"{b}.mlp"
        w.matrix(f"{m}.gate.weight", EXPERTS, hidden, gain=2.0)
        w.matrix(f"{m}.shared_expert_gate.weight", 1, hidden)
        for part, rows, cols in (("gate_proj", 32, hidden), ("up_proj", 32, hidden), ("down_proj", hidden, 32)):
            mlp(f"{m}.shared_expert.{part}", rows, cols)
        if packed:
            for expert in range(EXPERTS):
                for part, rows, cols in (("gate_proj", 32, hidden), ("up_proj", 32, hidden), ("down_proj", hidden, 32)):
                    w.nvfp4(f"{m}.experts.{expert}.{part}", rows, cols)
        else:
            w.matrix(f"{m}.experts.gate_up_proj", EXPERTS, 2 * INTERMEDIATE, hidden)
            w.matrix(f"{m}.experts.down_proj", EXPERTS, hidden, INTERMEDIATE)
    w.matrix("model.visual.patch_embed.proj.weight", 16, 3, 2, 4, 4)  # a text engine passes these two by
    w.matrix("mtp.fc.weight", hidden, 2 * hidden)
    text = _COMMON | {
        "model_type": "qwen3_5_moe_text", "head_dim": 16, "moe_intermediate_size": INTERMEDIATE,
        "shared_expert_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "layer_types": kinds, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "attn_output_gate": True, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "attention_bias": False, "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": tie,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                            "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": tie,
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5_moe_vision", "depth": 1, "hidden_size": 16, "out_hidden_size": hidden},
    }
    if packed:
        algorithms = {
            name.removesuffix(".weight_scale"): {
                "quant_algo": "FP8" if f"{name}_2" not in w.tensors else "W4A16_NVFP4",
                "group_size": 16,
            }
            for name in w.tensors
            if name.endswith(".weight_scale") and ".experts." not in name
        }
        algorithms |= {
            f"{root}.layers.{n}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for n in range(4)
        }
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": algorithms,
        }
    return config, w.tensors


_MAKERS: dict[str, Callable[[torch.Generator, torch.dtype, bool], tuple[dict[str, Any], dict[str, torch.Tensor]]]] = {
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "gpt_oss_mxfp4": lambda generator, dtype, tie: _gpt_oss(generator, dtype, tie, packed=True),
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_nvfp4": lambda generator, dtype, tie: _qwen3_5_moe(generator, dtype, tie, packed=True),
}


# ---------------------------------------------------------------------- files


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, chosen in files.items():
        save_file({name: tensors[name].contiguous() for name in chosen}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, chosen in files.items() for name in chosen}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_tokenizer(folder: Path) -> None:
    """A byte tokenizer (one token a byte, every id decodes) with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    for number in range(len(alphabet), VOCAB - len(SPECIALS)):
        vocabulary[f"Ġw{number}"] = number
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
