"""Back to a setting that worked: which proven settings a deployment has had, and one of them made to run again.

Every proven launch leaves its run folder; before a live resize rewrites one, what it held is kept under `before/`. The
plan of that setting is carried out as it stands, by the same loop as any apply: live where that is enough, by a restart
otherwise, proven, and what ran is given back where it fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken import paths
from freetoken.deploy import runs
from freetoken.deploy.apply import Application
from freetoken.deploy.current import find_running
from freetoken.deploy.tools import DEFAULT_TOOLS, Progress, Tools, ignore_progress
from freetoken.deploy.values import ApplyResult, DeployModel
from freetoken.errors import UsageError
from freetoken.recipe.load import LoadedRecipe
from freetoken.supervisor.files import read_json
from freetoken.supervisor.launch import REPORT_FILE, read_launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetoken.planner.plan import Plan
    from freetoken.recipe.model import Recipe


class GoodSetting(DeployModel):
    """A setting that was proven: `id` is what `--to` takes."""

    id: str
    proven_at: str
    strategy: str
    expert_slots: int
    kv_tokens: int
    decode_tps: float | None = None
    is_current: bool = False


@dataclass(frozen=True)
class _Kept:
    """A proven setting on disk."""

    id: str
    folder: Path
    plan: Plan
    recipe: Recipe

    def describe(self, *, is_current: bool) -> GoodSetting:
        proof = (read_json(self.folder / REPORT_FILE) or {}).get("proof") or {}
        settings = self.plan.settings
        return GoodSetting(
            id=self.id, proven_at=str(proof.get("proven_at") or ""), strategy=settings.strategy,
            expert_slots=settings.expert_slots, kv_tokens=settings.kv_tokens, decode_tps=proof.get("decode_tps"),
            is_current=is_current,
        )  # fmt: skip


def list_good_settings(name: str) -> tuple[GoodSetting, ...]:
    """Every setting of `name` that was proven, the newest first; what runs now, or ran last, is marked."""
    kept, current = _find_kept(name), _find_current(name)
    return tuple(one.describe(is_current=one.id == current) for one in kept)


def choose_name(name: str | None) -> str:
    """`name`, else the only deployment of this state folder. UsageError where that is not clear."""
    declared = [one.name for one in runs.read_declarations()]
    if name is None and len(declared) == 1:
        return declared[0]
    if name in declared and name is not None:
        return name
    listed = ", ".join(f"`{one}`" for one in declared) or "none"
    words = f"no deployment `{name}`" if name is not None else f"{len(declared)} deployments are declared here"
    raise UsageError(f"{words}; there is: {listed}", hint="`ft rollback NAME`")


def rollback(
    name: str,
    *,
    to: str | None = None,
    is_dry_run: bool = False,
    is_waiting: bool = True,
    confirm: Callable[[str], bool] | None = None,
    progress: Progress = ignore_progress,
    tools: Tools = DEFAULT_TOOLS,
) -> ApplyResult:
    """Makes the last setting that differs from what runs now run again, or the one called `to`.

    Raises UsageError where there is none, and what an apply raises.
    """
    target = _choose(name, to)
    loaded = LoadedRecipe(target.recipe, {}, None, target.folder)
    pinned = replace(tools, make_plan=lambda request, adapter, force: target.plan)
    application = Application(loaded, name, target.plan.is_forced, progress, pinned, confirm, is_pinned=True)
    if is_dry_run:
        return application.preview()
    application.say("rollback", f"going back to {target.id}")
    return application.run(is_waiting=is_waiting)


def _choose(name: str, to: str | None) -> _Kept:
    kept, current = _find_kept(name), _find_current(name)
    if to is not None:
        found = next((one for one in kept if one.id == to), None)
        if found is None:
            raise UsageError(f"`{name}` has no proven setting `{to}`", hint=f"`ft rollback {name} --list`")
        return found
    now = next((one for one in kept if one.id == current), None)
    for one in kept:
        if now is None or (one.plan.settings, one.recipe) != (now.plan.settings, now.recipe):
            return one
    raise UsageError(f"`{name}` has never run with another setting that was proven")


def _find_kept(name: str) -> list[_Kept]:
    found = []
    for run_dir in sorted(paths.runs_dir().glob("*"), reverse=True):
        launch = read_launch(run_dir)
        if launch is None or launch.name != name:
            continue
        older = sorted((run_dir / runs.BEFORE_DIR).glob("*"), reverse=True)
        for folder in (run_dir, *older):
            plan, recipe = runs.read_plan(folder), runs.read_recipe(folder)
            if plan is not None and recipe is not None and (folder / REPORT_FILE).exists():
                key = run_dir.name if folder == run_dir else f"{run_dir.name}/{folder.name}"
                found.append(_Kept(key, folder, plan, recipe))
    return found


def _find_current(name: str) -> str | None:
    """The run that stands for the name now; None where what was asked for last never worked and nothing runs."""
    running = find_running(name, is_repairing=False)
    declared = runs.read_declaration(name)
    if running is not None:
        return running.life.record.run_id
    return declared.run_id if declared is not None and not declared.is_wanted else None
