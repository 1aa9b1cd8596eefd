"""The tuned recipe as a file, with its lock beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken import paths
from freetoken.deploy.tools import DEFAULT_TOOLS
from freetoken.errors import FtError

if TYPE_CHECKING:
    from freetoken.planner.plan import PlanRequest
    from freetoken.recipe.load import LoadedRecipe
    from freetoken.recipe.model import Recipe
    from freetoken.tuner.confirm import Confirmation
    from freetoken.tuner.outcome import TuneResult
    from freetoken.tuner.site import PlannedSite
    from freetoken.tuner.values import Point


def write_tuned_recipe(
    loaded: LoadedRecipe, site: PlannedSite, winner: Point, result: TuneResult, about: Sequence[str],
    warnings: list[str],
) -> str:  # fmt: skip
    """`<name>.tuned.yaml` beside the recipe where that is a folder of the user's, else in the state folder; its path.

    `about` are sentences for its head: what is proven of this very setting. What went wrong on the way is added to
    `warnings`. Raises FtError where it can be written nowhere.
    """
    from freetoken.recipe.dump import dump_recipe
    from freetoken.supervisor.files import write_text

    recipe = loaded.recipe
    launchable = site.forecast(winner)
    has_slots = launchable is not None and launchable.high > 0
    fixed = site.fix(winner, slots=int(winner["expert_slots"]) if has_slots and "expert_slots" in winner else None)
    name = f"{recipe.name[:70]}.tuned"
    fixed = _leave_open(site, fixed, winner)
    settings = fixed.recipe.settings
    tuned = recipe.model_copy(update={"name": name, "settings": settings, "extends": None})
    heads = [
        f"{name}: {head.describe()}"
        for name, head in (("this", result.best_headline), ("baseline", result.baseline_headline))
        if head is not None
    ]
    lines = [f"tuned for `{recipe.workload.name}`: {', '.join(result.objectives)}", *about, *heads]
    head = "".join(f"# {one}\n" for one in lines if one)
    text = head + dump_recipe(tuned, base_dir=loaded.base_dir)
    for folder in (loaded.path.parent if loaded.path else None, paths.state_dir() / "recipes"):
        if folder is None or _is_shipped(folder):
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / f"{name}.yaml", text)
            _write_lock(tuned, fixed, site, folder / f"{name}.yaml", warnings)
            return str(folder / f"{name}.yaml")
        except OSError as error:
            warnings.append(f"{folder}: {error.strerror}")
    raise FtError(f"the tuned recipe could not be written: {warnings[-1]}")


def describe_proof(proof: Confirmation) -> str:
    """What was confirmed, in a line."""
    versus = proof.imported
    return proof.describe() + (f"; against the best imported setting {versus.describe_interval()}" if versus else "")


def _leave_open(site: PlannedSite, fixed: PlanRequest, winner: Point) -> PlanRequest:
    """`fixed` with what does nothing under the winner's strategy as the recipe had it: nobody measured those values."""
    recipe, kept = fixed.recipe, site.space.relevant(winner)
    open_ = {one.name: getattr(site.request.recipe.settings, one.name) for one in site.space if one.name not in kept}
    settings = recipe.settings.model_copy(update=open_)
    return fixed.model_copy(update={"recipe": recipe.model_copy(update={"settings": settings})})


def _write_lock(
    tuned: Recipe, request: PlanRequest, site: PlannedSite, path: Path, warnings: list[str]
) -> None:  # fmt: skip
    """The lock of the tuned recipe beside it; where that fails the recipe stands all the same."""
    from freetoken.deploy.lock import find_lock_path, make_lock, write_lock

    try:
        plan = DEFAULT_TOOLS.make_plan(request, site.adapter, False)
        if plan.kind == "plan":
            write_lock(make_lock(tuned, plan, site.adapter), find_lock_path(path, tuned.name))
    except (FtError, OSError) as error:
        warnings.append(f"no lock was written: {error}")


def _is_shipped(folder: Path) -> bool:
    """Inside the installed package, where nothing of the user's may lie."""
    return paths.package_data().resolve() in (folder.resolve(), *folder.resolve().parents)
