"""Prefill: a layer's experts streamed through two buffers, the next group copied while one is computed on.

Groups are fixed ranges of expert numbers, so that a whole range of a bank in RAM is one copy, and the first range of
the next layer can be on its way before that layer's router has spoken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from freetoken.engine.compute import Routing, run_group
from freetoken.engine.layout import ExpertLayout
from freetoken.engine.slots import Fetcher, allocate_records

#: Size that one of the two buffers aims at; at least one expert.
BUFFER_BYTES = 64 << 20
#: From this share of a range's experts on, the whole range is copied at once.
_WHOLE = 0.75


def group_size(experts: int, record_bytes: int) -> int:
    """How many experts one buffer holds."""
    return min(experts, max(1, BUFFER_BYTES // record_bytes))


class Staging:
    """Two buffers of records on the device, and the streams' events that say when each is full and free."""

    def __init__(self, fetcher: Fetcher, layouts: Sequence[ExpertLayout], experts: int, record_bytes: int) -> None:
        self._fetcher = fetcher
        self._layouts = layouts
        self._experts = experts
        self.group = group_size(experts, record_bytes)
        self.buffers = [allocate_records(self.group, record_bytes, fetcher.device) for _ in range(self._count)]
        self._turn = 0
        #: (layer, buffer) of a first range that was started before its layer began.
        self._ahead: tuple[int, int] | None = None
        self._ready: list[Any] = [None] * self._count
        self._free: list[Any] = [None] * self._count

    @property
    def _count(self) -> int:
        return 1 if self._fetcher.stream is None else 2

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def run(
        self, layer: int, module: Any, routing: Routing, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """All tokens through the layer's experts: float32 [tokens, H]."""
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        ordered = routing.weights(weights)
        groups = self._split(routing.experts)
        places = [self._take_first(layer, groups[0])]
        is_early = self._fetcher.bank.is_resident and self._count == 2
        for number, (first, members) in enumerate(groups):
            has_next = number + 1 < len(groups)
            if has_next and is_early:
                places.append(self._start(layer, groups[number + 1][1]))
            place = places[number]
            self._wait(place)
            rows = [expert % self.group for expert in members]
            buffer = self.buffers[place]
            run_group(module, self._layouts[layer], buffer, rows, routing, first, hidden, ordered, total)
            self._release(place)
            if has_next and not is_early:
                places.append(self._start(layer, groups[number + 1][1]))
        if is_early and len(routing.experts) >= _WHOLE * self._experts and layer + 1 < len(self._layouts):
            self._ahead = (layer + 1, self._start(layer + 1, range(min(self.group, self._experts))))
        return total

    def _split(self, experts: list[int]) -> list[tuple[int, list[int]]]:
        """(position of the first, experts) for each range that is used."""
        groups: list[tuple[int, list[int]]] = []
        for position, expert in enumerate(experts):
            if groups and groups[-1][1][0] // self.group == expert // self.group:
                groups[-1][1].append(expert)
            else:
                groups.append((position, [expert]))
        return groups

    def _take_first(self, layer: int, group: tuple[int, list[int]]) -> int:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == layer and group[1][0] < self.group:
            return ahead[1]
        return self._start(layer, group[1])

    def _start(self, layer: int, members: Sequence[int]) -> int:
        """Start copying a group into the buffer whose turn it is."""
        place = self._turn
        self._turn = (place + 1) % self._count
        start = members[0] // self.group * self.group
        whole = range(start, min(start + self.group, self._experts))
        wanted = whole if len(members) >= _WHOLE * len(whole) and self._fetcher.bank.is_resident else members
        stream = self._fetcher.stream
        if stream is not None and self._free[place] is not None:
            stream.wait_event(self._free[place])
        self._fetcher.fetch(layer, wanted, [expert % self.group for expert in wanted], self.buffers[place])
        if stream is not None:
            self._ready[place] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready[place].record(stream)
        return place

    def _wait(self, place: int) -> None:
        if self._ready[place] is not None:
            torch.cuda.current_stream(self._fetcher.device).wait_event(self._ready[place])

    def _release(self, place: int) -> None:
        if self._fetcher.stream is not None:
            self._free[place] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._free[place].record(torch.cuda.current_stream(self._fetcher.device))

    def close(self) -> None:
        """Free the buffers."""
        self.buffers = []
        self._ahead = None
