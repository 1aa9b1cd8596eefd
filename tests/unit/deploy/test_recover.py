"""What a failed start means, and what the next plan allows for."""

from __future__ import annotations

import pytest

from freetoken.adapters.base import Failure
from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.deploy.recover import StartFailure, classify, correct
from freetoken.planner.plan import Plan, PlanRequest, Residual
from freetoken.planner.solve import make_plan
from freetoken.units import GIB, MIB
from tests.fakes.fake_adapter import FakeAdapter, make_hardware, make_shape
from tests.fakes.planner_cases import make_gpu, make_machine, make_request
from tests.fakes.planner_cases import make_recipe as recipe_of_a_model
from tests.unit.deploy.test_diff import make_recipe, plan_of

REQUEST = PlanRequest(recipe=make_recipe(), hardware=make_hardware(), shape=make_shape())
PLAN = plan_of(make_recipe())


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (StartFailure("crash", "x", log="FakeOutOfMemory: 20 slots need 4096 B more than there is"), "ram_oom"),
        (StartFailure("crash", "CUDA out of memory"), "vram_oom"),
        (StartFailure("crash", "engine ended with SIGKILL (-9)", exit_code=-9), "killed"),
        (StartFailure("hang", "silence"), "hang"),
        (StartFailure("log_full", "no space"), "log_full"),
        (StartFailure("foreign_port", "port"), "port_taken"),
        (StartFailure("crash", "engine ended with code 3", exit_code=3), "engine_died"),
    ],
)
def test_a_failed_start_is_classified(failure: StartFailure, kind: str) -> None:
    assert classify(FakeAdapter(), failure).kind == kind


START = "[keeper] 2031-05-04T09:30:00.125Z run lab: engine --port 1"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("Traceback (most recent call last):\n  File x\nOSError: no such device\nbye", "OSError: no such device"),
        ("error: the model is odd\n[keeper] engine ended", "the model is odd"),
        ("cannot open the file\nusage: engine", "cannot open the file"),
        (f"{START}\nerror: the first start\n{START}\nloading", ""),
        ("loading terrors of old\nready", ""),
    ],
)
def test_where_no_rule_matches_the_last_telling_line_of_the_newest_start_is_the_cause(log: str, said: str) -> None:
    found = classify(FakeAdapter(), StartFailure("crash", "engine ended with code 3", exit_code=3, log=log))
    assert (found.kind, found.cause) == ("engine_died", "engine ended with code 3" + (f": {said}" if said else ""))


def test_a_line_of_the_log_that_the_keeper_told_already_is_not_said_twice() -> None:
    failure = StartFailure("crash", "engine ended with code 1: no memory map", log="error: no memory map")
    assert classify(FakeAdapter(), failure).cause == failure.cause


def test_an_exact_overshoot_is_added_to_its_line_and_to_what_was_known() -> None:
    failure = Failure(kind="ram_oom", cause="4096 B are missing", line="expert_slots", missing_bytes=4096)
    first = correct(REQUEST, PLAN, failure, 0)
    assert first is not None
    assert first.request.calibration.residuals == (Residual(key="expert_slots", bytes=4096),)
    second = correct(first.request, PLAN, failure, 1)
    assert second is not None
    assert second.request.calibration.residuals == (Residual(key="expert_slots", bytes=8192),)
    assert second.words == "4096 B are missing; planning again with exactly 4.00 KiB more for `expert_slots`"


def test_an_unknown_overshoot_is_a_step_that_doubles() -> None:
    failure = Failure(kind="killed", cause="killed")
    steps = []
    for attempt in range(3):
        correction = correct(REQUEST, PLAN, failure, attempt)
        assert correction is not None
        (residual,) = correction.request.calibration.residuals
        assert residual.key == "runtime"
        steps.append(residual.bytes)
    base = PLAN.ram.available_bytes // 25
    assert base > 64 * MIB
    assert steps == [base, 2 * base, 4 * base]


def gpu_request(free_gib: float, **request: int) -> PlanRequest:
    machine = make_machine(make_gpu(8, free_gib, uuid="GPU-1"), ram_gib=64, ram_free_gib=50)
    return make_request(recipe_of_a_model(), machine, **request)


OOM = Failure(kind="vram_oom", cause="out of memory", line="expert_slots", missing_bytes=300 * MIB)


@pytest.mark.parametrize(("reclaimable", "free_gib"), [(0, 7.5), (2 * GIB, 5.5)])
def test_memory_that_is_gone_since_the_plan_is_what_failed(reclaimable: int, free_gib: float) -> None:
    request = gpu_request(free_gib, reclaimable_vram_bytes=reclaimable)
    plan = make_plan(request, FreetokenAdapter())
    assert isinstance(plan, Plan)
    now = gpu_request(6.5).hardware
    correction = correct(request, plan, OOM, 0, machine=now)
    assert correction is not None
    assert correction.is_loss
    assert correction.words == (
        "out of memory (at `expert_slots`, 300 MiB too much); 1.00 GiB less VRAM is free by now; "
        "planning again with what there is"
    )
    assert correction.request.calibration == request.calibration
    again = make_plan(correction.request, FreetokenAdapter())
    assert isinstance(again, Plan)
    assert again.vram is not None
    assert again.vram.available_bytes == int(6.5 * GIB)
    # The next failure with the same memory is a line's.
    second = correct(correction.request, again, OOM, 1, machine=now)
    assert second is not None
    assert not second.is_loss
    assert second.request.calibration.residuals == (Residual(key="expert_slots", bytes=300 * MIB),)


def test_a_gpu_that_is_gone_changes_nothing_in_the_correction() -> None:
    request = gpu_request(7.5)
    plan = make_plan(request, FreetokenAdapter())
    assert isinstance(plan, Plan)
    correction = correct(request, plan, OOM, 0, machine=make_machine(make_gpu(8, 7, uuid="GPU-2")))
    assert correction is not None
    assert not correction.is_loss


def test_host_memory_that_is_gone_is_planned_without() -> None:
    machine = REQUEST.hardware
    less = machine.ram.model_copy(update={"available_bytes": machine.ram.available_bytes - GIB})
    failure = Failure(kind="killed", cause="killed")
    correction = correct(REQUEST, PLAN, failure, 0, machine=machine.model_copy(update={"ram": less}))
    assert correction is not None
    assert correction.words == "killed; 1.00 GiB less RAM is free by now; planning again with what there is"
    assert correction.request.hardware.ram == less


@pytest.mark.parametrize(
    "kind", ["port_taken", "bad_flag", "bad_checkpoint", "no_gpu", "log_full", "hang", "engine_died"]
)
def test_what_another_plan_cannot_avoid_is_not_tried_again(kind: str) -> None:
    assert correct(REQUEST, PLAN, Failure.model_validate({"kind": kind, "cause": "x"}), 0) is None
