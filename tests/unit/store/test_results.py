from freetoken.planner.plan import Calibration, Residual
from freetoken.store import open_store, read_calibration, read_store
from freetoken.store.rows import (
    DeploymentRow,
    EventRow,
    LineContext,
    MachineRow,
    MeasuredLine,
    ResultRow,
    RunFacts,
    RunRow,
)

CONTEXT = LineContext(engine="freetoken", engine_version="0.2.1", attention="triton", gpu_generation="8.6")


def make_run(name="r1", **facts):
    return RunRow(id=name, deployment="demo", engine="native", model_name="demo-moe", **facts)


def make_line(key, planned, measured, correction=0):
    return MeasuredLine(
        ledger="vram", key=key, planned_bytes=planned, measured_bytes=measured, correction_bytes=correction
    )


def test_every_kind_of_row_comes_back_as_it_went_in(store, hardware):
    machine = store.record_machine(hardware, "f00d")
    run = make_run(machine_id=machine, plan={"kind": "plan", "settings": {"kv_tokens": 8192}}, ready_s=3.25)
    store.record_run(run)
    deployment = DeploymentRow(
        name="demo", run_id="r1", engine="native", model_name="demo-moe", recipe={"name": "demo"}
    )
    deployment_id = store.record_deployment(deployment)
    event = EventRow(run_id="r1", kind="proven", message="ok", data={"ttft_s": 0.5, "words": ["a", "b"]})
    store.record_event(event)
    result = ResultRow(
        run_id="r1", machine_id=machine, recipe_name="demo", workload="chat-2k", engine="native", model_name="demo-moe",
        settings={"expert_slots": 64}, metrics={"decode_tps": 21.5}, is_estimated=True, invalid_because="throttled",
    )  # fmt: skip
    result_id = store.record_result(result)

    assert store.list_runs() == (run,)
    assert store.read_run("r1") == run
    assert store.read_run("r2") is None
    assert store.list_deployments("demo") == (deployment.model_copy(update={"id": deployment_id}),)
    assert [one.model_copy(update={"id": None}) for one in store.list_events("r1")] == [event]
    assert store.list_results(recipe="demo", workload="chat-2k") == (result.model_copy(update={"id": result_id}),)
    assert store.list_results(recipe="other") == ()
    (known,) = store.list_machines()
    assert (known.id, known.fingerprint, known.hardware) == (machine, "f00d", hardware)
    assert isinstance(known, MachineRow)


def test_a_machine_seen_again_keeps_its_id_and_is_brought_up_to_date(store, hardware):
    first = store.record_machine(hardware, "f00d")
    fuller = hardware.model_copy(update={"name": "renamed"})
    assert store.record_machine(fuller, "f00d") == first
    assert store.record_machine(hardware, "beef") != first
    assert {one.fingerprint: one.name for one in store.list_machines()} == {"f00d": "renamed", "beef": "laptop"}


def test_an_event_read_twice_from_its_file_is_kept_once(store):
    events = [EventRow(run_id="r1", at=f"2031-01-01T00:00:0{i}Z", kind="engine_started") for i in range(3)]
    store.record_events(events)
    store.record_events(events[1:])
    assert [one.at for one in store.list_events("r1")] == [one.at for one in events]
    assert [one.at for one in store.list_events("r1", limit=2)] == [one.at for one in events[1:]]


def test_an_outcome_updates_the_run_and_only_a_known_one(store):
    store.record_run(make_run())
    store.record_outcome("r1", "ready", ready_s=2.5)
    assert (store.read_run("r1").outcome, store.read_run("r1").ready_s, store.read_run("r1").ended_at) == (
        "ready",
        2.5,
        None,
    )
    store.record_outcome("r1", "failed", exit_code=-9, error="killed")
    run = store.read_run("r1")
    assert (run.outcome, run.exit_code, run.error, run.ready_s) == ("failed", -9, "killed", 2.5)
    assert run.ended_at is not None
    store.record_outcome("unknown", "failed")
    assert len(store.list_runs()) == 1


def learnt(key, count, runs):
    """A residual of lines that were planned with 100 bytes, corrections left out."""
    return Residual(key=key, bytes=count, runs=runs, planned_bytes=100)


def test_residuals_are_the_mean_of_measured_less_uncorrected_plan(store):
    # The second plan already held the first run's 20 bytes: planned 120 = 100 + 20, measured 126, so 26 were missing.
    store.record_measured_lines("r1", [make_line("cuda_context", 100, 120)], CONTEXT)
    store.record_measured_lines("r2", [make_line("cuda_context", 120, 126, correction=20)], CONTEXT)
    found = store.read_calibration(CONTEXT)
    assert found.residuals == (learnt("cuda_context", 23, 2),)
    assert found.launches == 2
    assert abs(found.mean_error_ratio - (20 / 120 + 6 / 126) / 2) < 1e-12


def test_residuals_hold_for_their_own_context_only(store):
    store.record_measured_lines("r1", [make_line("kv_cache", 100, 110)], CONTEXT)
    for other in ({"engine_version": "0.2.0"}, {"gpu_generation": "8.9"}, {"os": "wsl"}, {"attention": "fi"}):
        assert store.read_calibration(CONTEXT.model_copy(update=other)).residuals == ()
    before_one_is_chosen = CONTEXT.model_copy(update={"attention": None})
    assert store.read_calibration(before_one_is_chosen).residuals == (learnt("kv_cache", 10, 1),)


def test_old_launches_fade_out_of_the_residual(store):
    for number in range(20):
        measured = 1000 if number < 12 else 200
        store.record_measured_lines(f"r{number}", [make_line("allocator", 100, measured)], CONTEXT)
    assert store.read_calibration(CONTEXT).residuals == (learnt("allocator", 100, 8),)


def test_track_record_is_that_of_the_machine_asked_for(store, hardware):
    here, there = store.record_machine(hardware, "here"), store.record_machine(hardware, "there")
    store.record_measured_lines("r1", [make_line("a", 90, 100)], CONTEXT, machine_id=here)
    store.record_measured_lines("r2", [make_line("a", 50, 100)], CONTEXT, machine_id=there)
    assert abs(store.read_calibration(CONTEXT, "here").mean_error_ratio - 0.1) < 1e-12
    assert abs(store.read_calibration(CONTEXT, "there").mean_error_ratio - 0.5) < 1e-12
    assert store.read_calibration(CONTEXT, "nowhere").launches == 0


def test_a_launch_that_only_held_what_can_be_counted_says_nothing_of_plans(store):
    store.record_measured_lines("r1", [make_line("expert_slots", 100, 100), make_line("kv_cache", 5, 5)], CONTEXT)
    assert (store.read_calibration(CONTEXT).mean_error_ratio, store.read_calibration(CONTEXT).launches) == (None, 0)
    store.record_measured_lines("r2", [make_line("expert_slots", 90, 100)], CONTEXT)
    store.record_measured_lines("r3", [make_line("expert_slots", 100, 100), make_line("runtime", 50, 100)], CONTEXT)
    assert store.read_calibration(CONTEXT).launches == 2
    assert abs(store.read_calibration(CONTEXT).mean_error_ratio - (0.1 + 0.25) / 2) < 1e-12


def test_facts_recorded_twice_leave_one_of_each(store, hardware):
    result = ResultRow(recipe_name="demo", workload="chat-2k", engine="native", model_name="m", kind="proof")
    deployment = DeploymentRow(name="demo", run_id="r1", engine="native", model_name="m", recipe={})
    facts = RunFacts(fingerprint="f00d", hardware=hardware, run=make_run(), deployment=deployment, context=CONTEXT,
                     lines=(make_line("a", 1, 2),), results=(result,))  # fmt: skip
    machine = store.record_facts(facts)
    assert store.record_facts(facts) == machine
    counts = [len(rows) for rows in (store.list_runs(), store.list_deployments(), store.list_results(),
                                     store.list_measured_lines("r1"), store.list_machines())]  # fmt: skip
    assert counts == [1, 1, 1, 1, 1]
    assert store.list_results()[0].machine_id == machine


def test_reading_makes_no_file_where_there_is_none(path):
    assert read_store(path) is None
    assert read_calibration(CONTEXT, path=path) == Calibration()
    assert not path.parent.exists()


def test_a_reader_sees_what_a_writer_that_is_still_open_has_committed(store, path):
    store.record_measured_lines("r1", [make_line("kv_cache", 100, 110)], CONTEXT)
    assert read_calibration(CONTEXT, path=path).residuals == (learnt("kv_cache", 10, 1),)
    with open_store(path) as second:
        assert second.list_measured_lines("r1") == (make_line("kv_cache", 100, 110),)


def test_lines_of_another_model_correct_only_what_every_model_shares(store):
    for name, run in (("one", "r1"), ("other", "r2")):
        store.record_run(make_run(run).model_copy(update={"model_name": name}))
    store.record_measured_lines(
        "r1", [make_line("allocator", 100, 130), make_line("dense_weights", 1000, 1500)], CONTEXT
    )

    def corrections(context, model):
        return {one.key: one.bytes for one in store.read_calibration(context, model_name=model).residuals}

    assert corrections(CONTEXT, "one") == {"allocator": 30, "dense_weights": 500}
    assert corrections(CONTEXT, "other") == {"allocator": 30}
    assert corrections(CONTEXT.model_copy(update={"attention": "fi"}), "one") == {}
    assert corrections(CONTEXT.model_copy(update={"os": "wsl"}), "one") == {}
