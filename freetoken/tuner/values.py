"""What the tuner talks about: a point of the space, what was measured there, and what came of trying it.

Every value here is frozen and dumps to JSON, since a study keeps them beside its trials: whoever resumes a study,
on this machine or another, reads them back and needs nothing else.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: A value for every knob of the space, by field name of `recipe.model.Settings`.
Point = dict[str, Any]
Kind = Literal["ok", "refused", "crash", "hang", "garbage", "invalid", "stopped"]
#: `default`, `calibrate`, `predicted`, `other strategy`, `grow`, `repeat`, `probe`, `search`; free for other samplers.
Stage = str
#: Outcomes that say that the point must not be used; an invalid measurement says nothing of the point.
INFEASIBLE: frozenset[Kind] = frozenset({"refused", "crash", "hang", "garbage"})


class TunerModel(BaseModel):
    """Base of the room's values: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Measurement(TunerModel):
    """Figures of one workload run. Seconds, tok/s, bytes, ratios; None where nobody told."""

    decode_tps: float = Field(gt=0)
    #: Mean over the workload's requests, send to first token.
    ttft_s: float = Field(gt=0)
    #: Mean over the workload's requests, send to last token.
    turn_time_s: float = Field(gt=0)
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    prefill_tps: float | None = None
    total_decode_tps: float | None = None
    joules_per_token: float | None = None
    hit_ratio: float | None = Field(default=None, ge=0, le=1)
    #: Peak of the memory that decides (VRAM, or RAM on a CPU-only device), other processes included as planned.
    peak_bytes: int | None = None
    #: Relative standard error of the turn time.
    noise_ratio: float = Field(default=0.02, ge=0)
    #: The same of the decode rate; None where only the turn's is known.
    decode_noise_ratio: float | None = Field(default=None, ge=0)
    #: And of the rate of all requests together.
    total_noise_ratio: float | None = Field(default=None, ge=0)


class Outcome(TunerModel):
    """What came of trying a point."""

    kind: Kind
    measurement: Measurement | None = None
    #: Bytes that were missing, where that is why it did not work; at least 1 for an infeasible point.
    violation_bytes: int = Field(default=0, ge=0)
    #: Of a refusal by whoever launches: what was missing in the memory that slots are taken from; None = not told.
    ledger_bytes: int | None = None
    words: str = ""
    duration_s: float = 0.0
    run_id: str | None = None

    @property
    def is_ok(self) -> bool:
        """There are figures that may be compared."""
        return self.kind == "ok" and self.measurement is not None


class Observation(TunerModel):
    """One trial as the method sees it."""

    number: int
    point: Point
    stage: Stage = ""
    #: Which start of an engine it was measured in, from 1; 0 where none was needed (a refusal).
    start: int = 0
    outcome: Outcome
    #: Cost that the model predicted before the trial; None where it predicted nothing.
    predicted_cost: float | None = None

    @property
    def measurement(self) -> Measurement | None:
        """The figures, where there are any that count."""
        return self.outcome.measurement if self.outcome.is_ok else None
