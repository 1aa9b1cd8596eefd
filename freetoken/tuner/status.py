"""What a running study says of itself: one JSON file under `<state>/tune/`, read by `--status` and `--resume`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from freetoken import paths
from freetoken.supervisor.files import format_now, read_json, write_json
from freetoken.supervisor.process import ProcessId, identify_self, is_alive
from freetoken.tuner.values import TunerModel


class TuneStatus(TunerModel):
    """Where a study stands."""

    study: str
    recipe: str
    workload: str
    objective: str
    state: str = "running"  # running, done, interrupted, failed
    phase: str = ""
    message: str = ""
    trials: int = 0
    starts: int = 0
    best_figure: float | None = None
    best_point: dict[str, Any] = {}
    left_s: float | None = None
    #: Seconds of the budget that earlier processes used up.
    used_s: float = 0.0
    process: dict[str, Any] | None = None
    #: Run that was going before the study and is given back after it: folder and name.
    previous_run: str | None = None
    previous_name: str | None = None
    log: str | None = None
    updated_at: str = ""

    @property
    def is_alive(self) -> bool:
        """Its process lives."""
        process = ProcessId.from_dict(self.process) if self.process else None
        return process is not None and is_alive(process)


class Detached(TunerModel):
    """A study that goes on in the background."""

    kind: str = "detached"
    process: int
    log: str
    #: False where it was still preparing when `ft` stopped looking.
    has_begun: bool


def folder() -> Path:
    """`<state>/tune`."""
    return paths.state_dir() / "tune"


def write_status(status: TuneStatus) -> None:
    """Keeps it; a full disk is passed over, the study itself is what counts."""
    folder().mkdir(parents=True, exist_ok=True)
    now = status.model_copy(update={"updated_at": format_now(), "process": identify_self().to_dict()})
    try:
        write_json(_path(status.study), now.model_dump(mode="json"))
    except OSError:
        pass


def read_status(study: str) -> TuneStatus | None:
    """The status of a study, or None."""
    value = read_json(_path(study))
    try:
        return TuneStatus.model_validate(value) if value is not None else None
    except ValueError:
        return None


def list_statuses() -> tuple[TuneStatus, ...]:
    """All studies of this state folder, the one that moved last first."""
    if not folder().is_dir():
        return ()
    names = sorted(folder().glob("*.json"), key=os.path.getmtime, reverse=True)
    return tuple(one for name in names if (one := read_status(name.stem)) is not None)


def _path(study: str) -> Path:
    return folder() / f"{study}.json"
