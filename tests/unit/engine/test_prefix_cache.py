from __future__ import annotations

import numpy as np

from freetoken.engine.kv_extents import Extent
from freetoken.engine.prefix_cache import PrefixCache, common_start


def ids(*parts: range) -> np.ndarray:
    return np.array([one for part in parts for one in part], dtype=np.int64)


def test_the_longest_common_start_wins_and_leaves_one_token_to_compute() -> None:
    cache = PrefixCache()
    cache.add(ids(range(30)), Extent(0, 30))
    cache.add(ids(range(20), range(100, 140)), Extent(30, 60))
    entry, shared = cache.find(ids(range(20), range(100, 130), range(7)))
    assert (shared, entry.extent.start if entry else None) == (50, 30)
    entry, shared = cache.find(ids(range(30)))
    assert (shared, entry.extent.start if entry else None) == (29, 0)


def test_a_short_common_start_is_not_worth_a_copy() -> None:
    cache = PrefixCache()
    cache.add(ids(range(30)), Extent(0, 30))
    assert cache.find(ids(range(15), range(50, 90))) == (None, 0)


def test_a_longer_entry_replaces_its_own_beginning_and_a_shorter_one_is_not_kept() -> None:
    cache = PrefixCache()
    short, long = Extent(0, 20), Extent(20, 30)
    assert cache.add(ids(range(20)), short) == ()
    assert cache.add(ids(range(30)), long) == (short,)
    assert cache.add(ids(range(25)), again := Extent(50, 25)) == (again,)
    assert [entry.extent for entry in cache.entries] == [long]
    assert cache.tokens == 30


def test_the_least_recently_used_entry_goes_first_but_never_the_one_to_keep() -> None:
    cache = PrefixCache()
    for start in (0, 100, 200):
        cache.add(ids(range(start, start + 20)), Extent(start, 20))
    cache.touch(cache.entries[0])
    kept = cache.entries[1]
    popped = [cache.pop_oldest(kept) for _ in range(3)]
    assert [entry.extent.start if entry else None for entry in popped] == [200, 0, None]


def test_common_start_counts_equal_ids_from_the_beginning() -> None:
    assert [common_start(ids(range(5)), ids(range(other))) for other in (0, 3, 5, 9)] == [0, 3, 5, 5]
    assert common_start(ids(range(5)), ids(range(1, 6))) == 0
