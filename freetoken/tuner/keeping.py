"""What a study leaves in the store: a row for each measured trial, and one for a winner that was confirmed.

The study's own file is the truth and the store is a copy of it, so that `ft results --rebuild` brings the rows back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetoken.errors import FtError
from freetoken.hardware.fingerprint import compute_fingerprint
from freetoken.supervisor.files import describe_os_error
from freetoken.tuner import status
from freetoken.tuner.seeds import to_store_names

if TYPE_CHECKING:
    from freetoken.tuner.confirm import Confirmation
    from freetoken.tuner.headline import Headline
    from freetoken.tuner.site import PlannedSite
    from freetoken.tuner.values import Measurement, Point


def keep_trial(
    site: PlannedSite, study: str, settings: dict[str, Any], measurement: Measurement, run_id: str | None
) -> str | None:
    """Keeps what a trial measured; the warning where that failed."""
    return _keep(site, study, "trial", settings, measurement.model_dump(exclude_none=True), run_id)


def keep_winner(
    site: PlannedSite, study: str, winner: Point, headline: Headline, confirmation: Confirmation
) -> str | None:
    """Keeps a confirmed winner with its figures over the confirmation and its gain; the warning where that failed."""
    canonical, forecast = site.space.canonical(winner), site.forecast(winner)
    strategy = forecast.settings.strategy if forecast is not None else None
    settings = {one.name: canonical[one.name] for one in site.space if one.is_relevant(strategy)}
    figures = headline.measurement.model_dump(exclude_none=True)
    if headline.objective == "turn_time":
        figures |= {"turn_time_s_low": headline.low, "turn_time_s_high": headline.high}
    gains = {
        "gain_ratio": confirmation.gain, "gain_ratio_low": confirmation.gain_low,
        "gain_ratio_high": confirmation.gain_high,
    }  # fmt: skip
    figures |= {name: gain for name, gain in gains.items() if gain is not None}
    return _keep(site, study, "tuned", settings, figures, None)


def _keep(
    site: PlannedSite, study: str, kind: str, settings: dict[str, Any], figures: dict[str, float], run_id: str | None
) -> str | None:
    from freetoken.store import open_store
    from freetoken.store.rebuild import StudyFact, append_study_fact
    from freetoken.store.rows import ResultRow

    request, warning = site.request, None
    fingerprint = compute_fingerprint(request.hardware, request.recipe.engine.name, request.engine_version)
    row = ResultRow(
        run_id=run_id, recipe_name=request.recipe.name, workload=request.recipe.workload.name,
        engine=request.recipe.engine.name, engine_version=request.engine_version, model_name=request.shape.name,
        kind=kind, settings=settings, metrics=to_store_names(figures),
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
