"""Which files of a repository a model needs: weights, configuration, tokenizer. Never a pickle, never code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from freetoken.checkpoint.header import PICKLE_SUFFIXES, pick_shards
from freetoken.errors import BadFileError, UsageError

_SIDE_FILES = (
    "*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "vocab*", "merges*",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_NEVER = (
    "*.py",
    "README*",
    "LICENSE*",
    "*.md",
    "training_args*",
    "optimizer*",
    "*.safetensors",
    "*.gguf",
    "*.msgpack",
    "*.h5",
    "*.onnx",
)
_GGUF_PART = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")
INDEX_NAME = "model.safetensors.index.json"


#: Any of these makes a tokenizer; `tokenizer_config.json` alone does not.
_TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab*", "tekken.json")


def has_tokenizer(folder: Path) -> bool | None:
    """Whether a tokenizer's file lies in a model's folder; None for a model that is one file."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    return any(fnmatch(name, pattern) for name in names for pattern in _TOKENIZERS)


def needs_index(names: Iterable[str]) -> bool:
    """Whether only the index can tell which shards belong to the model: several series, or odd names."""
    files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    stems = {re.sub(r"-\d{5}-of-\d{5}\.safetensors$", "", name) for name in files}
    return len(stems) > 1 and "model.safetensors" not in files


def pick_weights(repo: str, names: Sequence[str], include: Sequence[str] = (), shards: Iterable[str] = ()) -> list[str]:
    """The weight files to fetch. `shards` are the index's, where it was read; `include` are patterns for a GGUF.

    Raises BadFileError where there are only pickles, UsageError where several GGUF models are there to choose from.
    """
    if known := sorted(set(shards)):
        return known
    safetensors = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    ggufs = [name for name in names if name.endswith(".gguf") and not name.rpartition("/")[2].startswith("mmproj")]
    if safetensors and not any("gguf" in pattern.lower() for pattern in include):
        return pick_shards(safetensors)
    if ggufs:
        return pick_gguf(repo, ggufs, include)
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        raise BadFileError(
            f"{repo}: its weights are pickles (`{pickles[0]}`), which can run code; "
            "only safetensors and GGUF are loaded"
        )
    raise BadFileError(f"{repo}: has no safetensors and no GGUF")


def pick_gguf(repo: str, names: Sequence[str], include: Sequence[str]) -> list[str]:
    """The files of the one GGUF model that `include` matches, in order. Raises UsageError where it is not one."""
    chosen = [name for name in names if not include or any(fnmatch(name.lower(), one.lower()) for one in include)]
    models: dict[str, list[str]] = {}
    for name in chosen:
        match = _GGUF_PART.match(name)
        models.setdefault(match["stem"] if match else name, []).append(name)
    if len(models) == 1:
        return sorted(next(iter(models.values())))
    available = sorted({_GGUF_PART.sub(r"\g<stem>", name).rpartition("/")[2].removesuffix(".gguf") for name in names})
    shown = ", ".join(available[:8]) + (" ..." if len(available) > 8 else "")
    what = f"`{' '.join(include)}` matches {len(models)} of them" if include else f"{len(models)} GGUF models"
    raise UsageError(
        f"{repo}: {what}: {shown}",
        hint="choose one: `--set model.file=Q4_K_M`, or for `ft model` `--include '*Q4_K_M*'`",
    )


def pick_files(names: Sequence[str], weights: Iterable[str]) -> list[str]:
    """All files to fetch: the weights, and what stands beside them to configure and tokenise."""
    chosen = set(weights)
    for name in names:
        is_wanted = any(fnmatch(name, pattern) for pattern in _SIDE_FILES) and name.count("/") <= name.count(
            "chat_templates/"
        )
        if is_wanted and not any(
            fnmatch(name, pattern) for pattern in (*_NEVER, *(f"*{one}" for one in PICKLE_SUFFIXES))
        ):
            chosen.add(name)
    if not any(name.endswith(".safetensors") for name in chosen):
        chosen.discard(INDEX_NAME)
    return sorted(chosen)
