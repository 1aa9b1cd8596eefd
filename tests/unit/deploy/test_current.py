"""What a running deployment would give back, from what the driver lists and what was free before it began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.deploy import current
from freetoken.deploy.current import MOST_UNLISTED_BYTES, Running, measure_reclaimable
from freetoken.deploy.prepare import plan_request, prepare_request
from freetoken.deploy.start import make_launch
from freetoken.deploy.tools import DEFAULT_TOOLS
from freetoken.hardware.model import GpuHolder
from freetoken.recipe.load import load_recipe
from freetoken.supervisor.launch import Launch
from freetoken.supervisor.life import Life
from freetoken.supervisor.process import ProcessId
from freetoken.supervisor.register import make_record
from tests.fakes.planner_cases import make_gpu, make_machine, make_recipe, make_request

ENGINE, OTHER = 991, 918
# As an H200 told it: 41,484,288 bytes more are gone than the driver lists for the engine.
FREE_BEFORE, FREE_NOW, HELD, OTHERS = 8_591_114_240, 169_410_560, 8_380_219_392, 141_509_525_504


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(**changes: Any) -> Running:
        fields = {"vram_available_bytes": FREE_BEFORE, "vram_others": {str(OTHER): OTHERS}, "gpu": "0"} | changes
        launch = Launch("r1", "demo", "native", ("python",), 1919, planned_vram_bytes=8_000_000_000, **fields)
        life = Life(make_record(launch, tmp_path), launch, None, "ready", "")
        return Running(life, None, None)

    monkeypatch.setattr(current, "find_members", lambda run_id, engine: [ProcessId("boot", ENGINE, 1)])
    return make


def machine(free: int = FREE_NOW, engine: int = HELD, others: dict[int, int] | None = None):  # type: ignore[no-untyped-def]
    found = {OTHER: OTHERS} if others is None else others
    holders = [GpuHolder(pid=pid, name="x", used_bytes=used) for pid, used in ({ENGINE: engine} | found).items()]
    gpu = make_gpu(140, 0, vram_free_bytes=free, holders=tuple(holders))
    return make_machine(gpu)


def test_what_ran_until_a_moment_ago_still_fits(running) -> None:
    back = measure_reclaimable(running(), machine())
    assert FREE_NOW + back.vram_bytes == FREE_BEFORE
    assert back.vram_bytes - HELD == 41_484_288


def test_what_others_took_meanwhile_is_not_ours(running) -> None:
    taken = 100 << 20
    back = measure_reclaimable(running(), machine(free=FREE_NOW - taken, others={OTHER: OTHERS + taken}))
    assert back.vram_bytes - HELD == 41_484_288
    gone = measure_reclaimable(running(), machine(free=FREE_NOW + OTHERS, others={}))
    assert gone.vram_bytes - HELD == 41_484_288


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        (machine(others={OTHER: OTHERS, 4242: 5 << 20}), {}),
        (machine(free=FREE_NOW + (50 << 20)), {}),
        (machine(), {"vram_available_bytes": 0, "vram_others": {}}),
        (machine(), {"gpu": "GPU-gone"}),
    ],
    ids=["a newcomer", "nothing is missing", "launched by an older ft", "the GPU is gone"],
)
def test_only_what_is_listed_is_believed(running, seen, changes) -> None:
    assert measure_reclaimable(running(**changes), seen).vram_bytes == HELD


def test_more_than_a_driver_takes_is_somebody_elses(running) -> None:
    back = measure_reclaimable(running(), machine(free=0))
    assert back.vram_bytes == HELD + MOST_UNLISTED_BYTES


def test_a_driver_that_lists_no_bytes_leaves_the_plans_word(running) -> None:
    assert measure_reclaimable(running(), machine(engine=0)).vram_bytes == 8_000_000_000


def test_a_launch_keeps_what_was_free_before_it() -> None:
    seen = machine(free=8 << 30, others={OTHER: OTHERS})
    gpu = seen.gpus[0].model_copy(update={"holders": seen.gpus[0].holders[1:]})
    request = make_request(make_recipe(), make_machine(gpu)).model_copy(update={"reclaimable_vram_bytes": 1 << 30})
    plan = plan_request(request).model_copy(update={"model_path": "/models/here"})
    spec = FreetokenAdapter().make_launch_spec(plan, interpreter="python")
    launch = make_launch("demo", request.recipe, plan, spec, DEFAULT_TOOLS, "r1", {}, request)
    assert (launch.vram_available_bytes, launch.vram_others) == (9 << 30, {str(OTHER): OTHERS})
    assert Launch.from_dict(json.loads(json.dumps(launch.to_dict()))) == launch
    gone = plan.model_copy(update={"settings": plan.settings.model_copy(update={"gpu": "GPU-gone"})})
    launch = make_launch("demo", request.recipe, gone, spec, DEFAULT_TOOLS, "r1", {}, request)
    assert (launch.vram_available_bytes, launch.vram_others) == (0, {})


def test_a_deployment_does_not_stand_in_its_own_way(running) -> None:
    seen = machine()
    request = prepare_request(load_recipe("demo"), hardware_now=seen, reclaimable=measure_reclaimable(running(), seen))
    assert [one.pid for one in request.hardware.gpus[0].holders] == [OTHER]
