"""Finished requests whose KV is kept, and which of them a new prompt can start from. Token ids only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freetoken.engine.kv_extents import Extent

#: A shorter common start is not worth a copy.
MIN_SHARED_TOKENS = 16


@dataclass(eq=False)
class Entry:
    """Token ids whose keys and values stand in `extent`, place by place."""

    token_ids: NDArray[np.int64]
    extent: Extent
    last_used: int = 0


@dataclass
class PrefixCache:
    """Entries in order of use. Owns no memory: whoever drops an entry frees its extent."""

    entries: list[Entry] = field(default_factory=list)
    _clock: int = 0

    @property
    def tokens(self) -> int:
        """Places of the store that entries hold."""
        return sum(entry.extent.tokens for entry in self.entries)

    def find(self, prompt_ids: NDArray[np.int64]) -> tuple[Entry | None, int]:
        """The entry that shares the longest start with the prompt, and how many tokens; (None, 0) where none does.

        At least the last prompt token is always left to compute: its logits are not kept.
        """
        best, shared = None, MIN_SHARED_TOKENS - 1
        for entry in self.entries:
            length = min(common_start(entry.token_ids, prompt_ids), len(prompt_ids) - 1)
            if length > shared:
                best, shared = entry, length
        return (best, shared) if best is not None else (None, 0)

    def touch(self, entry: Entry) -> None:
        """Marks `entry` as just used."""
        self._clock += 1
        entry.last_used = self._clock

    def add(self, token_ids: NDArray[np.int64], extent: Extent) -> tuple[Extent, ...]:
        """Keeps `extent`; the answer is what need not be kept any more, perhaps `extent` itself."""
        superseded = []
        for entry in list(self.entries):
            shared = common_start(entry.token_ids, token_ids)
            if shared == len(token_ids):
                self.touch(entry)
                return (extent,)
            if shared == len(entry.token_ids):
                self.entries.remove(entry)
                superseded.append(entry.extent)
        entry = Entry(token_ids, extent)
        self.entries.append(entry)
        self.touch(entry)
        return tuple(superseded)

    def pop_oldest(self, keep: Entry | None = None) -> Entry | None:
        """Takes out the entry that was not used for longest, `keep` aside; None where there is no other."""
        candidates = [entry for entry in self.entries if entry is not keep]
        if not candidates:
            return None
        oldest = min(candidates, key=lambda entry: entry.last_used)
        self.entries.remove(oldest)
        return oldest


def common_start(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many token ids both begin with."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length
