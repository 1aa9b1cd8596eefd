"""What `ft serve` takes where a flag is left out: the planner's choice for this machine, explicit flags obeyed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.cli.output import note
from freetoken.errors import DoesNotFitError
from freetoken.recipe.workload import Workload
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.planner.plan import Plan, Refusal
    from freetoken.recipe.load import LoadedRecipe

#: Tokens of one request, tried in this order where `--kv-tokens` says nothing.
CONTEXTS = (8192, 4096, 2048)
#: Flags that the planner decides together; with all of them given nothing is planned.
_DECIDED = (
    "device", "strategy", "expert_slots", "kv_tokens", "max_running_requests", "prefill_chunk_tokens",
    "embed_on_host", "experts_from",
)  # fmt: skip
#: Flags that are recipe settings of the same name.
_SETTINGS = (
    "gpu", "strategy", "expert_slots", "kv_tokens", "max_running_requests", "prefill_chunk_tokens", "cpu_threads",
    "embed_on_host",
)  # fmt: skip


def fill_settings(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """`given` with every None taken from a plan, or left to the engine's own default.

    Raises DoesNotFitError where the model does not fit this machine, BadFileError for files that cannot be read.
    """
    missing = [name for name in _DECIDED if given[name] is None]
    if given["strategy"] in ("fused", "cpu") and "expert_slots" in missing:
        missing.remove("expert_slots")
    settings = {name: value for name, value in given.items() if value is not None}
    if not missing:
        return settings
    answer = _plan(folder, settings)
    if answer.kind == "refusal":
        raise _make_error(answer)
    planned = answer.settings.model_dump()
    settings = {**{name: planned[name] for name in (*missing, "cpu_threads", "gpu") if planned[name] is not None},
                **settings}  # fmt: skip
    if settings["device"] == "cpu":
        settings.pop("gpu", None)
    note(f"planned: {_describe(answer, settings)}")
    return settings


def _plan(folder: Path, settings: dict[str, Any]) -> Plan | Refusal:
    from freetoken.checkpoint.header import read_shape
    from freetoken.deploy.prepare import prepare_plan
    from freetoken.hardware.probe import probe_hardware
    from freetoken.recipe.load import make_model_recipe

    # A count of 0 leaves the choice to the engine, which no recipe can say.
    sets = [f"settings.{name}={_yaml(settings[name])}" for name in _SETTINGS if settings.get(name) not in (None, 0)]
    loaded, hardware = make_model_recipe(str(folder), sets=sets), probe_hardware(folder)
    if settings.get("device") == "cpu":
        hardware = hardware.model_copy(update={"gpus": ()})
    most = read_shape(folder).max_position_tokens
    answers = (prepare_plan(_with_context(loaded, context), hardware=hardware) for context in _contexts(settings, most))
    refusals: list[Refusal] = []
    for answer in answers:
        if answer.kind == "plan":
            return answer
        refusals.append(answer)
    return refusals[-1]


def _contexts(settings: dict[str, Any], most: int) -> tuple[int, ...]:
    """Contexts of one request to plan for, the best first: what the KV given holds, else what fits."""
    running = settings.get("max_running_requests") or 1
    given = settings.get("kv_tokens")
    wanted = (max(2, given // running),) if given else CONTEXTS
    return tuple(dict.fromkeys(min(context, most) for context in wanted))


def _with_context(loaded: LoadedRecipe, context_tokens: int) -> LoadedRecipe:
    running = loaded.recipe.settings.max_running_requests
    workload = Workload(
        name="serve",
        prompt_tokens=context_tokens // 2,
        output_tokens=context_tokens - context_tokens // 2,
        concurrency=1 if running == "auto" else running,
    )
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"workload": workload}))


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe(plan: Plan, settings: dict[str, Any]) -> str:
    slots = f"{settings['expert_slots']:,} expert slots, " if settings["strategy"] == "offload" else ""
    memory = plan.vram if settings["device"] == "cuda" and plan.vram is not None else plan.ram
    kind = "VRAM" if memory is plan.vram else "RAM"
    return (
        f"{settings['device']}, {settings['strategy']}, {slots}KV {settings['kv_tokens']:,} tokens,"
        f" {format_bytes(memory.peak_bytes)} of {kind}; flags change it"
    )


def _make_error(refusal: Refusal) -> DoesNotFitError:
    from freetoken.cli.render import make_refusal_error

    flags = {f"settings.{name}" for name in _SETTINGS}
    repairs = tuple(one for one in refusal.repairs if one.sets.keys() <= flags)
    error = make_refusal_error(refusal.model_copy(update={"repairs": repairs}), show=_show_flags)
    error.details = tuple(_as_flags(one) for one in error.details)
    error.hint = _as_flags(error.hint) if error.hint else None
    return error


def _show_flags(sets: Mapping[str, str]) -> str:
    """A repair as flags of `ft serve`; what a recipe calls `auto` is a flag left out."""
    values = {f"--{key.removeprefix('settings.').replace('_', '-')}": value for key, value in sets.items()}
    typed = [_show_flag(flag, value) for flag, value in values.items() if value != "auto"]
    left_out = [flag for flag, value in values.items() if value == "auto"]
    words = [f"`{' '.join(typed)}`"] * bool(typed) + [f"no `{' '.join(left_out)}`"] * bool(left_out)
    return " and ".join(words)


def _show_flag(flag: str, value: str) -> str:
    return {"true": flag, "false": f"--no-{flag[2:]}"}.get(value, f"{flag} {value}")


def _as_flags(words: str) -> str:
    """The advice of a finding, which is written for a recipe, as advice for `ft serve`."""
    flags = re.sub(r"--set settings\.(\w+)=", lambda found: f"--{found[1].replace('_', '-')} ", words)
    return flags.replace(", or `auto`", "")
