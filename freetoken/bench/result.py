"""`BenchResult`: what a workload took on a running engine, with intervals, and why it may not be comparable."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FindingKind = Literal[
    "other_process", "throttling", "link", "swap", "prefix_cache", "token_count", "repetition", "restart", "settings",
    "sizing", "busy",
]  # fmt: skip


class BenchModel(BaseModel):
    """Base: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Estimate(BenchModel):
    """A figure with its 95 % bootstrap interval; `n` is how many measurements it rests on."""

    mean: float
    low: float
    high: float
    n: int = Field(ge=1)

    @property
    def half_width_ratio(self) -> float:
        """Half the interval over the figure: 0.02 reads as plus or minus 2 %."""
        return (self.high - self.low) / 2 / abs(self.mean) if self.mean else 0.0


class Finding(BenchModel):
    """Something that was seen beside the run. An invalidating one means: do not compare these figures."""

    kind: FindingKind
    message: str
    is_invalidating: bool = True


class RequestFigures(BenchModel):
    """One request as the client saw it. `turn` counts from 0; None where there were too few tokens or no count."""

    repeat: int
    conversation: int
    turn: int
    prompt_tokens: int | None
    #: Prompt tokens that the prefix cache answered; None where the engine does not say.
    cached_tokens: int | None = None
    completion_tokens: int
    ttft_ms: float
    e2e_ms: float
    tpot_ms: float | None = None
    #: Pieces of text that came; a piece may hold several tokens.
    chunk_count: int = 0
    is_estimated: bool = False


class TokenCounts(BenchModel):
    """Tokens of all timed requests together, from the engine's own `usage`."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    #: True where an answer came without `usage`, so that chunks were counted instead.
    is_estimated: bool = False


class BenchResult(BenchModel):
    """One measurement of a workload. Names in `metrics` carry their unit: `decode_tps`, `ttft_p95_ms`, ..."""

    workload: str
    model: str = ""
    #: Tells a restart of the engine between two results.
    instance_id: str | None = None
    repeats: int
    seed: int
    #: Whether the prompts were those that a search never sees.
    is_unseen: bool = False
    metrics: dict[str, Estimate] = {}
    findings: tuple[Finding, ...] = ()
    is_valid: bool = True
    tokens: TokenCounts = TokenCounts()
    #: Seconds of the timed part, and of all of it with warm-up and preparation.
    measured_s: float = 0.0
    duration_s: float = 0.0
    requests: tuple[RequestFigures, ...] = ()

    @property
    def invalid_because(self) -> str:
        """Why the figures must not be compared; empty where they may."""
        return "; ".join(one.message for one in self.findings if one.is_invalidating)

    def mean(self, name: str) -> float | None:
        """The figure called `name`, None where it could not be measured."""
        found = self.metrics.get(name)
        return found.mean if found is not None else None
