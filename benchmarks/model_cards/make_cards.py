"""Write freetoken/data/cards/*.yaml: shapes computed from configurations, not typed by hand.

Each model's class is built on the meta device from the facts of its config.json, every parameter is given the storage
format of the published checkpoint, and the result goes through the same table that reads real headers.

    python benchmarks/model_cards/make_cards.py            # all cards
    python benchmarks/model_cards/make_cards.py NAME ...   # some
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from models import CARDS, Card

from freetoken.checkpoint.build import make_shape
from freetoken.checkpoint.cards import compress_shape, expand_shape
from freetoken.checkpoint.config import parse_config
from freetoken.checkpoint.gguf import GGML_TYPES
from freetoken.checkpoint.shape import ModelShape
from freetoken.checkpoint.table import DTYPE_BITS, TensorTable

OUT = Path(__file__).resolve().parents[2] / "freetoken" / "data" / "cards"
GGML_SIZES = {name: (block, size) for name, block, size in GGML_TYPES.values()}
Tensor = tuple[str, str, tuple[int, ...]]


def list_parameters(card: Card) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every parameter of the model, built without memory; draft layers are the card's own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(**card.config)
    maker = AutoModelForImageTextToText if "vision_config" in card.config else AutoModelForCausalLM
    with torch.device("meta"):
        model = maker.from_config(config)
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    for name, parameter in model.named_parameters():
        if not (tied and name.startswith("lm_head")):
            yield name, tuple(parameter.shape)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name or "tid2eid" in name:
            yield name, tuple(buffer.shape)


def make_companions(name: str, scheme: str, out: int, width: int, card: Card) -> Iterator[Tensor]:
    """The tensors that store one matrix [out, width] under `scheme`."""
    base = name.removesuffix(".weight")
    if scheme == "fp8":
        yield f"{base}.weight", "F8_E4M3", (out, width)
        yield f"{base}.weight_scale", "F32", ()
        if card.input_scales:
            yield f"{base}.input_scale", "F32", ()
    elif scheme == "fp8_block":
        yield f"{base}.weight", "F8_E4M3", (out, width)
        yield f"{base}.weight_scale_inv", card.block_scale_dtype, (-(-out // 128), -(-width // 128))
    elif scheme == "nvfp4":
        yield f"{base}.weight", "U8", (out, width // 2)
        yield f"{base}.weight_scale", "F8_E4M3", (out, width // 16)
        yield f"{base}.weight_scale_2", "F32", ()
        if card.expert_input_scales:
            yield f"{base}.input_scale", "F32", ()
    elif scheme == "ds_fp4":
        yield f"{base}.weight", "I8", (out, width // 2)
        yield f"{base}.scale", "F8_E8M0", (out, width // 32)
    elif scheme == "fp8_table":
        yield name, "F8_E4M3", (out, width)
    elif scheme == "ds_fp8":
        yield f"{base}.weight", "F8_E4M3", (out, width)
        yield f"{base}.scale", "F8_E8M0", (-(-out // 128), -(-width // 128))
    else:
        yield f"{base}.weight", {"bf16": "BF16", "f32": "F32"}[scheme], (out, width)


def add(table: TensorTable, tensor: Tensor, tensors: int = 1) -> int:
    """Counts `tensors` tensors of one name in; their bytes together."""
    name, dtype, shape = tensor
    if dtype.startswith("ggml:"):
        block, block_bytes = GGML_SIZES[dtype.removeprefix("ggml:")]
        size = math.prod(shape) // block * block_bytes
    else:
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
    table.add(name, dtype, shape, size * tensors, math.prod(shape) * tensors, tensors=tensors)
    return size * tensors


def add_experts(table: TensorTable, name: str, shape: tuple[int, ...], card: Card, hidden: int) -> None:
    """Counts one stacked parameter of routed experts in, as the published checkpoint stores it."""
    scheme = card.scheme(name)
    count = shape[0]
    head, _, leaf = name.rpartition(".experts.")
    if scheme in ("mxfp4",):
        if len(shape) == 2:  # a bias
            add(table, (name, "BF16", shape))
            return
        out, width = (shape[2], shape[1]) if card.is_transposed else (shape[1], shape[2])
        add(table, (f"{name}_blocks", "U8", (count, out, width // 32, 16)))
        add(table, (f"{name}_scales", "U8", (count, out, width // 32)))
        return
    if scheme.startswith("ggml:"):
        add(table, (name, scheme, shape))
        return
    if scheme == "bf16" and card.is_stacked:
        add(table, (name, "BF16", shape))
        return
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    out, width = shape[1] // len(parts), shape[2]
    layer = int(head.split("layers.")[1].split(".")[0])
    for part in parts:
        for tensor in make_companions(f"{head}.experts.0.{part}.weight", scheme, out, width, card):
            size = add(table, tensor, tensors=count)
            if "layers." in head and not head.startswith("mtp") and layer < table.layers:
                for expert in range(count):
                    table.add_expert(layer, expert, size // count)


def make_table(card: Card, layers: int, hidden: int) -> TensorTable:
    """Every tensor of the checkpoint that the card describes."""
    table = TensorTable(layers)
    for name, shape in [*list_parameters(card), *card.extra]:
        if any(part in name for part in card.left_out):
            continue
        if card.renames:
            for old, new in card.renames:
                name = name.replace(old, new)
        if ".experts." in name and len(shape) >= 2 and "shared" not in name:
            add_experts(table, name, shape, card, hidden)
            continue
        scheme = card.scheme(name)
        if scheme.startswith("ggml:"):
            add(table, (name, scheme, shape))
            continue
        if len(shape) == 2 and scheme not in ("bf16", "f32"):
            for tensor in make_companions(name, scheme, *shape, card):
                add(table, tensor)
        else:
            dtype = "F32" if scheme == "f32" else "I64" if "tid2eid" in name else "BF16"
            add(table, (name, dtype, shape))
    return table


def make_card(card: Card) -> dict[str, Any]:
    """The card's YAML document."""
    facts = parse_config({"architectures": [card.architecture], **card.config}, name=card.repo)
    shape = make_shape(facts, make_table(card, facts.layers, facts.hidden_size))
    if card.finish is not None:
        shape = card.finish(shape)
    written = compress_shape(shape)
    written.pop("notes", None)
    document = {
        "name": card.name,
        "repo": card.repo,
        "aliases": list(card.aliases),
        "description": card.description,
        "sources": list(card.sources),
        "unverified": list(card.unverified),
        "shape": written,
    }
    again = ModelShape.model_validate({"name": card.repo, **expand_shape(written)})
    assert again.model_copy(update={"notes": shape.notes, "dtype": shape.dtype}) == shape, card.name
    report(card, shape)
    return document


def report(card: Card, shape: ModelShape) -> None:
    gib = 1 << 30
    experts = shape.experts
    groups = ("dense", "embedding", "head", "shared_experts", "vision", "draft", "side_tables")
    parts = "  ".join(f"{name} {getattr(shape, name).bytes / gib:.2f}" for name in groups if getattr(shape, name).bytes)
    print(f"{card.name}: {shape.disk_bytes / 1e9:.2f} GB; {shape.quantization}")
    bank = f"{experts.bank_bytes / gib:.2f} GiB"
    print(f"    experts {experts.layers} x {experts.per_layer} x {experts.expert_bytes:,} B = {bank}")
    print(f"    GiB: {parts}")
    print(f"    KV {shape.kv_bytes_per_token():,} B a token, state {shape.state_bytes_per_sequence():,} B a sequence")
    for note in shape.notes:
        print("    note:", note)


class Dumper(yaml.SafeDumper):
    """Lists on one line, keys in the order of the model."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.Node:
        is_short = all(not isinstance(one, (dict, list)) for one in sequence) and len(str(list(sequence))) < 90
        return super().represent_sequence(tag, sequence, flow_style=is_short)


def write_card(document: dict[str, Any]) -> None:
    text = yaml.dump(document, Dumper=Dumper, sort_keys=False, width=100_000, allow_unicode=True)
    note = "# Written by benchmarks/model_cards/make_cards.py; shapes only, no weights.\n"
    (OUT / f"{document['name']}.yaml").write_text(note + text, encoding="utf-8")


Maker = Callable[[Card], dict[str, Any]]

if __name__ == "__main__":
    wanted = set(sys.argv[1:])
    for one in CARDS:
        if not wanted or one.name in wanted:
            write_card(make_card(one))
