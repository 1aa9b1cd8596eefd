from __future__ import annotations

import pytest

from freetoken.engine.kv_extents import ExtentTable


def test_a_new_extent_takes_the_smallest_gap_that_holds_it() -> None:
    table = ExtentTable(100, lambda *_: None)
    first, second, third = table.allocate(30), table.allocate(10), table.allocate(40)
    table.free(first)
    assert (table.allocate(15).start, second.start, third.start) == (80, 30, 40)


def test_scattered_free_places_are_gathered_by_moving_what_is_written() -> None:
    moves: list[tuple[int, int, int]] = []
    table = ExtentTable(100, lambda *move: moves.append(move))
    extents = [table.allocate(20) for _ in range(5)]
    extents[1].used, extents[3].used = 7, 0
    table.free(extents[0])
    table.free(extents[2])
    new = table.allocate(40)
    assert moves == [(20, 0, 7)]
    assert [(one.start, one.tokens) for one in table.extents] == [(0, 20), (20, 20), (40, 20), (60, 40)]
    assert new.start == 60


def test_an_extent_grows_in_place_and_pushes_its_neighbours_aside() -> None:
    moves: list[tuple[int, int, int]] = []
    table = ExtentTable(100, lambda *move: moves.append(move))
    first, second = table.allocate(20), table.allocate(20)
    first.used = second.used = 20
    table.grow(first, 70)
    assert moves == [(20, 80, 20)]
    assert [(one.start, one.tokens) for one in (first, second)] == [(0, 70), (80, 20)]


def test_more_than_is_free_is_refused_with_the_numbers() -> None:
    table = ExtentTable(10, lambda *_: None)
    table.allocate(8)
    with pytest.raises(ValueError, match="3 tokens asked for, 2 of 10 are free"):
        table.allocate(3)
    with pytest.raises(ValueError, match="8 places are in use, more than 7"):
        table.set_capacity(7)
