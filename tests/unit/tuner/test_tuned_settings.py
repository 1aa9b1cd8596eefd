from freetoken.store import open_store
from freetoken.store.results import read_tuned
from freetoken.store.rows import ResultRow
from tests.fakes.planner_cases import make_gpu, make_machine

SAME = {"engine": "native", "model_name": "tiny", "workload": "code-4k"}


def keep(store, machine_id, **changes):
    row = {"recipe_name": "r", "kind": "tuned", "machine_id": machine_id, "settings": {"expert_slots": 7}, **SAME,
           "metrics": {"turn_time_s": 5.0, "gain_ratio": 0.2}}  # fmt: skip
    return store.record_result(ResultRow(**(row | changes)))


def test_the_newest_confirmed_settings_of_this_machine_model_and_workload_count(tmp_path):
    path = tmp_path / "ft.db"
    with open_store(path) as store:
        here = store.record_machine(make_machine(make_gpu(8, 7)), "here")
        there = store.record_machine(make_machine(make_gpu(6, 5)), "there")
        keep(store, here)
        newest = keep(store, here, settings={"expert_slots": 9})
        keep(store, there, settings={"expert_slots": 1})
        keep(store, here, workload="chat-2k", settings={"expert_slots": 2})
        keep(store, here, kind="trial", settings={"expert_slots": 3})
        keep(store, here, metrics={"turn_time_s": 1.0}, settings={"expert_slots": 5})
        keep(store, here, invalid_because="throttled", settings={"expert_slots": 4})
    found = read_tuned("here", **SAME, path=path)
    assert (found.id, found.settings) == (newest, {"expert_slots": 9})
    assert read_tuned("elsewhere", **SAME, path=path) is None
    assert read_tuned("here", **SAME, path=tmp_path / "none.db") is None
