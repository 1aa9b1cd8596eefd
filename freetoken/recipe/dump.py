"""A `Recipe` back as YAML that reads as the same recipe, and the JSON Schemas of what people write by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from freetoken import units
from freetoken.recipe.lookup import resolve_model_path
from freetoken.recipe.model import Recipe
from freetoken.recipe.nodes import parse_scalar
from freetoken.recipe.workload import Workload

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader would take for something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if parse_scalar(text) != text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_recipe(recipe: Recipe, *, base_dir: Path | None = None) -> str:
    """The recipe as YAML, complete: loading it gives the same recipe, without `extends`, which is merged in.

    With `base_dir` a relative `model.path` is written as an absolute one, so that the file may lie anywhere.
    """
    values = recipe.model_dump(mode="json", exclude_none=True, exclude={"extends"})
    slots = recipe.settings.expert_slots
    if not isinstance(slots, (int, str)):
        values["settings"]["expert_slots"] = units.format_bytes_exactly(slots.bytes)
    if base_dir is not None and recipe.model.path not in (None, "demo"):
        values["model"]["path"] = str(resolve_model_path(recipe.model, base_dir))
    return dump_yaml(values)


def dump_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML in their own order; every text comes back as a text."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def make_recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe's file: `workload` may be a name, and what a parent gives may be left out."""
    schema = _tidy(Recipe.model_json_schema())
    schema["properties"]["workload"] = {
        "anyOf": [{"type": "string", "description": "name or path of a workload"}, schema["properties"]["workload"]]
    }
    # A recipe that extends another one has these from its parent.
    schema["if"] = {"required": ["extends"]}
    schema["then"] = {"required": ["name"]}
    schema["else"] = {"required": schema.pop("required")}
    return {"$schema": _DIALECT, **schema}


def make_workload_schema() -> dict[str, Any]:
    """JSON Schema of a workload's file."""
    return {"$schema": _DIALECT, **_tidy(Workload.model_json_schema())}


def _tidy(value: Any) -> Any:
    """pydantic's `ge` on a value that may be a text too, under JSON Schema's own name."""
    if isinstance(value, dict):
        renamed = {"minimum" if key == "ge" else key: one for key, one in value.items()}
        return {key: _tidy(one) for key, one in renamed.items()}
    return [_tidy(one) for one in value] if isinstance(value, list) else value
