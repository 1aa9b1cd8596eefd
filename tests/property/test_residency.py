"""Laws of the slot table and of trace replay, against a naive model, over random steps, resizes and resets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.residency import (
    HitCounters,
    SlotTable,
    Trace,
    TraceHeader,
    TraceWriter,
    compute_hit_curve,
    read_trace,
    replay,
)
from freetoken.residency.trace import Event, Reset, Resize, Step

LAYERS, EXPERTS = 3, 6
KEYS = LAYERS * EXPERTS


@dataclass
class NaiveTable:
    """The same rules with a plain list, oldest first: slow and easy to believe."""

    slots: int
    order: list[tuple[int, int]] = field(default_factory=list)
    lookups: int = 0
    hits: int = 0

    def serve(self, layer: int, experts: tuple[int, ...]) -> None:
        keys = [(layer, expert) for expert in experts]
        found = [key for key in keys if key in self.order]
        self.lookups += len(keys)
        self.hits += len(found)
        if len(keys) <= self.slots:
            served = [keys]
        else:
            ordered = found + [key for key in keys if key not in found]
            served = [ordered[at : at + self.slots] for at in range(0, len(ordered), self.slots)]
        for group in served:
            rest = [key for key in self.order if key not in group]
            room = self.slots - len(group)
            self.order = (rest[-room:] if room else []) + group

    def resize(self, slots: int) -> None:
        self.slots, self.order = slots, self.order[-slots:]


steps = st.builds(
    lambda layer, experts: Step(layer, tuple(sorted(experts))),
    st.integers(0, LAYERS - 1),
    st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS),
)
small_steps = st.builds(
    lambda layer, experts: Step(layer, tuple(sorted(experts))),
    st.integers(0, LAYERS - 1),
    st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3),
)
resizes = st.builds(Resize, st.integers(1, KEYS))
events = st.lists(st.one_of(steps, steps, steps, resizes, st.just(Reset())), max_size=60)


def make_trace(happened: list[Event], slots: int = 4) -> Trace:
    return Trace(TraceHeader(LAYERS, EXPERTS, 2, slots), tuple(happened))


@settings(max_examples=200, deadline=None)
@given(events, st.integers(1, KEYS))
def test_table_equals_a_naive_list_through_steps_resizes_and_resets(happened: list[Event], slots: int) -> None:
    table, naive = SlotTable(slots, EXPERTS), NaiveTable(slots)
    content: dict[int, tuple[int, int]] = {}  # what a device would hold in each slot
    for event in happened:
        if isinstance(event, Step):
            for batch in table.serve(event.layer, event.experts):
                for expert, slot in batch.misses:
                    content[slot] = (event.layer, expert)
                assert len(set(batch.slots)) == len(batch.slots)
                assert [content[slot] for slot in batch.slots] == [(event.layer, e) for e in batch.experts]
            naive.serve(event.layer, event.experts)
        elif isinstance(event, Resize):
            content = {move.new_slot: content[move.old_slot] for move in table.resize(event.slots)}
            naive.resize(event.slots)
        else:
            table.reset()
            naive.order, content = [], {}
        assert table.residents() == naive.order
        assert all(content[table.slot_of(*key)] == key for key in naive.order)
        assert all(0 <= table.slot_of(*key) < table.slots for key in naive.order)
    assert table.counters() == HitCounters(naive.lookups, naive.hits, naive.lookups - naive.hits)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(small_steps, small_steps, st.just(Reset())), max_size=60))
def test_hit_curve_equals_replay_for_every_slot_count_that_holds_a_step(happened: list[Event]) -> None:
    trace = make_trace(happened)
    curve = compute_hit_curve(trace)
    for slots in range(max(1, curve.exact_from), KEYS + 3):
        assert curve.counters(slots) == replay(trace, slots)


@settings(max_examples=60, deadline=None)
@given(st.lists(small_steps, max_size=40), st.integers(0, 50))
def test_warm_up_is_left_out_by_replay_and_curve_alike(happened: list[Event], warmup: int) -> None:
    trace = make_trace(happened)
    curve = compute_hit_curve(trace, warmup_steps=warmup)
    assert curve.counters(5) == replay(trace, 5, warmup_steps=warmup)


@settings(max_examples=60, deadline=None)
@given(st.lists(small_steps, max_size=60))
def test_more_slots_never_hit_less(happened: list[Event]) -> None:
    hits = [replay(make_trace(happened), slots).hits for slots in range(3, KEYS + 1)]
    assert hits == sorted(hits)


@settings(max_examples=60, deadline=None)
@given(events)
def test_a_written_trace_reads_back_as_it_was(tmp_path_factory, happened: list[Event]) -> None:
    path: Path = tmp_path_factory.mktemp("trace") / "routing.trace"
    header = TraceHeader(LAYERS, EXPERTS, 2, 4, "tiny")
    with TraceWriter(path, header) as writer:
        for event in happened:
            if isinstance(event, Step):
                writer.step(event.layer, event.experts)
            elif isinstance(event, Resize):
                writer.resize(event.slots)
            else:
                writer.reset()
    assert read_trace(path) == Trace(header, tuple(happened))
