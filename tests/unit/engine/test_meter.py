from __future__ import annotations

from freetoken.engine.meter import Rate


def test_a_rate_counts_the_time_spent_and_forgets_after_the_window() -> None:
    now = [0.0]
    rate = Rate(now=lambda: now[0])
    rate.add(100, 0.5)
    now[0] = 4.0
    rate.add(20, 0.5)
    assert rate.read() == 120.0
    now[0] = 5.5
    assert rate.read() == 40.0
    now[0] = 10.0
    assert rate.read() == 0.0
