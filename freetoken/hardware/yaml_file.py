"""One YAML file of a profile: read with the line of every key, written so that reading gives the same value back.

The safe loader alone. A key written twice, an alias, a file above 1 MiB and anything but a mapping are refused.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from yaml.constructor import SafeConstructor

from freetoken.errors import BadFileError
from freetoken.units import GIB, KIB, MIB

MOST_BYTES = MIB
Model = TypeVar("Model", bound=BaseModel)
#: libyaml's parser where PyYAML has it: ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Lines = dict[tuple[str | int, ...], int]


def read_yaml_file(path: Path, model: type[Model]) -> Model:
    """The file as a `model`. Raises BadFileError with the file, the line and the key of everything that is wrong."""
    value, lines = _compose(path)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = [_sentence(path, lines, model, problem) for problem in error.errors()]
        raise BadFileError(found[0], details=tuple(found[1:])) from error


def dump_yaml(value: BaseModel) -> str:
    """`value` as YAML, defaults left out, sizes exact and readable (`6144MiB`, not `6442450944`)."""
    tree = _readable(value.model_dump(mode="json", exclude_defaults=True))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def write_yaml_file(value: BaseModel, path: Path) -> None:
    """Writes `value` to `path`, whose folder is made, by a temporary name that is renamed."""
    import tempfile  # Brings OpenSSL with it, which reading a profile does without.

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(dump_yaml(value))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def format_exact_bytes(count: int) -> str | int:
    """`count` in the largest unit that divides it, so that parsing gives it back to the byte."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % scale == 0:
            return f"{count // scale}{unit}"
    return count


def _readable(tree: Any, key: str = "") -> Any:
    if isinstance(tree, dict):
        return {name: _readable(value, name) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_readable(value) for value in tree]
    if key.endswith("_bytes") and isinstance(tree, int):
        return format_exact_bytes(tree)
    if key.endswith("_per_s") and isinstance(tree, float) and tree.is_integer():
        return int(tree)
    return tree


def _compose(path: Path) -> tuple[dict[str, Any], _Lines]:
    lines: _Lines = {}
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadFileError(f"{path} has {path.stat().st_size:,} bytes, a profile has at most {MOST_BYTES:,}")
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_LOADER)
        _collect_lines(path, node, (), lines, set())
        value = SafeConstructor().construct_document(node) if node is not None else None
    except UnicodeDecodeError as error:
        raise BadFileError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}") from error
    except OSError as error:
        raise BadFileError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise BadFileError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(value, dict):
        raise BadFileError(f"{path} holds {_kind_of(value)}, expected `key: value` lines")
    return value, lines


def _collect_lines(path: Path, node: Any, place: tuple[str | int, ...], lines: _Lines, seen: set[int]) -> None:
    if node is None:
        return
    if id(node) in seen:
        # An alias gives the same node again: it can make a file endless or huge, and a profile has no use for one.
        raise BadFileError(f"{path}:{lines[place]}: `{'.'.join(map(str, place))}`: aliases are not read here")
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            below = (*place, str(key.value))
            if below in lines:
                line = key.start_mark.line + 1
                raise BadFileError(f"{path}:{line}: `{key.value}` stands here and in line {lines[below]}")
            lines[below] = key.start_mark.line + 1
            _collect_lines(path, child, below, lines, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            lines[(*place, index)] = child.start_mark.line + 1
            _collect_lines(path, child, (*place, index), lines, seen)


def _sentence(path: Path, lines: _Lines, model: type[BaseModel], problem: Any) -> str:
    """`profiles/x.yaml:3: unknown key `gpu`; did you mean `gpus`?`"""
    place = tuple(problem["loc"])
    known = next((place[:length] for length in range(len(place), 0, -1) if place[:length] in lines), ())
    where = f"{path}:{lines[known]}" if known else str(path)
    name = ".".join(map(str, place)) or "the file"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(place[-1]), _keys_at(model, place[:-1]), n=1)
        return f"{where}: unknown key `{name}`" + (f"; did you mean `{near[0]}`?" if near else "")
    if problem["type"] == "missing":
        return f"{where}: `{name}` is missing"
    message = problem["msg"].removeprefix("Value error, ")
    shown = problem["input"]
    if problem["type"] == "value_error" or isinstance(shown, (dict, list)):
        return f"{where}: `{name}`: {message}"
    return f"{where}: `{name}` is `{shown}`: {message[:1].lower()}{message[1:]}"


def _keys_at(model: type[BaseModel], place: tuple[str | int, ...]) -> list[str]:
    """Keys that `model` knows at `place`."""
    current: Any = model
    for part in place:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        models = [one for one in _types_in(field.annotation) if issubclass(one, BaseModel)] if field else []
        if not models:
            return []
        current = models[0]
    return list(current.model_fields)


def _types_in(annotation: Any) -> list[type]:
    """Every class that an annotation mentions."""
    if isinstance(annotation, type):
        return [annotation]
    return [one for argument in get_args(annotation) for one in _types_in(argument)]


def _kind_of(value: Any) -> str:
    return {"NoneType": "nothing", "list": "a list", "str": "text"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )
