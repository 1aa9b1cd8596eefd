"""What a tensor is for, told from its name: one ordered table of patterns for all families.

A name is split at its numbers into a template (`model.layers.#.mlp.experts.#.up_proj.weight`) and its indices, and the
patterns see the template alone, so that 93,275 names become about forty decisions. The first pattern that matches
wins. What none knows goes to the dense part and is reported, since that is where an unknown tensor does least harm:
it is counted as resident, never as streamed.

Set aside: one table a family. It reads more exactly, but every new family would need code before `ft plan` says a word.
"""

from __future__ import annotations

import re
from typing import Literal

Role = Literal["expert", "shared", "embedding", "head", "vision", "draft", "side", "dense", "unknown"]

_NUMBER = re.compile(r"(?:(?<=\.)|^)(\d+)(?=\.|$)")

_RULES: tuple[tuple[str, Role], ...] = (
    # Draft layers (multi-token prediction) hold experts and heads of their own, so they come first.
    (r"(^|\.)(mtp|nextn|eagle\d*|draft_model|mtp_block|multi_token_predictor)(\.|_|$)", "draft"),
    # Encoders and what joins them to the text model.
    (
        r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|vision|vit|vpm|audio_tower|audio_encoder|audio_model"
        r"|multi_modal_projector|mm_projector|merger|resampler|embed_vision|embed_audio|image_newline|patch_merger"
        r"|patch_embed|sound_encoder|radio_model|mlp1)(\.|$)",
        "vision",
    ),
    (r"^(v|mm|a)\.", "vision"),  # a GGUF projector
    # Routed experts: one set a layer and expert, or all experts of a layer stacked in one tensor.
    (r"(^|\.)experts\.(#\.|gate_up_proj|gate_proj|up_proj|down_proj|w[123]\b|mlp\.w[123]|switch_)", "expert"),
    (r"(^|\.)ffn_(gate|up|down|gate_up)_exps(\.|$)", "expert"),
    (r"(^|\.)shared_expert_gate(\.|$)|(^|\.)ffn_gate_inp_shexp(\.|$)", "dense"),
    (r"(^|\.)(shared_experts?|shared_mlp|shared_expert_mlp)(\.|$)|(^|\.)ffn_(gate|up|down)_shexp(\.|$)", "shared"),
    # Tables that are looked up by token id in a layer of their own.
    (r"(^|\.)(ple_embedding\.\w|embed_tokens_per_layer|per_layer_(token_)?embd?\w*|engram\w*|ngram_embed\w*)", "side"),
    (r"(^|\.)(embed_tokens|(word_|tok_)?embeddings?|embed_in|wte|token_embd)(\.|$)|^embed\.", "embedding"),
    (r"(^|\.)(lm_head|embed_out)(\.|$)|^(head|output)\.(weight|scale|bias)", "head"),
    # The dense part: attention of every kind, norms, routers, plain feed-forward blocks, and their companions.
    (
        r"(^|\.)(self_attn|attn|attention|linear_attn|self_attention|cross_attn|mixer|mamba|temporal_block|conv1d|conv"
        r"|mlp|ffn|feed_forward|ple|scorer|block_sparse_moe|moe|router|gate|indexer|compressor|rotary_emb|attn_sinks"
        r"|sinks)(\.|$)",
        "dense",
    ),
    (r"(^|\.)\w*(norm|layernorm|ln_f|ln_\d)\w*(\.|$)", "dense"),
    (
        r"(^|\.)(per_layer_\w+|layer_scalar|laurel|altup\w*|hc_\w+|\w*_hc|\w*hyper_connection\w*|enorm|hnorm|eh_proj"
        r"|\w*bias|\w*scale|\w*_multiplier)(\.|$)",
        "dense",
    ),
    (r"^(blk\.#\.)(attn|ssm|ffn|indexer|exp_probs|post|layer)\w*", "dense"),
    (r"^(output_norm|rope_freqs|token_types|output_hc\w*)", "dense"),
)
_COMPILED = tuple((re.compile(pattern), role) for pattern, role in _RULES)


def split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """The template of `name`, its numbers replaced by `#`, and the numbers: `a.3.b` → (`a.#.b`, (3,))."""
    parts = _NUMBER.split(name)
    return "#".join(parts[::2]), tuple(map(int, parts[1::2]))


def find_role(template: str) -> Role:
    """What tensors of this template are for; `unknown` where no pattern knows it."""
    for pattern, role in _COMPILED:
        if pattern.search(template):
            return role
    return "unknown"


_LAYER = re.compile(r"(^|\.)(layers|h|blocks|block|blk)\.#(\.|$)")


def has_layer(template: str) -> bool:
    """Whether the first number of the template is the index of a layer of the text model."""
    match = _LAYER.search(template)
    return match is not None and "#" not in template[: match.start()]


#: Companion tensors of a quantised weight, longest suffix first: the suffix, and what stands for it in the weight.
COMPANIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("_blocks_scale_inv", ("_blocks",)),
    (".weight_scale_inv", (".weight",)),
    (".weight_scale_2", (".weight",)),
    (".weight_global_scale", (".weight_packed", ".weight")),
    (".input_global_scale", (".weight_packed", ".weight")),
    (".weight_zero_point", (".weight_packed", ".weight")),
    (".weight_shape", (".weight_packed",)),
    (".weight_scale", (".weight_packed", ".weight")),
    (".input_scale", (".weight_packed", ".weight")),
    (".activation_scale", (".weight",)),
    ("_weight_scale_inv", ("", "_weight")),
    ("_weight_scale_2", ("", "_weight")),
    ("_weight_scale", ("", "_weight")),
    ("_scale_inv", ("",)),
    ("_input_scale", ("",)),
    ("_scales", ("_blocks",)),
    (".scales", (".qweight", ".weight")),
    (".qzeros", (".qweight",)),
    (".g_idx", (".qweight",)),
    (".scale", (".weight",)),
    ("_scale", ("",)),
)


def find_weight(template: str, templates: frozenset[str]) -> tuple[str, str] | None:
    """The weight whose companion `template` is, and the suffix that says so; None for a weight itself."""
    for suffix, stands_for in COMPANIONS:
        if template.endswith(suffix):
            base = template[: -len(suffix)]
            for ending in stands_for:
                if base + ending in templates:
                    return base + ending, suffix
    return None
