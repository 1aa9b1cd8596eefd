"""The facts that a session writes beside its study: recipe, model, machine class, workload, what is open."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import __version__, paths
from freetoken.errors import FtError
from freetoken.tuner.objectives import Limit, Objective
from freetoken.tuner.record import LimitFacts, StudyFacts
from freetoken.units import GIB, format_bytes

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.recipe.load import LoadedRecipe
    from freetoken.recipe.workload import Workload
    from freetoken.tuner.site import PlannedSite


def make_facts(
    loaded: LoadedRecipe, site: PlannedSite, objectives: Sequence[Objective], limits: Sequence[Limit], budget_s: float
) -> StudyFacts:
    """What the study of `loaded` on `site` is about."""
    recipe, request = loaded.recipe, site.request
    attempt = site.plan_attempt
    is_on_gpu = attempt is not None and attempt.budget.vram is not None
    knobs = {one.name for one in site.space}
    fixed = {
        name: value for name, value in recipe.settings.list_fixed().items() if name not in knobs and name != "gpu"
    }  # fmt: skip
    return StudyFacts(
        recipe=recipe.name, target=name_target(loaded), description=recipe.description, engine=recipe.engine.name,
        engine_version=request.engine_version, model=request.shape.name, workload=recipe.workload.name,
        workload_words=describe_workload(recipe.workload), is_named_workload=_has_name(recipe.workload),
        workload_set=_write_workload(recipe.workload),
        sets=_list_sets(loaded, knobs),
        machine=describe_machine(request.hardware, attempt.budget.settings.gpu if attempt and is_on_gpu else None),
        ledger="vram" if is_on_gpu else "ram", objectives=tuple(one.name for one in objectives),
        limits=tuple(LimitFacts(one.name, one.bound, one.is_upper) for one in limits),
        knobs=tuple(site.space), fixed=fixed, budget_s=budget_s, ft_version=__version__,
        began_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def name_target(loaded: LoadedRecipe) -> str:
    """How a command line names the recipe without telling where a person keeps files: a name, or a path from here."""
    if loaded.path is None:
        return loaded.recipe.name
    path = Path(loaded.path).absolute()
    if any(path.parent == folder.absolute() for folder in paths.search_dirs("recipes")):
        return path.stem
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def describe_machine(hardware: Hardware, gpu: str | None) -> str:
    """The machine's class in words: `NVIDIA RTX 3060, 12 GiB; AMD Ryzen 7, 8 cores; 32 GiB RAM; linux`."""
    words = []
    card = hardware.pick_gpu(gpu) if gpu is not None else None
    if card is not None:
        words.append(f"{card.name}, {format_bytes(card.vram_total_bytes)}")
    words.append(f"{hardware.cpu.model}, {hardware.cpu.physical_cores} cores")
    words.append(f"{round(hardware.ram.total_bytes / GIB)} GiB RAM")
    words.append("WSL" if hardware.os.is_wsl else hardware.os.name)
    if card is not None and hardware.software.driver:
        words.append(f"driver {hardware.software.driver}")
    return "; ".join(words)


def describe_workload(workload: Workload) -> str:
    """`6 turns of 1,024 new prompt tokens and 256 output tokens, 2,048 shared, 4 at once, 8,192 tokens of context`."""
    words = [
        f"{workload.turns} turn{'s' if workload.turns > 1 else ''} of {workload.prompt_tokens:,} new prompt tokens "
        f"and {workload.output_tokens:,} output tokens"
    ]
    if workload.shared_prefix_tokens:
        words.append(f"{workload.shared_prefix_tokens:,} shared")
    if workload.concurrency > 1:
        words.append(f"{workload.concurrency} at once")
    words.append(f"{workload.context_tokens:,} tokens of context")
    return ", ".join(words)


def _write_workload(workload: Workload) -> str:
    """The workload as a value of a command line."""
    if workload.recording is not None:
        return ""
    return json.dumps(workload.model_dump(mode="json", exclude_defaults=True, exclude={"description"}))


def _has_name(workload: Workload) -> bool:
    """Whether the workload's name alone leads to it."""
    from freetoken.recipe.load import load_workload

    try:
        return load_workload(workload.name) == workload
    except FtError:
        return False


def _list_sets(loaded: LoadedRecipe, knobs: Collection[str]) -> tuple[str, ...]:
    """What the command line overrode, as `--set` takes it; knobs, workload and places of a person's own left out."""
    document, found = loaded.recipe.model_dump(mode="json"), []
    for key, source in loaded.provenance.items():
        if source != "command line" or key.startswith(("workload", "model.path")):
            continue
        value: Any = document
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        is_knob = key.removeprefix("settings.") in knobs
        if isinstance(value, str | int | float) and not is_knob and not str(value).startswith(("/", "~")):
            found.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return tuple(found)
