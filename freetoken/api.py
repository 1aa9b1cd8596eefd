"""The Python API: what the commands of `ft` do, as functions that give back the same typed values.

    from freetoken import api

    plan = api.plan("qwen3.6-35b-a3b-8gb", machine="rtx-4060-8gb")
    print(plan.kind, plan.settings.expert_slots, plan.vram.peak_bytes)

    api.apply("demo")
    print(api.measure("demo", workload="code-4k", repeats=1).result.mean("decode_tps"))
    api.stop("demo")

Nothing is printed and nobody is asked. Whatever a command would print as an error is raised as an `FtError` with the
same sentence (`message`), `hint` and `exit_code`; a plan that does not fit is a value (`Refusal`), not an error. Each
function imports what it needs when it is called, so that `from freetoken import api` costs nothing.

A recipe is named as on the command line: its name or file, a model card, a hub repository, a model's folder, or a
recipe that is already loaded. `sets` are `--set`s: `("settings.kv_tokens=16k",)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.errors import DoesNotFitError, FtError, NotReadyError, TargetMissedError, UsageError

if TYPE_CHECKING:
    from freetoken.adapters.control import ControlClient
    from freetoken.deploy.measure import BenchReport
    from freetoken.deploy.overview import Overview
    from freetoken.deploy.tools import Step
    from freetoken.deploy.values import ApplyResult, StopOutcome
    from freetoken.engine.scheduler import Engine
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Plan, Refusal
    from freetoken.planner.suggest import Suggestions
    from freetoken.recipe.load import LoadedRecipe
    from freetoken.share.receive import Received
    from freetoken.store.rows import ResultRow
    from freetoken.tuner.outcome import TuneResult

__all__ = [
    "DoesNotFitError", "FtError", "NotReadyError", "TargetMissedError", "UsageError", "apply", "connect",
    "export_bundle", "fetch", "import_bundle", "load", "machine", "measure", "open_engine", "plan", "probe", "results",
    "status", "stop", "suggest", "tune", "use_state",
]  # fmt: skip


def use_state(folder: str | Path) -> None:
    """Takes `folder` as the state folder of this process, as `ft --state` does."""
    from freetoken import paths

    paths.set_state_dir(str(folder))


# -- machines and recipes


def probe() -> Hardware:
    """What this machine has: GPUs, CPU, RAM, disk, software; bandwidths where they were measured."""
    from freetoken.hardware.probe import probe_hardware

    return probe_hardware(None)


def machine(profile: str | None = None, *, gpu: str | None = None, ram: str | None = None) -> Hardware:
    """A machine that is not here: a profile by name or file, or one made up, `gpu="RTX 3060 Laptop 6GB", ram="32GiB"`.

    Raises UsageError for a name that nobody knows.
    """
    if profile is not None:
        from freetoken.hardware.profiles import load_profile

        if gpu is not None or ram is not None:
            raise UsageError("a profile is a whole machine: give it, or a card and RAM")
        return load_profile(profile)
    from freetoken.hardware.catalog import make_what_if

    return make_what_if(gpu or "none", ram, None)


def load(recipe: str | Path, *, sets: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe with the origin of each value. Raises BadFileError, with file, line and key, for a wrong one."""
    from freetoken.deploy.target import load_target

    return load_target(str(recipe), sets=tuple(sets))


def plan(
    recipe: str | Path | LoadedRecipe, *, machine: Hardware | str | None = None, sets: Sequence[str] = (),
    force: bool = False,
) -> Plan | Refusal:  # fmt: skip
    """Ledgers, settings and predicted speed on `machine` (None: this one), or a reasoned no (`kind` is `refusal`)."""
    from freetoken.deploy.prepare import prepare_plan

    return prepare_plan(_load(recipe, sets), hardware=_machine(machine), force=force)


def suggest(*, machine: Hardware | str | None = None, workload: str = "agent-8k") -> Suggestions:
    """The models that `machine` can run well, out of the model cards, the best first."""
    from freetoken.deploy.suggest import suggest_models

    return suggest_models(_machine(machine), workload=workload)


def fetch(repo: str, *, revision: str = "main", progress: Callable[[Any], None] | None = None) -> Path:
    """Downloads a model with its hashes verified, or finishes a download; its folder. Raises DoesNotFitError (disk)."""
    from freetoken.checkpoint.fetch import fetch_model
    from freetoken.recipe.model import ModelRef

    return fetch_model(ModelRef(repo=repo, revision=revision), progress=progress)


# -- deployments


def apply(
    recipe: str | Path | LoadedRecipe, *, sets: Sequence[str] = (), name: str | None = None, dry_run: bool = False,
    force: bool = False, progress: Callable[[Step], None] | None = None,
) -> ApplyResult:  # fmt: skip
    """Makes a recipe run with the least change that gets there, and proves it by a real generation.

    Raises DoesNotFitError with the planner's no, NotReadyError where the engine never became ready.
    """
    from freetoken.deploy.apply import apply_recipe
    from freetoken.deploy.tools import ignore_progress

    return apply_recipe(
        _load(recipe, sets), name=name, is_dry_run=dry_run, is_forced=force, progress=progress or ignore_progress
    )


def status(name: str | None = None) -> Overview:
    """What runs, declared, planned and measured side by side, and who else holds VRAM."""
    from freetoken.deploy.overview import read_overview

    return read_overview(name)


def stop(name: str | None = None, *, everything: bool = False) -> tuple[StopOutcome, ...]:
    """Ends one deployment (the only one, or `name`), or all of this user's; returns once all of it is gone."""
    from freetoken.deploy import stop

    return stop.stop(name, is_all=everything)


def connect(name: str | None = None, *, timeout_s: float = 10.0) -> ControlClient:
    """A control client of a running deployment: health, stats, cache sizes, live resize, requests. Close it."""
    from freetoken.deploy.connect import connect_deployment

    return connect_deployment(name, timeout_s=timeout_s)


# -- figures


def measure(
    name: str | None = None, *, workload: str | None = None, repeats: int = 3, seed: int = 0,
    limit_s: float | None = None, log: Callable[[str], None] | None = None,
) -> BenchReport:  # fmt: skip
    """Measures a workload on a running deployment: TTFT, ITL, tok/s, hit rate, memory, with intervals. It is kept."""
    from freetoken.deploy.connect import find_one, read_own_key
    from freetoken.deploy.measure import choose_workload, find_target, measure_target

    found = find_one(name)
    target = find_target(found, read_own_key(found))
    chosen, base_dir = choose_workload(target, workload)
    return measure_target(
        target, chosen, base_dir=base_dir, repeats=repeats, seed=seed, log=log, deadline_s=limit_s
    )  # fmt: skip


def tune(
    recipe: str | Path | LoadedRecipe, *, workload: str | None = None, sets: Sequence[str] = (),
    objectives: Sequence[str] = (), budget_s: float | None = None, starts: int | None = None,
    trials: int | None = None, storage: str | None = None, resume: bool = False,
    say: Callable[[str, str], None] | None = None,
) -> TuneResult:  # fmt: skip
    """Finds the fastest setting that really fits, held against the engine's default; what ran before runs again after.

    Limits that are None are the recipe's. `say` gets a phase and a sentence for each step.
    """
    from freetoken.tuner.outcome import Options, choose_workload, parse_objectives
    from freetoken.tuner.session import Session

    options = Options(
        objectives=parse_objectives(tuple(objectives)), budget_s=budget_s, trials=trials, starts=starts,
        storage=storage, is_resuming=resume,
    )  # fmt: skip
    return Session(choose_workload(_load(recipe, sets), workload), options, say=say or (lambda *_: None)).run()


def results(recipe: str | None = None, *, limit: int = 100) -> tuple[ResultRow, ...]:
    """What was measured on this machine, the newest first; () where nothing was."""
    from freetoken.store import read_store

    store = read_store()
    if store is None:
        return ()
    with store:
        return store.list_results(recipe=recipe, limit=limit)


# -- sharing


def export_bundle(recipe: str | Path | LoadedRecipe, path: str | Path, *, sign: bool = False) -> str:
    """Writes recipe, lock, evidence and the tuner's trials into one file, nothing personal in it; its SHA-256."""
    from freetoken import paths
    from freetoken.share.export import check_readable, export_recipe, write_bundle
    from freetoken.share.study import make_points
    from freetoken.tuner.seeds import read_trials

    loaded = _load(recipe, ())
    trials = read_trials(loaded.recipe, paths.studies_path()) if paths.studies_path().is_file() else ()
    data = export_recipe(loaded, is_signed=sign, study=make_points(trials))
    check_readable(data)
    return write_bundle(data, Path(path))


def import_bundle(path: str | Path, *, keep: bool = True, replace: bool = False, name: str | None = None) -> Received:
    """Judges a bundle and plans it for this machine: what the author ran, what would run here, what changed and why.

    With `keep` the recipe is kept in the state folder (`Received.path`); it is never started. Raises BadFileError.
    """
    from freetoken.share.receive import receive

    return receive(Path(path), name=name, is_kept=keep, is_replacing=replace)


# -- the native engine in this process


def open_engine(model: str | Path, **settings: Any) -> Engine:
    """The native engine on a model's folder, in this process: token ids in, token ids out. Close it when done.

    `settings` are those of `freetoken.engine.config.EngineConfig`: `device`, `strategy`, `expert_slots`, `kv_tokens`,
    `prefill_chunk_tokens` and so on. Raises BadFileError for a broken checkpoint, DoesNotFitError for one too large.
    """
    from freetoken.engine.config import EngineConfig
    from freetoken.engine.loader import load_model
    from freetoken.engine.scheduler import Engine

    config = EngineConfig(model_path=Path(model), **settings)
    return Engine(load_model(config), config)


def _load(recipe: str | Path | LoadedRecipe, sets: Sequence[str]) -> LoadedRecipe:
    if isinstance(recipe, (str, Path)):
        return load(recipe, sets=sets)
    if sets:
        raise UsageError("`sets` change a recipe while it is loaded: give them to `load`")
    return recipe


def _machine(value: Hardware | str | None) -> Hardware | None:
    return machine(value) if isinstance(value, str) else value
