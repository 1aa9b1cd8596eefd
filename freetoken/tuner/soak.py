"""A soak: the workload over and over on one setting, with an eye on crashes, growing memory and slow-down.

A confirmation takes minutes. What it cannot see is an allocator that grows from turn to turn and runs out of memory
in an hour, or a laptop that throttles once it is warm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from freetoken.tuner.launching import Launcher
from freetoken.tuner.values import Measurement, Outcome, Point
from freetoken.units import format_bytes, format_seconds

#: So much higher may the peak of the later half of the rounds be than that of the earlier one; and so much slower it.
GROWTH_BYTES, DRIFT = 64 << 20, 0.10
#: Fewer rounds than these show no trend.
LEAST_ROUNDS = 4
#: So many measurements in a row that something came between are the end: nothing can be seen on this machine now.
MOST_DISTURBED = 5


@dataclass(frozen=True)
class Soak:
    """What came of it. `is_sound` unless the engine crashed, hung or talked nonsense; `words` is one sentence."""

    is_sound: bool = True
    words: str = ""


def soak(
    launcher: Launcher, point: Point, seconds: float, *, clock: Callable[[], float], say: Callable[[str], None]
) -> Soak:
    """Runs `point` for `seconds`, at least one round. Ctrl-C ends it early; what was seen till then counts."""
    rounds: list[Measurement] = []
    began_s, disturbed, is_cut, outcome = clock(), 0, False, Outcome(kind="ok")
    try:
        outcome = launcher.start(point)
        began_s = clock()
        if outcome.kind in ("invalid", "refused"):  # it says nothing of the engine, which did not even start
            return Soak(words=f"it could not begin: {outcome.words}")
        while outcome.kind in ("ok", "invalid") and disturbed < MOST_DISTURBED:
            if rounds and clock() - began_s >= seconds:
                break
            outcome = launcher.measure(is_unseen=True)
            disturbed = disturbed + 1 if outcome.kind == "invalid" else 0
            if outcome.measurement is not None and outcome.kind == "ok":
                rounds.append(outcome.measurement)
                say(_describe_round(rounds, max(0.0, seconds - (clock() - began_s))))
    except KeyboardInterrupt:
        is_cut = True
    time = f"{len(rounds):,} round{'' if len(rounds) == 1 else 's'} in {format_seconds(clock() - began_s)}"
    if is_cut:
        time += ", where it was interrupted"
    elif outcome.kind not in ("ok", "invalid"):
        return Soak(is_sound=False, words=f"not stable: {outcome.kind} after {time}: {outcome.words}".rstrip(": "))
    if disturbed >= MOST_DISTURBED:
        time += f", after which something came between each measurement ({outcome.words})"
    return Soak(words=_judge(rounds, time))


def _judge(rounds: list[Measurement], time: str) -> str:
    if len(rounds) < LEAST_ROUNDS:
        return f"no crash in {time}, too few for a trend"
    half = len(rounds) // 2
    turns = [one.turn_time_s for one in rounds]
    peaks, later = ([one.peak_bytes for one in part if one.peak_bytes] for part in (rounds[:half], rounds[half:]))
    growth = max(later) - max(peaks) if peaks and later else 0
    drift = median(turns[half:]) / median(turns[:half]) - 1
    figures = f"turn time {drift:+.1%}"
    if peaks and later:
        figures += f", memory peak {format_bytes(peaks[0])} at first and {format_bytes(later[-1])} at last"
    faults = ["memory grows"] * (growth > GROWTH_BYTES) + ["it slows down"] * (drift > DRIFT)
    return f"{'not stable: ' + ' and '.join(faults) if faults else 'stable'} over {time}: {figures}"


def _describe_round(rounds: list[Measurement], left_s: float) -> str:
    last = rounds[-1]
    memory = f", memory peak {format_bytes(last.peak_bytes)}" if last.peak_bytes is not None else ""
    return f"round {len(rounds):,}: turn time {last.turn_time_s:.3g} s{memory}, {format_seconds(left_s)} left"
