"""What a checkpoint says about generating with it: stop tokens and sampling defaults, from its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from freetoken.errors import BadFileError


class GenerationDefaults(BaseModel):
    """Stop token ids, and the sampling fields that the checkpoint sets; None = it says nothing."""

    model_config = ConfigDict(frozen=True)

    stop_token_ids: frozenset[int] = frozenset()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def sampling(self) -> dict[str, float | int]:
        """The sampling fields that are set."""
        fields = self.model_dump(exclude={"stop_token_ids"}, exclude_none=True)
        return dict(fields)


def read_generation_defaults(model_path: Path) -> GenerationDefaults:
    """From `generation_config.json`, and `config.json` for the stop tokens where that has none."""
    generation, config = _read(model_path / "generation_config.json"), _read(model_path / "config.json")
    text = config.get("text_config") or {}
    ids = next((ids for one in (generation, config, text) if (ids := one.get("eos_token_id")) is not None), None)
    fields = {key: generation.get(key) for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    if generation.get("do_sample") is False:
        fields |= {"temperature": 0.0}
    return GenerationDefaults(stop_token_ids=frozenset(_as_ids(ids)), **fields)


def _as_ids(value: Any) -> list[int]:
    return [] if value is None else [int(one) for one in value] if isinstance(value, list) else [int(value)]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadFileError(f"{path}: cannot be read as JSON: {error}") from error
    return document if isinstance(document, dict) else {}
