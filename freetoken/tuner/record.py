"""A study as a value: what is written beside it, and all that a report needs of it (read back in `reading.py`).

A study carries its facts (recipe, machine class, objectives, knobs) and, once a process has ended its search, that
process's result. Several processes of equal machines may share a study, so there may be several results. Nothing
here measures or judges anew; what a trial lacks (an older tool, a killed process) stays None.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import ValidationError

from freetoken.supervisor.files import format_now
from freetoken.supervisor.process import identify_self
from freetoken.tuner import history
from freetoken.tuner.confirm import Confirmation
from freetoken.tuner.headline import Headline
from freetoken.tuner.importance import Importance
from freetoken.tuner.objectives import OBJECTIVES, Objective
from freetoken.tuner.space import Parameter, Space
from freetoken.tuner.values import Measurement, Point, TunerModel

if TYPE_CHECKING:
    from optuna.study import Study

    from freetoken.tuner.outcome import TuneResult

FACTS, RESULT = "facts", "result."
#: What is drawn against each other where a study has one objective: both matter to whoever sits before it.
TRADE_OFF = ("ttft", "decode_tps")
State = Literal["measured", "refused", "crash", "hang", "garbage", "invalid", "stopped", "lost", "running", "waiting"]


class LimitFacts(NamedTuple):
    """A hard limit as it was asked for."""

    name: str
    bound: float
    is_upper: bool


class StudyFacts(TunerModel):
    """What a study is about, in words and numbers that name no person, path or host."""

    recipe: str
    #: What follows `ft apply` and `ft tune` to mean this recipe.
    target: str
    description: str = ""
    engine: str
    engine_version: str | None = None
    model: str
    workload: str
    workload_words: str = ""
    #: Whether `--workload NAME` leads to it.
    is_named_workload: bool = False
    #: Else what `--set workload=` takes to mean it; "" where it is a recording, which is a file of its own.
    workload_set: str = ""
    #: Other values that the command line gave, as `--set` takes them.
    sets: tuple[str, ...] = ()
    machine: str = ""
    #: The memory whose peak decides.
    ledger: Literal["vram", "ram"] = "vram"
    objectives: tuple[str, ...]
    limits: tuple[LimitFacts, ...] = ()
    knobs: tuple[Parameter, ...] = ()
    #: Settings that the recipe itself fixed.
    fixed: dict[str, Any] = {}
    budget_s: float | None = None
    ft_version: str = ""
    began_at: str = ""


class StudyResult(TunerModel):
    """How one process ended its search."""

    reason: str
    finished_at: str
    duration_s: float = 0.0
    #: What is to be run: what was confirmed to be better, else the baseline.
    best: Point = {}
    baseline: Point = {}
    baseline_words: str = ""
    #: What was held against the baseline and did not win; {} where it won, or nothing was found.
    candidate: Point = {}
    confirmation: Confirmation | None = None
    missed: tuple[str, ...] = ()
    soak: str = ""
    #: File name of the recipe that was written; None where nothing was confirmed.
    tuned_recipe: str | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, result: TuneResult) -> StudyResult:
        """What of a session's result belongs beside the study: no path, no figures that a trial holds already."""
        values = {name: getattr(result, name) for name in cls.model_fields if hasattr(result, name)}
        written = Path(result.tuned_recipe).name if result.tuned_recipe else None
        return cls.model_validate({**values, "tuned_recipe": written, "finished_at": format_now()})


class TrialRecord(TunerModel):
    """One trial with everything that was written beside it."""

    number: int
    state: State
    stage: str = ""
    reason: str = ""
    words: str = ""
    #: Which start of an engine it was measured in; 0 where none was needed.
    start: int = 0
    point: Point = {}
    measurement: Measurement | None = None
    #: The objectives' figures, in their own units.
    figures: dict[str, float] = {}
    #: Limits that the measurement misses.
    missed: tuple[str, ...] = ()
    predicted_figure: float | None = None
    violation_bytes: int = 0
    planned: history.Planned | None = None
    run_id: str | None = None
    #: Machines of a shared study in the order of their first trial, from 1.
    machine: int = 1
    began_at: str = ""
    duration_s: float | None = None


class FrontPoint(TunerModel):
    """A setting of the front: its last trial, and its figures as means over `repeats` measurements."""

    number: int
    figures: tuple[float, float]
    repeats: int = 1


class StudyRecord(TunerModel):
    """A study with all its trials."""

    name: str
    facts: StudyFacts
    trials: tuple[TrialRecord, ...] = ()
    #: The newest first.
    results: tuple[StudyResult, ...] = ()
    best: int | None = None
    baseline: int | None = None
    baseline_words: str = ""
    #: The setting that was held against the baseline and did not win.
    candidate: int | None = None
    #: Figures of the three over all their measurements, or over those of the confirmation where there was one.
    best_figures: Headline | None = None
    baseline_figures: Headline | None = None
    candidate_figures: Headline | None = None
    #: Two objectives' names, and the settings that no other one beats in both, by the first.
    front_axes: tuple[str, str] = TRADE_OFF
    front: tuple[FrontPoint, ...] = ()
    importances: tuple[Importance, ...] = ()

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What was optimised."""
        return tuple(OBJECTIVES[name] for name in self.facts.objectives)

    @property
    def axes(self) -> tuple[Objective, Objective]:
        """What the front is drawn over."""
        return OBJECTIVES[self.front_axes[0]], OBJECTIVES[self.front_axes[1]]

    @property
    def result(self) -> StudyResult | None:
        """How it ended, as the process that ended last says; None while nobody has ended it."""
        return self.results[0] if self.results else None

    @property
    def starts(self) -> int:
        """Starts of an engine."""
        return len({one.start for one in self.trials if one.start})

    @property
    def crashes(self) -> int:
        """Trials that broke their engine: crashed, hung, or answered garbage."""
        return sum(one.state in ("crash", "hang", "garbage") for one in self.trials)

    @property
    def machines(self) -> int:
        """Machines that took part."""
        return max((one.machine for one in self.trials), default=1)

    def trial(self, number: int | None) -> TrialRecord | None:
        """The trial with this number."""
        return next((one for one in self.trials if one.number == number), None) if number is not None else None

    def canonical(self, point: Point) -> Point:
        """`point` with knobs that do nothing under its strategy at one value, where the knobs are known."""
        return make_canonical(self.facts.knobs, point)


# --- writing


def write_facts(study: Study, facts: StudyFacts) -> None:
    """Keeps beside `study` what it is about; a process that joins says the same again, but for when it began."""
    known = study.user_attrs.get(FACTS)
    began_at = known.get("began_at", "") if isinstance(known, dict) else facts.began_at
    study.set_user_attr(FACTS, facts.model_copy(update={"began_at": began_at}).model_dump(mode="json"))


def read_knobs(attributes: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """The knobs of the study with these attributes; () where an older tool wrote none."""
    try:
        return StudyFacts.model_validate(attributes.get(FACTS)).knobs
    except ValidationError:
        return ()


def write_result(study: Study, result: StudyResult) -> None:
    """Keeps how this process ended its search, beside those of others."""
    own = hashlib.sha256(str(identify_self()).encode()).hexdigest()[:8]
    study.set_user_attr(f"{RESULT}{own}", result.model_dump(mode="json"))


def is_ended(attributes: Mapping[str, Any]) -> bool:
    """Whether a process has ended its search in the study with these attributes."""
    return any(key.startswith(RESULT) for key in attributes)


def make_canonical(knobs: tuple[Parameter, ...], point: Point) -> Point:
    """`point` as the space writes it, so that two of the same setting are equal; as it is where it lacks a knob."""
    strategy = point.get("strategy")
    if not knobs or any(one.name not in point and one.is_relevant(strategy) for one in knobs):
        return point
    return Space(parameters=knobs).canonical(point)
