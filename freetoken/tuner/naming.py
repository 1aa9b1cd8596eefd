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
    return _follow(name, _list_known(name, storage))


def find_resumable(name: str, storage: BaseStorage) -> str:
    """The newest study of this name. Raises UsageError where there is none."""
    known = _list_known(name, storage)
    if not known:
        raise UsageError(f"no study `{name}` to resume", hint="leave out `--resume`")
    return known[max(known)]


def find_shared(name: str, storage: BaseStorage) -> tuple[str, bool]:
    """The newest study of this name and True where somebody is at work on it or nobody has ended it; else a new name.

    Names are read once: of two that look at the same moment both find the same new one, and whoever comes second to
    make it joins it.
    """
    from optuna.trial import TrialState

    known = _list_known(name, storage)
    if known:
        newest = known[max(known)]
        number = storage.get_study_id_from_name(newest)
        is_open = not is_ended(storage.get_study_user_attrs(number))
        if is_open or storage.get_all_trials(number, deepcopy=False, states=(TrialState.RUNNING,)):
            return newest, True
    return _follow(name, known), False


def _list_known(name: str, storage: BaseStorage) -> dict[int, str]:
    """Studies of this name by their number; the first one has none in its name."""
    numbered = re.compile(re.escape(name) + r"(?:\.(\d+))?")
    found = (numbered.fullmatch(one.study_name) for one in storage.get_all_studies())
    return {int(one[1] or 1): one[0] for one in found if one is not None}


def _follow(name: str, known: dict[int, str]) -> str:
    return f"{name}.{max(known) + 1}" if known else name
