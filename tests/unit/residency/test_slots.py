from __future__ import annotations

import pytest

from freetoken.residency import Batch, HitCounters, Move, SlotTable


def test_lru_evicts_oldest_unpinned_expert_when_full() -> None:
    table = SlotTable(3, 8)
    table.serve(0, (1, 2, 3))
    table.pin(0, (1,))
    assert table.serve(1, (5,)) == [Batch((5,), (1,), ((5, 1),))]
    assert table.residents() == [(0, 1), (0, 3), (1, 5)]
    table.unpin(0, (1,))
    table.serve(1, (6,))
    assert table.residents() == [(0, 3), (1, 5), (1, 6)]


def test_experts_of_one_step_never_evict_each_other() -> None:
    table = SlotTable(2, 8)
    table.serve(0, (1, 2))
    (batch,) = table.serve(0, (1, 3))  # 1 is the oldest, and needed
    assert batch == Batch((1, 3), (0, 1), ((3, 1),))
    assert table.counters() == HitCounters(4, 1, 3)


def test_a_step_larger_than_the_slots_is_split_with_the_residents_first() -> None:
    table = SlotTable(2, 8)
    table.serve(0, (4, 5))
    batches = table.serve(0, (1, 2, 3, 5))
    assert [batch.experts for batch in batches] == [(5, 1), (2, 3)]
    assert table.counters() == HitCounters(6, 1, 5)


def test_shrinking_keeps_the_most_recent_and_moves_them_into_range() -> None:
    table = SlotTable(4, 8)
    table.serve(0, (0, 1, 2, 3))
    table.serve(0, (0,))
    assert table.resize(2) == [Move((0, 3), 3, 1), Move((0, 0), 0, 0)]
    assert (table.slots, table.residents()) == (2, [(0, 3), (0, 0)])


def test_growing_moves_nothing_and_takes_new_slots_first_free() -> None:
    table = SlotTable(1, 8)
    table.serve(0, (7,))
    assert table.resize(3) == [Move((0, 7), 0, 0)]
    assert table.serve(0, (6,)) == [Batch((6,), (1,), ((6, 1),))]


def test_discarded_experts_are_missed_again() -> None:
    table = SlotTable(2, 8)
    table.serve(0, (1, 2))
    table.discard(0, (1, 3))
    assert table.residents() == [(0, 2)]
    assert table.serve(0, (1,))[0].misses == ((1, 0),)


@pytest.mark.parametrize("slots", [0, -1])
def test_a_table_without_slots_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots, at least 1 is needed"):
        SlotTable(slots, 8)
    with pytest.raises(ValueError, match=f"{slots} slots, at least 1 are needed"):
        SlotTable(1, 8).resize(slots)


def test_pins_that_fill_all_slots_leave_none_to_serve_with() -> None:
    table = SlotTable(1, 8)
    table.serve(0, (1,))
    table.pin(0, (1,))
    with pytest.raises(ValueError, match="all 1 slots are pinned, none is left for layer 1"):
        table.serve(1, (2,))
    with pytest.raises(KeyError):
        table.pin(3, (3,))


def test_hit_ratio_is_none_before_the_first_lookup() -> None:
    assert HitCounters().hit_ratio is None
    assert HitCounters(4, 3, 1).hit_ratio == 0.75
