"""The KV store's places against a naive model: every written token stays with its owner, nothing overlaps."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.engine.kv_extents import Extent, ExtentTable

CAPACITY = 64


class Store:
    """A store of plain values with an owner's mark in every written place."""

    def __init__(self) -> None:
        self.places: list[object] = [None] * CAPACITY
        self.table = ExtentTable(CAPACITY, self.move)

    def move(self, source: int, target: int, count: int) -> None:
        self.places[target : target + count] = list(self.places[source : source + count])

    def write(self, extent: Extent, values: list[object]) -> None:
        assert extent.used + len(values) <= extent.tokens
        start = extent.start + extent.used
        self.places[start : start + len(values)] = values
        extent.used += len(values)

    def read(self, extent: Extent) -> list[object]:
        return self.places[extent.start : extent.start + extent.used]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_extents_never_overlap_and_keep_what_was_written(seed: int) -> None:
    rng, store = random.Random(seed), Store()
    written: dict[Extent, list[object]] = {}
    for step in range(40):
        action = rng.choice(["allocate", "allocate", "write", "free", "shrink", "grow"])
        if action == "allocate" and store.table.free_tokens:
            extent = store.table.allocate(rng.randint(1, store.table.free_tokens))
            written[extent] = []
        elif written:
            extent = rng.choice(list(written))
            if action == "write":
                values = [(step, number) for number in range(rng.randint(0, extent.tokens - extent.used))]
                store.write(extent, list(values))
                written[extent].extend(values)
            elif action == "free":
                store.table.free(extent)
                del written[extent]
            elif action == "shrink":
                store.table.shrink(extent, rng.randint(1, extent.tokens))
                del written[extent][extent.tokens :]
            elif action == "grow":
                store.table.grow(extent, extent.tokens + rng.randint(0, store.table.free_tokens))
        ends = [(one.start, one.end) for one in store.table.extents]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends)), f"seed {seed}: {ends}"
        assert all(start >= 0 and end <= CAPACITY for start, end in ends), f"seed {seed}"
        assert store.table.free_tokens == CAPACITY - sum(end - start for start, end in ends), f"seed {seed}"
        for extent, values in written.items():
            assert store.read(extent) == values, f"seed {seed}, step {step}"
