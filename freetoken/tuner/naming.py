"""Names of studies in their storage: a fresh one, the one to resume, the one that others are at work on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from freetoken.errors import UsageError
from freetoken.hardware.fingerprint import compute_fingerprint
from freetoken.tuner.record import is_ended

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from freetoken.planner.plan import PlanRequest


def make_study_name(request: PlanRequest, objectives: Sequence[str]) -> str:
    """Recipe, workload, objectives, and a digest of what makes figures comparable."""
    recipe = request.recipe
    facts = [
        compute_fingerprint(request.hardware, recipe.engine.name, request.engine_version),
        request.shape.name, recipe.workload.model_dump_json(), recipe.settings.model_dump_json(),
        str(recipe.allow_quality_changes),
    ]  # fmt: skip
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    words = "-".join([recipe.name, recipe.workload.name, *objectives])
    return f"{re.sub(r'[^a-z0-9._-]', '-', words.lower())[:60]}-{digest}"


def find_fresh(name: str, storage: BaseStorage) -> str:
    """`name`, with a number where a study of that name exists: a new search does not continue an old one."""
    known = {one.study_name for one in storage.get_all_studies()}
    return next(one for one in (name, *(f"{name}.{n}" for n in range(2, 10_000))) if one not in known)


def find_resumable(name: str, storage: BaseStorage) -> str:
    """The newest study of this name. Raises UsageError where there is none."""
    names = [one.study_name for one in storage.get_all_studies()]
    known = [one for one in names if one == name or one.startswith(f"{name}.")]
    if not known:
        raise UsageError(f"no study `{name}` to resume", hint="leave out `--resume`")
    return max(known, key=lambda one: int(one.rpartition(".")[2]) if one != name else 1)


def find_open(name: str, storage: BaseStorage) -> str | None:
    """The newest study of this name that somebody is at work on, or that nobody has ended yet; None without one."""
    from optuna.trial import TrialState

    try:
        newest = find_resumable(name, storage)
    except UsageError:
        return None
    number = storage.get_study_id_from_name(newest)
    is_open = not is_ended(storage.get_study_user_attrs(number))
    return newest if is_open or storage.get_all_trials(number, deepcopy=False, states=(TrialState.RUNNING,)) else None
