"""How an engine's command line reads as a recipe, and back: one table a engine, used in both directions.

A flag is a recipe's value, an argument that travels as it is (`engine.extra_args`), something that a recipe says
otherwise (with a note), or unknown; nothing is dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from freetoken.errors import UsageError

Fields = dict[str, Any]


@dataclass(frozen=True)
class Flag:
    """What one flag means: the recipe's dotted key and how its text is read; `constant` where it takes no text."""

    key: str = ""
    read: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    has_value: bool = True
    constant: Any = None
    #: Said where it is met; `{}` is its value.
    note: str = ""
    #: True for the spelling that is written.
    is_canonical: bool = True


@dataclass(frozen=True)
class CommandTable:
    """An engine's command line: how it begins, what its flags mean, and what it says without flags."""

    engine: str
    program: tuple[str, ...]
    flags: Mapping[str, Flag]
    #: Flags of the engine that no recipe field stands for and that travel as arguments -> whether they take a value;
    #: a text is the value of a flag that may stand without one.
    passed: Mapping[str, bool | str] = field(default_factory=dict)
    #: True where the model is an argument without a flag.
    has_positional_model: bool = False
    model_flag: str = ""
    #: Flags for a hub's repository (a quantisation after a `:`) and for a file of it, where the engine has such.
    repo_flags: tuple[str, str] | None = None
    #: Written always: what a plan means and the engine does not do by itself.
    always: tuple[str, ...] = ()
    #: What the engine does without a flag where that is not a recipe's default; None = something no recipe says.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Looks at all fields together: values that follow from several flags, and what is worth saying.
    finish: Callable[[Fields], Sequence[str]] = lambda fields: ()


@dataclass(frozen=True)
class ParsedCommand:
    """Recipe values by dotted key, notes in words, and what nobody understood."""

    engine: str
    fields: Fields
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def parse_arguments(table: CommandTable, arguments: Sequence[str]) -> ParsedCommand:
    """The recipe values of `arguments`. Raises UsageError where a value is missing or cannot be read."""
    fields: Fields = {"engine.name": table.engine}
    notes: list[str] = []
    unknown: list[str] = []
    extra: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, has_text, text = argument.partition("=")
        if not argument.startswith("-"):
            if table.has_positional_model and "model" not in fields:
                fields["model"] = argument
            else:
                unknown.append(argument)
        elif (flag := table.flags.get(name)) is not None:
            value = _take(name, text if has_text else None, rest) if flag.has_value else flag.constant
            _keep(flag, name, value, fields, notes)
        elif name in table.passed:
            extra.append(argument)
            implied = table.passed[name]
            if isinstance(implied, str) and not has_text and (not rest or rest[0].startswith("-")):
                extra.append(implied)
            elif implied and not has_text:
                extra.append(_take(name, None, rest))
        else:
            unknown.append(argument)
            if not has_text and rest and not rest[0].startswith("-"):
                unknown[-1] += f" {rest.pop(0)}"
    if extra:
        fields["engine.extra_args"] = extra
    for key, value in table.defaults.items():
        if value is not None:
            fields.setdefault(key, value)
    return ParsedCommand(table.engine, fields, (*notes, *table.finish(fields)), tuple(unknown))


def format_arguments(table: CommandTable, fields: Mapping[str, Any]) -> list[str]:
    """The command line of recipe values; `auto` is what the engine does by itself and is left out."""
    argv = list(table.program)
    model = fields.get("model")
    if model is not None and table.repo_flags is not None and fields.get("is_repo"):
        repo_flag, file_flag = table.repo_flags
        file = fields.get("model.file") or ""
        is_file = file.endswith(".gguf")
        argv += [repo_flag, f"{model}:{file}" if file and not is_file else str(model)]
        argv += [file_flag, file] if is_file else []
    elif model is not None:
        argv += [str(model)] if table.has_positional_model else [table.model_flag, str(model)]
    argv += table.always
    for name, flag in table.flags.items():
        if not flag.key or not flag.is_canonical or flag.key == "model" or flag.key not in fields:
            continue
        value = fields[flag.key]
        if flag.has_value and value != "auto":
            argv += [name, flag.write(value)]
        elif not flag.has_value and value == flag.constant:
            argv.append(name)
    return [*argv, *fields.get("engine.extra_args", ())]


def _take(name: str, text: str | None, rest: list[str]) -> str:
    if text is not None:
        return text
    # A negative number is a value, another flag is none.
    if not rest or (rest[0].startswith("-") and not rest[0][1:2].isdigit()):
        raise UsageError(f"`{name}` needs a value")
    return rest.pop(0)


def _keep(flag: Flag, name: str, value: Any, fields: Fields, notes: list[str]) -> None:
    if flag.note:
        notes.append(f"`{name}`: {flag.note.format(value)}")
    if not flag.key:
        return
    try:
        found = flag.read(value) if flag.has_value else value
    except ValueError as error:
        raise UsageError(f"`{name} {value}` cannot be read: {error}") from error
    if fields.get(flag.key, found) != found:
        notes.append(f"`{name}` says {found} where {fields[flag.key]} was said before; the last counts")
    fields[flag.key] = found


_MULTIPLES = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}


def number(text: str) -> int:
    """A whole number; `k` and `m` are powers of 1000, `K` and `M` of 1024."""
    found = re.fullmatch(r"(-?\d+)([kKmM]?)", text, re.ASCII)
    if found is None:
        raise ValueError("expected a whole number")
    return int(found[1]) * _MULTIPLES[found[2]]


def number_or_auto(text: str) -> int | str:
    """A whole number, or `auto`."""
    return text if text == "auto" else number(text)


def ratio(text: str) -> float:
    """A number with or without a point."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


def finish_kv(fields: Fields) -> list[str]:
    """Puts the type of the KV cache in order: one that changes answers is allowed by name, others are noted."""
    dtype = fields.get("settings.kv_dtype", "model")
    if dtype in ("fp8", "bf16"):
        fields["allow_quality_changes"] = ["kv_dtype"]
        return []
    fields.pop("settings.kv_dtype", None)
    if dtype == "model":
        return []
    return [f"a KV cache of type `{dtype}` is not something a recipe can say; the model's own type is taken"]


def device(text: str) -> int | str:
    """An index or a uuid."""
    return int(text) if text.isdigit() else text


def show_ratio(value: Any) -> str:
    """A ratio without needless digits."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
