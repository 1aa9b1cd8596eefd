"""The apply loop on the fake engine: launch, nothing, resize, restart, proof, correction, restoration, adoption."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from freetoken import __version__
from freetoken.deploy import ending, runs, stop
from freetoken.deploy.apply import KeptError, RefusedError, apply_recipe
from freetoken.deploy.prepare import make_line_context, prepare_request
from freetoken.deploy.tools import Step, Tools
from freetoken.errors import FtError, NotReadyError, UsageError
from freetoken.planner.budget import describe_track_record
from freetoken.planner.plan import PlanRequest
from freetoken.recipe.load import load_recipe
from freetoken.store import open_store
from freetoken.store.rows import MeasuredLine
from freetoken.supervisor import register
from freetoken.supervisor.process import ProcessId, is_alive
from tests.e2e.life import Lab, make_lab, stop_all, wait_for  # noqa: F401
from tests.fakes.fake_adapter import SLOT_BYTES, make_tools
from tests.fakes.planner_cases import make_gpu, make_machine


def test_apply_launches_proves_and_records_and_a_second_apply_changes_nothing(lab: Lab) -> None:
    first = lab.apply()
    assert (first.diff.action, first.url, first.model) == ("launch", f"http://127.0.0.1:{lab.port}/v1", "lab")
    assert first.proof is not None
    assert (first.proof.expert_slots, first.proof.kv_tokens, first.proof.strategy) == (16, 2048, "offload")
    assert first.proof.chunk_tokens == 256
    assert 256 <= first.proof.chunk_prompt_tokens < 2048
    engine = lab.life().engine
    second = lab.apply()
    assert (second.diff.action, second.diff.changes, second.run_id) == ("nothing", (), first.run_id)
    assert lab.life().engine == engine
    assert sorted(path.name for path in lab.run_dirs()[-1].iterdir()) == [
        "engine.log", "events.jsonl", "facts.jsonl", "keeper.json", "keeper.lock", "keeper.log", "launch.json",
        "plan.json", "recipe.yaml", "report.json",
    ]  # fmt: skip
    with open_store() as store:
        (run,) = store.list_runs()
        (result,) = store.list_results()
        lines = {line.key: (line.planned_bytes, line.measured_bytes) for line in store.list_measured_lines(run.id)}
    assert (run.id, run.outcome, run.deployment) == (first.run_id, "ready", "lab")
    assert (result.kind, sorted(result.metrics)) == ("proof", ["chunk_ttft_ms", "decode_tps", "ttft_ms"])
    assert lines == {"expert_slots": (16 * SLOT_BYTES,) * 2, "kv_cache": (2048 * 1024,) * 2}
    stop_all()
    assert register.read_records() == ()


def test_other_slots_are_a_live_resize_and_a_restart_by_the_keeper_keeps_them(lab: Lab) -> None:
    lab.apply()
    before = lab.life()
    result = lab.apply(expert_slots=24)
    assert [change.describe() for change in result.diff.changes] == ["settings.expert_slots: 16 -> 24 (live)"]
    assert result.diff.action == "resize"
    assert result.proof is not None
    assert result.proof.expert_slots == 24
    after = lab.life()
    assert (after.engine, after.record.run_id) == (before.engine, before.record.run_id)
    assert lab.apply(expert_slots=24).diff.action == "nothing"
    lab.kill(after.engine)
    wait_for(lambda: (found := lab.keeper_state()) and found.restarts == 1 and found.state == "ready")
    assert lab.view().drift == ()
    assert lab.apply(expert_slots=24).diff.action == "nothing"
    stop_all()


def test_another_strategy_is_a_restart(lab: Lab) -> None:
    lab.apply()
    before = lab.life().engine
    result = lab.apply(strategy="cpu")
    assert [change.describe() for change in result.diff.changes] == ["settings.strategy: offload -> cpu (restart)"]
    assert result.diff.action == "restart"
    assert not is_alive(before)
    assert lab.life().condition == "ready"
    assert len(lab.run_dirs()) == 2
    stop_all()


def test_a_rejected_live_resize_becomes_a_restart(lab: Lab) -> None:
    lab.apply(engine="--most-live-slots, '20'")
    result = lab.apply(engine="--most-live-slots, '20'", expert_slots=40)
    assert result.diff.action == "restart"
    assert result.proof is not None
    assert result.proof.expert_slots == 40
    assert result.corrections == (
        "live resize: the engine answered `rejected`: requested cache (moe=40 slots) needs more; old cache kept",
    )
    stop_all()


def test_where_a_restart_is_not_wanted_a_rejected_resize_leaves_what_runs_as_it_is(lab: Lab) -> None:
    lab.apply(engine="--most-live-slots, '20'")
    before = lab.life()
    wanted = load_recipe(str(lab.write_recipe("lab", engine="--most-live-slots, '20'", expert_slots=40)))
    with pytest.raises(KeptError, match="`lab` was left as it is") as kept:
        apply_recipe(wanted, tools=make_tools(), confirm=lambda question: False)
    assert kept.value.not_live is not None
    assert kept.value.not_live.is_declined
    assert "rejected" in str(kept.value.not_live.error)
    after = lab.life()
    assert (after.condition, after.record.run_id) == ("ready", before.record.run_id)
    assert not lab.view().drift, "it has the slots that it had"
    another = load_recipe(str(lab.write_recipe("lab", engine="--most-live-slots, '20'", strategy="cpu")))
    with pytest.raises(KeptError) as kept:
        apply_recipe(another, tools=make_tools(), confirm=lambda question: False)
    assert kept.value.not_live is None, "no resize would have done"
    stop_all()


def test_a_resize_by_hand_is_drift_and_apply_takes_it_back(lab: Lab) -> None:
    lab.apply()
    with make_tools().connect(f"http://127.0.0.1:{lab.port}", None) as client:
        client.rebuild(expert_slots=12)
    view = lab.view()
    assert (view.condition, view.drift, view.is_wrong) == ("ready", ("`expert_slots` is 12, planned 16",), True)
    result = lab.apply()
    assert [change.describe() for change in result.diff.changes] == ["settings.expert_slots: 12 -> 16 (live)"]
    assert lab.view().is_wrong is False
    stop_all()


def test_a_dry_run_shows_argv_and_touches_nothing(lab: Lab) -> None:
    result = lab.apply(is_dry_run=True)
    assert (result.kind, result.diff.action, result.run_id) == ("dry_run", "launch", None)
    assert result.argv[2:6] == ("--port", str(lab.port), "--strategy", "offload")
    assert list(lab.state.iterdir()) == []


def test_what_does_not_fit_is_refused_and_forced_only_when_asked(lab: Lab) -> None:
    with pytest.raises(RefusedError, match="`lab` needs 200 slots, 100 fit") as refused:
        lab.apply(expert_slots=200)
    assert refused.value.exit_code == 3
    assert list(lab.state.iterdir()) == []
    lab.apply(expert_slots=200, is_forced=True)
    view = lab.view()
    assert (view.is_forced, view.condition) == (True, "ready")
    stop_all()


def test_a_start_that_runs_out_of_memory_is_planned_again_by_the_exact_overshoot(lab: Lab) -> None:
    result = lab.apply(engine="--most-slots, '70'", expert_slots="auto")
    missing = 30 * SLOT_BYTES
    assert result.proof is not None
    assert result.proof.expert_slots == 70
    words = f"{missing} B are missing; planning again with exactly 120 KiB more for `expert_slots`"
    assert result.corrections == (words,)
    failed, ready = lab.run_dirs()
    assert lab.keeper_state(failed).state == "failed"  # type: ignore[union-attr]
    assert "corrected" in lab.event_kinds(failed)
    with open_store() as store:
        assert [(one.id, one.outcome) for one in store.list_runs()] == [(ready.name, "ready"), (failed.name, "failed")]
    assert lab.apply(engine="--most-slots, '70'", expert_slots="auto").diff.action == "nothing"
    stop_all()


def test_what_a_start_lacked_corrects_the_next_plan_which_says_how_far_off_it_was(lab: Lab) -> None:
    first = lab.apply(engine="--most-slots, '70'", expert_slots="auto")
    assert first.proof is not None
    assert (first.proof.expert_slots, len(first.corrections)) == (70, 1)
    stop_all()
    loaded = load_recipe(str(lab.write_recipe(engine="--most-slots, '70'", expert_slots="auto")))
    request = prepare_request(loaded, tools=make_tools())
    learnt = {one.key: (one.bytes, one.runs) for one in request.calibration.residuals}
    assert learnt["expert_slots"] == (30 * SLOT_BYTES, 1)
    assert request.calibration.launches == 1
    # The second apply starts at once: no start dies of what is known.
    before = len(lab.run_dirs())
    second = lab.apply(engine="--most-slots, '70'", expert_slots="auto")
    assert second.proof is not None
    assert (second.proof.expert_slots, second.corrections, len(lab.run_dirs())) == (70, (), before + 1)
    stop_all()
    again = prepare_request(loaded, tools=make_tools()).calibration
    assert {one.key: one.bytes for one in again.residuals}["expert_slots"] == 30 * SLOT_BYTES
    assert describe_track_record(request.model_copy(update={"calibration": again})) == (
        # The second held what can be counted, and was corrected by nothing new: it says nothing of plans.
        f"plans were {again.mean_error_ratio:.1%} off on average over 1 launch here"
    )
    stop_all()


def test_an_engine_on_the_cpu_learns_beside_a_gpu_that_it_cannot_use(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FT_STATE", str(tmp_path))
    machine = make_machine(make_gpu(8, 7.6), is_probed=True)
    assert machine.software.torch_cuda is None
    loaded = load_recipe("demo")
    with open_store() as store:
        line = MeasuredLine(ledger="ram", key="runtime", planned_bytes=100, measured_bytes=170)
        store.record_measured_lines("r1", [line], make_line_context(machine, "native", __version__, None))
    tools = Tools(probe=lambda _: machine)
    found = {one.key: one.bytes for one in prepare_request(loaded, tools=tools).calibration.residuals}
    assert found == {"runtime": 70}


def test_a_fixed_setting_that_does_not_start_is_a_no_with_the_reason(lab: Lab) -> None:
    with pytest.raises(NotReadyError) as failed:
        lab.apply(engine="--most-slots, '10'")
    assert failed.value.exit_code == 4
    assert failed.value.message == f"`lab` never became ready: {6 * SLOT_BYTES} B are missing"
    view = lab.view()
    assert (view.condition, view.is_wrong) == ("not running", True)


def test_death_in_the_full_prefill_chunk_is_a_failed_start(lab: Lab) -> None:
    with pytest.raises(NotReadyError, match="out of VRAM in the prefill"):
        lab.apply(engine="--longest-prompt, '200'")
    assert register.read_records() == ()


def test_sizes_that_are_not_the_plans_are_named(lab: Lab) -> None:
    with pytest.raises(NotReadyError, match="it answers, but not as planned: `expert_slots` is 9, planned 16"):
        lab.apply(engine="--lie-slots, '9'")
    with pytest.raises(NotReadyError, match="`strategy` is `fused`, planned `offload`"):
        lab.apply(engine="--lie-strategy, fused")


def test_a_failed_change_gives_back_what_ran_before(lab: Lab) -> None:
    first = lab.apply()
    with pytest.raises(NotReadyError) as failed:
        lab.apply(engine="--exit-at-start, '3'")
    assert failed.value.message == "`lab` never became ready: engine ended with code 3, before it was ready"
    restored = lab.run_dirs()[-1].name
    assert f"what ran before was restored as run {restored}" in failed.value.details
    assert lab.life().condition == "ready"
    assert "restored" in lab.event_kinds()
    assert lab.apply().diff.action == "nothing"
    assert first.run_id != restored
    stop_all()


def test_ctrl_c_in_a_launch_ends_what_was_started(lab: Lab) -> None:
    with pytest.raises(KeyboardInterrupt):
        lab.apply(engine="--load-s, '30'", on_step=_interrupt_at("load"))
    assert register.read_records() == ()
    assert lab.keeper_state().state == "stopped"  # type: ignore[union-attr]
    assert lab.view().is_wrong is False


def test_ctrl_c_in_a_restart_brings_back_what_ran_before(lab: Lab) -> None:
    lab.apply()
    with pytest.raises(KeyboardInterrupt):
        lab.apply(engine="--load-s, '30'", on_step=_interrupt_at("load"))
    life = lab.life()
    assert life.condition == "ready"
    assert lab.apply().diff.action == "nothing"
    stop_all()


def test_a_stop_while_it_starts_ends_the_apply(lab: Lab) -> None:
    def stop_it(step: Step) -> None:
        if step.phase == "load":
            stop_all()

    with pytest.raises(FtError, match="`lab` was stopped while it was starting") as stopped:
        lab.apply(engine="--load-s, '30'", on_step=stop_it)
    assert stopped.value.exit_code == 1


def test_a_taken_port_is_named_with_its_holder_before_anything_is_started(lab: Lab) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", lab.port))
        holder.listen()
        with pytest.raises(FtError) as refused:
            lab.apply()
    name = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert refused.value.message == f"port {lab.port} is taken by `{name}` (process {os.getpid()})"
    assert "--set serve.port=" in (refused.value.hint or "")
    assert not (lab.state / "runs").exists()


def test_a_plan_for_this_machine_knows_who_holds_the_port(lab: Lab) -> None:
    def prepare(port: int) -> PlanRequest:
        return prepare_request(load_recipe(str(lab.write_recipe(port=port))), tools=make_tools())

    assert prepare(lab.port).taken_ports == ()
    with socket.create_server(("127.0.0.1", lab.port)):
        told = prepare(lab.port)
    (words,) = told.taken_ports
    assert words.endswith(f"(process {os.getpid()})")
    assert (told.taken_ports_hint or "").startswith("`--set serve.port=")


def test_a_port_taken_by_another_deployment_names_it(lab: Lab) -> None:
    lab.apply(name="first")
    with pytest.raises(FtError) as refused:
        lab.apply(name="second")
    first, second = (
        prepare_request(load_recipe(str(lab.folder / f"{name}.yaml")), tools=make_tools())
        for name in ("first", "second")
    )
    assert (first.taken_ports, second.taken_ports) == ((), (refused.value.message,))
    assert refused.value.message == f"port {lab.port} is taken by the deployment `first` (`ft stop first`)"
    stop_all()


def test_several_deployments_run_at_once_and_stop_by_name(lab: Lab) -> None:
    from tests.e2e.life import find_free_port

    lab.apply(name="one")
    lab.apply(name="two", port=find_free_port())
    with pytest.raises(UsageError, match="several deployments run here: `one`, `two`"):
        stop.find_targets(None)
    (target,) = stop.find_targets("one")
    assert stop.stop_run(target).how == "stopped on request: engine ended by SIGINT"
    assert [(record.name) for record in register.read_records()] == ["two"]
    assert stop.find_targets("one") == ()
    with pytest.raises(UsageError, match="no deployment `three`; running: `two`"):
        stop.find_targets("three")
    stop_all()


def test_a_stop_waits_until_the_driver_has_taken_the_vram_back(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [9 << 30, 9 << 30, 6 << 30, 2 << 30, 2 << 30]

    class Gauge:
        def __init__(self, gpu: str) -> None:
            assert gpu == "GPU-lab"

        def read_used_bytes(self) -> int | None:
            return looks.pop(0) if len(looks) > 1 else looks[0]

    monkeypatch.setattr(ending, "GpuGauge", Gauge)
    run_dir = lab.write_launch(gpu="GPU-lab")
    lab.start_keeper(run_dir)
    lab.wait_state(run_dir, "ready")
    outcome = ending.end_life(lab.life())
    assert (outcome.vram_freed_bytes, looks) == (7 << 30, [2 << 30])


def test_a_secret_reaches_the_engine_and_no_file(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = lab.write_recipe()
    recipe.write_text(recipe.read_text().replace("serve: {", "serve: {api_key_env: LAB_KEY, "))
    with pytest.raises(UsageError, match="the engine needs `LAB_KEY`, which is not set"):
        _apply_file(recipe)
    monkeypatch.setenv("LAB_KEY", "sesame-open")
    _apply_file(recipe)
    for path in [*lab.run_dirs()[-1].iterdir(), *Path(os.environ["FT_RUNTIME_DIR"]).rglob("*")]:
        assert not path.is_file() or b"sesame-open" not in path.read_bytes()
    stop_all()


def test_an_open_address_needs_an_api_key(lab: Lab) -> None:
    recipe = lab.write_recipe()
    recipe.write_text(recipe.read_text().replace("serve: {", "serve: {host: 0.0.0.0, "))
    with pytest.raises(UsageError, match=r"`serve.host` is 0\.0\.0\.0, which others can reach, and no API key"):
        _apply_file(recipe)


def test_a_name_that_leads_elsewhere_is_refused(lab: Lab) -> None:
    with pytest.raises(UsageError, match="is not a name"):
        lab.apply(name="lab", as_name="../../elsewhere")
    with pytest.raises(UsageError, match="no deployment"):
        stop.find_targets("../../elsewhere")


def test_a_restart_cap_that_is_reached_is_told_by_status(lab: Lab) -> None:
    lab.apply()
    for restarts in range(3):
        state = wait_for(lambda n=restarts: (one := lab.keeper_state()) and one.restarts == n and one.ready_at and one)
        lab.kill(state.engine)
    wait_for(lambda: lab.keeper_state().state == "failed")  # type: ignore[union-attr]
    view = lab.view()
    words = "engine ended with SIGKILL (-9); not restarted again after 2 restarts in 60 s"
    assert (view.condition, view.words, view.is_wrong) == ("not running", words, True)


def test_records_of_another_boot_are_cleaned_in_words(lab: Lab) -> None:
    lab.apply()
    record, run_dir = register.read_records()[0], lab.run_dirs()[-1]
    stop_all()
    runs.write_declaration("lab", run_dir.name, is_wanted=True)
    _pretend_reboot(record, run_dir)
    view = lab.view()
    words = "the machine was restarted since; nothing of it runs"
    assert (view.condition, view.words, view.is_wrong) == ("not running", words, True)
    assert register.read_records() == ()
    assert lab.apply().diff.action == "launch"
    stop_all()


def test_both_keeper_and_engine_killed_is_said_and_apply_starts_again(lab: Lab) -> None:
    lab.apply()
    life = lab.life()
    lab.kill(life.keeper)
    lab.kill(life.engine)
    wait_for(lambda: not is_alive(life.engine) and not is_alive(life.keeper))
    view = lab.view()
    assert (view.condition, view.words) == ("not running", "keeper and engine are both gone, killed from outside")
    assert view.is_wrong
    assert lab.apply().diff.action == "launch"
    stop_all()


def test_a_killed_keeper_is_replaced_by_the_next_apply_which_changes_nothing(lab: Lab) -> None:
    lab.apply()
    before = lab.life()
    lab.kill(before.keeper)
    wait_for(lambda: not is_alive(before.keeper))
    assert lab.apply().diff.action == "nothing"
    after = lab.life()
    assert (after.engine, after.condition) == (before.engine, "ready")
    assert after.keeper != before.keeper
    stop_all()


def _apply_file(path: Path) -> object:
    from freetoken.deploy.apply import apply_recipe
    from freetoken.recipe.load import load_recipe

    return apply_recipe(load_recipe(str(path)), tools=make_tools())


def _interrupt_at(phase: str):  # type: ignore[no-untyped-def]
    """Presses Ctrl-C once, as soon as `phase` shows."""
    pressed: list[bool] = []

    def press(step: Step) -> None:
        if step.phase == phase and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    return press


def _pretend_reboot(record: register.Deployment, run_dir: Path) -> None:
    """Writes records as they would be found after the machine was restarted under a running deployment."""
    from dataclasses import replace

    from freetoken.supervisor.launch import read_state, write_state

    gone = ProcessId("another-boot", 1, 1)
    state = read_state(run_dir)
    assert state is not None
    (run_dir / "keeper.lock").unlink()
    write_state(run_dir, replace(state, state="ready", keeper=gone, engine=gone, ended_at=None))
    register.write_record(replace(record, keeper=gone, engine_process=gone))
