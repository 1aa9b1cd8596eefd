"""The model cards against one machine: what `ft plan --suggest` asks the planner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from freetoken.deploy.tools import DEFAULT_TOOLS, Tools

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Plan, PlanRequest, Refusal
    from freetoken.planner.suggest import Candidate, Suggestions

#: Findings that another engine, model or quantisation may not have; the others are mended in the recipe.
OF_THE_MACHINE = frozenset(
    {"gpu", "gpu_generation", "os", "driver", "checkpoint_layout", "architecture", "top_k", "vram"}
)
#: How many times faster another engine has to be to be named beside a plan.
CLEARLY_FASTER = 1.3
#: Other models that a refusal names.
MOST_INSTEAD = 2
#: Ends of card names that say how the same model is stored.
QUANTIZATION = re.compile(r"-(nvfp4|mxfp4|fp8|bf16|int4|awq|gptq|i?q\d\w*)$")


def suggest_models(
    hardware: Hardware | None = None,
    *,
    workload: str = "agent-8k",
    engine: str | None = None,
    sets: tuple[str, ...] = (),
    options: str = "",
    tools: Tools = DEFAULT_TOOLS,
) -> Suggestions:
    """Every card planned for `hardware` (None: this machine) on every engine, or on `engine` alone. Changes nothing."""
    from freetoken.planner.suggest import suggest

    machine = hardware or tools.probe(None)
    options = f"--workload {workload} {options}".rstrip()
    candidates = list_candidates(machine, workload, engine, sets, tools, is_here=hardware is None)
    return suggest(candidates, machine.name, workload, options)


def list_candidates(
    machine: Hardware, workload: str, engine: str | None, sets: tuple[str, ...], tools: Tools, *, is_here: bool
) -> Iterator[Candidate]:
    """One candidate a card: its shape, and what it would take on each engine.

    On this very machine a checkpoint that was fetched already is found, and costs no download.
    """
    from pathlib import Path

    from freetoken.adapters import ADAPTERS
    from freetoken.checkpoint.cards import list_cards, read_card
    from freetoken.planner.plan import PlanRequest
    from freetoken.planner.suggest import Candidate
    from freetoken.recipe.load import make_model_recipe
    from freetoken.recipe.model import ModelRef

    recipes = {
        name: make_model_recipe("owner/model", sets=(f"engine.name={name}", f"workload={workload}", *sets)).recipe
        for name in (ADAPTERS if engine is None else (engine,))
    }
    adapters = {name: tools.find_adapter(name) for name in recipes}
    for info in list_cards():
        ref = ModelRef(repo=info.repo)
        located = tools.locate(ref, Path.cwd()) if is_here else None
        shape = located.shape if located is not None and located.shape is not None else read_card(Path(info.path))
        left = located.download_bytes if located is not None else shape.disk_bytes
        requests = []
        for name, recipe in recipes.items():
            mine = recipe.model_copy(update={"model": ref, "name": info.name})
            request = PlanRequest(recipe=mine, hardware=machine, shape=shape, download_bytes=left)
            requests.append((adapters[name], request))
        yield Candidate(QUANTIZATION.sub("", info.name), info.name, info.repo, shape, tuple(requests))


def suggest_instead(
    refusal: Refusal, hardware: Hardware | None, workload: str, options: str = "", tools: Tools = DEFAULT_TOOLS
) -> Refusal:
    """`refusal` with the nearest thing that does run here, where no change of settings helps.

    Another quantisation or engine for the same model where one runs well, else the models that do.
    """
    from freetoken.checkpoint.cards import find_card_info

    fatal = {finding.check for finding in refusal.findings if finding.is_fatal}
    if refusal.repairs or (fatal and fatal.isdisjoint(OF_THE_MACHINE)):
        return refusal
    found = suggest_models(hardware, workload=workload, options=options, tools=tools).suggestions
    info = find_card_info(refusal.model_name)
    family = QUANTIZATION.sub("", info.name) if info is not None else None
    same = [one for one in found if one.model == family]
    words = [f"`{one.command}`: {one.decode_tps:.3g} tok/s predicted" for one in same or found[:MOST_INSTEAD]]
    if not words:
        words = ["nothing among the model cards runs well on this machine: `ft plan --suggest` says what each lacks"]
    return refusal.model_copy(update={"alternatives": (*refusal.alternatives, *words)})


def find_faster_engine(plan: Plan, request: PlanRequest, tools: Tools = DEFAULT_TOOLS) -> tuple[str, float] | None:
    """An engine that can be started and runs the same clearly faster (its name, tok/s predicted), or None."""
    from freetoken.adapters import ADAPTERS
    from freetoken.planner.suggest import try_candidate

    if plan.prediction is None:
        return None
    least = plan.prediction.decode_tps * CLEARLY_FASTER
    best: tuple[str, float] | None = None
    for name in ADAPTERS:
        adapter = tools.find_adapter(name)
        if name == plan.engine or not adapter.is_launched:
            continue
        engine = request.recipe.engine.model_copy(update={"name": name, "version": ""})
        recipe = request.recipe.model_copy(update={"engine": engine})
        attempt, reason = try_candidate(request.model_copy(update={"recipe": recipe, "engine_version": None}), adapter)
        if attempt is not None and not reason and attempt.prediction.decode_tps > max(least, best[1] if best else 0.0):
            best = (name, attempt.prediction.decode_tps)
    return best
