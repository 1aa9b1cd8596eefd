"""What the author ran, what this machine would run, what changed and why, and what that is predicted to cost.

An imported recipe is planned like any other, made to fit where it does not; each setting that differs is a row of the
table with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from freetoken.deploy.lock import compute_slot_bytes
from freetoken.deploy.prepare import prepare_request
from freetoken.deploy.tools import DEFAULT_TOOLS, Tools
from freetoken.hardware.fingerprint import compute_fingerprint
from freetoken.share.evidence import make_machine_class
from freetoken.share.fit import HARDWARE, Freedom, find_freedom, fit
from freetoken.share.model import MachineClass, compact
from freetoken.units import MIB, format_bytes, format_significant

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Plan, PlanRequest, Refusal
    from freetoken.recipe.load import LoadedRecipe
    from freetoken.share.bundle import Bundle


class CompareModel(BaseModel):
    """Base: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ChangeRow(CompareModel):
    """One setting: what the author ran, what runs here, and why; `reason` is empty where they are equal."""

    setting: str
    author: str
    here: str
    reason: str = ""


class Distance(CompareModel):
    """How this machine differs from the author's; `is_same_class` when figures may be compared."""

    is_same_class: bool
    differences: tuple[str, ...] = ()


class Comparison(CompareModel):
    """The answer to an import: a plan or a refusal, the table, and the speed that may be expected."""

    name: str
    signer: str
    is_planned: bool
    refusal: str = ""
    rows: tuple[ChangeRow, ...] = ()
    relaxed: tuple[str, ...] = ()
    distance: Distance | None = None
    #: Tok/s that the author measured, that this machine is predicted to reach, and the ratio of the two;
    #: no ratio between machines of the same class, where the measurement is what to expect.
    author_decode_tps: float | None = None
    predicted_decode_tps: float | None = None
    predicted_low_tps: float | None = None
    predicted_high_tps: float | None = None
    expected_ratio: float | None = None
    evidence: str = ""
    #: Values that the recipe fixes and that this machine would do better without, and the tok/s predicted then.
    open_names: tuple[str, ...] = ()
    open_decode_tps: float | None = None


def compare(
    bundle: Bundle, loaded: LoadedRecipe, *, hardware: Hardware | None = None, tools: Tools = DEFAULT_TOOLS
) -> tuple[Comparison, LoadedRecipe, Plan | Refusal]:
    """The comparison, the recipe that this machine would run, and the planner's answer to it."""
    request = prepare_request(loaded, hardware=hardware, tools=tools)
    adapter = tools.find_adapter(loaded.recipe.engine.name)

    def plan(one: LoadedRecipe) -> Plan | Refusal:
        update = {"recipe": one.recipe, "provenance": one.provenance}
        return tools.make_plan(request.model_copy(update=update), adapter, False)

    fitted, relaxed, answer = fit(loaded, plan)
    freedom = find_freedom(fitted, answer, plan)
    return _describe(bundle, request, answer, relaxed, freedom), fitted, answer


def measure_distance(author: MachineClass | None, hardware: Hardware, fingerprint: str) -> Distance | None:
    """How `hardware` differs from the author's machine, in words with numbers; None where that is not known."""
    if author is None:
        return None
    here = make_machine_class(hardware, fingerprint)
    found = tuple(_differences(author, here))
    return Distance(is_same_class=author.fingerprint == fingerprint or not found, differences=found)


def _differences(author: MachineClass, here: MachineClass) -> Iterator[str]:
    if author.gpu != here.gpu:
        yield f"GPU: {author.gpu or 'none'} there, {here.gpu or 'none'} here"
    for name, theirs, ours in (("VRAM", author.vram_bytes, here.vram_bytes), ("RAM", author.ram_bytes, here.ram_bytes)):
        if theirs != ours:
            yield f"{name}: {format_bytes(theirs)} there, {format_bytes(ours)} here{_times(ours, theirs)}"
    links = [
        (one.pcie_generation or 0) and 2 ** (one.pcie_generation or 0) * (one.pcie_width or 0) for one in (author, here)
    ]
    if all(links) and links[0] != links[1]:
        there, ours_ = (f"{one.pcie_generation}.0 x{one.pcie_width}" for one in (author, here))
        yield f"PCIe: {there} there, {ours_} here{_times(links[1], links[0])}"
    if author.cpu != here.cpu:
        yield f"CPU: {author.cpu} with {author.cores} cores there, {here.cpu} with {here.cores} here"
    if author.os != here.os:
        yield f"system: {author.os} there, {here.os} here"


def _times(here: float, there: float) -> str:
    return f" ({format_significant(here / there)} x)" if there else ""


def _describe(
    bundle: Bundle, request: PlanRequest, answer: Plan | Refusal, relaxed: list[str], freedom: Freedom | None
) -> Comparison:  # fmt: skip
    fingerprint = compute_fingerprint(request.hardware, request.recipe.engine.name, request.engine_version)
    distance = measure_distance(bundle.evidence.machine, request.hardware, fingerprint)
    best = bundle.evidence.best()
    measured = best.figures["decode_tps"].median if best is not None else None
    is_plan = answer.kind == "plan"
    is_same = distance is not None and distance.is_same_class
    prediction = answer.prediction if answer.kind == "plan" else None
    predicted = prediction.decode_tps if prediction is not None else None
    return Comparison(
        name=bundle.recipe.name,
        signer=bundle.signer.describe(),
        is_planned=is_plan,
        refusal="" if answer.kind == "plan" else answer.message,
        rows=tuple(_rows(bundle, answer, relaxed)) if answer.kind == "plan" else (),
        relaxed=tuple(relaxed),
        distance=distance,
        author_decode_tps=measured,
        predicted_decode_tps=predicted,
        predicted_low_tps=prediction.decode_tps_low if prediction is not None else None,
        predicted_high_tps=prediction.decode_tps_high if prediction is not None else None,
        # Between equal machines a measurement says more than a prediction.
        expected_ratio=predicted / measured if predicted and measured and not is_same else None,
        evidence=describe_evidence(bundle),
        open_names=freedom.names if freedom is not None else (),
        open_decode_tps=freedom.prediction.decode_tps if freedom is not None else None,
    )


def describe_evidence(bundle: Bundle) -> str:
    """One sentence: what was measured, on what, how often, and what failed."""
    evidence = bundle.evidence
    machine = evidence.machine
    where = f" on {machine.gpu or machine.cpu}" if machine is not None else ""
    best = evidence.best()
    if best is None:
        words = f"nothing was measured{where}"
    else:
        figure = best.figures["decode_tps"]
        count = f"{figure.n} measurement{'s' if figure.n > 1 else ''}"
        spread = f"{format_significant(figure.low)} to {format_significant(figure.high)}, "
        spread = spread if figure.low < figure.high else ""
        words = f"{format_significant(figure.median)} tok/s ({spread}{count}){where}, {best.day}"
    if evidence.failed:
        words += f"; {_count(len(evidence.failed), 'setting')} failed there"
    broken = sum(one.kind != "ok" for one in evidence.study)
    if evidence.study:
        words += f"; {_count(len(evidence.study), 'setting')} tried by its tuner"
        words += f", {broken} of which failed" if broken else ""
    return words


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _rows(bundle: Bundle, plan: Plan, relaxed: list[str]) -> Iterator[ChangeRow]:
    best = bundle.evidence.best()
    theirs: dict[str, Any] = dict(bundle.evidence.planned or (best.settings if best is not None else {}))
    slot_bytes = compute_slot_bytes(plan)
    ours = compact(plan.settings.model_dump(mode="json"), slot_bytes)
    their_slot_bytes = bundle.lock.slot_bytes if bundle.lock is not None else slot_bytes
    if HARDWARE in relaxed:
        reason = "the recipe asks for more than this machine has; by the planner's arithmetic it fits"
        needs = bundle.recipe.hardware.model_dump(mode="json", exclude_none=True)
        asked = ", ".join(
            f"{name} {_show_need(value)}" for part in needs.values() for name, value in part.items() if value != []
        )
        yield ChangeRow(setting=HARDWARE, author=asked, here="given up", reason=reason)
    for name in dict.fromkeys((*theirs, *ours)):
        before, after = theirs.get(name), ours.get(name)
        key = "expert_slots" if name == "expert_slots_bytes" else name
        reason = ""
        if before != after:
            origin = plan.provenance.get(f"settings.{key}", "not used here")
            fixed = "the author's value does not fit here; " if key in relaxed else ""
            reason = fixed + origin.removeprefix("planner: ")
        author, here = _show(name, before, their_slot_bytes), _show(name, after, slot_bytes)
        yield ChangeRow(setting=name, author=author, here=here, reason=reason)


def _show_need(value: Any) -> str:
    if isinstance(value, int):
        return f">= {format_bytes(value) if value >= MIB else value}"
    return " ".join(map(str, value)) if isinstance(value, list) else f">= {value}"


def _show(name: str, value: Any, slot_bytes: int = 0) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if name == "expert_slots_bytes":
        count = f" ({int(value) // slot_bytes:,})" if slot_bytes else ""
        return format_bytes(int(value)) + count
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
