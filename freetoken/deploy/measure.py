"""`ft bench run`: a workload on what runs now, recorded in its run folder and in the store.

Which engine is meant, which workload it was declared with, and which settings the figures belong to is known here;
`bench/` only sees an address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from freetoken.bench.result import BenchResult
from freetoken.bench.targets import TargetCheck, check_targets
from freetoken.deploy.hits import make_hit_counter
from freetoken.errors import FtError, UsageError
from freetoken.recipe.model import Recipe

if TYPE_CHECKING:
    from freetoken.adapters.control import ControlClient
    from freetoken.planner.plan import Plan
    from freetoken.recipe.workload import Workload
    from freetoken.store.rows import ResultRow
    from freetoken.supervisor.life import Life

#: Figures whose interval is kept in the store beside their mean.
_WITH_INTERVAL = ("decode_tps", "total_decode_tps", "turn_time_s", "ttft_ms", "tpot_ms")


class BenchReport(BaseModel):
    """What `ft bench run` shows: the result, whose it is, and whether it is good enough."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    result: BenchResult
    checks: tuple[TargetCheck, ...] = ()
    #: What could not be kept, in words; empty where all was.
    warning: str = ""

    @property
    def missed(self) -> tuple[TargetCheck, ...]:
        """Targets that were not met."""
        return tuple(one for one in self.checks if not one.is_met)


@dataclass(frozen=True)
class Target:
    """An engine to be measured. Plan, recipe and run folder are those of a deployment of ours."""

    name: str
    base_url: str
    api_key: str | None = None
    engine_pid: int | None = None
    run_dir: Path | None = None
    plan: Plan | None = None
    recipe: Recipe | None = None


def find_target(found: Life, api_key: str | None = None) -> Target:
    """The deployment `found` as a target."""
    from freetoken.deploy import runs

    folder = found.record.folder
    return Target(
        found.record.name, found.record.base_url, api_key, found.engine.pid if found.engine else None, folder,
        runs.read_plan(folder), runs.read_recipe(folder),
    )  # fmt: skip


def choose_workload(target: Target, name: str | None) -> tuple[Workload, Path | None]:
    """The workload called `name`, else the target's own, and the folder that a recording's path starts from.

    Raises UsageError where neither is there.
    """
    from freetoken.recipe.load import load_workload
    from freetoken.recipe.lookup import find_workload

    if name is not None:
        path = find_workload(name, Path.cwd())
        return load_workload(name), path.parent if path is not None else None
    if target.recipe is None:
        raise UsageError(
            f"nothing says which workload {target.name} is for", hint="`--workload code-4k`; `ft workload list`"
        )
    return target.recipe.workload, None


def measure_target(
    target: Target, workload: Workload, *, base_dir: Path | None = None, repeats: int = 3, seed: int = 0,
    log: Callable[[str], None] | None = None, deadline_s: float | None = None,
) -> BenchReport:  # fmt: skip
    """Measures, records and checks. Raises what `run_workload` raises."""
    from freetoken.bench.run import BenchOptions, run_workload

    options = BenchOptions(base_dir=base_dir, deadline_s=deadline_s, read_hits=make_hit_counter(target.run_dir))
    result = run_workload(
        target.base_url, workload, repeats=repeats, seed=seed, api_key=target.api_key, log=log,
        engine_pid=target.engine_pid, options=options,
    )  # fmt: skip
    warning = record_result(target, workload, result)
    # A recipe's targets are those of its own workload.
    is_own = target.recipe is not None and target.recipe.workload == workload
    checks = check_targets(target.recipe.good_enough, result) if is_own and target.recipe else ()
    return BenchReport(target=target.name, result=result, checks=checks, warning=warning or "")


def record_result(target: Target, workload: Workload, result: BenchResult, kind: str = "bench") -> str | None:
    """Keeps the result in the run folder, which is the truth, and in the store; the warning where that failed."""
    from freetoken.store import open_store
    from freetoken.store.rebuild import append_result

    try:
        row = make_row(target, workload, result, kind)
        with open_store() as store:
            machine_id = _find_machine(store.list_runs(limit=1000), target)
            store.record_result(row.model_copy(update={"machine_id": machine_id}))
        if target.run_dir is not None:
            append_result(target.run_dir, row)
    except (FtError, OSError) as error:
        return f"not recorded: {error}"
    return None


def _find_machine(rows: Any, target: Target) -> int | None:
    run_id = target.run_dir.name if target.run_dir is not None else None
    return next((row.machine_id for row in rows if row.id == run_id), None)


def make_row(target: Target, workload: Workload, result: BenchResult, kind: str = "bench") -> ResultRow:
    """The row of `ft results`."""
    from freetoken.store.rows import ResultRow

    plan = target.plan
    metrics = {name: one.mean for name, one in result.metrics.items()}
    for name in _WITH_INTERVAL:
        if (one := result.metrics.get(name)) is not None:
            metrics |= {f"{name}_low": one.low, f"{name}_high": one.high}
    return ResultRow(
        run_id=target.run_dir.name if target.run_dir is not None else None,
        recipe_name=target.recipe.name if target.recipe is not None else target.name,
        workload=workload.name,
        engine=plan.engine if plan is not None else "",
        engine_version=plan.engine_version if plan is not None else None,
        model_name=plan.model_name if plan is not None else result.model,
        kind=kind,
        settings=_settings_in_force(target),
        metrics=metrics,
        is_estimated=result.tokens.is_estimated,
        invalid_because=result.invalid_because,
    )


def _settings_in_force(target: Target) -> dict[str, Any]:
    """The plan's settings, with the sizes that the engine tells: a live resize may have changed them since."""
    from freetoken.adapters.control import ControlClient

    settings = target.plan.settings.model_dump(mode="json") if target.plan is not None else {}
    try:
        with ControlClient(target.base_url, target.api_key) as client:
            settings |= _read_sizes(client)
    except FtError:  # an engine without this part of the API
        pass
    return settings


def _read_sizes(client: ControlClient) -> dict[str, int]:
    status = client.cache_status()
    return {"expert_slots": status.expert_slots, "kv_tokens": status.kv_tokens}
