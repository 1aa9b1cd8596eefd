"""What is wrong with a file, as sentences: pydantic's errors with the place and the text of what was written.

Used for recipes and workloads alike; knows the fields only by looking at the models.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from freetoken.errors import BadFileError
from freetoken.recipe.nodes import KeyPath, Node

#: What a pattern means, for people, by dotted key.
_PATTERNS = {
    "name": "lower-case letters, digits, `.`, `_` and `-`, at most 80",
    "model.repo": "`owner/name` of a hub repository, or the name of a model card",
    "serve.api_key_env": "the name of an environment variable",
    "settings.attention": "the name of an attention backend such as `triton`",
}
#: What is expected where the list of a union's members would not be understood.
_IN_WORDS = {"settings.expert_slots": "a count such as `512`, a size such as `3GiB`, or `auto`"}
#: What to write where something has to be there.
_MISSING = {"workload": "name one such as `agent-8k`", "model": "e.g. `model: {repo: owner/name}`"}
#: A text in quotes that YAML would read as something else without them.
_LOOKS_OTHERWISE = re.compile(r"[-+]?[0-9][0-9_.eE+-]*|true|false|yes|no|on|off|null|~", re.I)
_KINDS = {
    "int_": "a whole number",
    "float_": "a number",
    "finite_number": "a finite number",
    "bool_": "`true` or `false`",
    "string_type": "a text",
    "string_sub_type": "a text",
    "tuple_": "a list",
    "list_": "a list",
    "model_": "a mapping",
    "dict_": "a mapping",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def raise_findings(findings: Iterable[str]) -> None:
    """Raises one BadFileError with all of `findings`; does nothing where there are none."""
    told = list(dict.fromkeys(findings))
    if told:
        raise BadFileError(told[0], details=tuple(told[1:]))


def describe_errors(error: ValidationError, tree: Node, model: type[BaseModel]) -> list[str]:
    """One sentence for each value that `model` does not take, in the order of the files' lines."""
    unions: dict[KeyPath, list[Mapping[str, Any]]] = {}
    told: list[tuple[str, int, str]] = []
    for one in error.errors(include_url=False):
        node, depth = tree.find(one["loc"])
        path = tuple(one["loc"][:depth])
        if one["type"] == "extra_forbidden" and depth == len(one["loc"]):
            parent = tree.find(path[:-1])[0]
            mark = parent.key_marks.get(str(path[-1]), node.mark)
            told.append((mark.source, mark.line, f"{mark}: {describe_unknown_key(path, model)}"))
        elif one["type"] == "missing" and depth == len(one["loc"]) - 1:
            key = dotted(one["loc"])
            sentence = f"{node.mark}: `{key}` is missing" + (f"; {_MISSING[key]}" if key in _MISSING else "")
            told.append((node.mark.source, node.mark.line, sentence))
        else:
            # A union reports one error for each of its members, all under the same value.
            unions.setdefault(path, []).append(one)
    for path, errors in unions.items():
        node = tree.find(path)[0]
        told.append((node.mark.source, node.mark.line, f"{node.mark}: {_describe_value(path, node, errors)}"))
    told.sort(key=lambda entry: entry[:2])
    return [sentence for _, _, sentence in told]


def dotted(path: Iterable[str | int]) -> str:
    """`settings.kv_tokens`, `hardware.cpu.isa[0]`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def describe_unknown_key(path: KeyPath, model: type[BaseModel]) -> str:
    """`unknown key `settings.kv_tokn`; did you mean `kv_tokens`?`: the nearest beside it, else anywhere."""
    key, parent = str(path[-1]), dotted(path[:-1])
    known = known_keys(model)
    beside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == parent]
    nearest = difflib.get_close_matches(key, beside, n=1, cutoff=0.7)
    suggestion = f"{parent}.{nearest[0]}" if nearest and parent else nearest[0] if nearest else ""
    if not suggestion:
        elsewhere = {one.rpartition(".")[2]: one for one in reversed(known)}
        nearest = difflib.get_close_matches(key, list(elsewhere), n=1, cutoff=0.8)
        suggestion = elsewhere[nearest[0]] if nearest else ""
    if not suggestion and (loose := difflib.get_close_matches(key, beside, n=1, cutoff=0.5)):
        suggestion = f"{parent}.{loose[0]}" if parent else loose[0]
    hint = f"; did you mean `{suggestion}`?" if suggestion else _list_keys(beside)
    return f"unknown key `{dotted(path)}`{hint}"


def _list_keys(keys: list[str]) -> str:
    return "; known are " + ", ".join(f"`{key}`" for key in keys) if keys else ""


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of `model` and of the models in it."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if (inner := find_model(field.annotation)) is not None:
            keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def find_model(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, looking into `X | None`; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [found for one in typing.get_args(annotation) if (found := find_model(one)) is not None]
    return inner[0] if len(inner) == 1 and len(typing.get_args(annotation)) == 2 else None


def _describe_value(path: KeyPath, node: Node, errors: list[Mapping[str, Any]]) -> str:
    key = dotted(path)
    sentences = [str(one["ctx"]["error"]) for one in errors if one["type"] in ("value_error", "assertion_error")]
    choices = [text for one in errors if (text := _describe_expected(key, one))]
    if node.is_mapping and sentences and not choices:
        return sentences[0]  # A check of several fields at once names them itself.
    if not node.text and sentences:  # A mapping or a list where a value should be: its dump would say nothing.
        choices += [sentence.rpartition("expected ")[2] for sentence in sentences]
        sentences = []
    if sentences:
        rest = " or " + " or ".join(dict.fromkeys(choices)) if choices and "expected" in sentences[0] else ""
        return f"`{key}`: {sentences[0]}{rest}" if key else sentences[0]
    expected = _IN_WORDS.get(key) or " or ".join(dict.fromkeys(choices)) or str(errors[0]["msg"]).lower()
    is_kind = any(one["type"] == "literal_error" or str(one["type"]).endswith("_type") for one in errors)
    return f"`{key}` is {_show(node, is_kind=is_kind)}, expected {expected}" if key else f"expected {expected}"


def _describe_expected(key: str, error: Mapping[str, Any]) -> str:
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind in ("literal_error", "enum"):
        return re.sub(r"'([^']*)'", r"`\1`", str(context["expected"]))
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]:g}"
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(key, f"a text like `{context['pattern']}`")
    return next((words for start, words in _KINDS.items() if kind.startswith(start)), "")


def _show(node: Node, *, is_kind: bool = False) -> str:
    """The value in words; with `is_kind`, that a number in quotes is a text."""
    if node.is_mapping:
        return "a mapping"
    if isinstance(node.value, list):
        return "a list"
    text = node.text if len(node.text) <= 60 else node.text[:57] + "..."
    if is_kind and isinstance(node.value, str) and _LOOKS_OTHERWISE.fullmatch(text):
        return f'the text `"{text}"`'
    return f"`{text}`" if text else "empty"
