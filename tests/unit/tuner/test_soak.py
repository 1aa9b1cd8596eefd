"""A soak over engines that hold, grow, slow down, die, or are disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from freetoken.tuner.soak import MOST_DISTURBED, soak
from freetoken.tuner.values import Measurement, Outcome

MIB = 1 << 20
ROUND_S, START_S = 60.0, 90.0


class Engine:
    """Rounds of a minute each, with the outcomes of a script."""

    can_resize = True

    def __init__(self, script: Iterator[Outcome], start: Outcome | None = None) -> None:
        self.script, self.first, self.now_s = script, start or Outcome(kind="ok"), 0.0

    def start(self, point: dict[str, object]) -> Outcome:
        self.now_s += START_S
        return self.first

    resize = start

    def measure(self, *, is_unseen: bool = False) -> Outcome:
        assert is_unseen
        self.now_s += ROUND_S
        return next(self.script)

    def stop(self) -> None: ...


def ok(turn_s: float = 2.0, peak: int | None = 8000 * MIB) -> Outcome:
    measurement = Measurement(decode_tps=100, ttft_s=0.5, turn_time_s=turn_s, peak_bytes=peak)
    return Outcome(kind="ok", measurement=measurement)


def run(script: Iterator[Outcome], minutes: float = 30, **options: Outcome):  # type: ignore[no-untyped-def]
    engine, told = Engine(script, **options), []
    found = soak(engine, {}, minutes * 60, clock=lambda: engine.now_s, say=told.append)
    return found, told, engine


def each(make: Callable[[int], Outcome]) -> Iterator[Outcome]:
    return (make(index) for index in count())


def test_an_engine_that_holds_is_stable_for_as_long_as_was_asked():
    found, told, engine = run(each(lambda index: ok(2.0 + 0.01 * (index % 3), (8000 + index % 2) * MIB)))
    assert found.is_sound
    assert found.words.startswith("stable over 30 rounds in 30 min")
    # The engine's start is no part of it.
    assert (len(told), engine.now_s) == (30, START_S + 1800.0)
    assert "7.81 GiB" in found.words
    assert told[0] == "round 1: turn time 2 s, memory peak 7.81 GiB, 29 min 00 s left"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda index: ok(peak=(8000 + 10 * index) * MIB), "not stable: memory grows over 30 rounds"),
        (lambda index: ok(2.0 if index < 12 else 2.4), "not stable: it slows down over 30 rounds"),
        (lambda index: ok(2.0 + 0.1 * index, (8000 + 10 * index) * MIB), "not stable: memory grows and it slows down"),
    ],
    ids=["a leak", "a laptop that throttles", "both"],
)
def test_growth_and_slow_down_are_not_stable_but_do_run(make, words):
    found, _, _ = run(each(make))
    assert found.is_sound
    assert found.words.startswith(words)


def test_what_is_allocated_once_is_no_leak():
    found, _, _ = run(each(lambda index: ok(peak=(8000 + (300 if index else 0)) * MIB)))
    assert found.words.startswith("stable")


@pytest.mark.parametrize("kind", ["crash", "hang", "garbage"])
def test_an_engine_that_dies_is_not_sound(kind):
    script = iter([ok(), ok(), Outcome(kind=kind, words="out of memory")])
    found, _, _ = run(script)
    assert not found.is_sound
    assert found.words == f"not stable: {kind} after 2 rounds in 3 min 00 s: out of memory"


def test_one_that_does_not_even_start_again_is_not_sound():
    found, told, _ = run(iter([]), start=Outcome(kind="crash", words="no"))
    assert (found.is_sound, told) == (False, [])


def test_a_port_that_somebody_took_says_nothing_of_the_setting():
    found, _, _ = run(iter([]), start=Outcome(kind="invalid", words="port 2020 is taken"))
    assert (found.is_sound, found.words) == (True, "it could not begin: port 2020 is taken")


def test_a_disturbed_round_counts_for_nothing_and_ends_nothing():
    bad = Outcome(kind="invalid", words="another process on the GPU")
    found, told, _ = run(each(lambda index: bad if index % 3 else ok()))
    assert found.words.startswith("stable over 10 rounds in")
    assert len(told) == 10


def test_a_machine_that_is_never_quiet_ends_it():
    bad = Outcome(kind="invalid", words="another process on the GPU")
    script = iter([*(ok() for _ in range(6)), *(bad for _ in range(MOST_DISTURBED))])
    found, _, _ = run(script)
    assert found.is_sound
    assert "something came between" in found.words
    assert "another process on the GPU" in found.words


def test_one_round_is_made_however_short_the_time_and_says_no_more_than_it_knows():
    found, _, _ = run(each(lambda index: ok()), minutes=0.01)
    assert found.words == "no crash in 1 round in 1 min 00 s, too few for a trend"


def test_ctrl_c_keeps_what_was_seen():
    def script() -> Iterator[Outcome]:
        yield from (ok() for _ in range(5))
        raise KeyboardInterrupt

    found, _, _ = run(script())
    assert found.is_sound
    assert "interrupted" in found.words
    assert found.words.startswith("stable over 5 rounds")


def test_without_figures_of_memory_none_are_told():
    found, _, _ = run(each(lambda index: ok(peak=None)))
    assert "memory" not in found.words
