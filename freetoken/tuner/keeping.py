"""What a study leaves in the store: a row for each measured trial, and one for what the confirmation left standing.

The study's own file is the truth and the store is a copy of it, so that `ft results --rebuild` brings the rows back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from freetoken.errors import FtError
from freetoken.hardware.fingerprint import compute_fingerprint
from freetoken.supervisor.files import describe_os_error
from freetoken.tuner import status
from freetoken.tuner.headline import make_headline
from freetoken.tuner.history import average
from freetoken.tuner.objectives import OBJECTIVES
from freetoken.tuner.seeds import list_fixed, to_store_names

if TYPE_CHECKING:
    from freetoken.tuner.confirm import Confirmation
    from freetoken.tuner.site import PlannedSite
    from freetoken.tuner.values import Measurement, Point


#: Objective -> its column in the store, and how many of the column's units are one of the objective's.
_COLUMNS = {
    "turn_time": ("turn_time_s", 1), "decode_tps": ("decode_tps", 1), "ttft": ("ttft_ms", 1000),
    "throughput": ("total_decode_tps", 1), "efficiency": ("joules_per_token", 1),
}  # fmt: skip


def keep_trial(
    site: PlannedSite, study: str, settings: dict[str, Any], measurement: Measurement, run_id: str | None
) -> str | None:
    """Keeps what a trial measured; the warning where that failed."""
    return _keep(site, study, "trial", settings, to_store_names(measurement.model_dump(exclude_none=True)), run_id)


def keep_winner(
    site: PlannedSite, study: str, winner: Point, blocks: Sequence[Measurement], proof: Confirmation | None
) -> str | None:
    """Keeps a winner with its figures over `blocks`, and the gain that `proof` confirms; the warning where that failed.

    Without a proof it is what works where the engine's default does not.
    """
    known = {}
    if proof is not None:
        gains = {"gain_ratio": proof.gain, "gain_ratio_low": proof.gain_low, "gain_ratio_high": proof.gain_high}
        known = {name: gain for name, gain in gains.items() if gain is not None}
    return _keep(site, study, "tuned", site.space.relevant(winner), {**summarise(blocks), **known}, None)


def keep_baseline(site: PlannedSite, study: str, baseline: Point, proof: Confirmation) -> str | None:
    """Keeps the baseline that stays, with its figures over the confirmation; the warning where that failed."""
    return _keep(site, study, "confirm", site.space.relevant(baseline), summarise(proof.baseline_blocks), None)


def summarise(blocks: Sequence[Measurement]) -> dict[str, float]:
    """Means of `blocks` by the names of the store, what can be an objective with its 95 % interval."""
    found = to_store_names(average(blocks).model_dump(exclude_none=True))
    for name, (column, scale) in _COLUMNS.items():
        head = make_headline(blocks, OBJECTIVES[name])
        if head is not None and column in found:
            found |= {f"{column}_low": head.low * scale, f"{column}_high": head.high * scale}
    return found


def _keep(
    site: PlannedSite, study: str, kind: str, settings: dict[str, Any], figures: dict[str, float], run_id: str | None
) -> str | None:
    from freetoken.store import open_store
    from freetoken.store.rebuild import StudyFact, append_study_fact
    from freetoken.store.rows import ResultRow

    request, warning = site.request, None
    fingerprint = compute_fingerprint(request.hardware, request.recipe.engine.name, request.engine_version)
    settings = {**list_fixed(request.recipe), **settings}
    row = ResultRow(
        run_id=run_id, recipe_name=request.recipe.name, workload=request.recipe.workload.name,
        engine=request.recipe.engine.name, engine_version=request.engine_version, model_name=request.shape.name,
        kind=kind, settings=settings, metrics=figures,
    )  # fmt: skip
    fact = StudyFact(fingerprint=fingerprint, hardware=request.hardware, result=row)
    try:
        append_study_fact(status.folder(), study, fact)
    except OSError as error:
        warning = describe_os_error(error, status.folder())
    try:
        with open_store() as store:
            machine_id = store.record_machine(request.hardware, fingerprint)
            store.record_result(row.model_copy(update={"machine_id": machine_id}))
    except FtError as error:
        warning = error.message
    return warning
