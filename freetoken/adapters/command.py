"""`ft recipe from-command` and `show --command`: which engine a command line is of, and the recipe that it comes to."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from freetoken.adapters.command_freetoken import FREETOKEN
from freetoken.adapters.command_llamacpp import LLAMACPP
from freetoken.adapters.command_native import NATIVE
from freetoken.adapters.command_shell import ShellCommand, is_preparing, read_shell, read_words
from freetoken.adapters.command_table import CommandTable, Fields, ParsedCommand, format_arguments, parse_arguments
from freetoken.adapters.command_vllm import VLLM
from freetoken.errors import UsageError

if TYPE_CHECKING:
    from freetoken.recipe.model import Recipe

TABLES: dict[str, CommandTable] = {one.engine: one for one in (NATIVE, FREETOKEN, LLAMACPP, VLLM)}
KNOWN = "known: `ft serve`, `python -m freetoken`, `llama-server`, `vllm serve`, `docker run` of either"
#: Variables whose value is a secret by their name.
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIALS?)($|_)", re.I)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: What runs an image, and images whose arguments are those of the engine's server.
_CONTAINERS = ("docker", "podman")
_IMAGE = re.compile(r"(^|/)(vllm-openai(-\w+)?|llama\.cpp|llama-server)([:@]|$)")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
#: Tokens of the answer that a workload made from a context length leaves room for, at most.
_ANSWER_TOKENS = 512
_SHORT_CHAT = "chat-2k"


def parse_command(command: str | Sequence[str]) -> ParsedCommand:
    """The recipe values of an engine's command line, every flag accounted for. UsageError where it is no engine's.

    A text may be a whole script: the first command in it that starts an engine counts, the others are named.
    """
    commands = read_shell(command, _is_engine) if isinstance(command, str) else [read_words(command, _is_engine)]
    commands = [one for one in commands if one.words] or [ShellCommand([])]
    chosen = next((one for one in commands if _is_engine(one.words)), None)
    if chosen is None:
        chosen = next((one for one in commands if one.words and not is_preparing(one)), commands[0])
    if not chosen.words:
        raise UsageError("the command line is empty", hint=KNOWN)
    table, arguments = find_table(chosen.words)
    parsed = parse_arguments(table, arguments)
    fields, notes = dict(parsed.fields), [*chosen.notes]
    notes += _read_environment(chosen.env, fields)
    if PurePath(chosen.words[0]).name in _CONTAINERS:
        own = chosen.words[1 : 1 + (_find_image(chosen.words[1:]) or 0)]
        notes.append(f"left out, since `ft` runs no container: `{shlex.join(own)}`")
    if "model" not in fields:
        raise UsageError("the command line names no model")
    notes += [
        f"`{word}` holds a variable of the shell, whose value is not known here: put it there"
        for word in dict.fromkeys(arguments) if re.search(r"\$[A-Za-z_{(]", word)
    ]  # fmt: skip
    if _make_workload(fields) == _SHORT_CHAT:
        notes.append(
            f"the command names no context: the workload is `{_SHORT_CHAT}`, 2,048 tokens; name another such as "
            "`agent-8k`, since KV cache is planned for it"
        )
    unknown = (*parsed.unknown, *(shlex.join(one.words) for one in commands if one is not chosen))
    return replace(parsed, fields=fields, notes=(*notes, *parsed.notes), unknown=unknown)


def _is_engine(words: Sequence[str]) -> bool:
    try:
        find_table(words)
    except UsageError:
        return False
    return True


def _read_environment(env: dict[str, str], fields: Fields) -> Iterator[str]:
    """Variables before the command into `fields`; a note for each that does not become part of a recipe."""
    kept = {}
    for name, value in env.items():
        if name == "CUDA_VISIBLE_DEVICES":
            first = value.split(",")[0].strip()
            if first.isdigit() or first.startswith("GPU-"):
                fields.setdefault("settings.gpu", int(first) if first.isdigit() else first)
            if first != value:
                yield f"`{name}={value}`: one GPU serves a recipe; {first or 'none'} is taken"
        elif _SECRET.search(name):
            yield f"`{name}` is left out: a secret belongs into no file; set it where `ft` runs"
        else:
            kept[name] = value
    if kept:
        fields["engine.env"] = kept


def _find_image(words: Sequence[str]) -> int | None:
    """Where in `docker run ... IMAGE ...` the image of an engine's server stands; None where there is none."""
    if "run" not in words:
        return None
    return next((at for at, one in enumerate(words) if _IMAGE.search(one) and not one.startswith("-")), None)


def find_table(words: Sequence[str]) -> tuple[CommandTable, list[str]]:
    """Which engine `words` start, and its arguments. Raises UsageError where they start none."""
    rest = list(words)
    program = PurePath(rest.pop(0)).name if rest else ""
    if _PYTHON.fullmatch(program) and rest[:1] == ["-m"] and len(rest) > 1:
        module, rest = rest[1], rest[2:]
        program = {"freetoken": "freetoken", "freetoken.cli": "ft", "vllm.entrypoints.openai.api_server": "vllm"}.get(
            module, module
        )
    if program in _CONTAINERS and (at := _find_image(rest)) is not None:
        return (VLLM if "vllm" in rest[at] else LLAMACPP), rest[at + 1 :]
    if program == "llama-server":
        return LLAMACPP, rest
    if program == "vllm":
        return VLLM, rest[1:] if rest[:1] == ["serve"] else rest
    if program in ("ft", "freetoken"):
        has_verb = rest[:1] == ["serve"]
        rest = rest[1:] if has_verb else rest
        # Our own `ft serve` takes the model as its first argument, the upstream engine's after a flag.
        is_ours = has_verb and bool(rest) and not any(one.split("=")[0] in ("--model", "--model-path") for one in rest)
        return (NATIVE, rest) if is_ours else (FREETOKEN, rest)
    raise UsageError(f"`{program}` starts no engine that can be read", hint=KNOWN)


def make_recipe_values(parsed: ParsedCommand, *, name: str | None = None) -> dict[str, Any]:
    """What a recipe's file says of `parsed`: nested values, and a workload that its context length allows."""
    fields = dict(parsed.fields)
    model = str(fields.pop("model"))
    values: dict[str, Any] = {
        "version": 1,
        "name": name or make_name(model),
        "model": {"repo": model} if _REPO.fullmatch(model) and not model.endswith(".gguf") else {"path": model},
    }
    if "model.file" in fields and "path" in values["model"]:
        del fields["model.file"]
    values["workload"] = _make_workload(fields)
    for key, value in fields.items():
        section, _, leaf = key.partition(".")
        if leaf:
            values.setdefault(section, {})[leaf] = value
        elif section not in ("context", "sequences"):
            values[section] = value
    order = ("version", "name", "model", "engine", "serve", "workload", "settings", "allow_quality_changes")
    return {key: values[key] for key in order if key in values}


def make_name(model: str) -> str:
    """A recipe's name for `model`."""
    stem = PurePath(model.rstrip("/")).name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")[:80] or "model"


def format_command(recipe: Recipe) -> list[str]:
    """The engine's own command line for what `recipe` fixes; raises UsageError for an engine without a table."""
    table = TABLES.get(recipe.engine.name)
    if table is None:
        raise UsageError(f"the command line of engine `{recipe.engine.name}` is not known to this version")
    fields: Fields = {"model": recipe.model.repo or recipe.model.path}
    if recipe.model.repo is not None:
        fields |= {"is_repo": True, "model.file": recipe.model.file}
        fields |= {"model.revision": recipe.model.revision} if recipe.model.revision != "main" else {}
        fields |= {"model.source": recipe.model.source} if recipe.model.source != "huggingface" else {}
    for section, default in (("settings", type(recipe.settings)()), ("serve", type(recipe.serve)())):
        part = getattr(recipe, section)
        for name in type(part).model_fields:
            value = getattr(part, name)
            implied = table.defaults.get(f"{section}.{name}", getattr(default, name))
            if value not in (implied, "auto", "model", None):
                is_size = hasattr(value, "bytes")
                fields[f"{section}.{name}_bytes" if is_size else f"{section}.{name}"] = (
                    value.bytes if is_size else value
                )
    if recipe.engine.extra_args:
        fields["engine.extra_args"] = recipe.engine.extra_args
    fields["context"] = recipe.workload.context_tokens
    argv = format_arguments(table, fields)
    return [*(f"{key}={value}" for key, value in recipe.engine.env.items()), *argv]


def join_command(argv: Sequence[str]) -> str:
    """`argv` as a line that a shell takes, the variables in front of it too."""
    # A shell finds the home folder for a `~/` that is not quoted.
    words = [f"~/{shlex.quote(one[2:])}" if one.startswith("~/") and one[2:] else shlex.quote(one) for one in argv]
    for index, one in enumerate(argv):
        name, is_assignment, value = one.partition("=")
        if not is_assignment or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            break
        words[index] = f"{name}={shlex.quote(value)}"
    return " ".join(words)


def _make_workload(fields: Fields) -> str | dict[str, Any]:
    """A workload that fills the context that the command line gives; the shipped short chat where it gives none."""
    concurrency = int(fields.get("settings.max_running_requests", 1) or 1)
    context = fields.get("context")
    if context is None and isinstance(fields.get("settings.kv_tokens"), int):
        context = fields["settings.kv_tokens"] // concurrency
    if not context or context < 16:
        return _SHORT_CHAT if concurrency == 1 else {"name": "command", "concurrency": concurrency}
    answer = min(_ANSWER_TOKENS, context // 4)
    return {
        "name": "command", "prompt_tokens": context - answer, "output_tokens": answer, "concurrency": concurrency,
        "context_tokens": context,
    }  # fmt: skip
