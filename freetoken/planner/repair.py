"""The smallest changes that turn a no into a yes, each planned again before it is offered.

A repair is a set of `--set` arguments that can be pasted. What an engine's own message advises is never repeated
unchecked: a suggestion that does not plan is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from freetoken.planner.budget import Budget, choose_gpu, is_wsl_policy
from freetoken.planner.limits import check_limits, is_older
from freetoken.planner.memory import Finding, Ledger
from freetoken.planner.plan import PlanRequest, Repair
from freetoken.recipe.model import Recipe, Settings
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.planner.solve import Attempt

#: How many repairs are shown.
MOST_REPAIRS = 4
#: To how many tokens the largest KV cache that fits is looked for.
KV_STEP_TOKENS = 1024
#: Settings whose fixed value may be what does not fit, in the order in which giving it up costs least.
RELEASABLE = (
    "expert_slots",
    "memory_ratio",
    "prefill_chunk_tokens",
    "attention",
    "embed_on_host",
    "prefix_cache",
    "prefill_overlap",
    "max_running_requests",
    "kv_tokens",
    "strategy",
    "expert_load",
    "cpu_layers",
    "gpu",
)


class UnknownFieldError(ValueError):
    """A dotted path that names no field of a recipe."""


def apply_sets(recipe: Recipe, sets: dict[str, Any]) -> Recipe:
    """`recipe` with dotted fields replaced, validated again. Raises ValidationError or UnknownFieldError."""
    document = recipe.model_dump(mode="json")
    for path, value in sets.items():
        *parents, leaf = path.split(".")
        target: Any = document
        for name in parents:
            target = target.get(name)
            if not isinstance(target, dict):
                raise UnknownFieldError(f"`{path}` names no field of a recipe")
        target[leaf] = value
    return Recipe.model_validate(document)


def find_repairs(request: PlanRequest, adapter: EngineAdapter) -> tuple[Repair, ...]:
    """Changes that plan, the ones that keep most predicted decode speed first; few changes before many."""
    repairs: list[Repair] = []
    for size in (1, 2):
        for sets in _proposals(request, adapter, size):
            repair = _check(request, adapter, sets)
            if repair is not None:
                repairs.append(repair)
            if size > 1 and len(repairs) >= MOST_REPAIRS:
                break
        if repairs:
            break
    if any("settings.kv_tokens" in one.sets for one in repairs):
        repairs += [one for sets in _most_kv(request, adapter) if (one := _check(request, adapter, sets)) is not None]
    if not repairs:
        everything = _release_all(request)
        repair = _check(request, adapter, everything) if everything else None
        repairs = [repair] if repair is not None else []
    unique = {tuple(sorted(one.sets.items())): one for one in repairs}
    ranked = sorted(unique.values(), key=lambda one: -(one.predicted_decode_tps or 0))
    return tuple(ranked[:MOST_REPAIRS])


def _proposals(request: PlanRequest, adapter: EngineAdapter, size: int) -> Iterator[dict[str, Any]]:
    single = [*_releases(request), *_lighter(request, adapter)]
    if size == 1:
        yield from single
        return
    for index, first in enumerate(single):
        for second in single[index + 1 :]:
            if not first.keys() & second.keys():
                yield first | second


def _releases(request: PlanRequest) -> Iterator[dict[str, Any]]:
    """Each fixed setting given back to the planner, which then finds the value that fits."""
    for name in RELEASABLE:
        if getattr(request.recipe.settings, name) != Settings.model_fields[name].default:
            yield {f"settings.{name}": "auto"}


def _most_kv(request: PlanRequest, adapter: EngineAdapter) -> Iterator[dict[str, Any]]:
    """The largest KV cache below the one that the recipe fixes: `auto` would give no more than the workload needs."""
    fixed, needed = request.recipe.settings.kv_tokens, request.recipe.workload.kv_tokens
    if not isinstance(fixed, int):
        return
    # More than every request's whole context helps nobody.
    wanted = min(fixed, request.shape.max_position_tokens * request.recipe.workload.concurrency + KV_STEP_TOKENS)
    if wanted - needed < 2 * KV_STEP_TOKENS:
        return
    low, high = needed // KV_STEP_TOKENS, wanted // KV_STEP_TOKENS  # in steps: fits perhaps, does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if try_sets(request, adapter, {"settings.kv_tokens": middle * KV_STEP_TOKENS}) is None:
            high = middle
        else:
            low = middle
    if low * KV_STEP_TOKENS > needed:
        yield {"settings.kv_tokens": low * KV_STEP_TOKENS}


def _release_all(request: PlanRequest) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for one in _releases(request):
        merged |= one
    return merged


def _lighter(request: PlanRequest, adapter: EngineAdapter) -> Iterator[dict[str, Any]]:
    """Things that the recipe leaves open or asks for, made smaller."""
    recipe = request.recipe
    if isinstance(recipe.headroom, int) or (recipe.headroom == "desktop" and not is_wsl_policy(request)):
        yield {"headroom": "server"}
    knobs = {knob.name for knob in adapter.knobs}
    if "state_dtype" in knobs and request.shape.state_bytes_per_sequence() and recipe.settings.state_dtype == "model":
        yield {
            "allow_quality_changes": sorted({*recipe.allow_quality_changes, "state_dtype"}),
            "settings.state_dtype": "bfloat16",
        }
    workload = recipe.workload
    if workload.concurrency > 1:
        yield {"workload.concurrency": 1}
    needed = workload.needed_context_tokens
    if workload.context_tokens > needed:
        yield {"workload.context_tokens": needed}
    if workload.turns > 1:
        turns = workload.turns // 2
        each = workload.prompt_tokens + workload.output_tokens
        yield {"workload.turns": turns, "workload.context_tokens": workload.shared_prefix_tokens + turns * each}


def _check(request: PlanRequest, adapter: EngineAdapter, sets: dict[str, Any]) -> Repair | None:
    """The repair of `sets` when it plans, with the value that the planner found in place of `auto`."""
    attempt = try_sets(request, adapter, sets)
    if attempt is None:
        return None
    pinned = {path: _pin(path, value, attempt) for path, value in sets.items()}
    if pinned != sets and try_sets(request, adapter, pinned) is None:
        pinned = sets
    ledger = attempt.budget.vram or attempt.budget.ram
    return Repair(
        description=_describe(pinned, attempt),
        sets={path: _as_argument(value) for path, value in pinned.items()},
        frees_bytes=max(0, ledger.left_bytes - ledger.headroom_bytes),
        predicted_decode_tps=attempt.prediction.decode_tps,
    )


def try_sets(request: PlanRequest, adapter: EngineAdapter, sets: dict[str, Any]) -> Attempt | None:
    """The feasible attempt of `request` with `sets` applied; None where that does not plan either."""
    from freetoken.planner.solve import search

    try:
        recipe = apply_sets(request.recipe, sets)
    except (ValidationError, UnknownFieldError):
        return None
    changed = request.model_copy(update={"recipe": recipe})
    if any(finding.is_fatal for finding in check_limits(changed, adapter.limits)):
        return None
    attempt = search(changed, adapter.memory_model)
    return attempt if attempt is not None and attempt.is_feasible else None


def _pin(path: str, value: Any, attempt: Attempt) -> Any:
    name = path.removeprefix("settings.")
    if value != "auto" or name == "gpu":
        return value
    resolved = getattr(attempt.budget.settings, name, None)
    return value if resolved is None else resolved


def _as_argument(value: Any) -> str:
    """The text after `=` of a `--set` argument."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(str(one) for one in value) + "]"
    return str(value)


def _describe(sets: dict[str, Any], attempt: Attempt) -> str:
    changes = ", ".join(f"{path.removeprefix('settings.')} {_as_argument(value)}" for path, value in sets.items())
    prediction = attempt.prediction
    return f"{changes}: {attempt.budget.settings.expert_slots:,} slots, {prediction.decode_tps:.3g} tok/s predicted"


def suggest_alternatives(
    request: PlanRequest, adapter: EngineAdapter, budget: Budget | None, fatal: list[Finding]
) -> tuple[str, ...]:
    """What would work instead, in words: findings' own hints, then what the missing bytes mean for this machine."""
    words = [finding.hint for finding in fatal if finding.hint]
    if budget is None:
        return tuple(dict.fromkeys(words))
    for ledger in budget.ledgers:
        if not ledger.missing_bytes:
            continue
        if isinstance(request.recipe.headroom, int) and ledger.peak_bytes <= ledger.available_bytes:
            continue  # only the recipe's own headroom is in the way
        missing = format_bytes(ledger.missing_bytes)
        if ledger.kind == "vram":
            words.append(
                f"a card with {missing} more VRAM free{_name_card(request, ledger)}, or what holds VRAM now closed"
            )
        elif ledger.kind == "ram":
            words.append(_ram_alternative(request, adapter, ledger, missing))
        else:
            words.append(f"{missing} more disk free on {request.hardware.disk.path or 'the disk of the models'}")
    return tuple(dict.fromkeys(words))


def _name_card(request: PlanRequest, ledger: Ledger) -> str:
    """`, such as `RTX 3060 12GB`": the smallest card of this one's form and a generation that every engine takes."""
    from freetoken.hardware.cards import CARDS
    from freetoken.hardware.catalog import make_gpu

    gpu = choose_gpu(request)
    is_laptop = gpu is not None and gpu.is_laptop
    needed = ledger.peak_bytes + ledger.headroom_bytes
    enough = [
        card
        for card in CARDS
        if card.vendor == "nvidia"
        and (card.form == "laptop") is is_laptop
        and not is_older(card.compute_capability or "0", "8.0")
        and make_gpu(card).vram_free_bytes >= needed
    ]
    nearest = min(enough, key=lambda card: (card.vram_bytes, card.name), default=None)
    return f", such as `{nearest.name}`" if nearest is not None else ""


def _ram_alternative(request: PlanRequest, adapter: EngineAdapter, ledger: Ledger, missing: str) -> str:
    if request.shape.experts.bank_bytes < ledger.missing_bytes:
        return f"{missing} more RAM"  # were there no experts at all, it would not fit
    bank = format_bytes(request.shape.experts.bank_bytes)
    text = f"{missing} more RAM for the {bank} of experts, or a smaller quantisation"
    if not adapter.is_embedded:
        command = f"ft plan {model_name(request)} --engine native"
        text += f"; engine `native` reads experts from disk where RAM is short: `{command}`"
    return text


def model_name(request: PlanRequest) -> str:
    """The model as `ft plan` takes it on its command line: the repository or the path of the recipe."""
    model = request.recipe.model
    return model.repo or model.path or request.shape.name
