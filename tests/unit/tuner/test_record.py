import json

import optuna
import pytest

from freetoken.errors import UsageError
from freetoken.recipe.model import GoodEnough
from freetoken.tuner.naming import find_fresh, find_resumable, find_shared
from freetoken.tuner.reading import list_studies, pick_study, read_study
from freetoken.tuner.record import StudyResult, write_result
from freetoken.tuner.values import Outcome
from tests.fakes.studies import finish, make_search
from tests.fakes.tuning import ScriptedLauncher


@pytest.fixture(scope="module")
def storage():
    return optuna.storages.InMemoryStorage()


@pytest.fixture(scope="module")
def finished(storage):
    search = make_search(storage, "demo-a")
    return search, finish(search), read_study(storage, "demo-a")


def test_a_study_reads_back_as_its_search_saw_it(finished):
    search, end, record = finished
    measured = [one for one in record.trials if one.measurement is not None]
    assert [one.number for one in record.trials] == [one.number for one in end.observations]
    assert [one.measurement for one in measured] == [one.measurement for one in end.observations if one.measurement]
    assert (record.starts, record.crashes) == (end.starts, 0)
    assert record.canonical(record.trial(record.best).point) == search.site.space.canonical(end.best.point)
    assert record.result.reason == end.reason
    assert record.machines == 1


def test_what_the_plan_said_is_kept_beside_every_trial(finished):
    search, _, record = finished
    for one in record.trials:
        forecast = search.site.forecast(one.point)
        slots = search.method.slots_of(one.point, forecast)
        assert one.planned == (forecast.peak_at(slots), forecast.limit_bytes, slots, one.point["strategy"])


def test_a_study_that_nobody_ended_has_the_best_and_the_baseline_of_its_trials(storage):
    search = make_search(storage, "demo-open", trials=8)
    search.run()
    record = read_study(storage, "demo-open")
    assert record.result is None
    best = min((one.measurement.turn_time_s, one.number) for one in record.trials if one.measurement)
    assert record.best == best[1]
    assert record.baseline_words == (
        "the engine's default did not work (refused); the first setting that worked stands for it"
    )
    assert record.trial(record.baseline) == next(one for one in record.trials if one.measurement)


def test_limits_are_read_back_and_their_misses_told(storage):
    search = make_search(storage, "demo-limits", targets=GoodEnough(ttft_p95="2500ms", decode_tps=">=1"))
    search.run()
    record = read_study(storage, "demo-limits")
    missed = {one.number for one in record.trials if one.missed}
    assert missed == {one.number for one in record.trials if one.measurement and one.measurement.ttft_s > 2.5}
    assert missed
    assert not missed & {one.number for one in record.front}


def test_a_trial_in_hand_and_one_that_lost_its_process_are_told_apart(storage):
    search = make_search(storage, "demo-kill", trials=3)
    search.run()
    search.study.ask(search.site.space.distributions())
    lost = search.study.ask(search.site.space.distributions())
    search.study.tell(lost, state=optuna.trial.TrialState.FAIL)
    search.study.enqueue_trial(lost.params)
    assert [one.state for one in read_study(storage, "demo-kill").trials[-3:]] == ["running", "lost", "waiting"]


def test_an_engine_that_never_started_leaves_neither_best_nor_baseline(storage):
    launcher = ScriptedLauncher(2, lambda number, point: Outcome(kind="hang", words="no answer"))
    make_search(storage, "demo-hang", launcher=launcher, starts=9, trials=30).run()
    record = read_study(storage, "demo-hang")
    assert (record.best, record.baseline, record.front) == (None, None, ())
    assert record.baseline_words.endswith("; none worked")
    assert record.crashes == record.starts == 5


def test_two_objectives_have_a_front_that_no_trial_beats(storage):
    search = make_search(storage, "demo-two", objectives=("ttft", "decode_tps"), starts=5)
    end = search.run()
    record = read_study(storage, "demo-two")
    assert record.front_axes == ("ttft", "decode_tps")
    assert [one.number for one in record.front] == [one.number for one in end.front]
    assert [one.figures[0] for one in record.front] == sorted(one.measurement.ttft_s for one in end.front)
    assert len(record.importances) == 2


def test_a_storage_lists_our_studies_alone_the_newest_first(storage, finished):
    optuna.create_study(storage=storage, study_name="somebody-else-s")
    names = [one.name for one in list_studies(storage)]
    assert "somebody-else-s" not in names
    assert names[-1] == "demo-a"
    with pytest.raises(UsageError, match="was not made by this version of `ft tune`"):
        read_study(storage, "somebody-else-s")


def test_a_study_is_picked_by_name_recipe_or_beginning():
    storage = optuna.storages.InMemoryStorage()
    with pytest.raises(UsageError, match="no study of `ft tune`"):
        pick_study(storage, None)
    make_search(storage, "demo-code-4k-turn_time-aa")
    assert pick_study(storage, None) == ("demo-code-4k-turn_time-aa", "")
    make_search(storage, "demo-code-4k-turn_time-aa.2")
    make_search(storage, "mine-chat-2k-turn_time-bb", recipe="mine")
    assert pick_study(storage, "demo-code-4k-turn_time-aa").name == "demo-code-4k-turn_time-aa"
    assert pick_study(storage, "demo").note == "study `demo-code-4k-turn_time-aa.2`, the newest of 2"
    assert pick_study(storage, "mine-chat").name == "mine-chat-2k-turn_time-bb"
    with pytest.raises(UsageError, match="did you mean `mine`") as caught:
        pick_study(storage, "mien")
    assert caught.value.hint.startswith("there are `mine-chat-2k-turn_time-bb`, ")
    with pytest.raises(UsageError, match=r"which study\? there are"):
        pick_study(storage, None)


def test_facts_and_results_name_no_host_path_or_process(finished):
    search, _, _ = finished
    kept = json.dumps({key: value for key, value in search.study.user_attrs.items() if key != "about"})
    assert "/" not in kept.replace("recipes/demo.yaml", "").replace("tok/s", "").replace("J/token", "")


def test_whoever_joins_a_study_does_not_move_its_beginning():
    storage = optuna.storages.InMemoryStorage()
    make_search(storage, "s", began_at="2031-05-04T09:30:00+00:00")
    make_search(storage, "s", began_at="2031-05-04T11:00:00+00:00")
    assert read_study(storage, "s").facts.began_at == "2031-05-04T09:30:00+00:00"


def test_a_shared_study_is_open_until_its_last_process_has_ended():
    storage = optuna.storages.InMemoryStorage()
    assert find_shared("s", storage) == ("s", False)
    search = make_search(storage, "s")
    assert find_shared("s", storage) == ("s", True)
    write_result(search.study, StudyResult(reason="r", finished_at="2031-05-04T10:15:00.000Z"))
    assert find_shared("s", storage) == ("s.2", False)
    search.study.ask(search.site.space.distributions())
    assert find_shared("s", storage) == ("s", True)


def test_two_that_look_at_once_for_a_shared_study_make_one():
    """The other one makes it between this one's look at what is open and its choice of a name."""

    class Late:
        def __init__(self):
            self.inner, self.looks = optuna.storages.InMemoryStorage(), 0

        def get_all_studies(self):
            known = self.inner.get_all_studies()
            if not self.looks:
                optuna.create_study(study_name="s", storage=self.inner)
            self.looks += 1
            return known

        def __getattr__(self, name):
            return getattr(self.inner, name)

    storage = Late()
    assert find_shared("s", storage) == ("s", False)
    assert storage.looks == 1
    assert find_shared("s", storage) == ("s", True)


def test_studies_of_one_name_are_numbered_and_the_newest_is_resumed():
    storage = optuna.storages.InMemoryStorage()
    for name in ("s", "s.2", "s.10", "s.new", "st"):
        optuna.create_study(study_name=name, storage=storage)
    assert (find_resumable("s", storage), find_fresh("s", storage)) == ("s.10", "s.11")
    assert find_fresh("other", storage) == "other"
    with pytest.raises(UsageError, match="no study `other` to resume"):
        find_resumable("other", storage)
