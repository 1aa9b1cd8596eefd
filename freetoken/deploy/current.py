"""What runs under a name now, what it would give back, and what was declared for it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.deploy import runs
from freetoken.deploy.diff import Current
from freetoken.deploy.prepare import Reclaimable
from freetoken.deploy.prove import find_drift
from freetoken.deploy.tools import Tools
from freetoken.errors import FtError
from freetoken.supervisor import life
from freetoken.supervisor.process import find_members, read_resident

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Plan, PlanRequest
    from freetoken.recipe.model import Recipe
    from freetoken.supervisor.launch import Launch

#: What the driver takes for a process without listing it, at most; the rest of a difference is somebody else's.
MOST_UNLISTED_BYTES = 64 << 20


@dataclass(frozen=True)
class Running:
    """A living run of a deployment with what it carries out; plan or recipe are None where they cannot be read."""

    life: life.Life
    plan: Plan | None
    recipe: Recipe | None

    @property
    def declared(self) -> dict[str, Any]:
        """What it was launched for."""
        return self.life.launch.declared if self.life.launch else {}

    @property
    def api_key(self) -> str | None:
        """The key that the engine asks for, from this process's environment."""
        name = self.life.launch.api_key_env if self.life.launch else None
        return os.environ.get(name) if name else None


def find_running(name: str, *, is_repairing: bool = True) -> Running | None:
    """What lives under `name` in this state folder, the newest where there are several."""
    lives = life.reconcile() if is_repairing else life.examine_all()
    here = paths.state_dir().resolve()
    found = [
        one
        for one in lives
        if one.is_living and one.record.name == name and Path(one.record.state_dir).resolve() == here
    ]
    if not found:
        return None
    newest = max(found, key=lambda one: one.record.run_id)
    return Running(newest, runs.read_plan(newest.record.folder), runs.read_recipe(newest.record.folder))


def read_current(running: Running, tools: Tools) -> Current | None:
    """`running` for a diff, with the sizes that the engine tells where they are not its plan's; None if unreadable."""
    if running.plan is None or running.recipe is None:
        return None
    try:
        with tools.connect(running.life.record.base_url, running.api_key) as client:
            status = client.cache_status()
    except FtError:
        return Current(running.plan, running.recipe)
    drift = " ".join(find_drift(running.plan, status, None))
    return Current(
        running.plan,
        running.recipe,
        expert_slots=status.expert_slots if "`expert_slots`" in drift else None,
        kv_tokens=status.kv_tokens if "`kv_tokens`" in drift else None,
    )


def measure_reclaimable(running: Running, hardware: Hardware) -> Reclaimable:
    """What the machine gets back when `running` ends: its VRAM by NVML (else as planned), its own host memory."""
    record = running.life.record
    members = find_members(record.run_id, running.life.engine)
    pids = frozenset(one.pid for one in members)
    held = sum(holder.used_bytes for gpu in hardware.gpus for holder in gpu.holders if holder.pid in pids)
    if held:
        vram = held + _find_unlisted(running.life.launch, hardware, pids, held)
    else:
        vram = record.planned_vram_bytes if record.gpu is not None else 0
    return Reclaimable(vram, read_resident(members).anonymous_bytes, record.gpu, pids)


def _find_unlisted(launch: Launch | None, hardware: Hardware, pids: frozenset[int], held_bytes: int) -> int:
    """Bytes that the driver took for the engine and lists under no process, such as page tables.

    They are what is missing of the VRAM that was free before the start. On a card that its plan filled they decide:
    without them the size that ran until a moment ago would not fit (41 MB on an H200).
    """
    if launch is None or launch.gpu is None or not launch.vram_available_bytes:
        return 0
    try:
        gpu = hardware.pick_gpu(launch.gpu)
    except KeyError:
        return 0
    others = {str(one.pid): one.used_bytes for one in gpu.holders if one.pid not in pids} if gpu is not None else {}
    if gpu is None or not others.keys() <= launch.vram_others.keys() or not all(others.values()):
        return 0  # what a newcomer took, or one of whom the driver tells nothing, cannot be told from what we did
    free_without_us = launch.vram_available_bytes + sum(launch.vram_others.values()) - sum(others.values())
    return min(max(0, free_without_us - gpu.vram_free_bytes - held_bytes), MOST_UNLISTED_BYTES)


def make_declared(request: PlanRequest, recipe: Recipe, *, is_forced: bool) -> dict[str, Any]:
    """What decides a plan apart from the moment: as long as it stays equal, the running plan stands."""
    shape = hashlib.sha256(request.shape.model_dump_json(exclude={"source", "source_note"}).encode()).hexdigest()
    declared = {
        "recipe": recipe.model_dump(mode="json", exclude={"description"}),
        "tuned": dict(request.calibration.tuned),
        "engine_version": request.engine_version,
        "shape": shape[:16],
        "is_forced": is_forced,
    }
    # As it comes back from `launch.json`, so that the two compare.
    plain: dict[str, Any] = json.loads(json.dumps(declared))
    return plain
