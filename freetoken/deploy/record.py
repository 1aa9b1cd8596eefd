"""What a launch leaves in the store: machine, declaration, run, events, measured against planned lines, the proof.

The run folder is the truth and the store is a copy of it: a store that cannot be written costs a warning, never a
deployment that already serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from freetoken.deploy.prepare import make_line_context
from freetoken.errors import FtError
from freetoken.hardware.fingerprint import compute_fingerprint
from freetoken.supervisor.files import describe_os_error, read_events
from freetoken.supervisor.launch import EVENTS_FILE

#: Where an engine's output goes in its run folder (`Tools.log`).
LOG_FILE = "engine.log"
#: Lines that are a count times a size: a correction of one stands for memory that went missing beside it.
EXACT_LINES = ("expert_slots", "kv_cache", "linear_state")

if TYPE_CHECKING:
    from freetoken.deploy.values import Proof
    from freetoken.planner.memory import Ledger
    from freetoken.planner.plan import Plan, PlanRequest
    from freetoken.recipe.model import Recipe
    from freetoken.store import Store
    from freetoken.store.rows import DeploymentRow, LineContext, MeasuredLine, ResultRow, RunFacts, RunRow


def record_success(
    name: str,
    action: str,
    run_dir: Path,
    recipe: Recipe,
    plan: Plan,
    proof: Proof,
    request: PlanRequest,
    ready_s: float,
) -> str | None:
    """Records a proven launch, in its run folder and in the store; the warning where that failed."""
    from freetoken.store.rows import RunFacts

    context = make_line_context(
        request.hardware, plan.engine, plan.engine_version, plan.settings.gpu, plan.settings.attention
    )
    facts = RunFacts(
        fingerprint=compute_fingerprint(request.hardware, plan.engine, plan.engine_version),
        hardware=request.hardware,
        run=_make_run(name, run_dir, plan, outcome="ready", ready_s=ready_s),
        deployment=_make_declaration(name, action, run_dir, recipe, plan),
        context=context,
        lines=make_measured_lines(
            plan,
            proof,
            request,
            # The log tells of the start: after a live resize, or growth, the plan's sizes are others.
            told={} if action == "resize" or plan.start_slots is not None else measure_from_log(run_dir, plan, proof),
            lacked=find_lacking(request, read_residuals(context, plan.model_name)),
        ),
        results=(_make_result(recipe, run_dir, plan, proof),),
    )
    return _keep(run_dir, facts)


def record_failure(
    name: str, run_dir: Path, plan: Plan, request: PlanRequest, error: str, exit_code: int | None
) -> str | None:
    """Records a start that failed; the warning where that failed too."""
    from freetoken.store.rows import RunFacts

    facts = RunFacts(
        fingerprint=compute_fingerprint(request.hardware, plan.engine, plan.engine_version),
        hardware=request.hardware,
        run=_make_run(name, run_dir, plan, outcome="failed", error=error, exit_code=exit_code),
        context=make_line_context(request.hardware, plan.engine, plan.engine_version, plan.settings.gpu),
    )
    return _keep(run_dir, facts)


def record_stop(run_id: str, exit_code: int | None) -> str | None:
    """Records that a run was stopped on purpose; nothing happens where the store does not know it."""
    try:
        from freetoken.store import open_store

        with open_store() as store:
            store.record_outcome(run_id, "stopped", exit_code=exit_code)
        return None
    except FtError as error:
        return f"not recorded: {error.message}"


def measure_from_log(run_dir: Path, plan: Plan, proof: Proof) -> dict[str, int]:
    """Lines that the engine's API does not tell and its log does; none where there is no log to read."""
    from freetoken.adapters import get_adapter

    try:
        log = (run_dir / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return get_adapter(plan.engine).measure_lines(plan, log, proof.vram_bytes)


def read_residuals(context: LineContext, model_name: str) -> dict[str, int]:
    """What the store knew before this launch, by line; nothing where it cannot be read."""
    from freetoken.store.results import read_calibration

    try:
        return {one.key: one.bytes for one in read_calibration(context, model_name=model_name).residuals}
    except FtError:
        return {}


def find_lacking(request: PlanRequest, known: dict[str, int]) -> frozenset[str]:
    """Lines that starts of this very apply died of: corrected further than anything the store knew."""
    residuals = request.calibration.residuals
    return frozenset(one.key for one in residuals if one.bytes > max(0, known.get(one.key, 0)))


def make_measured_lines(
    plan: Plan,
    proof: Proof,
    request: PlanRequest,
    *,
    told: dict[str, int] | None = None,
    lacked: frozenset[str] = frozenset(),
) -> tuple[MeasuredLine, ...]:
    """Planned against measured bytes of every line that could be measured; `told` beside what the proof has.

    A line of `lacked` counts as large as it had to be planned for the start to succeed, whatever is measured of it:
    memory went missing there, and the next plan must not die of it again.
    """
    from freetoken.store.rows import MeasuredLine

    sizes = {**(told or {}), **proof.measured_bytes}
    corrections = {one.key: one.bytes for one in request.calibration.residuals}
    found = []
    for ledger in (one for one in (plan.vram, plan.ram) if one is not None):
        for line in ledger.lines:
            measured = _measured_bytes(ledger, line.key, plan, sizes)
            if line.key in lacked and not _is_shadowed(ledger, line.key, plan):
                measured = line.bytes if measured is None else max(measured, line.bytes)
            elif line.key in EXACT_LINES and corrections.get(line.key, 0) > 0:
                # A count times a size is as large as ever; what an earlier start lacked is lacking all the same.
                continue
            if measured is not None:
                found.append(
                    MeasuredLine(
                        ledger=ledger.kind,
                        key=line.key,
                        planned_bytes=line.bytes,
                        measured_bytes=measured,
                        correction_bytes=corrections.get(line.key, 0),
                    )
                )
    return tuple(found)


def _measured_bytes(ledger: Ledger, key: str, plan: Plan, sizes: dict[str, int]) -> int | None:
    # The engine names what it allocated by the planner's keys, without saying where; on a GPU that is VRAM, but
    # for the lines that only exist in host memory.
    return None if _is_shadowed(ledger, key, plan) else sizes.get(key)


def _is_shadowed(ledger: Ledger, key: str, plan: Plan) -> bool:
    return ledger.kind == "ram" and plan.vram is not None and plan.vram.line(key) is not None


def _keep(run_dir: Path, facts: RunFacts) -> str | None:
    """The facts into the run folder, which is the truth, then into the store; the warning where either failed."""
    from freetoken.store.rebuild import append_facts

    warning = None
    try:
        append_facts(run_dir, facts)
    except OSError as error:
        warning = describe_os_error(error, run_dir)
    try:
        from freetoken.store import open_store

        with open_store() as store:
            store.record_facts(facts)
            _record_events(store, run_dir)
    except FtError as error:
        warning = f"not recorded: {error.message}"
    return warning


def _make_declaration(name: str, action: str, run_dir: Path, recipe: Recipe, plan: Plan) -> DeploymentRow:
    from freetoken.store.rows import DeploymentRow

    facts = {"engine": plan.engine, "model_name": plan.model_name, "recipe": recipe.model_dump(mode="json")}
    return DeploymentRow.model_validate({"name": name, "run_id": run_dir.name, "action": action, **facts})


def _make_run(name: str, run_dir: Path, plan: Plan, **facts: object) -> RunRow:
    from freetoken.store.rows import RunRow

    row = {
        "id": run_dir.name,
        "deployment": name,
        "engine": plan.engine,
        "engine_version": plan.engine_version,
        "model_name": plan.model_name,
        "plan": plan.model_dump(mode="json"),
        **facts,
    }
    return RunRow.model_validate(row)


def _record_events(store: Store, run_dir: Path) -> None:
    from freetoken.store.rows import EventRow

    # The store keeps an event that it knows only once.
    store.record_events(
        EventRow(run_id=run_dir.name, at=one.at, kind=one.kind, message=one.message, data=one.data)
        for one in read_events(run_dir / EVENTS_FILE)
    )


def _make_result(recipe: Recipe, run_dir: Path, plan: Plan, proof: Proof) -> ResultRow:
    from freetoken.store.rows import ResultRow

    metrics = {"ttft_ms": proof.ttft_s * 1000, "chunk_ttft_ms": proof.chunk_ttft_s * 1000}
    if proof.decode_tps is not None:
        metrics["decode_tps"] = proof.decode_tps
    return ResultRow(
        run_id=run_dir.name,
        recipe_name=recipe.name,
        workload=recipe.workload.name,
        engine=plan.engine,
        engine_version=plan.engine_version,
        model_name=plan.model_name,
        kind="proof",
        settings=plan.settings.model_dump(mode="json"),
        metrics=metrics,
    )
