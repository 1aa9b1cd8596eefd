"""Model cards: shapes of well-known models, so that `ft plan` answers before a download and without a network.

A card is one YAML file in `freetoken/data/cards/`: who it is, where its figures come from, what could not be verified,
and a `ModelShape` written short (`40 x full` for forty entries, even layers left out). Where a card and a checkpoint's
headers disagree, the headers win. Only the named card is parsed: the others are found by their first lines.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from freetoken import paths
from freetoken.checkpoint.shape import ModelShape
from freetoken.errors import BadFileError

_REPEAT = re.compile(r"^\s*(\d+)\s*x\s+(.+)$")
_HEAD_LINE = re.compile(r"^(name|repo|aliases|description): *(.*)$")


class CardInfo(BaseModel):
    """Who a card is about, without its figures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    repo: str
    aliases: tuple[str, ...] = ()
    description: str = ""
    path: str

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """What the card answers to, in lower case: its name and repository, its aliases, the repository's last part."""
        groups = ((self.name, self.repo), self.aliases, (self.repo.rpartition("/")[2],))
        return tuple(tuple(one.lower() for one in group if one) for group in groups)


def find_card(repo_or_name: str) -> ModelShape | None:
    """The shape on the card of a repository id or short name, whatever its case; None where there is no card."""
    info = find_card_info(repo_or_name)
    return read_card(Path(info.path)) if info else None


def find_card_info(repo_or_name: str) -> CardInfo | None:
    """Which card answers to `repo_or_name`: a name or repository, else an alias, else a repository's last part."""
    wanted = repo_or_name.strip().lower()
    for rank in range(3):
        for card in list_cards():
            if wanted in card.keys[rank]:
                return card
    return None


def suggest_cards(repo_or_name: str, count: int = 3) -> tuple[str, ...]:
    """Card names that look like `repo_or_name`, nearest first: for `did you mean`."""
    names = {key: card.name for card in list_cards() for group in card.keys for key in group}
    found = difflib.get_close_matches(repo_or_name.strip().lower(), names, n=3 * count, cutoff=0.5)
    return tuple(dict.fromkeys(names[key] for key in found))[:count]


def list_cards() -> tuple[CardInfo, ...]:
    """All bundled cards, by name."""
    return _list_cards(paths.package_data("cards"))


@lru_cache(maxsize=4)
def _list_cards(folder: Path) -> tuple[CardInfo, ...]:
    return tuple(_read_info(path) for path in sorted(folder.glob("*.yaml")))


def _read_info(path: Path) -> CardInfo:
    """The head of a card, read line by line: parsing all cards as YAML would cost half of a plan's time."""
    head: dict[str, str] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.startswith("shape:"):
                break
            if match := _HEAD_LINE.match(line):
                head[match[1]] = match[2].strip().strip("'\"")
    aliases = tuple(one.strip() for one in head.get("aliases", "").strip("[]").split(",") if one.strip())
    return CardInfo(
        name=head.get("name", path.stem),
        repo=head.get("repo", ""),
        aliases=aliases,
        description=head.get("description", ""),
        path=str(path),
    )


def read_card(path: Path) -> ModelShape:
    """The shape on the card in `path`. Raises BadFileError for one that does not parse."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        card = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        shape = expand_shape(dict(card["shape"]))
        shape["source"], shape["name"] = "card", card.get("repo") or card["name"]
        shape["source_note"] = f"model card `{card['name']}`: {'; '.join(card.get('sources', ()))}"
        shape["unverified"] = tuple(card.get("unverified", ()))
        return ModelShape.model_validate(shape)
    except (yaml.YAMLError, KeyError, TypeError, ValidationError, ValueError) as error:
        raise BadFileError(f"{path}: not a model card: {error}") from error


def expand_shape(shape: dict[str, Any]) -> dict[str, Any]:
    """A shape as a card writes it → the fields of `ModelShape`."""
    attention = dict(shape["attention"])
    for key in ("kinds", "compress_ratios"):
        if key in attention:
            attention[key] = _expand(attention[key])
    experts = dict(shape["experts"])
    layers = int(experts["layers"])
    experts["layer_ids"] = _expand(experts.get("layer_ids", list(range(layers))))
    per_layer = int(experts["expert_bytes"]) * int(experts["per_layer"])
    experts["bytes_by_layer"] = _expand(experts.get("bytes_by_layer", [per_layer] * layers))
    shape = {**shape, "attention": attention, "experts": experts}
    if "dense_bytes_by_layer" in shape:
        shape["dense_bytes_by_layer"] = _expand(shape["dense_bytes_by_layer"])
    return shape


def _expand(values: Any) -> tuple[Any, ...]:
    """`[2 x full sliding, linear]` → full, sliding, full, sliding, linear; `3 to 91` → 3, 4, ... 91; numbers stay."""
    expanded: list[Any] = []
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if not isinstance(value, str):
            expanded.append(value)
            continue
        if span := re.fullmatch(r"\s*(\d+) to (\d+)\s*", value):
            expanded.extend(range(int(span[1]), int(span[2]) + 1))
            continue
        match = _REPEAT.match(value)
        count, words = (int(match[1]), match[2]) if match else (1, value)
        expanded.extend([int(word) if word.isdecimal() else word for word in words.split()] * count)
    return tuple(expanded)


def compress_shape(shape: ModelShape) -> dict[str, Any]:
    """A shape as a card writes it: defaults left out, repetitions folded. `expand_shape` gives it back."""
    left_out = {"name", "source", "source_note", "unverified"}
    data = shape.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
    for group in ("dense", "shared_experts", "embedding", "head", "vision", "draft", "side_tables"):
        data.get(group, {}).get("by_format", {}) or data.get(group, {}).pop("by_format", None)
    data["attention"]["kinds"] = _fold(shape.attention.kinds)
    if shape.attention.compress_ratios:
        data["attention"]["compress_ratios"] = _fold(shape.attention.compress_ratios)
    if shape.dense_bytes_by_layer:
        data["dense_bytes_by_layer"] = _fold(shape.dense_bytes_by_layer)
    data["experts"] = _compress_experts(shape)
    return data


def _compress_experts(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    data = experts.model_dump(mode="json", exclude={"bytes_by_layer", "layer_ids"})
    if experts.layer_ids != tuple(range(experts.layers)):
        data["layer_ids"] = _fold_ids(experts.layer_ids)
    if set(experts.bytes_by_layer) - {experts.expert_bytes * experts.per_layer}:
        data["bytes_by_layer"] = _fold(experts.bytes_by_layer)
    return data


def _fold_ids(values: tuple[int, ...]) -> list[Any]:
    is_run = len(values) > 2 and values == tuple(range(values[0], values[-1] + 1))
    return [f"{values[0]} to {values[-1]}"] if is_run else _fold(values)


def _fold(values: tuple[Any, ...]) -> list[Any]:
    """Repeated runs of up to eight entries as `COUNT x ENTRIES`, the rest in one line."""
    folded: list[Any] = []
    plain: list[str] = []
    position = 0
    while position < len(values):
        best_length, best_count = 1, 1
        for length in range(1, 9):
            unit, count = values[position : position + length], 1
            while values[position + count * length : position + (count + 1) * length] == unit and unit:
                count += 1
            if count > 1 and length * count > best_length * best_count:
                best_length, best_count = length, count
        if best_count > 1:
            folded, plain = [*folded, *([" ".join(plain)] if plain else [])], []
            words = " ".join(str(one) for one in values[position : position + best_length])
            folded.append(f"{best_count} x {words}")
        else:
            plain.append(str(values[position]))
        position += best_length * best_count
    return [*folded, " ".join(plain)] if plain else folded
