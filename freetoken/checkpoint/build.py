"""`ModelShape` from a `TensorTable` and `ConfigFacts`: which bytes belong together, and in which format they are.

Where the configuration and the tensors disagree on what exists, the tensors win and a note says so; where they cannot
both be true of one model (255 experts of 256), the checkpoint is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from freetoken.checkpoint.config import ConfigFacts
from freetoken.checkpoint.names import find_weight
from freetoken.checkpoint.shape import (
    Attention,
    AttentionKind,
    Experts,
    Format,
    ModelShape,
    Shard,
    TensorGroup,
)
from freetoken.checkpoint.table import TensorClass, TensorTable
from freetoken.errors import BadFileError

_FORMATS = frozenset(get_args(Format))
_FLOATS: dict[str, Format] = {"F32": "f32", "F64": "f32", "BF16": "bf16", "F16": "f16"}
_DTYPES: dict[str, Format] = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32"}
#: A second format below this share of a group's bytes does not make it `mixed`: norms beside projections.
MIXED_RATIO = 0.1


class Sorter:
    """Tells the storage format and the logical elements of each tensor class, companions counted with their weight."""

    def __init__(self, table: TensorTable) -> None:
        self.classes = tuple(table.classes.values())
        templates = frozenset(one.template for one in self.classes)
        self._weight_of: dict[str, str] = {}
        self._companions: dict[str, dict[str, TensorClass]] = {}
        for one in self.classes:
            if found := find_weight(one.template, templates):
                self._weight_of[one.template] = found[0]
                self._companions.setdefault(found[0], {})[found[1]] = one
        self._by_template: dict[str, list[TensorClass]] = {}
        for one in self.classes:
            self._by_template.setdefault(one.template, []).append(one)

    def is_companion(self, one: TensorClass) -> bool:
        """Whether `one` holds scales or the like of another tensor."""
        return one.template in self._weight_of

    def find_format(self, one: TensorClass) -> str:
        """The storage format of `one`: a `Format`, or the name of a ggml type; that of its weight for a companion."""
        if one.dtype.startswith("ggml:"):
            return one.dtype.removeprefix("ggml:")
        if (weight := self._weight_of.get(one.template)) is not None:
            formats = [self.find_format(other) for other in self._by_template[weight]]
            return next((each for each in formats if each not in ("bf16", "f16", "f32")), formats[0])
        if one.dtype in _FLOATS:
            return _FLOATS[one.dtype]
        companions = self._companions.get(one.template, {})
        if one.dtype in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
            return _find_fp8(one, companions)
        if one.dtype in ("U8", "I8", "F4"):
            return _find_fp4(companions)
        return "unknown"

    def count_elements(self, one: TensorClass) -> int:
        """Logical elements of `one`: two to a byte where 4-bit values are packed, none for companions."""
        if self.is_companion(one):
            return 0
        if one.dtype.startswith("ggml:"):
            return one.elements
        is_packed = one.dtype in ("U8", "I8") and self.find_format(one) in ("nvfp4", "mxfp4", "ds_fp4")
        return one.elements * (2 if is_packed else 1)

    def make_group(self, classes: Iterable[TensorClass]) -> TensorGroup:
        """The sum of `classes`."""
        by_format: dict[str, int] = {}
        total = elements = tensors = quantized = rows = 0
        for one in classes:
            kind = self.find_format(one)
            if kind not in ("f32", "bf16", "f16", "unknown") and not self.is_companion(one):
                quantized, rows = quantized + one.tensors, rows + one.rows
            by_format[kind] = by_format.get(kind, 0) + one.bytes
            total, elements, tensors = total + one.bytes, elements + self.count_elements(one), tensors + one.tensors
        by_format = dict(sorted(by_format.items(), key=lambda item: -item[1]))
        return TensorGroup(
            bytes=total,
            elements=elements,
            tensors=tensors,
            format=pick_format(by_format),
            by_format=by_format,
            quantized_tensors=quantized,
            quantized_rows=rows,
        )


def pick_format(by_format: dict[str, int], mixed_ratio: float = MIXED_RATIO) -> Format:
    """The format of a group: the one that holds nearly all its bytes, else `mixed`; bf16 for an empty group.

    Any share of a ggml type makes it `gguf`; `by_format` then names the types.
    """
    if not by_format:
        return "bf16"
    if any(kind not in _FORMATS for kind in by_format):
        return "gguf"
    largest = max(by_format, key=lambda kind: by_format[kind])
    is_mixed = sum(by_format.values()) - by_format[largest] > mixed_ratio * sum(by_format.values())
    return "mixed" if is_mixed else largest  # type: ignore[return-value]


def _find_fp8(one: TensorClass, companions: dict[str, TensorClass]) -> Format:
    """`fp8_block` where scales cover blocks, `mxfp8` where they cover 32 values, else `fp8` (a tensor or a row)."""
    for suffix, scale in companions.items():
        if "scale_inv" in suffix:
            return "fp8_block"
        if "input" in suffix or "activation" in suffix or len(scale.shape) < 2 or scale.shape[-1] == 1:
            continue
        per_scale = one.shape[-1] // scale.shape[-1] if one.shape and scale.shape[-1] else 0
        return "mxfp8" if per_scale == 32 else "fp8_block"
    return "fp8"


def _find_fp4(companions: dict[str, TensorClass]) -> Format:
    if any(suffix.endswith(("scale_2", "weight_global_scale")) for suffix in companions):
        return "nvfp4"
    if "_scales" in companions:
        return "mxfp4"
    if ".scale" in companions:
        return "ds_fp4"
    scale = companions.get(".weight_scale") or companions.get("_weight_scale")
    if scale is None:
        return "unknown"
    return "nvfp4" if scale.dtype == "F8_E4M3" else "mxfp4"


def make_shape(
    facts: ConfigFacts, table: TensorTable, *, shards: Iterable[Shard] = (), notes: Iterable[str] = ()
) -> ModelShape:
    """The shape of a model. Raises BadFileError where config and tensors contradict each other."""
    sorter = Sorter(table)
    roles: dict[str, list[TensorClass]] = {}
    for one in sorter.classes:
        roles.setdefault("dense" if one.role == "unknown" else one.role, []).append(one)
    found_notes = [*notes, *_note_unknown(sorter.classes)]
    experts = _make_experts(facts, table, sorter, roles.get("expert", []), found_notes)
    groups = {role: sorter.make_group(classes) for role, classes in roles.items() if role != "expert"}
    embedding, head = groups.get("embedding", TensorGroup()), groups.get("head", TensorGroup())
    layered = [*roles.get("dense", ()), *roles.get("shared", ())]
    return ModelShape(
        name=facts.name,
        family=facts.family,
        architecture=facts.architecture,
        layers=facts.layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size or _count_rows(roles.get("embedding", [])),
        max_position_tokens=facts.max_position_tokens,
        dtype=_DTYPES.get(facts.dtype, "bf16"),
        rotary_dim=facts.rotary_dim,
        tie_embeddings=head.bytes == 0 and embedding.bytes > 0,
        quantization=describe_quantization(experts, groups, sorter.make_group(roles.get("expert", [])).by_format),
        experts=experts,
        attention=make_attention(facts, roles.get("dense", [])),
        dense=groups.get("dense", TensorGroup()),
        shared_experts=groups.get("shared", TensorGroup()),
        embedding=embedding,
        head=head,
        vision=groups.get("vision", TensorGroup()),
        draft=groups.get("draft", TensorGroup()),
        side_tables=groups.get("side", TensorGroup()),
        dense_bytes_by_layer=sum_by_layer(layered, facts.layers),
        shards=tuple(shards),
        notes=tuple(found_notes),
    )


def sum_by_layer(classes: Iterable[TensorClass], layers: int) -> tuple[int, ...]:
    """Bytes of `classes` in each layer, in layer order; what belongs to no layer is left out."""
    sums = [0] * layers
    for one in classes:
        for layer, count in one.bytes_by_layer.items():
            if 0 <= layer < layers:
                sums[layer] += count
    return tuple(sums)


def _count_rows(embedding: list[TensorClass]) -> int:
    return max((one.shape[0] for one in embedding if one.shape), default=0)


def _note_unknown(classes: Iterable[TensorClass]) -> list[str]:
    names = sorted({one.template for one in classes if one.role == "unknown"})
    if not names:
        return []
    count = sum(one.tensors for one in classes if one.role == "unknown")
    size = sum(one.bytes for one in classes if one.role == "unknown")
    shown = ", ".join(f"`{name}`" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"{count} tensors ({size:,} bytes) of unknown purpose are counted as dense: {shown}"]


def _count_projections(templates: Iterable[str]) -> int:
    """Weight matrices of one expert: a fused gate_up counts twice."""
    text = " ".join(templates)
    has_gate = any(word in text for word in ("gate_up", "gate_proj", "w3", "ffn_gate_exps", "linear_v", "gate."))
    return 3 if has_gate else 2


def _make_experts(
    facts: ConfigFacts, table: TensorTable, sorter: Sorter, classes: list[TensorClass], notes: list[str]
) -> Experts:
    if not classes:
        if facts.experts > 1 and facts.top_k > 0:
            raise BadFileError(
                f"{facts.name}: config.json says {facts.experts} experts, no tensor is named as one of a known layout"
            )
        return Experts(
            layers=0, per_layer=0, top_k=0, hidden_size=facts.hidden_size, intermediate_size=0, expert_bytes=0
        )
    by_layer: dict[int, int] = {}
    for one in classes:
        for layer, count in one.bytes_by_layer.items():
            by_layer[layer] = by_layer.get(layer, 0) + count
    layer_ids = tuple(sorted(by_layer))
    if not layer_ids:
        raise BadFileError(f"{facts.name}: expert tensors without a layer number: `{classes[0].template}`")
    per_layer = _count_experts(facts, table, classes, layer_ids)
    if not 0 < facts.top_k <= per_layer:
        raise BadFileError(f"{facts.name}: `num_experts_per_tok` is {facts.top_k}, expected 1 to {per_layer}")
    is_stacked = not table.expert_bytes
    largest = (
        max(table.expert_bytes.values())
        if table.expert_bytes
        else max(-(-size // per_layer) for size in by_layer.values())
    )
    by_format = sorter.make_group(one for one in classes if not one.template.endswith("bias")).by_format
    projections = _count_projections(one.template for one in classes)
    return Experts(
        layers=len(layer_ids),
        per_layer=per_layer,
        top_k=facts.top_k,
        hidden_size=facts.hidden_size,
        intermediate_size=_find_intermediate(facts, sorter, classes, layer_ids[0], per_layer, projections, notes),
        format=pick_format(by_format, mixed_ratio=0.01),
        expert_bytes=largest,
        bytes_by_layer=tuple(by_layer[layer] for layer in layer_ids),
        layer_ids=layer_ids,
        has_bias=any(one.template.endswith("bias") for one in classes),
        has_input_scale=any("input_scale" in one.template or "input_global_scale" in one.template for one in classes),
        is_stacked=is_stacked,
        projections=projections,
    )


def _count_experts(
    facts: ConfigFacts, table: TensorTable, classes: list[TensorClass], layer_ids: tuple[int, ...]
) -> int:
    """Routed experts of each MoE layer, the same in all; raises BadFileError where tensors and config differ."""
    if not table.expert_bytes:
        rows = {one.shape[0] for one in classes if len(one.shape) > 1}
        stacked = facts.experts or max(rows, default=0)
        if rows and rows != {stacked}:
            raise BadFileError(
                f"{facts.name}: stacked experts of {sorted(rows)} rows, config.json says {facts.experts} experts"
            )
        return stacked
    counts = dict.fromkeys(layer_ids, 0)
    for layer, _ in table.expert_bytes:
        counts[layer] += 1
    expected = facts.experts or max(counts.values())
    for layer, count in counts.items():
        if count != expected:
            raise BadFileError(
                f"{facts.name}: layer {layer} has {count} routed experts in its tensors, expected {expected}"
            )
    return expected


def _find_intermediate(
    facts: ConfigFacts,
    sorter: Sorter,
    classes: list[TensorClass],
    layer: int,
    per_layer: int,
    projections: int,
    notes: list[str],
) -> int:
    """Inner width of one expert, from its elements; the config's where they do not divide evenly."""
    elements = 0
    for one in classes:
        if one.elements and not one.template.endswith("bias") and not sorter.is_companion(one):
            elements += one.elements_by_layer.get(layer, 0) * (sorter.count_elements(one) // one.elements)
    width, rest = divmod(elements, per_layer * projections * facts.hidden_size)
    if rest or not width:
        notes.append("the experts' inner width is config.json's: their tensors do not divide by the hidden size")
        return facts.expert_intermediate_size
    return width


def make_attention(facts: ConfigFacts, dense: list[TensorClass]) -> Attention:
    """How past tokens are kept. Layers whose tensors are a linear attention's are linear, whatever the config says."""
    kinds: list[AttentionKind] = list(facts.kinds)
    for one in dense:
        if ".linear_attn." in one.template:
            for layer in one.bytes_by_layer:
                kinds[layer] = "linear"
    if ("full" in kinds or "sliding" in kinds) and not (facts.kv_heads and facts.head_dim):
        raise BadFileError(f"{facts.name}: config.json does not say how many attention heads there are, or how wide")
    if "linear" in kinds and not (facts.linear and all(facts.linear.values())):
        missing = [name for name, value in facts.linear.items() if not value] or ["linear_num_key_heads"]
        raise BadFileError(f"{facts.name}: linear attention, but config.json does not give {', '.join(missing)}")
    return Attention(
        kinds=tuple(kinds),
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        sliding_window=facts.sliding_window,
        sliding_kv_heads=facts.sliding_kv_heads,
        sliding_head_dim=facts.sliding_head_dim,
        latent_dim=facts.latent_dim,
        index_head_dim=facts.index_head_dim,
        index_layers=facts.index_layers,
        index_ratio=facts.index_ratio,
        compress_ratios=facts.compress_ratios,
        mamba_state_bytes_per_sequence=facts.mamba_state_bytes,
        **facts.linear,
    )


_WORDS = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "fp8": "FP8", "fp8_block": "FP8 (128x128 blocks)",
          "ds_fp4": "FP4 (e8m0 scales)", "bf16": "none", "f16": "none", "f32": "none"}  # fmt: skip


def describe_quantization(experts: Experts, groups: dict[str, TensorGroup], experts_by_format: dict[str, int]) -> str:
    """A word for people: `NVFP4 experts; dense fp8, shared nvfp4, head nvfp4`, or `none`."""
    parts = {"dense": "dense", "shared": "shared", "embedding": "embedding", "head": "head"}
    formats = {word: groups[role].format for role, word in parts.items() if role in groups and groups[role].bytes}
    if "gguf" in (experts.format, *(group.format for group in groups.values())):
        types: dict[str, int] = {}
        for group in groups.values():
            for kind, size in group.by_format.items():
                types[kind] = types.get(kind, 0) + size
        for kind, size in experts_by_format.items():
            types[kind] = types.get(kind, 0) + size
        shown = sorted(types, key=lambda kind: -types[kind])[:3]
        return f"GGUF ({', '.join(shown)})"
    if not experts.count:
        return _WORDS.get(formats.get("dense", "bf16"), formats.get("dense", "none"))
    main = _WORDS.get(experts.format, experts.format)
    others = ", ".join(f"{word} {kind}" for word, kind in formats.items())
    if main == "none" and all(_WORDS.get(kind, kind) == "none" for kind in formats.values()):
        return "none"
    return f"{'unquantised' if main == 'none' else main} experts; {others}"
