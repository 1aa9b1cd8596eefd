import re

import optuna
import pytest

from freetoken.tuner.history import read_history
from freetoken.tuner.objectives import pick_objectives
from freetoken.tuner.space import Space
from freetoken.tuner.study import Budget, Search
from freetoken.tuner.values import Outcome
from tests.fakes.tuning import ScriptedLauncher, make_site

TURN_TIME = pick_objectives(("turn_time",))


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """One database for the module: making its tables is what takes time."""
    return optuna.storages.RDBStorage(f"sqlite:///{tmp_path_factory.mktemp('studies') / 'studies.db'}")


def make_search(launcher, site=None, *, budget=None, **changes):
    site = site or make_site(launcher.machine.seed)
    return Search(site, launcher, TURN_TIME, budget=budget or Budget(starts=5, trials=20), seed=0, **changes)


def test_the_engines_default_comes_first_and_the_best_is_found_within_a_few_starts():
    launcher = ScriptedLauncher(seed=2)
    end = make_search(launcher).run()
    assert end.observations[0].stage == "default"
    assert end.starts <= 5
    assert end.best.measurement.turn_time_s < 0.8 * max(
        one.measurement.turn_time_s for one in end.observations if one.measurement
    )
    assert launcher.crashes == 0


def test_a_point_that_the_planner_refuses_costs_no_start():
    site, launcher = make_site(2), ScriptedLauncher(seed=2)
    end = make_search(launcher, site, budget=Budget(trials=1)).run()
    assert [(one.outcome.kind, one.start) for one in end.observations] == [("refused", 0)]
    assert end.observations[0].outcome.violation_bytes > 100 << 20
    assert launcher.log == []


def test_who_launches_may_refuse_too_and_is_asked_for_less_in_the_same_start():
    class Careful(ScriptedLauncher):
        """Counts 40 MiB less as free while an engine runs than the plan that the search knows."""

        def resize(self, point):
            forecast, slots = site.forecast(point), point["expert_slots"]
            missing = forecast.peak_at(slots) + (40 << 20) - forecast.limit_bytes
            if missing > 0:
                self.log.append(("refused", dict(point)))
                return Outcome(kind="refused", violation_bytes=missing, words="by plan")
            return super().resize(point)

    site, launcher = make_site(2), Careful(seed=2)
    end = make_search(launcher, site).run()
    refused = [one for one in end.observations if one.outcome.kind == "refused" and one.stage == "grow"]
    grown = [one for one in end.observations if one.outcome.is_ok and one.stage == "grow"]
    assert refused
    assert grown
    assert {one.start for one in refused} == {0}, "no engine was started for it"
    first = refused[0].number
    assert end.observations[first + 1].stage == "grow"
    assert end.observations[first + 1].start == end.observations[first - 1].start
    assert end.observations[first + 1].point["expert_slots"] < refused[0].point["expert_slots"]
    assert launcher.stops == 0
    assert launcher.starts == end.starts


class Refusing(ScriptedLauncher):
    """Refuses what `is_refused` says, of starts and of resizes, with `told` bytes missing."""

    def __init__(self, seed, is_refused, told=None):
        super().__init__(seed)
        self.is_refused, self.told = is_refused, told

    def _judge(self, point, kind):
        if not self.is_refused(kind, point):
            return None
        self.log.append(("refused", dict(point)))
        return Outcome(kind="refused", violation_bytes=self.told or 1, ledger_bytes=self.told, words="no room")

    def start(self, point):
        return self._judge(point, "start") or super().start(point)

    def resize(self, point):
        return self._judge(point, "resize") or super().resize(point)


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_an_engine_that_refuses_every_resize_still_has_all_its_starts(seed):
    launcher = Refusing(seed, lambda kind, point: kind == "resize")
    end = make_search(launcher, make_site(seed), budget=Budget(starts=5), stop_rule=None).run()
    assert end.starts == 5, end.reason
    assert end.reason == "5 starts were made"


@pytest.mark.parametrize("seed", [2, 3])
def test_a_strategy_that_is_always_refused_is_asked_for_twice(seed):
    launcher = Refusing(seed, lambda kind, point: point["strategy"] == "hybrid")
    end = make_search(launcher, make_site(seed), budget=Budget(starts=5), stop_rule=None).run()
    refused = [point for kind, point in launcher.log if kind == "refused"]
    assert end.starts == 5, end.reason
    assert 1 <= len(refused) <= 4
    assert refused[-1]["expert_slots"] < 0.99 * refused[0]["expert_slots"] or len(refused) == 1


@pytest.mark.parametrize("told", [0, 20 << 30], ids=["in another memory", "far more than there is"])
def test_what_was_short_for_a_moment_does_not_end_a_search(told):
    refusals = []

    def once(kind, point):
        if kind == "start" and len(launcher.log) > 2 and not refusals:
            refusals.append(point)
            return True
        return False

    launcher = Refusing(2, once, told=told)
    end = make_search(launcher, budget=Budget(starts=5), stop_rule=None).run()
    assert refusals
    assert end.starts == 5, end.reason
    calm = make_search(ScriptedLauncher(seed=2), budget=Budget(starts=5), stop_rule=None).run()
    slots = [max(one.point["expert_slots"] for one in found.observations if one.outcome.is_ok) for found in (end, calm)]
    assert slots[0] > 0.95 * slots[1]


def test_refusals_of_another_day_neither_end_a_resumed_search_nor_cost_it_slots(storage):
    first = make_search(Refusing(2, lambda kind, point: True), storage=storage, name="refused", budget=Budget(starts=5))
    assert "settings were refused" in first.run().reason
    launcher = ScriptedLauncher(seed=2)
    second = make_search(launcher, storage=storage, name="refused", budget=Budget(starts=3), stop_rule=None)
    end = second.run()
    assert end.starts == 3, end.reason
    fresh = make_search(ScriptedLauncher(seed=2), budget=Budget(starts=3), stop_rule=None).run()
    slots = [
        max(one.point["expert_slots"] for one in found.observations if one.outcome.is_ok) for found in (end, fresh)
    ]
    assert slots[0] > 0.95 * slots[1]


def test_a_study_goes_on_with_a_knob_that_it_did_not_have_before(storage):
    """FlashInfer was installed in between."""
    before = make_site(2)
    before.space = Space(parameters=tuple(one for one in before.space if one.name != "attention"))
    plan, launcher = before.forecast, ScriptedLauncher(seed=2)
    before.forecast = lambda point: plan({**point, "attention": "triton"})
    load, measure = launcher._load, launcher.measure
    launcher._load = lambda point: load({**point, "attention": "triton"})
    launcher.measure = measure
    make_search(launcher, before, storage=storage, name="grown", budget=Budget(starts=2), stop_rule=None).run()
    end = make_search(
        ScriptedLauncher(seed=2), make_site(2), storage=storage, name="grown", budget=Budget(starts=4), stop_rule=None
    ).run()
    assert end.starts == 4, end.reason
    assert all(one.point["attention"] in ("triton", "fi") for one in end.observations)


def test_no_room_beyond_the_plan_is_used_whatever_a_peak_has_shown():
    site, launcher = make_site(13), ScriptedLauncher(seed=13)
    assert launcher.machine.workspace_bytes < -100 << 20, "this machine has much more room than its plan says"
    end = make_search(launcher, site).run()
    started = [one for one in end.observations if one.start]
    assert len(started) > 3
    for one in started:
        forecast = site.forecast(one.point)
        spare = forecast.limit_bytes - forecast.peak_at(one.point["expert_slots"] if forecast.high else 0)
        assert spare >= 12 << 20, "the next start may find a little less free"


def test_a_launcher_that_refuses_everything_ends_a_search():
    launcher = ScriptedLauncher(seed=2, fate=lambda *_: Outcome(kind="refused", violation_bytes=1, words="no room"))
    end = make_search(launcher, budget=Budget(starts=5)).run()
    assert re.fullmatch(r"the last \d+ settings were refused: no room", end.reason)
    assert end.starts == 0


@pytest.mark.parametrize("kind", ["crash", "hang", "garbage"])
def test_an_engine_that_fails_in_any_way_costs_one_trial(kind):
    def fate(number, point):
        return Outcome(kind=kind, words="as told") if number == 2 else None

    launcher = ScriptedLauncher(seed=2, fate=fate)
    search = make_search(launcher)
    end = search.run()
    failed = [one for one in end.observations if one.outcome.kind == kind]
    assert [one.start for one in failed] == [2]
    assert launcher.stops == 1
    assert end.best is not None
    trial = search.study.trials[failed[0].number]
    # Told with its violation, not as FAIL, which would lose it.
    assert trial.state.name in ("COMPLETE", "PRUNED")
    assert trial.constraints["memory_bytes"] > 0


def test_an_invalid_measurement_is_made_once_more_and_says_nothing_of_the_point():
    launcher = ScriptedLauncher(seed=2)
    honest, calls = launcher.measure, []

    def measure(*, is_unseen=False):
        calls.append(is_unseen)
        return Outcome(kind="invalid", words="another process took the GPU") if len(calls) == 1 else honest()

    launcher.measure = measure
    end = make_search(launcher, budget=Budget(starts=2, trials=4)).run()
    kinds = [one.outcome.kind for one in end.observations if one.outcome.kind != "refused"]
    assert kinds[:2] == ["invalid", "ok"]
    started = [one.point for one in end.observations if one.start]
    assert started[0] == started[1]


def test_ctrl_c_keeps_what_is_known_and_another_process_goes_on_with_the_trial_in_hand(storage):
    def fate(number, point):
        if number == 3:
            raise KeyboardInterrupt
        return

    first = make_search(ScriptedLauncher(seed=2, fate=fate), storage=storage, name="s")
    with pytest.raises(KeyboardInterrupt):
        first.run()
    known = read_history(first.study)
    lost = first.study.trials[len(known)]
    assert lost.state.name == "FAIL"
    second = make_search(ScriptedLauncher(seed=2), storage=storage, name="s")
    again = second.step()
    assert again.point == lost.params
    assert again.outcome.is_ok
    assert read_history(second.study)[: len(known)] == known


def test_a_killed_process_leaves_a_running_trial_that_is_failed_and_tried_again(storage):
    first = make_search(ScriptedLauncher(seed=2), storage=storage, name="t", budget=Budget(trials=2))
    first.run()
    dead = first.study.ask(first.site.space.distributions())  # a kill at this point tells nobody anything
    said = []
    second = make_search(
        ScriptedLauncher(seed=2), storage=storage, name="t", budget=Budget(trials=3), say=said.append
    )  # fmt: skip
    end = second.run()
    assert said[0].event == "resume"
    assert second.study.trials[dead.number].state.name == "FAIL"
    assert dead.params in [one.point for one in end.observations]
    assert len(end.observations) == 3


def test_a_search_for_a_figure_that_nothing_measures_ends_with_its_first_measurement():
    said = []
    launcher = ScriptedLauncher(seed=2)
    search = Search(
        make_site(2), launcher, pick_objectives(("efficiency",)), (), Budget(starts=9), None, "e", say=said.append
    )
    end = search.run()
    assert (end.best, end.reason) == (None, "nothing here measures `efficiency`")
    assert [one.measurement is not None for one in end.observations].count(True) == 1
    assert [one.message for one in said if one.event == "done"][-1] == "measured, but nothing tells `efficiency`"


def test_what_is_shown_of_a_trial_leaves_out_what_does_nothing_in_it():
    said = []
    make_search(ScriptedLauncher(seed=2), budget=Budget(trials=6), say=said.append).run()
    shown = {one.point["strategy"]: one.point for one in said if one.event in ("trial", "done")}
    assert "cpu_threads" not in shown["offload"]
    assert all("cpu_threads" in shown[name] for name in ("hybrid", "cpu") if name in shown)


def test_a_search_without_one_start_that_works_ends():
    launcher = ScriptedLauncher(seed=2, fate=lambda number, point: Outcome(kind="crash", words="no such flag"))
    end = make_search(launcher, budget=Budget(starts=40, trials=80)).run()
    assert end.reason == "none of 5 starts worked"
    assert end.best is None


def test_budgets_of_time_and_starts_end_a_search():
    ticks = iter(range(0, 10_000, 10))
    end = make_search(ScriptedLauncher(seed=2), budget=Budget(seconds=200), clock=lambda: next(ticks)).run()
    assert end.reason == "the time is used up"
    end = make_search(ScriptedLauncher(seed=2), budget=Budget(starts=2, trials=50), stop_rule=None).run()
    assert end.reason == "2 starts were made"
    assert end.starts == 2
    assert make_search(ScriptedLauncher(seed=2), budget=Budget(trials=1)).run().reason == "1 trial was made"


def test_two_objectives_give_a_front():
    launcher = ScriptedLauncher(seed=2)
    search = Search(
        make_site(2), launcher, pick_objectives(("ttft", "decode_tps")), budget=Budget(starts=4, trials=9), seed=0,
        stop_rule=None,
    )  # fmt: skip
    end = search.run()
    assert end.front
    times = [one.measurement.ttft_s for one in end.front]
    rates = [one.measurement.decode_tps for one in end.front]
    assert times == sorted(times)
    assert rates == sorted(rates)
