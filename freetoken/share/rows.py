"""Which rows of the store speak of a recipe: of its engine, model and workload as they are now, on one machine class.

A recipe is a file that people edit, and rows only keep names. What a run was declared with tells whether the name
still means the same: figures of another model, or of a workload with other counts, are no evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from freetoken.recipe.workload import Workload
from freetoken.share.portable import hash_workload

if TYPE_CHECKING:
    from freetoken.recipe.model import Recipe
    from freetoken.store import Store
    from freetoken.store.rows import MachineRow, ResultRow, RunRow

_MAX_ROWS = 1000


class RecipeRows(NamedTuple):
    """What the store has on a recipe, newest first; `machine` is the one that all of it is from."""

    machine: MachineRow | None = None
    results: tuple[ResultRow, ...] = ()
    runs: tuple[RunRow, ...] = ()


def find_rows(recipe: Recipe, store: Store | None) -> RecipeRows:
    """The rows of `recipe`, or of the one that it was tuned from, on the machine class that was used last."""
    if store is None:
        return RecipeRows()
    names = dict.fromkeys((recipe.name, recipe.name.removesuffix(".tuned")))
    results = [row for name in names for row in _list_results(recipe, name, store)]
    runs = [row for name in names for row in store.list_runs(name, limit=_MAX_ROWS)]
    declared = {row.run_id: row.recipe for name in names for row in store.list_deployments(name, limit=_MAX_ROWS)}
    declared |= {row.run_id: row.recipe for row in store.list_deployments(f"{recipe.name[:70]}-tune", limit=_MAX_ROWS)}
    other = {number for number, what in declared.items() if not _is_same(recipe, what)}
    models = {row.model_name for row in results if row.run_id in declared and row.run_id not in other}
    results = [row for row in results if row.run_id not in other and (not models or row.model_name in models)]
    runs = [row for row in runs if row.id not in other and (not models or row.model_name in models)]
    results.sort(key=lambda row: row.measured_at, reverse=True)
    runs.sort(key=lambda row: row.started_at, reverse=True)
    latest = [(row.measured_at, row.machine_id) for row in results[:1]]
    latest += [(row.started_at, row.machine_id) for row in runs[:1]]
    if not latest:
        return RecipeRows()
    number = max(latest, key=lambda one: one[0])[1]
    return RecipeRows(
        next((one for one in store.list_machines() if one.id == number), None),
        tuple(row for row in results if row.machine_id == number),
        tuple(row for row in runs if row.machine_id == number),
    )


def _list_results(recipe: Recipe, name: str, store: Store) -> Sequence[ResultRow]:
    workload, engine = recipe.workload.name, recipe.engine.name
    found = store.list_results(recipe=name, workload=workload, engine=engine, limit=_MAX_ROWS)
    # An older tool called tuned what it had held against nothing.
    return [row for row in found if row.kind != "tuned" or "gain_ratio" in row.metrics]


def _is_same(recipe: Recipe, declared: Mapping[str, Any]) -> bool:
    """Engine and model are the recipe's; a workload of its name has its counts (a bench may have used another)."""
    model, engine = declared.get("model") or {}, declared.get("engine") or {}
    same_model = (model.get("repo"), model.get("file")) == (recipe.model.repo, recipe.model.file)
    if not same_model or engine.get("name") != recipe.engine.name:
        return False
    told = declared.get("workload") or {}
    if told.get("name") != recipe.workload.name:
        return True
    try:
        return hash_workload(Workload.model_validate(told)) == hash_workload(recipe.workload)
    except ValidationError:
        return False
