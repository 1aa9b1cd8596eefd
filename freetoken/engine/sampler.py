"""Picks the next token from logits: greedy, temperature, top-k, top-p, min-p, penalties, seed.

The candidates are cut down where the logits are; the draw itself is one number of a CPU generator of the request,
so that the same seed gives the same text on every device, whatever else runs beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from pydantic import BaseModel, ConfigDict, Field

#: Candidates looked at first when only `top_p` limits them; the full sort follows where they do not reach `top_p`.
_FIRST_CANDIDATES = 1024


class SamplingParams(BaseModel):
    """How to sample. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=0.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)

    @property
    def has_penalties(self) -> bool:
        """Whether past tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Sampler:
    """The sampling state of one request: its generator, and the counts that penalties need."""

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int] = ()) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % (1 << 63))
        self._prompt_ids = frozenset(prompt_ids) if params.repetition_penalty != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()

    def pick(self, logits: torch.Tensor) -> int:
        """The next token id for `logits` `[vocabulary]`; remembers it. Raises ValueError where they are not finite."""
        scores = logits.float()
        if self.params.has_penalties:
            scores = self._penalise(scores)
        token = self._pick_greedy(scores) if self.params.temperature < 1e-5 else self._draw(scores)
        if self.params.has_penalties:
            self._counts[token] += 1
        return token

    def _pick_greedy(self, scores: torch.Tensor) -> int:
        value, index = scores.max(dim=-1)
        _check_finite(float(value))
        return int(index)

    def _draw(self, scores: torch.Tensor) -> int:
        values, ids = self._candidates(scores / self.params.temperature)
        weights = values.double().cpu()
        cumulated = weights.cumsum(0)
        total = float(cumulated[-1])
        _check_finite(total)
        point = torch.rand((), generator=self._generator, dtype=torch.float64) * total
        position = int(torch.searchsorted(cumulated, point, right=True).clamp(max=len(weights) - 1))
        return position if ids is None else int(ids[position])

    def _candidates(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weights, ids) that may be drawn, likeliest first; ids None = the whole vocabulary in its order."""
        p = self.params
        probabilities = torch.softmax(scores, dim=-1)
        if p.top_k == 0 and p.top_p >= 1.0:
            return _cut_min_p(probabilities, p.min_p), None
        count = min(p.top_k or _FIRST_CANDIDATES, scores.numel())
        values, ids = torch.topk(probabilities, count)
        if not p.top_k and float(values.sum()) < p.top_p:
            values, ids = torch.sort(probabilities, descending=True)
        if p.top_p < 1.0:
            kept = values / values.sum() if p.top_k else values
            # A candidate stays while what comes before it has not reached top_p, so that at least one stays.
            before = kept.cumsum(0) - kept
            values = torch.where(before < p.top_p, values, 0.0)
        return _cut_min_p(values, p.min_p), ids

    def _penalise(self, scores: torch.Tensor) -> torch.Tensor:
        p, scores = self.params, scores.clone()
        if self._counts and (p.presence_penalty or p.frequency_penalty):
            ids = torch.tensor(list(self._counts), device=scores.device)
            counts = torch.tensor(list(self._counts.values()), device=scores.device, dtype=scores.dtype)
            scores[ids] -= p.presence_penalty + p.frequency_penalty * counts
        if p.repetition_penalty != 1.0 and (seen := self._prompt_ids | self._counts.keys()):
            ids = torch.tensor(sorted(seen), device=scores.device)
            chosen = scores[ids]
            scores[ids] = torch.where(chosen > 0, chosen / p.repetition_penalty, chosen * p.repetition_penalty)
        return scores


def _cut_min_p(weights: torch.Tensor, min_p: float) -> torch.Tensor:
    return torch.where(weights >= min_p * weights.max(), weights, 0.0) if min_p else weights


def _check_finite(value: float) -> None:
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("the model's logits are not finite; the checkpoint or its number format is broken")
