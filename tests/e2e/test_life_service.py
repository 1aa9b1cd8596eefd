"""What a systemd unit runs: it brings a deployment up after a reboot, follows it, and stops it in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from freetoken.deploy import runs
from tests.e2e.life import REPO, Lab, is_alive, make_lab, stop_all, wait_for  # noqa: F401

StartService = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(name="start")
def make_start(lab: Lab) -> Iterator[StartService]:
    started = []

    def start(name: str = "lab") -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.fakes.service_fake", str(lab.state), name]
        process = subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    yield start
    stop_all()
    for process in started:
        process.kill()
        process.wait(60)


def test_after_a_reboot_what_was_proven_is_brought_up_and_a_stop_by_hand_ends_the_service(
    lab: Lab, start: StartService
) -> None:
    lab.apply(expert_slots=24)
    first = lab.view()
    pretend_reboot(lab)
    service = start()
    again = wait_for(lambda: ready_view(lab, not_run=first.run_id))
    assert [row.measured for row in again.rows if row.field == "expert_slots"] == [24]
    assert lab.ft("stop", "lab").returncode == 0
    assert service.wait(60) == 0
    output = service.stdout.read()  # type: ignore[union-attr]
    assert output.splitlines()[-1] == "`lab` was stopped by `ft stop`"
    after = start()
    assert after.wait(60) == 0
    expected = "`lab` was stopped by `ft stop`; `ft apply` runs it again\n"
    assert after.stdout.read() == expected  # type: ignore[union-attr]


def test_sigterm_stops_keeper_and_engine_in_order_and_leaves_the_declaration(lab: Lab, start: StartService) -> None:
    lab.apply()
    found = lab.life()
    service = start()
    assert service.stdout.readline() == "`lab` runs already\n"  # type: ignore[union-attr]
    service.send_signal(signal.SIGTERM)
    assert service.wait(60) == 0
    assert not is_alive(found.engine)
    assert not is_alive(found.keeper)
    assert lab.keeper_state().cause == "stopped on request: engine ended by SIGINT"  # type: ignore[union-attr]
    assert runs.read_declaration("lab").is_wanted  # type: ignore[union-attr]


def test_a_service_goes_on_with_what_an_apply_put_in_place_of_the_engine(lab: Lab, start: StartService) -> None:
    lab.apply()
    service = start()
    assert service.stdout.readline() == "`lab` runs already\n"  # type: ignore[union-attr]
    lab.apply(strategy="fused")
    service_is_there = service.poll() is None
    second = lab.life()
    service.send_signal(signal.SIGTERM)
    assert service.wait(60) == 0
    assert service_is_there
    assert not is_alive(second.engine)


def test_an_engine_that_has_failed_for_good_fails_the_service(lab: Lab, start: StartService) -> None:
    lab.apply(engine="--once, ONCE".replace("ONCE", str(lab.folder / "once")))
    service = start()
    assert service.stdout.readline() == "`lab` runs already\n"  # type: ignore[union-attr]
    for restarts in range(3):
        state = wait_for(lambda n=restarts: ready_state(lab, n))
        lab.kill(state.engine)
    assert service.wait(60) == 1
    said = service.stdout.read()  # type: ignore[union-attr]
    assert said == ("`lab` failed: engine ended with SIGKILL (-9); not restarted again after 2 restarts in 60 s\n")


def test_a_port_that_is_taken_after_the_reboot_is_named_and_fails_the_service(lab: Lab, start: StartService) -> None:
    lab.apply()
    pretend_reboot(lab)
    script = (
        f"import http.server as h; h.HTTPServer(('127.0.0.1', {lab.port}), h.BaseHTTPRequestHandler).serve_forever()"
    )
    stranger = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: listener_of(lab.port))
        service = start()
        assert service.wait(60) == 1
        said = service.stdout.read()  # type: ignore[union-attr]
        assert f"error: port {lab.port} is taken by `python" in said
        assert said.splitlines()[-1] == "`lab` could not be brought up (`ft apply` ended with 1)"
    finally:
        stranger.kill()
        stranger.wait()


def test_a_name_that_was_never_applied_is_wrong_usage(lab: Lab, start: StartService) -> None:
    service = start("other")
    assert service.wait(60) == 2
    assert service.stdout.read() == f"nothing was ever applied as `other` in {lab.state}\n"  # type: ignore[union-attr]


def pretend_reboot(lab: Lab) -> None:
    """Kills everything, and gives what is on disk the identities of another boot."""
    found = lab.life()
    lab.kill(found.keeper)
    lab.kill(found.engine)
    wait_for(lambda: not is_alive(found.keeper) and not is_alive(found.engine))
    boot = found.engine.boot_id  # type: ignore[union-attr]
    for path in [*lab.folder.glob("runtime/deployments/*.json"), *lab.state.glob("runs/*/keeper.json")]:
        path.write_text(path.read_text().replace(boot, "0" * 8 + boot[8:]))
        assert json.loads(path.read_text())


def listener_of(port: int) -> int | None:
    from freetoken.supervisor.ports import find_listener

    return find_listener(port)


def ready_view(lab: Lab, *, not_run: str | None):  # type: ignore[no-untyped-def]
    view = lab.view()
    return view if view.condition == "ready" and view.run_id != not_run else None


def ready_state(lab: Lab, restarts: int):  # type: ignore[no-untyped-def]
    state = lab.keeper_state()
    return state if state and state.state == "ready" and state.restarts == restarts else None
