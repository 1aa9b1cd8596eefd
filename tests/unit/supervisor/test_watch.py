"""Silence and restarts, on times that are given."""

from freetoken.supervisor.process import Activity
from freetoken.supervisor.watch import HangWatch, RestartBudget

QUIET = Activity(cpu_s=1.0, io_bytes=1000, major_faults=0)


def test_silence_grows_only_while_nothing_moves() -> None:
    watch = HangWatch(stall_timeout_s=10)
    silences = [watch.observe(float(second), "loading", QUIET) for second in range(0, 12, 3)]
    assert silences == [0, 3, 6, 9]
    assert not watch.is_hung(9)
    assert watch.is_hung(10)


def test_progress_cpu_io_and_page_faults_each_end_the_silence() -> None:
    moves = [
        ("more", QUIET),
        ("loading", Activity(2.0, 1000, 0)),
        ("loading", Activity(1.0, 10 << 20, 0)),
        ("loading", Activity(1.0, 1000, 100)),
    ]
    for progress, activity in moves:
        watch = HangWatch(stall_timeout_s=10)
        watch.observe(0.0, "loading", QUIET)
        assert watch.observe(5.0, "loading", QUIET) == 5
        assert watch.observe(10.0, progress, activity) == 0


def test_the_cost_of_answering_health_is_no_activity() -> None:
    watch = HangWatch(stall_timeout_s=10)
    watch.observe(0.0, "loading", QUIET)
    assert watch.observe(10.0, "loading", Activity(1.05, 60_000, 0)) == 10


def test_an_idle_engine_is_not_held_against_later_silence() -> None:
    watch = HangWatch(stall_timeout_s=10)
    watch.observe(0.0, "busy", QUIET)
    watch.reset()
    assert watch.observe(100.0, "busy", QUIET) == 0


def test_restarts_pause_longer_each_time_and_stop_at_the_cap() -> None:
    budget = RestartBudget(max_restarts=3, window_s=600, backoff_s=1, max_backoff_s=3)
    assert [budget.next_pause_s(float(now)) for now in (0, 10, 20, 30)] == [1, 2, 3, None]


def test_restarts_are_allowed_again_once_the_window_has_passed() -> None:
    budget = RestartBudget(max_restarts=1, window_s=600, backoff_s=1)
    assert budget.next_pause_s(0.0) == 1
    assert budget.next_pause_s(600.0) is None
    assert budget.next_pause_s(601.0) == 1
