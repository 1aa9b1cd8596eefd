"""The global LRU over `(layer, expert)`: which expert sits in which slot, what a miss evicts, and the counts.

Slots are numbered from 0 and alike: any can hold any expert of any layer. The unit of work is one layer of one
decode step: the *distinct* experts that its tokens need. All of them are needed at once, so none of them can evict
another, and whether one is a hit is decided before the step changes anything. That makes the table a stack
algorithm: what N slots hold is a part of what N + 1 hold, and one pass over a trace gives the hit rate of every N
(`replay.compute_hit_curve`). Taking the experts of a step one by one, each able to evict the next, was set aside:
it loses hits and the stack property.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

ExpertKey = tuple[int, int]


@dataclass(frozen=True)
class HitCounters:
    """Lookups of decode, one for each distinct expert that a layer needs in a step, and what they found."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    #: Bytes copied for the misses; 0 where the counter does not know sizes.
    miss_bytes: int = 0

    @property
    def hit_ratio(self) -> float | None:
        """Hits / lookups, 0 to 1; None before the first lookup."""
        return self.hits / self.lookups if self.lookups else None

    def __sub__(self, earlier: HitCounters) -> HitCounters:
        """What was counted since `earlier`."""
        return HitCounters(
            self.lookups - earlier.lookups,
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.miss_bytes - earlier.miss_bytes,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Experts that are resident together: `slots[i]` holds `experts[i]` once the `misses` have been copied."""

    experts: tuple[int, ...]
    slots: tuple[int, ...]
    #: (expert, slot) of each expert to copy in before use.
    misses: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Where a kept expert sat before a resize, and where it sits now."""

    key: ExpertKey
    old_slot: int
    new_slot: int


class SlotTable:
    """LRU over `slots` slots for keys `(layer, expert)` with `expert < experts_per_layer`. All steps are O(1) a key."""

    def __init__(self, slots: int, experts_per_layer: int) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots, at least 1 is needed")
        if experts_per_layer < 1:
            raise ValueError(f"{experts_per_layer} experts a layer, at least 1 is needed")
        self._slots = slots
        self._stride = experts_per_layer
        self._order: OrderedDict[int, int] = OrderedDict()  # key -> slot, oldest first
        self._free = list(range(slots - 1, -1, -1))  # the lowest number is taken first
        self._pinned: set[int] = set()
        self._lookups = self._hits = 0

    @property
    def slots(self) -> int:
        """How many experts can be resident at once."""
        return self._slots

    def __len__(self) -> int:
        """How many experts are resident now."""
        return len(self._order)

    def counters(self) -> HitCounters:
        """All lookups since the table was made; `miss_bytes` is not known here."""
        return HitCounters(self._lookups, self._hits, self._lookups - self._hits)

    def slot_of(self, layer: int, expert: int) -> int | None:
        """The slot of an expert, None where it is not resident; does not count as a use."""
        return self._order.get(layer * self._stride + expert)

    def residents(self) -> list[ExpertKey]:
        """Resident keys, least recently used first."""
        return [divmod(key, self._stride) for key in self._order]

    def pin(self, layer: int, experts: Sequence[int]) -> None:
        """Hold resident experts against eviction until `unpin`. Raises KeyError for one that is not resident."""
        keys = [layer * self._stride + expert for expert in experts]
        for key in keys:
            self._order[key]
        self._pinned.update(keys)

    def unpin(self, layer: int, experts: Sequence[int]) -> None:
        """Let experts be evicted again; one that was not pinned is fine."""
        self._pinned.difference_update(layer * self._stride + expert for expert in experts)

    def serve(self, layer: int, experts: Sequence[int]) -> list[Batch]:
        """Make the distinct `experts` of one layer's step resident and count them; state changes at once.

        One batch where they fit together. Where they are more than the slots that can be had, several batches,
        those that are resident now first; each batch must be used before the next one's misses are copied.
        Recency follows the order given, the last being the most recent.
        """
        base = layer * self._stride
        keys = [base + expert for expert in experts]
        room = self._slots - (len(self._pinned.difference(keys)) if self._pinned else 0)
        if len(keys) <= room:
            return [self._serve_together(base, keys)]
        if room < 1:
            raise ValueError(f"all {self._slots} slots are pinned, none is left for layer {layer}")
        ordered = [key for key in keys if key in self._order] + [key for key in keys if key not in self._order]
        return [self._serve_together(base, ordered[at : at + room]) for at in range(0, len(ordered), room)]

    def _serve_together(self, base: int, keys: list[int]) -> Batch:
        order = self._order
        slots: list[int] = []
        missing: list[int] = []
        for position, key in enumerate(keys):
            slot = order.get(key, -1)
            slots.append(slot)
            if slot < 0:
                missing.append(position)
            else:
                order.move_to_end(key)  # newest: out of reach of this step's own evictions
        self._lookups += len(keys)
        self._hits += len(keys) - len(missing)
        misses = []
        if missing:
            for position in missing:
                slots[position] = slot = self._free.pop() if self._free else self._evict_oldest()
                misses.append((keys[position] - base, slot))
            for key, slot in zip(keys, slots, strict=True):
                order[key] = slot
                order.move_to_end(key)
        return Batch(tuple(key - base for key in keys), tuple(slots), tuple(misses))

    def _evict_oldest(self) -> int:
        if not self._pinned:
            return self._order.popitem(last=False)[1]
        key = next(key for key in self._order if key not in self._pinned)
        return self._order.pop(key)

    def discard(self, layer: int, experts: Sequence[int]) -> None:
        """Forget experts whose copy failed, so that their slots are not taken for good ones; counts stay."""
        for expert in experts:
            key = layer * self._stride + expert
            self._pinned.discard(key)
            if (slot := self._order.pop(key, None)) is not None:
                self._free.append(slot)

    def resize(self, slots: int) -> list[Move]:
        """Change the number of slots, keeping the most recently used experts that fit; counts stay.

        The answer lists every expert that stays, oldest first, with its old and new slot. Pinned experts always
        stay. Raises ValueError when `slots` is below 1 or below the pinned count.
        """
        if slots < max(1, len(self._pinned)):
            raise ValueError(f"{slots} slots, at least {max(1, len(self._pinned))} are needed")
        while len(self._order) > slots:
            self._evict_oldest()
        taken = {slot for slot in self._order.values() if slot < slots}
        free = [slot for slot in range(slots - 1, -1, -1) if slot not in taken]
        moves = []
        for key, old in self._order.items():
            new = old if old < slots else free.pop()
            moves.append(Move(divmod(key, self._stride), old, new))
        for move in moves:
            self._order[move.key[0] * self._stride + move.key[1]] = move.new_slot
        self._slots, self._free = slots, free
        return moves

    def reset(self) -> None:
        """Forget all residents and pins; counts stay."""
        self._order.clear()
        self._pinned.clear()
        self._free = list(range(self._slots - 1, -1, -1))
