"""What a recipe from elsewhere may ask for; everything else is refused with its name.

Flags and variables come from the adapters' allow-lists. The rest is what a recipe could do to a machine: name its
files, open its network, take its secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from freetoken.adapters import ADAPTERS, get_adapter
from freetoken.errors import BadFileError

if TYPE_CHECKING:
    from freetoken.recipe.model import Recipe

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
#: Settings that follow from one machine's counts of cores, layers that its card holds, and free VRAM.
MACHINE_COUNTS = ("memory_ratio", "cpu_layers", "cpu_threads")
_RESERVED_PORTS = 1024
#: Findings that are told one by one; the rest is counted.
_MAX_TOLD = 8


def split_arguments(arguments: Sequence[str], allowed: dict[str, str]) -> tuple[list[str], list[str]]:
    """What of `arguments` the list allows, in order, and a sentence for everything else.

    Only the full name of a flag counts: an engine's parser may take abbreviations, which are refused here.
    """
    kept: list[str] = []
    refused: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        pattern = allowed.get(flag)
        if pattern is None:
            # Its value may be a secret, and sentences end up in logs.
            shown = _show(flag) + ("=..." if has_value else "")
            refused.append(f"`{shown}` is not on the list of arguments that may come from elsewhere")
            if rest and not rest[0].startswith("-"):
                rest.pop(0)  # its value, which means nothing alone
            continue
        if not pattern and not has_value:
            kept.append(flag)
            continue
        given = value if has_value or not rest else rest.pop(0)
        if pattern and re.fullmatch(pattern, given, re.ASCII):
            kept += [argument] if has_value else [flag, given]
        else:
            refused.append(f"`{flag}` may not have the value `{_show(given)}`")
    return kept, refused


def split_environment(env: dict[str, str], allowed: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The same for variables."""
    kept: dict[str, str] = {}
    refused: list[str] = []
    for name, value in env.items():
        if name not in allowed:
            refused.append(f"the variable `{_show(name)}` is not on the list of those that may come from elsewhere")
        elif not re.fullmatch(allowed[name], value, re.ASCII):
            refused.append(f"the variable `{name}` may not have the value `{_show(value)}`")
        else:
            kept[name] = value
    return kept, refused


def list_allowed(engine: str) -> tuple[dict[str, str], dict[str, str]]:
    """Flags and variables that may come from elsewhere for `engine`; none for one that cannot be driven."""
    if engine not in ADAPTERS:
        return {}, {}
    adapter = get_adapter(engine)
    return adapter.shared_args, adapter.shared_env


def refuse_unsafe(recipe: Recipe, shown: str) -> None:
    """Raises BadFileError (exit 2) that names everything in `recipe` that nobody else may ask of this machine."""
    found = list(find_unsafe(recipe))
    if found:
        told = found[1:_MAX_TOLD]
        if len(found) > _MAX_TOLD:
            told.append(f"and {len(found) - _MAX_TOLD:,} more")
        raise BadFileError(f"{shown} is refused: {found[0]}", details=tuple(told))


def find_unsafe(recipe: Recipe) -> Iterator[str]:
    """One sentence for each thing that is refused."""
    args, env = list_allowed(recipe.engine.name)
    yield from (f"in `engine.extra_args` {one}" for one in split_arguments(recipe.engine.extra_args, args)[1])
    yield from (f"in `engine.env` {one}" for one in split_environment(recipe.engine.env, env)[1])
    if recipe.engine.name not in ADAPTERS:
        yield f"engine `{recipe.engine.name}` cannot be driven by this version"
    if recipe.model.path not in (None, "demo"):
        yield "`model.path` names a file of a machine, a shared recipe names a repository"
    if not _REVISION.fullmatch(recipe.model.revision) or ".." in recipe.model.revision:
        yield f"`model.revision` is `{_show(recipe.model.revision)}`, which is no branch, tag or commit"
    for key, given in (("repo", recipe.model.repo), ("file", recipe.model.file)):
        if given is not None and not given.isascii():
            yield f"`model.{key}` is `{_show(given)}`, whose letters only look like those of a name"
    if recipe.serve.host not in LOOPBACK:
        yield f"`serve.host` is `{_show(recipe.serve.host)}`, which opens the server to the network"
    if recipe.serve.port < _RESERVED_PORTS:
        yield f"`serve.port` is {recipe.serve.port}, a port of the system"
    if recipe.serve.api_key_env is not None:
        yield "`serve.api_key_env` names a variable of a machine"
    if recipe.extends is not None:
        yield "`extends` names another file, a shared recipe is complete"
    if recipe.workload.recording is not None or recipe.workload.text == "recorded":
        yield "`workload.recording` names a file of a machine"
    if recipe.settings.gpu != "auto":
        yield "`settings.gpu` names a device of a machine"
    for name in MACHINE_COUNTS:
        if getattr(recipe.settings, name) != "auto":
            yield f"`settings.{name}` is a count of one machine, a shared recipe leaves it open"
    for key, text in (("description", recipe.description), ("workload.description", recipe.workload.description)):
        if not all(one.isprintable() for one in text):
            yield f"`{key}` holds characters that cannot be printed"
        elif len(text) > 500:
            yield f"`{key}` has {len(text):,} characters, 500 are allowed"
    if not re.fullmatch(r"[\w.-]{1,80}", recipe.workload.name) or not recipe.workload.name.isascii():
        yield f"`workload.name` is `{_show(recipe.workload.name)}`, which is no name"


def _show(text: str) -> str:
    return ascii(text[:60])[1:-1]
