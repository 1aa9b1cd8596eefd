"""The watchdog's decisions with everything it asks put in by hand; and the arithmetic of its watches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freetoken.supervisor import watchdog as module
from freetoken.supervisor.gpu import GpuGauge
from freetoken.supervisor.health import HealthLook, Work
from freetoken.supervisor.launch import Launch
from freetoken.supervisor.policy import KeeperPolicy
from freetoken.supervisor.ports import UNSEEN
from freetoken.supervisor.process import Activity, ProcessId
from freetoken.supervisor.watch import CpuMeter, DeadPortWatch, IdleWatch
from freetoken.supervisor.watchdog import Alarm, Watchdog

READY = HealthLook("ready")
LAUNCH = Launch("r", "lab", "any", (), 1919, policy=KeeperPolicy(idle_s=40.0, dead_s=20.0, look_s=1.0))


def test_idleness_grows_while_nothing_comes_and_ends_with_any_token_or_kernel() -> None:
    watch = IdleWatch()
    assert [watch.observe(now, 7, is_idle=True) for now in (0.0, 5.0, 10.0)] == [0, 5, 10]
    assert watch.observe(12.0, 8, is_idle=True) == 0
    assert watch.observe(20.0, 8, is_idle=True) == 8
    assert watch.observe(21.0, 8, is_idle=False) == 0
    assert watch.observe(30.0, 8, is_idle=True) == 0


def test_a_port_is_dead_from_its_first_unanswered_look_on() -> None:
    watch = DeadPortWatch()
    looks = ((0.0, True), (3.0, False), (6.0, False), (9.0, True), (12.0, False))
    assert [watch.observe(now, is_answered=answered) for now, answered in looks] == [0, 0, 3, 0, 0]


def test_cpu_use_is_in_cores_since_the_last_look_and_unknown_at_the_first() -> None:
    meter = CpuMeter()
    assert [meter.observe(0.0, 10.0), meter.observe(2.0, 13.0), meter.observe(4.0, 13.0)] == [None, 1.5, 0.0]


@pytest.fixture(name="world")
def make_world(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the watchdog's questions are answered with."""
    world: dict[str, Any] = {"work": Work(1, 5), "cpu_s": 0.0, "errors": (), "stranger": None}
    monkeypatch.setattr(module, "read_work", lambda *_, **__: world["work"])
    monkeypatch.setattr(module, "find_members", lambda *_, **__: ())
    monkeypatch.setattr(module, "read_activity", lambda _: Activity(world["cpu_s"], 0, 0))

    def read_requests(host: str, port: int, since: int, **_: Any) -> tuple[tuple[str, ...], int]:
        return tuple(world["errors"][since:]), len(world["errors"])

    monkeypatch.setattr(module, "read_requests", read_requests)
    monkeypatch.setattr(Watchdog, "_find_stranger", lambda *_: world["stranger"])
    return world


def look_often(
    dog: Watchdog, world: dict[str, Any], seconds: int, health: HealthLook = READY, **changes: Any
) -> list[Alarm]:
    """Looks at every second; a CPU burns all the while, so that only the device's idleness counts."""
    found = []
    for now in range(seconds):
        world["cpu_s"] += changes.get("cpu_per_s", 1.0)
        found += dog.look(float(now), health, None, is_up=True, is_proven=True)
    return found


def test_an_idle_gpu_is_an_alarm_only_where_one_more_token_is_not_generated_either(world: dict[str, Any]) -> None:
    for is_alive in (True, False):
        dog = Watchdog(LAUNCH, Path(), read_gpu=lambda: 0.0, generate=lambda *_, a=is_alive, **__: a)
        alarms = look_often(dog, world, 60)
        assert {one.kind for one in alarms} == (set() if is_alive else {"engine_idle"})
        assert set(dog.problems) == (set() if is_alive else {"engine_idle"})


def test_an_engine_that_says_tokens_flow_is_not_idle_whatever_the_gpu_says(world: dict[str, Any]) -> None:
    world["work"] = Work(1, 5, is_flowing=True)
    dog = Watchdog(LAUNCH, Path(), read_gpu=lambda: 0.0, generate=lambda *_, **__: False)
    assert look_often(dog, world, 100) == []


def test_a_gpu_that_cannot_be_asked_blames_nobody(world: dict[str, Any]) -> None:
    dog = Watchdog(LAUNCH, Path(), read_gpu=lambda: None, generate=lambda *_, **__: False)
    assert look_often(dog, world, 100) == []


def test_an_engine_on_the_cpu_is_idle_where_its_processes_use_no_cpu(world: dict[str, Any]) -> None:
    dog = Watchdog(LAUNCH, Path(), generate=lambda *_, **__: False)
    (first, *_) = look_often(dog, world, 70, cpu_per_s=0.0)
    assert (first.kind, first.reaction) == ("engine_idle", "restart")
    assert "and the CPU was idle for" in first.words
    assert look_often(Watchdog(LAUNCH, Path(), generate=lambda *_, **__: False), world, 100) == []


def test_an_idle_engine_without_requests_is_never_an_alarm(world: dict[str, Any]) -> None:
    world["work"] = Work(0, 5)
    dog = Watchdog(LAUNCH, Path(), read_gpu=lambda: 0.0, generate=lambda *_, **__: False)
    assert look_often(dog, world, 100, cpu_per_s=0.0) == []


def test_a_policy_of_ignoring_is_obeyed_for_each_of_the_three(world: dict[str, Any]) -> None:
    world["stranger"], world["errors"] = "`other` (process 1)", []
    policy = replace(LAUNCH.policy, on_idle="ignore", on_dead_port="ignore", on_too_large="ignore")
    dog = Watchdog(replace(LAUNCH, policy=policy), Path(), read_gpu=lambda: 0.0, generate=lambda *_, **__: False)
    world["errors"] += ["prompt is too long: 9 tokens > 5 maximum"]
    assert look_often(dog, world, 100) == []
    assert look_often(dog, world, 100, HealthLook("unreachable", message="refused")) == []


def test_a_stranger_on_the_port_is_named_at_the_next_costly_look(world: dict[str, Any]) -> None:
    world["stranger"] = "`nginx` (process 42)"
    (alarm, *_) = look_often(Watchdog(LAUNCH, Path()), world, 1)
    assert alarm == Alarm(
        "port_dead",
        "process None lives, but port 1919 is answered by `nginx` (process 42), not by this engine",
        "restart",
    )


@pytest.mark.parametrize(
    "error",
    [
        "prompt is too long: 9000 tokens > 8192 maximum (prompt + generation)",
        '{"error": {"code": "context_length_exceeded"}}',
        "the request exceeds the available context size, try increasing it",
        "This model's maximum context length is 8192 tokens",
    ],
)
def test_refusals_of_known_engines_for_want_of_kv_are_recognised(world: dict[str, Any], error: str) -> None:
    world["work"], errors = Work(0, 0), []
    world["errors"] = errors
    dog = Watchdog(LAUNCH, Path())
    assert dog.look(0.0, READY, None, is_up=True, is_proven=True) == []
    errors += [error, "`temperature`: must not be negative"]
    (alarm,) = dog.look(2.0, READY, None, is_up=True, is_proven=True)
    assert (alarm.kind, alarm.reaction) == ("request_too_large", "warn")
    assert alarm.words.startswith("1 request asked for more tokens than the KV pool holds (the last: ")
    assert dog.look(4.0, READY, None, is_up=True, is_proven=True) == []
    assert dog.problems == {"request_too_large": alarm.words}
    dog.look(5000.0, READY, None, is_up=True, is_proven=True)
    assert dog.problems == {}


def test_what_the_proof_asked_for_on_purpose_is_no_request_that_was_too_large(world: dict[str, Any]) -> None:
    world["work"], world["errors"] = Work(0, 0), ["prompt is too long: 9000 tokens > 8192 maximum"]
    dog = Watchdog(LAUNCH, Path())
    for now in (0.0, 2.0):
        assert dog.look(now, READY, None, is_up=True, is_proven=False) == []
    assert dog.look(4.0, READY, None, is_up=True, is_proven=True) == []
    dog.reset(is_restart=True)
    assert [one.kind for one in dog.look(6.0, READY, None, is_up=True, is_proven=True)] == ["request_too_large"]


def test_a_gpu_without_a_driver_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.supervisor.gpu._LIBRARIES", ("libnowhere.so.1",))
    assert GpuGauge("GPU-1")() is None
    assert GpuGauge("GPU-1").read_used_bytes() is None


@pytest.mark.parametrize(("gpu", "expected"), [("GPU-1", 0.37), ("1", 0.37), ("GPU-2", None), ("7", None)])
def test_a_gpu_is_asked_by_uuid_or_index(monkeypatch: pytest.MonkeyPatch, gpu: str, expected: float | None) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("freetoken.supervisor.gpu._load", lambda: driver)
    assert GpuGauge(gpu)() == expected
    assert GpuGauge(gpu).read_used_bytes() == (None if expected is None else 5 << 30)
    assert driver.is_open == 0


class FakeDriver:
    """NVML's C functions for one GPU."""

    is_open = 0

    def nvmlInit_v2(self) -> int:
        self.is_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open -= 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, _: Any, found: Any) -> int:
        found._obj.total, found._obj.free, found._obj.used = 8 << 30, 3 << 30, 5 << 30
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 1
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 1
        return 0 if index.value == 1 else 6

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = 37, 12
        return 0 if handle.value == 1 else 6


def test_a_listener_without_a_visible_process_is_believed_at_the_third_look(monkeypatch: pytest.MonkeyPatch) -> None:
    holders: list[int | None] = [None, None, 1, None, None, None]
    monkeypatch.setattr(module, "find_members", lambda *_, **__: (ProcessId("boot", 7, 1),))
    monkeypatch.setattr(module, "is_listening", lambda _: True)
    monkeypatch.setattr(module, "find_listener", lambda _, pids=None: None if pids else holders.pop(0))
    dog = Watchdog(LAUNCH, Path())
    found = [dog._find_stranger(None) for _ in range(6)]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[2].endswith("(process 1)")
    assert found[3:] == [None, None, UNSEEN]
