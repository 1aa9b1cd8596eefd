"""What a launch leaves in the store: machine, declaration, run, events, measured against planned lines, the proof.

The run folder is the truth and the store is a copy of it: a store that cannot be written costs a warning, never a
deployment that already serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from freetoken.deploy.prepare import make_line_context
from freetoken.errors import FtError
from freetoken.supervisor.files import read_events
from freetoken.supervisor.launch import EVENTS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetoken.deploy.values import Proof
    from freetoken.hardware.model import Hardware
    from freetoken.planner.memory import Ledger
    from freetoken.planner.plan import Plan, PlanRequest
    from freetoken.recipe.model import Recipe
    from freetoken.store import Store
    from freetoken.store.rows import MeasuredLine, ResultRow


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
    """Records a proven launch; the warning where that failed."""

    def write(store: Store, machine_id: int) -> None:
        _record_declaration(store, name, action, run_dir, recipe, plan)
        _record_run(store, name, run_dir, plan, machine_id, outcome="ready", ready_s=ready_s)
        _record_events(store, run_dir)
        lines = make_measured_lines(plan, proof, request)
        context = make_line_context(
            request.hardware, plan.engine, plan.engine_version, plan.settings.gpu, plan.settings.attention
        )
        store.record_measured_lines(run_dir.name, lines, context, machine_id=machine_id)
        store.record_result(_make_result(recipe, run_dir, plan, proof, machine_id))

    return _attempt(plan, request.hardware, write)


def record_failure(
    name: str, run_dir: Path, plan: Plan, request: PlanRequest, error: str, exit_code: int | None
) -> str | None:
    """Records a start that failed; the warning where that failed too."""

    def write(store: Store, machine_id: int) -> None:
        _record_run(store, name, run_dir, plan, machine_id, outcome="failed", error=error, exit_code=exit_code)
        _record_events(store, run_dir)

    return _attempt(plan, request.hardware, write)


def record_stop(run_id: str, exit_code: int | None) -> str | None:
    """Records that a run was stopped on purpose; nothing happens where the store does not know it."""
    try:
        from freetoken.store import open_store

        with open_store() as store:
            store.record_outcome(run_id, "stopped", exit_code=exit_code)
        return None
    except FtError as error:
        return f"not recorded: {error.message}"


def make_measured_lines(plan: Plan, proof: Proof, request: PlanRequest) -> tuple[MeasuredLine, ...]:
    """Planned against measured bytes of every line that could be measured."""
    from freetoken.store.rows import MeasuredLine

    corrections = {one.key: one.bytes for one in request.calibration.residuals}
    found = []
    for ledger in (one for one in (plan.vram, plan.ram) if one is not None):
        for line in ledger.lines:
            measured = _measured_bytes(ledger, line.key, plan, proof)
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


def _measured_bytes(ledger: Ledger, key: str, plan: Plan, proof: Proof) -> int | None:
    # The engine names what it allocated by the planner's keys, without saying where; on a GPU that is VRAM, but
    # for the lines that only exist in host memory.
    if ledger.kind == "ram" and plan.vram is not None and plan.vram.line(key) is not None:
        return None
    return proof.measured_bytes.get(key)


def _attempt(plan: Plan, hardware: Hardware, write: Callable[[Store, int], None]) -> str | None:
    from freetoken.hardware.fingerprint import compute_fingerprint

    try:
        from freetoken.store import open_store

        with open_store() as store:
            fingerprint = compute_fingerprint(hardware, plan.engine, plan.engine_version)
            machine_id = store.record_machine(hardware, fingerprint)
            write(store, machine_id)
        return None
    except FtError as error:
        return f"not recorded: {error.message}"


def _record_declaration(store: Store, name: str, action: str, run_dir: Path, recipe: Recipe, plan: Plan) -> None:
    from freetoken.store.rows import DeploymentRow

    store.record_deployment(
        DeploymentRow.model_validate(
            {
                "name": name,
                "run_id": run_dir.name,
                "engine": plan.engine,
                "model_name": plan.model_name,
                "recipe": recipe.model_dump(mode="json"),
                "action": action,
            }
        )
    )


def _record_run(store: Store, name: str, run_dir: Path, plan: Plan, machine_id: int, **facts: object) -> None:
    from freetoken.store.rows import RunRow

    row = {
        "id": run_dir.name,
        "deployment": name,
        "machine_id": machine_id,
        "engine": plan.engine,
        "engine_version": plan.engine_version,
        "model_name": plan.model_name,
        "plan": plan.model_dump(mode="json"),
        **facts,
    }
    store.record_run(RunRow.model_validate(row))


def _record_events(store: Store, run_dir: Path) -> None:
    from freetoken.store.rows import EventRow

    known = {(one.at, one.kind) for one in store.list_events(run_dir.name)}
    events = [one for one in read_events(run_dir / EVENTS_FILE) if (one.at, one.kind) not in known]
    store.record_events(
        EventRow(run_id=run_dir.name, at=one.at, kind=one.kind, message=one.message, data=one.data) for one in events
    )


def _make_result(recipe: Recipe, run_dir: Path, plan: Plan, proof: Proof, machine_id: int) -> ResultRow:
    from freetoken.store.rows import ResultRow

    metrics = {"ttft_ms": proof.ttft_s * 1000, "chunk_ttft_ms": proof.chunk_ttft_s * 1000}
    if proof.decode_tps is not None:
        metrics["decode_tps"] = proof.decode_tps
    return ResultRow(
        run_id=run_dir.name,
        machine_id=machine_id,
        recipe_name=recipe.name,
        workload=recipe.workload.name,
        engine=plan.engine,
        engine_version=plan.engine_version,
        model_name=plan.model_name,
        kind="proof",
        settings=plan.settings.model_dump(mode="json"),
        metrics=metrics,
    )
