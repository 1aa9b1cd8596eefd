"""Which stretch of the KV store belongs to whom, in tokens. Pure arithmetic: no tensors.

Every request owns one contiguous stretch, so that attention reads plain views of the store and nothing is
gathered. Pages were set aside: with one forward a request they would cost a copy of the whole context in every
step. The price is fragmentation, which is paid only when no gap is large enough: extents are then moved
together, and `move` (given by the owner of the tensors) copies what is written in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: `move(source, target, count)` copies `count` tokens of the store; the ranges may overlap.
Move = Callable[[int, int, int], None]


@dataclass(eq=False)
class Extent:
    """`tokens` places from `start` on, of which the first `used` are written."""

    start: int
    tokens: int
    used: int = 0

    @property
    def end(self) -> int:
        """The first place behind it."""
        return self.start + self.tokens


class ExtentTable:
    """Extents in a store of `capacity` tokens; they never overlap and never pass its end."""

    def __init__(self, capacity: int, move: Move) -> None:
        self.capacity = capacity
        self._move = move
        self._extents: list[Extent] = []

    @property
    def extents(self) -> tuple[Extent, ...]:
        """All extents by start."""
        return tuple(self._extents)

    @property
    def free_tokens(self) -> int:
        """Places that belong to nobody, in however many gaps."""
        return self.capacity - sum(one.tokens for one in self._extents)

    def allocate(self, tokens: int) -> Extent:
        """A new extent in the smallest gap that holds it; moves others together where no gap does.

        Raises ValueError when fewer than `tokens` are free: the caller makes room first.
        """
        if tokens < 1 or tokens > self.free_tokens:
            raise ValueError(f"{tokens} tokens asked for, {self.free_tokens} of {self.capacity} are free")
        fitting = [gap for gap in self._gaps() if gap[1] >= tokens]
        if not fitting:
            self.pack()
            fitting = [gap for gap in self._gaps() if gap[1] >= tokens]
        start, _ = min(fitting, key=lambda gap: (gap[1], gap[0]))
        extent = Extent(start, tokens)
        self._extents.append(extent)
        self._sort()
        return extent

    def free(self, extent: Extent) -> None:
        """Takes `extent` out; its tokens may be overwritten from now on."""
        self._extents.remove(extent)

    def shrink(self, extent: Extent, tokens: int) -> None:
        """Gives back all but the first `tokens` places of `extent`."""
        if not 0 < tokens <= extent.tokens:
            raise ValueError(f"an extent of {extent.tokens} tokens cannot shrink to {tokens}")
        extent.tokens, extent.used = tokens, min(extent.used, tokens)

    def grow(self, extent: Extent, tokens: int) -> None:
        """Makes `extent` `tokens` long, its written part kept; others are pushed aside where they stand in the way."""
        if tokens - extent.tokens > self.free_tokens:
            raise ValueError(f"{tokens - extent.tokens} more tokens asked for, {self.free_tokens} are free")
        if self._room_behind(extent) < tokens - extent.tokens:
            self._gather_room_behind(extent)
        extent.tokens = tokens

    def pack(self) -> None:
        """Moves all extents to the low end, so that the free places are one gap."""
        place = 0
        for extent in self._extents:
            self._shift(extent, place)
            place = extent.end

    def set_capacity(self, capacity: int) -> None:
        """Changes the size of the store. Raises ValueError where an extent would pass the end (pack first)."""
        if self._extents and self._extents[-1].end > capacity:
            raise ValueError(f"{self._extents[-1].end} places are in use, more than {capacity}")
        self.capacity = capacity

    def _gaps(self) -> list[tuple[int, int]]:
        """(start, tokens) of every gap, by start."""
        gaps, place = [], 0
        for start, end in [(one.start, one.end) for one in self._extents] + [(self.capacity, self.capacity)]:
            if start > place:
                gaps.append((place, start - place))
            place = end
        return gaps

    def _room_behind(self, extent: Extent) -> int:
        position = self._extents.index(extent)
        following = self._extents[position + 1].start if position + 1 < len(self._extents) else self.capacity
        return following - extent.end

    def _gather_room_behind(self, extent: Extent) -> None:
        """Packs `extent` and all before it to the low end, the others to the high end."""
        position, place = self._extents.index(extent), 0
        for one in self._extents[: position + 1]:
            self._shift(one, place)
            place = one.end
        place = self.capacity
        for one in reversed(self._extents[position + 1 :]):
            self._shift(one, place - one.tokens)
            place = one.start

    def _shift(self, extent: Extent, start: int) -> None:
        if start != extent.start:
            if extent.used:
                self._move(extent.start, start, extent.used)
            extent.start = start

    def _sort(self) -> None:
        self._extents.sort(key=lambda one: one.start)
