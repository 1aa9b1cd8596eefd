"""One running request inside the engine: where it stands, and the forward passes that take it further."""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any, Literal

import torch

from freetoken.engine.kv_cache import Reservation
from freetoken.engine.request import FinishReason, RequestHandle
from freetoken.engine.sampler import Sampler

if TYPE_CHECKING:
    from freetoken.engine.loader import LoadedModel


def find_cache_argument(model: Any) -> str:
    """The name under which `model` takes its cache: newer `transformers` renamed it, and warn of the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class ForwardPass:
    """Calls the model for one request at a time; hides what changed between versions of `transformers`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._cache_name = find_cache_argument(loaded.model)

    def run(self, token_ids: list[int], reservation: Reservation, *, is_prefill: bool) -> torch.Tensor:
        """Logits `[vocabulary]` of the last of `token_ids`, which follow what stands in the reservation's cache."""
        start, device = reservation.length, self.loaded.device
        ids = torch.tensor([token_ids], device=device)
        positions = torch.arange(start, start + len(token_ids), device=device).unsqueeze(0)
        arguments: dict[str, Any] = {self._cache_name: reservation.cache}
        phase = self.loaded.experts.prefill() if is_prefill else self.loaded.experts.decode()
        with phase:
            output = self.loaded.model(
                input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **arguments
            )
        logits: torch.Tensor = output.logits[0, -1]
        return logits


class Sequence:
    """A request that has its KV. `ids` = prompt and all that was sampled, stop token included."""

    def __init__(self, handle: RequestHandle, reservation: Reservation, stop_token_ids: frozenset[int]) -> None:
        self.handle, self.reservation = handle, reservation
        self.request = handle.request
        self.ids = list(handle.request.prompt_ids)
        self.stop_token_ids = stop_token_ids
        self.sampler = Sampler(self.request.sampling, self.request.prompt_ids)
        self.admitted_at = time.monotonic()
        self.finish_reason: FinishReason | None = None
        self.phase: Literal["prefill", "decode"] = "prefill"
        handle.cached_tokens = reservation.cached_tokens

    @property
    def is_prefilled(self) -> bool:
        """Whether every prompt token has passed the model."""
        return self.reservation.length >= len(self.request.prompt_ids)

    @property
    def written_ids(self) -> list[int]:
        """The ids whose keys and values stand in the cache."""
        return self.ids[: self.reservation.length]

    def prefill(self, forward: ForwardPass, chunk_tokens: int) -> int:
        """One chunk of the prompt; the last chunk gives the first token. The answer is the chunk's tokens."""
        start = self.reservation.length
        chunk = list(self.request.prompt_ids[start : start + chunk_tokens])
        logits = forward.run(chunk, self.reservation, is_prefill=True)
        if self.is_prefilled:
            self._accept(self.sampler.pick(logits))
        return len(chunk)

    def decode(self, forward: ForwardPass) -> None:
        """One more token."""
        self.phase = "decode"
        self._accept(self.sampler.pick(forward.run(self.ids[-1:], self.reservation, is_prefill=False)))

    def _accept(self, token_id: int) -> None:
        self.ids.append(token_id)
        is_stop = token_id in self.stop_token_ids
        self.handle.push(token_id, is_visible=not is_stop)
        if is_stop:
            self.finish_reason = "stop"
        elif len(self.ids) - len(self.request.prompt_ids) >= self.request.max_tokens:
            self.finish_reason = "length"
