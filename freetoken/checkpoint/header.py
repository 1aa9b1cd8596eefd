"""`read_shape`: a checkpoint folder's shape, from `config.json` and the safetensors headers alone.

Reads the first bytes of each file, never the weights; a checkpoint whose data is a hole reads as well as a real one.
Only safetensors and GGUF are understood: a pickle can run code when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from freetoken.checkpoint.build import make_shape
from freetoken.checkpoint.config import ConfigFacts, parse_config, read_json
from freetoken.checkpoint.shape import ModelShape, Shard
from freetoken.checkpoint.table import TensorTable, parse_header_length
from freetoken.errors import BadFileError

MAX_INDEX_BYTES = 512 << 20
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors$")


def read_shape(folder: Path) -> ModelShape:
    """The shape of the checkpoint in `folder` (or of a `.gguf` file). Raises BadFileError, exit code 2."""
    folder = Path(folder)
    if folder.is_file() and folder.suffix == ".gguf":
        return _read_gguf(folder)
    if folder.is_file():
        raise BadFileError(f"{folder}: is a file; expected a folder with config.json and safetensors, or a .gguf file")
    if not folder.is_dir():
        raise BadFileError(f"{folder}: no such folder")
    names = sorted(entry.name for entry in folder.iterdir())
    if not any(name.endswith(".safetensors") for name in names):
        return _read_gguf(_pick_gguf(folder, names))
    if "config.json" not in names:
        raise BadFileError(f"{folder}: has safetensors, but no config.json to say what model they are")
    facts = parse_config(read_config(folder), name=find_name(folder), where=str(folder / "config.json"))
    return _read_safetensors(folder, names, facts)


def read_config(folder: Path) -> Any:
    """`config.json`, with the quantisation that ModelOpt keeps in a file beside it put where others keep it."""
    config = read_json(folder / "config.json")
    beside = folder / "hf_quant_config.json"
    if isinstance(config, dict) and "quantization_config" not in config and beside.is_file():
        side = read_json(beside)
        quantization = side.get("quantization") if isinstance(side, dict) else None
        if isinstance(quantization, dict):
            config = {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}
    return config


def find_name(folder: Path) -> str:
    """`org/name` for a snapshot in a hub cache, else the folder's own name."""
    parts = folder.absolute().parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return folder.absolute().name


def pick_shards(names: Iterable[str]) -> list[str]:
    """The safetensors files that make up the model, where no index says so. Raises BadFileError for a missing one.

    `model-00001-of-00010.safetensors` and its kin win over `model.safetensors`, which wins over anything else;
    `consolidated.safetensors` is a second copy of the same weights in many repositories.
    """
    files = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    series: dict[tuple[str, int], set[int]] = {}
    for name in files:
        if match := _NUMBERED.match(name):
            series.setdefault((match["stem"], int(match["count"])), set()).add(int(match["index"]))
    if series:
        stem, count = max(series, key=lambda key: (key[0] == "model", len(series[key])))
        missing = sorted(set(range(1, count + 1)) - series[stem, count]) if count <= 100_000 else [count]
        if missing:
            shown = ", ".join(f"{stem}-{index:05d}-of-{count:05d}.safetensors" for index in missing[:3])
            raise BadFileError(
                f"{len(missing)} of {count} shards are missing: {shown}", hint="fetch again: `ft model fetch REPO`"
            )
        return [f"{stem}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
    if "model.safetensors" in files:
        return ["model.safetensors"]
    return [name for name in files if not name.startswith(("consolidated", "adapter_"))] or files


def _read_safetensors(folder: Path, names: Sequence[str], facts: ConfigFacts) -> ModelShape:
    index_name = next((name for name in names if name == "model.safetensors.index.json"), None)
    index = _read_index(folder / index_name) if index_name else None
    files = sorted(set(index.values())) if index else _pick_local(folder, names)
    table, shards, notes = TensorTable(facts.layers), [], []
    seen: dict[str, str] = {}
    for name in files:
        path = folder / name
        header, size = read_header(path)
        tensors = table.add_safetensors(header, size - 8 - len(header), str(path))
        if twice := seen.keys() & tensors if len(files) > 1 else None:
            tensor = min(twice)
            raise BadFileError(f"{folder}: tensor `{tensor}` is in both {seen[tensor]} and {name}")
        seen.update(dict.fromkeys(tensors, name))
        shards.append(Shard(name=name, bytes=size))
    if index is not None:
        notes += _compare_index(index, seen, folder / str(index_name))
    return make_shape(facts, table, shards=shards, notes=notes)


def _pick_local(folder: Path, names: Sequence[str]) -> list[str]:
    try:
        return pick_shards(names)
    except BadFileError as error:
        raise BadFileError(f"{folder}: {error.message}", hint=error.hint) from error


def read_header(path: Path) -> tuple[bytes, int]:
    """The JSON header of a safetensors file and the file's size in bytes. Raises BadFileError."""
    try:
        if not path.is_file():
            raise BadFileError(f"{path}: not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = parse_header_length(file.read(8), size, str(path))
            header = file.read(length)
    except OSError as error:
        raise BadFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(header) < length:
        raise BadFileError(f"{path}: truncated inside its header: {len(header):,} of {length:,} bytes")
    return header, size


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name → shard name. Raises BadFileError for shards that are missing or lie elsewhere."""
    index = read_json(path, MAX_INDEX_BYTES)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise BadFileError(f"{path}: has no `weight_map`")
    files = {str(name) for name in weights.values()}
    if strange := sorted(name for name in files if not re.fullmatch(r"[\w.+-]+\.safetensors", name)):
        raise BadFileError(f"{path}: `{strange[0]}` is not the name of a safetensors file in this folder")
    missing = sorted(name for name in files if not (path.parent / name).is_file())
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise BadFileError(
            f"{path.parent}: {len(missing)} of {len(files)} shards are missing: {shown}",
            hint="fetch again: `ft model fetch REPO`",
        )
    return weights


def _compare_index(index: dict[str, str], seen: dict[str, str], path: Path) -> list[str]:
    """Notes on tensors that the index does not list. Raises BadFileError for ones that are not where it says."""
    if index == seen:
        return []
    for tensor, shard in index.items():
        if seen.get(tensor) != shard:
            where = f"it is in {seen[tensor]}" if tensor in seen else "no shard has it"
            raise BadFileError(f"{path}: says that tensor `{tensor}` is in {shard}, but {where}")
    extra = len(seen) - len(index)
    return [f"{extra} tensors are not listed in {path.name}"] if extra else []


def _pick_gguf(folder: Path, names: Sequence[str]) -> Path:
    """The first file of the one GGUF model in `folder`; raises BadFileError where there is none, or several."""
    files = [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
    firsts = [name for name in files if not re.search(r"-\d{5}-of-\d{5}\.gguf$", name) or "-00001-of-" in name]
    if len(firsts) == 1:
        return folder / firsts[0]
    if firsts:
        shown = ", ".join(firsts[:4])
        raise BadFileError(f"{folder}: holds {len(firsts)} GGUF models ({shown}); give the file itself")
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        raise BadFileError(
            f"{folder}: its weights are pickles (`{pickles[0]}`), which can run code; "
            "only safetensors and GGUF are loaded"
        )
    if "config.json" not in names:
        raise BadFileError(f"{folder}: has neither config.json nor a .gguf file: not a model")
    raise BadFileError(
        f"{folder}: has config.json, but no safetensors", hint="fetch the weights: `ft model fetch REPO`"
    )


def _read_gguf(path: Path) -> ModelShape:
    from freetoken.checkpoint.gguf import read_gguf_shape

    return read_gguf_shape(path)
