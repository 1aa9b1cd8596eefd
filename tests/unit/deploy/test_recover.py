"""What a failed start means, and what the next plan allows for."""

from __future__ import annotations

import pytest

from freetoken.adapters.base import Failure
from freetoken.deploy.recover import StartFailure, classify, correct
from freetoken.planner.plan import PlanRequest, Residual
from freetoken.units import MIB
from tests.fakes.fake_adapter import FakeAdapter, make_hardware, make_shape
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


@pytest.mark.parametrize(
    "kind", ["port_taken", "bad_flag", "bad_checkpoint", "no_gpu", "log_full", "hang", "engine_died"]
)
def test_what_another_plan_cannot_avoid_is_not_tried_again(kind: str) -> None:
    assert correct(REQUEST, PLAN, Failure.model_validate({"kind": kind, "cause": "x"}), 0) is None
