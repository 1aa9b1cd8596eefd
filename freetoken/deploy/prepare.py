"""A loaded recipe becomes a `PlanRequest`: what this machine is, where the model lies, what earlier runs taught.

`ft plan` and `ft apply` both come through here, so that what the one shows is what the other does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetoken.deploy.engines import find_engine
from freetoken.deploy.tools import DEFAULT_TOOLS, Tools
from freetoken.errors import FtError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from freetoken.adapters.base import EngineAdapter
    from freetoken.checkpoint.shape import ModelShape
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Calibration, Plan, PlanRequest, Refusal
    from freetoken.recipe.load import LoadedRecipe
    from freetoken.recipe.model import Recipe
    from freetoken.store.rows import LineContext


@dataclass(frozen=True)
class Reclaimable:
    """What our own running deployment gives back when it is replaced. Bytes."""

    vram_bytes: int = 0
    ram_bytes: int = 0
    #: The GPU it runs on: a recipe that leaves the choice open stays there.
    gpu: str | None = None
    #: Its processes, which are nothing that stands in its own way.
    pids: frozenset[int] = frozenset()


def prepare_request(
    loaded: LoadedRecipe,
    *,
    hardware: Hardware | None = None,
    reclaimable: Reclaimable | None = None,
    hardware_now: Hardware | None = None,
    tools: Tools = DEFAULT_TOOLS,
) -> PlanRequest:
    """Everything that the answer to `loaded` depends on; `hardware` stands in for this machine (a profile).

    `hardware_now` is this machine where it was just probed.

    Raises UsageError for an engine that cannot be driven, FtError where nothing is known of the model.
    """
    from freetoken.planner.plan import PlanRequest

    recipe, reclaimable = loaded.recipe, reclaimable or Reclaimable()
    adapter = tools.find_adapter(recipe.engine.name)
    home = find_engine(recipe.engine, adapter)
    located = tools.locate(recipe.model, loaded.base_dir)
    if located.shape is None:
        raise FtError(f"nothing is known of the model `{recipe.model.repo or recipe.model.path}`: {located.note}")
    machine = _give_back(hardware or hardware_now or tools.probe(None), reclaimable)
    if reclaimable.gpu is not None and recipe.settings.gpu == "auto" and _has_gpu(machine, reclaimable.gpu):
        settings = recipe.settings.model_copy(update={"gpu": reclaimable.gpu})
        recipe = recipe.model_copy(update={"settings": settings})
    version, experts = home.version if home else None, located.shape.experts
    # `ft apply` has just probed, and looks at the ports itself when all else is settled.
    taken = find_taken_ports(recipe, adapter) if hardware is None and hardware_now is None else ()
    return PlanRequest(
        recipe=recipe,
        # What `ft bench bw` measured for such experts with this engine's kernel, where it did.
        hardware=machine.for_experts(
            recipe.engine.name, experts.format, experts.hidden_size, experts.intermediate_size
        ),
        shape=located.shape,
        engine_version=version,
        calibration=read_calibration(machine, adapter, version, loaded, located.shape, is_here=hardware is None),
        model_path=str(located.path) if located.path is not None else None,
        has_tokenizer=_has_tokenizer(located.path) if located.path is not None else None,
        download_bytes=located.download_bytes,
        model_note=located.note,
        reclaimable_vram_bytes=reclaimable.vram_bytes,
        taken_ports=taken,
        taken_ports_hint=suggest_port(recipe, adapter) if taken else None,
        provenance=loaded.provenance,
    )


def _has_tokenizer(folder: Path) -> bool | None:
    # Imported where a model is here: a plan off a card pays for no reader of checkpoints.
    from freetoken.checkpoint.files import has_tokenizer

    return has_tokenizer(folder)


def prepare_plan(
    loaded: LoadedRecipe,
    *,
    hardware: Hardware | None = None,
    force: bool = False,
    tools: Tools = DEFAULT_TOOLS,
) -> Plan | Refusal:
    """The plan of `loaded` on this machine (or on `hardware`), or a reasoned no. Changes nothing."""
    return plan_request(prepare_request(loaded, hardware=hardware, tools=tools), force=force, tools=tools)


def plan_request(request: PlanRequest, *, force: bool = False, tools: Tools = DEFAULT_TOOLS) -> Plan | Refusal:
    """The answer to a request that was prepared, by its recipe's engine."""
    return tools.make_plan(request, tools.find_adapter(request.recipe.engine.name), force)


def find_taken_ports(recipe: Recipe, adapter: EngineAdapter) -> tuple[str, ...]:
    """Who holds a port that the engine would take, in words; a deployment of the recipe's own name is no trouble."""
    from freetoken.supervisor.ports import can_bind

    host, first = recipe.serve.host, recipe.serve.port
    taken = [port for port in range(first, first + adapter.port_count) if not can_bind(host, port)]
    if not taken:
        return ()
    from freetoken.deploy.start import describe_holder
    from freetoken.supervisor.ports import find_port_holder

    found = [holder for port in taken if (holder := find_port_holder(host, port))]
    return tuple(words for holder in found if (words := describe_holder(holder, but=recipe.name)))


def suggest_port(recipe: Recipe, adapter: EngineAdapter) -> str:
    """A port that is free now, as a `--set`."""
    from freetoken.deploy.start import find_free_port

    return f"`--set serve.port={find_free_port(recipe.serve.host, adapter.port_count)}`, or stop what holds it"


def read_calibration(
    hardware: Hardware,
    adapter: EngineAdapter,
    version: str | None,
    loaded: LoadedRecipe,
    shape: ModelShape,
    *,
    is_here: bool,
) -> Calibration:
    """What launches on this machine taught; nothing for a machine that is not here.

    Under the same engine version, attention backend, GPU generation and system; lines that follow from the model's
    own tensors and the settings' counts under the same model alone.
    """
    from freetoken.planner.plan import Calibration

    if not is_here:
        return Calibration()
    from freetoken.hardware.fingerprint import compute_fingerprint
    from freetoken.store.results import read_calibration as read_stored
    from freetoken.store.results import read_tuned

    settings = loaded.recipe.settings
    attention = adapter.default_attention(shape) if settings.attention == "auto" else settings.attention
    context = make_line_context(hardware, adapter.name, version, settings.gpu, attention)
    if not adapter.uses_gpu(hardware, settings.gpu):
        context = context.model_copy(update={"gpu_generation": None})
    fingerprint = compute_fingerprint(hardware, adapter.name, version)
    calibration = read_stored(context, fingerprint, model_name=shape.name)
    workload = loaded.recipe.workload.name
    tuned = read_tuned(fingerprint, engine=adapter.name, model_name=shape.name, workload=workload)
    if tuned is None:
        return calibration
    return calibration.model_copy(update={"tuned": tuned.settings, "tuned_from": f"tuned result {tuned.id}"})


def make_line_context(
    hardware: Hardware, engine: str, version: str | None, gpu: int | str | None = "auto", attention: str | None = None
) -> LineContext:
    """What a measured line holds for: engine, version, attention backend, GPU generation, operating system."""
    from freetoken.store.rows import LineContext

    return LineContext(
        engine=engine,
        engine_version=version,
        attention=attention,
        gpu_generation=_generation(hardware, gpu),
        os="wsl" if hardware.os.is_wsl else hardware.os.name,
    )


def _generation(hardware: Hardware, gpu: int | str | None) -> str | None:
    if gpu is None:
        return None
    try:
        found = hardware.pick_gpu(gpu)
    except KeyError as error:
        names = ", ".join(f"{one.index} ({one.name})" for one in hardware.gpus) or "none"
        raise UsageError(f"there is no GPU `{error.args[0]}` here; this machine has: {names}") from error
    return found.compute_capability if found else None


def _has_gpu(hardware: Hardware, name: str) -> bool:
    return any(name in (str(gpu.index), gpu.uuid) for gpu in hardware.gpus)


def _give_back(hardware: Hardware, reclaimable: Reclaimable) -> Hardware:
    """`hardware` without the replaced deployment, but for its VRAM in use, which is a field of the request."""
    ram, gpus = hardware.ram, hardware.gpus
    if reclaimable.ram_bytes:
        available = min(ram.total_bytes, ram.available_bytes + reclaimable.ram_bytes)
        ram = ram.model_copy(update={"available_bytes": available})
    if reclaimable.pids:
        gpus = tuple(
            gpu.model_copy(update={"holders": tuple(one for one in gpu.holders if one.pid not in reclaimable.pids)})
            for gpu in gpus
        )
    return hardware.model_copy(update={"ram": ram, "gpus": gpus})
