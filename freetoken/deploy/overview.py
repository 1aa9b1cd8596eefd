"""What runs, as `ft status` shows it: declared, planned and measured side by side, drift, and who holds the VRAM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.deploy import runs
from freetoken.deploy.connect import read_own_key
from freetoken.deploy.hits import make_hit_reader
from freetoken.deploy.prove import find_drift, read_strategy
from freetoken.deploy.studies import StudyView, list_studies
from freetoken.deploy.tools import DEFAULT_TOOLS, Tools
from freetoken.deploy.values import DeployModel
from freetoken.errors import FtError, UsageError
from freetoken.supervisor import life, register
from freetoken.supervisor.files import read_json
from freetoken.supervisor.launch import REPORT_FILE, read_launch, read_state
from freetoken.supervisor.process import find_members, read_resident

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Plan

_SHOWN = ("strategy", "expert_slots", "kv_tokens", "max_running_requests", "prefill_chunk_tokens", "gpu")


class Row(DeployModel):
    """One figure in its three versions; None where there is none."""

    field: str
    declared: Any = None
    planned: Any = None
    measured: Any = None


class DeploymentView(DeployModel):
    """One deployment: how it stands, and its figures."""

    name: str
    condition: str
    words: str = ""
    #: False for one that belongs to another state folder.
    is_here: bool = True
    state_dir: str = ""
    run_id: str | None = None
    run_dir: str | None = None
    url: str | None = None
    engine: str | None = None
    model: str | None = None
    engine_pid: int | None = None
    keeper_pid: int | None = None
    restarts: int = 0
    #: When and why the keeper last started the engine again.
    last_restart: str | None = None
    started_at: str | None = None
    is_forced: bool = False
    rows: tuple[Row, ...] = ()
    #: Where what runs differs from what was planned, in words.
    drift: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    #: Declared and not running as declared.
    is_wrong: bool = False


class VramHolder(DeployModel):
    """A process that holds VRAM, and the deployment it belongs to."""

    gpu: str
    pid: int
    name: str
    used_bytes: int
    deployment: str | None = None


class Overview(DeployModel):
    """Everything that `ft status` shows."""

    deployments: tuple[DeploymentView, ...] = ()
    holders: tuple[VramHolder, ...] = ()
    #: Studies of `ft tune` that are at work, wherever they were begun.
    studies: tuple[StudyView, ...] = ()

    @property
    def is_as_declared(self) -> bool:
        """True when nothing that was declared here is missing or different."""
        return not any(one.is_wrong for one in self.deployments)


def read_overview(name: str | None = None, *, tools: Tools = DEFAULT_TOOLS) -> Overview:
    """What runs now, this state folder's first; repairs what it finds on the way. UsageError for an unknown `name`."""
    lives = [one for one in life.reconcile() if name in (None, one.record.name)]
    views = [_view_life(one, tools) for one in lives if one.is_living]
    shown = {view.name for view in views if view.is_here}
    ended = {one.record.name: one for one in lives if not one.is_living and _is_here(one)}
    for declared in runs.read_declarations():
        if declared.name not in shown and name in (None, declared.name):
            views.append(_view_absent(declared, ended.get(declared.name)))
    if name is not None and not views:
        known = sorted({one.record.name for one in life.examine_all()} | {one.name for one in runs.read_declarations()})
        raise UsageError(
            f"no deployment `{name}`", hint=f"there is: {', '.join(known)}" if known else "`ft apply RECIPE` makes one"
        )
    ordered = sorted(views, key=lambda view: (not view.is_here, view.name))
    return Overview(
        deployments=tuple(ordered), holders=_find_holders(tools.probe(None)), studies=list_studies()
    )  # fmt: skip


def _view_life(found: life.Life, tools: Tools) -> DeploymentView:
    record, launch, state = found.record, found.launch, found.state
    plan = runs.read_plan(record.folder)
    rows, drift = _compare(found, plan, tools)
    is_here = _is_here(found)
    return DeploymentView(
        name=record.name,
        condition=_condition_words(found),
        words=found.words,
        is_here=is_here,
        state_dir=record.state_dir,
        run_id=record.run_id,
        run_dir=record.run_dir,
        url=f"{record.base_url}/v1",
        engine=record.engine,
        model=record.model,
        engine_pid=found.engine.pid if found.engine else None,
        keeper_pid=found.keeper.pid if found.keeper else None,
        restarts=state.restarts if state else 0,
        last_restart=(state.last_restart or None) if state else None,
        started_at=state.started_at if state else None,
        is_forced=launch.is_forced if launch else False,
        rows=rows,
        drift=drift,
        problems=state.problems if state else (),
        is_wrong=is_here and (found.condition != "ready" or bool(drift)),
    )


def _condition_words(found: life.Life) -> str:
    if found.condition in ("unproven", "starting") and not found.record.proven_at:
        return "starting (unproven)"
    return found.condition


def _view_absent(declared: runs.Declaration, ended: life.Life | None) -> DeploymentView:
    run_dir = paths.runs_dir() / declared.run_id
    launch, state = read_launch(run_dir), read_state(run_dir, fallback_dir=register.states_dir())
    cause = ended.words if ended else (state.cause if state else "no trace of it is left")
    if ended is None and state is not None and not state.is_final:
        cause = "it is in no register: the machine was restarted, or its runtime folder was cleaned"
    return DeploymentView(
        name=declared.name,
        condition="not running" if declared.is_wanted else "stopped",
        words=cause,
        state_dir=str(paths.state_dir()),
        run_id=declared.run_id,
        run_dir=str(run_dir),
        engine=launch.engine if launch else None,
        model=launch.model if launch else None,
        is_forced=launch.is_forced if launch else False,
        is_wrong=declared.is_wanted,
    )


def _compare(found: life.Life, plan: Plan | None, tools: Tools) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    if plan is None:
        return (), ()
    recipe = (found.launch.declared.get("recipe") if found.launch else None) or {}
    declared = recipe.get("settings", {})
    measured, drift = _measure(found, plan, tools)
    rows = [
        Row(field=name, declared=declared.get(name), planned=getattr(plan.settings, name), measured=measured.get(name))
        for name in _SHOWN
        if getattr(plan.settings, name) is not None and not (name == "expert_slots" and not plan.settings.expert_slots)
    ]
    if plan.vram is not None:
        rows.append(Row(field="vram_bytes", planned=plan.vram.peak_bytes, measured=measured.get("vram_bytes")))
    rows.append(Row(field="ram_bytes", planned=plan.ram.peak_bytes, measured=measured.get("ram_bytes")))
    prediction = plan.prediction
    rows.append(
        Row(
            field="decode_tps",
            planned=round(prediction.decode_tps, 1) if prediction else None,
            measured=measured.get("decode_tps"),
        )
    )
    if (prediction is not None and prediction.hit_ratio is not None) or measured.get("hit_ratio") is not None:
        planned = round(prediction.hit_ratio, 3) if prediction and prediction.hit_ratio is not None else None
        told = measured.get("hit_ratio")
        rows.append(Row(field="hit_ratio", planned=planned, measured=round(told, 3) if told is not None else None))
    return tuple(rows), drift


def _measure(found: life.Life, plan: Plan, tools: Tools) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the engine and /proc say now, and where that is not the plan's."""
    members = find_members(found.record.run_id, found.engine)
    measured: dict[str, Any] = {"ram_bytes": read_resident(members).total_bytes}
    measured["decode_tps"] = _read_proven_tps(found.record.folder)
    if found.condition not in ("ready", "unproven", "unkept"):
        return measured, ()
    try:
        with tools.connect(found.record.base_url, read_own_key(found)) as client:
            status, stats = client.cache_status(), client.stats()
    except FtError as error:
        return measured, (f"it does not answer: {error.message}",)
    strategy = read_strategy(status, stats)
    measured |= {"expert_slots": status.expert_slots, "kv_tokens": status.kv_tokens, "strategy": strategy}
    hits = stats.moe_hits or make_hit_reader(found)(status.geometry.unit_bytes.moe_per_expert)
    measured["hit_ratio"] = hits.hit_ratio if hits is not None else None
    measured["vram_bytes"] = _read_vram({one.pid for one in members}, tools) or stats.vram_bytes or None
    return measured, find_drift(plan, status, strategy)


def _read_vram(pids: set[int], tools: Tools) -> int:
    gpus = tools.probe(None).gpus
    return sum(holder.used_bytes for gpu in gpus for holder in gpu.holders if holder.pid in pids)


def _read_proven_tps(run_dir: Path) -> float | None:
    proof = (read_json(run_dir / REPORT_FILE) or {}).get("proof") or {}
    value = proof.get("decode_tps")
    return round(float(value), 1) if value is not None else None


def _find_holders(hardware: Hardware) -> tuple[VramHolder, ...]:
    owners: dict[int, str] = {}
    if any(gpu.holders for gpu in hardware.gpus):
        for one in life.examine_all():
            owners |= {member.pid: one.record.name for member in find_members(one.record.run_id, one.engine)}
    return tuple(
        VramHolder(
            gpu=f"{gpu.index} ({gpu.name})",
            pid=holder.pid,
            name=holder.name,
            used_bytes=holder.used_bytes,
            deployment=owners.get(holder.pid),
        )
        for gpu in hardware.gpus
        for holder in gpu.holders
    )


def _is_here(found: life.Life) -> bool:
    return Path(found.record.state_dir).resolve() == paths.state_dir().resolve()
