from freetoken.tuner.objectives import pick_objectives
from freetoken.tuner.pace import Pace
from freetoken.tuner.study import Budget, Search
from freetoken.tuner.values import Outcome
from tests.fakes.rigged import RiggedLauncher
from tests.fakes.tuning import ScriptedLauncher, make_site


class Clock:
    """Starts take 10 s, resizes 1 s, measurements 5 s; nothing else takes time."""

    def __init__(self, launcher):
        self.now_s = 0.0
        for kind, takes_s in (("start", 10.0), ("resize", 1.0), ("measure", 5.0)):
            setattr(launcher, kind, self.slow(getattr(launcher, kind), takes_s))

    def __call__(self):
        return self.now_s

    def slow(self, act, takes_s):
        def call(*arguments, **named):
            self.now_s += takes_s
            return act(*arguments, **named)

        return call


def make_search(seconds, keep_back=lambda pace: 0.0):
    launcher = ScriptedLauncher(seed=2)
    clock = Clock(launcher)
    pace = Pace(launcher, clock)
    pace.keep_back = lambda: keep_back(pace)
    search = Search(
        make_site(2), pace, pick_objectives(("turn_time",)), budget=Budget(seconds=seconds), seed=0, stop_rule=None,
        clock=clock, pacing=pace,
    )  # fmt: skip
    return search, clock


def test_the_search_leaves_the_time_that_confirmation_and_restart_take():
    def keep_back(pace):
        return pace.confirmation_s(shares_start=False) + pace.start_s()

    search, clock = make_search(200.0, keep_back)
    end = search.run()
    # Three starts and four measurements, and one start more: 60 s.
    assert keep_back(search.pacing) == 60.0
    assert len(end.observations) > 3
    assert 200 - 60 - 15 <= clock.now_s <= 200 - 60
    assert end.reason.startswith("the time is used up")


def test_a_budget_that_holds_no_second_trial_with_its_confirmation_says_how_long_that_takes():
    search, clock = make_search(40.0, lambda pace: pace.confirmation_s(shares_start=False))
    end = search.run()
    assert len([one for one in end.observations if one.start]) == 1
    assert clock.now_s == 15.0
    assert end.reason == (
        "the time is used up: 25.0 s are left, another setting and its confirmation take about 55.0 s"
    )


def test_settings_that_share_a_start_are_confirmed_sooner_and_what_failed_says_nothing_of_the_pace():
    launcher = RiggedLauncher(lambda point, is_unseen, count: (5.0, 1.0))
    works, launcher.start = launcher.start, lambda point: Outcome(kind="crash")
    clock = Clock(launcher)
    pace = Pace(launcher, clock)
    assert pace.confirmation_s(shares_start=False) == pace.step_s(is_live=False) == 0.0
    pace.start({})
    assert pace.start_s() == 0.0
    launcher.start = clock.slow(works, 10.0)
    pace.start({})
    pace.resize({})
    pace.measure()
    assert (pace.step_s(is_live=False), pace.step_s(is_live=True)) == (15.0, 6.0)
    assert pace.confirmation_s(shares_start=False) == 3 * 10 + 4 * 5
    assert pace.confirmation_s(shares_start=True) == 10 + 2 * 1 + 4 * 5
    assert pace.confirmation_s(shares_start=False, settings=3) == 5 * 10 + 6 * 5
    assert pace.confirmation_s(shares_start=True, settings=3) == 10 + 4 * 1 + 6 * 5
