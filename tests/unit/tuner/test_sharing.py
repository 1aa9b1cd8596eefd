import optuna
import pytest
from optuna.trial import TrialState

from freetoken.errors import FtError
from freetoken.supervisor.process import identify_self
from freetoken.tuner import history, sharing
from freetoken.tuner.history import read_history
from freetoken.tuner.objectives import pick_objectives
from freetoken.tuner.storage import open_storage
from freetoken.tuner.study import Budget, Search
from tests.fakes.tuning import ScriptedLauncher, make_site

TURN_TIME = pick_objectives(("turn_time",))
#: A process that is no more, and one of another machine.
GONE = {"boot_id": "before", "pid": 1, "start_ticks": 1}
ELSEWHERE = {history.MACHINE: "ffffffff", history.PROCESS: {"boot_id": "there", "pid": 7, "start_ticks": 3}}


@pytest.fixture
def storage():
    return optuna.storages.InMemoryStorage()


def make_search(storage, launcher=None, seed=1, **changes):
    options = {"budget": Budget(starts=5, trials=12), "seed": 0, "is_shared": True} | changes
    return Search(make_site(seed), launcher or ScriptedLauncher(seed), TURN_TIME, storage=storage, name="s", **options)


def start_elsewhere(search, point, stage, *, owner=ELSEWHERE):
    """A trial that another process has in hand: its number."""
    search.study.enqueue_trial(point)
    trial = search.study.ask(search.site.space.distributions())
    for key, value in {history.STAGE: stage, **owner}.items():
        trial.set_user_attr(key, value)
    return trial.number


def own(process):
    return {history.MACHINE: sharing.name_machine(), history.PROCESS: process}


def test_a_trial_is_stale_when_its_process_on_this_machine_is_gone(storage):
    search = make_search(storage)
    point = search.site.default_point()
    gone = start_elsewhere(search, point, "probe", owner=own(GONE))
    start_elsewhere(search, point, "probe", owner=own(identify_self().to_dict()))
    start_elsewhere(search, point, "probe")
    assert sharing.find_stale(search.study, is_shared=True) == [gone]


def test_without_others_every_trial_was_ours_whatever_this_machine_was_called_then(storage):
    search = make_search(storage)
    point = search.site.default_point()
    lost = [start_elsewhere(search, point, "probe"), start_elsewhere(search, point, "probe", owner=own(GONE))]
    start_elsewhere(search, point, "probe", owner=own(identify_self().to_dict()))
    assert sharing.find_stale(search.study, is_shared=False) == lost


def test_a_trial_that_says_nothing_of_its_process_is_stale_only_where_nobody_shares(storage):
    search = make_search(storage)
    silent = search.study.ask(search.site.space.distributions()).number
    assert sharing.find_stale(search.study, is_shared=False) == [silent]
    assert sharing.find_stale(search.study, is_shared=True) == []


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_of_another_machine_is_stale_when_its_heart_stops(tmp_path, monkeypatch):
    storage = open_storage(f"sqlite:///{tmp_path / 's.db'}", is_shared=True)
    search = make_search(storage)
    number = start_elsewhere(search, search.site.default_point(), "default")
    trial_id = search.study.get_trials(deepcopy=False)[number]._trial_id
    with sharing.beating(storage, trial_id):
        pass  # the first beat is at once
    assert sharing.find_stale(search.study, is_shared=True) == []
    monkeypatch.setattr(storage, "grace_period", -1)  # as if it had been long ago
    assert sharing.find_stale(search.study, is_shared=True) == [number]


def test_what_another_process_has_in_hand_counts_as_tried(storage):
    search = make_search(storage)
    start_elsewhere(search, search.site.default_point(), "default")
    found = search.step()
    assert found.stage == "calibrate"
    key = search.site.space.start_key
    assert key(found.point) != key(search.site.default_point())
    # Another process's trial is no observation: figures come from those that ended.
    assert [one.number for one in read_history(search.study)] == [found.number]


def test_of_two_that_asked_in_one_moment_the_later_gives_way(storage):
    search = make_search(storage)
    number = start_elsewhere(search, search.site.default_point(), "default")
    # What was asked before the other had been seen: the same point.
    search.study.enqueue_trial(search.site.default_point())
    mine = search.study.ask(search.site.space.distributions())
    mine.set_user_attr(history.STAGE, "default")
    assert sharing.find_rival(search.study, mine.number, search.method) == number
    other = {**search.site.default_point(), "prefill_chunk_tokens": 512}
    search.study.enqueue_trial(other)
    third = search.study.ask(search.site.space.distributions())
    assert sharing.find_rival(search.study, third.number, search.method) is None


def test_an_earlier_trial_that_has_not_spoken_yet_is_waited_for(storage):
    search = make_search(storage)
    search.study.enqueue_trial(search.site.default_point())
    earlier = search.study.ask(search.site.space.distributions())
    search.study.enqueue_trial(search.site.default_point())
    mine = search.study.ask(search.site.space.distributions())
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        for key, value in {history.STAGE: "default", **ELSEWHERE}.items():
            earlier.set_user_attr(key, value)

    assert sharing.find_rival(search.study, mine.number, search.method, sleep=sleep) == earlier.number
    assert len(waits) == 1


def test_a_search_that_gave_way_leaves_a_failed_trial_that_says_so_and_takes_another(storage, monkeypatch):
    search = make_search(storage)
    rivals = iter((0, None))
    start_elsewhere(search, search.site.default_point(), "default")
    monkeypatch.setattr(sharing, "find_rival", lambda *_: next(rivals))
    found = search.step()
    given_up = search.study.trials[1]
    assert given_up.state == TrialState.FAIL
    assert given_up.user_attrs[history.REASON] == "gave way to trial 0 of another machine"
    assert found.number == 2


def test_starts_of_a_shared_study_never_have_the_same_number(storage):
    first, second = make_search(storage), make_search(storage)
    seen = []
    for search in (first, second, first, second, second, first):
        seen.append((search, search.step()))
    ours = {one.start for search, one in seen if search is first and one.start}
    theirs = {one.start for search, one in seen if search is second and one.start}
    assert ours
    assert theirs
    assert not ours & theirs


def test_a_trial_that_another_machine_gave_up_does_not_count(storage):
    said = []

    def fate(number, point):
        running = search.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        storage.set_trial_state_values(running[0]._trial_id, state=TrialState.FAIL)
        return

    search = make_search(storage, ScriptedLauncher(1, fate), say=said.append)
    while search.step().outcome.kind == "refused":
        pass
    assert said[-1].event == "lost"
    assert all(one.outcome.kind == "refused" for one in read_history(search.study))


def test_a_storage_that_goes_away_is_told_in_a_sentence_with_the_way_on(storage, monkeypatch):
    search = make_search(storage)

    def fail(*_, **__):
        raise optuna.exceptions.StorageInternalError("x") from OSError("server closed the connection\nmore")

    monkeypatch.setattr(storage, "get_all_trials", fail)
    with pytest.raises(FtError, match=r"the storage cannot be used any more: server closed the connection$") as caught:
        search.run()
    assert caught.value.hint == "`--resume` goes on with what was kept"
