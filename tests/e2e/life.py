"""What the tests of a deployment's life share: a laboratory of its own for each test, and the search for orphans."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken import paths
from freetoken.deploy.apply import apply_recipe
from freetoken.deploy.overview import DeploymentView, read_overview
from freetoken.deploy.tools import Step, Tools
from freetoken.deploy.values import ApplyResult
from freetoken.recipe.load import load_recipe
from freetoken.supervisor import life as lives
from freetoken.supervisor import register
from freetoken.supervisor.files import read_events
from freetoken.supervisor.launch import KeeperState, Launch, read_launch, read_state, write_launch
from freetoken.supervisor.process import ProcessId, is_alive, read_stats
from tests.fakes.fake_adapter import ENGINE, make_tools
from tests.fakes.ports import find_free_port

REPO = Path(__file__).resolve().parents[2]
MARKER = "FT_LIFE_TEST"
#: Generous: nothing waits this long but on a machine that many others use.
WAIT_S = 90.0


def wait_for(what: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """The first true answer of `what`; fails when none came in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def find_orphans(token: str) -> list[str]:
    """Every living process that descends from this test, itself excepted."""
    found = []
    for stat in read_stats().values():
        if stat.pid == os.getpid() or not stat.is_running:
            continue
        try:
            raw = Path(f"/proc/{stat.pid}/environ").read_bytes()
            command = Path(f"/proc/{stat.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"{MARKER}={token}".encode() in raw:
            found.append(f"{stat.pid} {command}")
    return found


class Lab:
    """One test's state folder, runtime folder and port, with short ways to act and to look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.port = find_free_port()
        # Found by its mark among all processes of the machine, so no other test may have it.
        self.run_id = f"20310504-093000-000-{secrets.token_hex(3)}"
        self.steps: list[Step] = []

    def write_recipe(self, name: str = "lab", *, port: int | None = None, engine: str = "", **settings: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        values = ", ".join(f"{key}: {value}" for key, value in {"expert_slots": 16, **settings}.items())
        path.write_text(
            f"version: 1\nname: {name}\nmodel: {{path: /models/fake}}\n"
            f"engine: {{name: native, extra_args: [{engine}]}}\n"
            f"serve: {{port: {port or self.port}}}\nworkload: {{prompt_tokens: 512, output_tokens: 64}}\n"
            f"settings: {{{values}}}\n"
        )
        return path

    def apply(
        self,
        *,
        name: str = "lab",
        tools: Tools | None = None,
        port: int | None = None,
        engine: str = "",
        on_step: Any = None,
        is_dry_run: bool = False,
        is_forced: bool = False,
        as_name: str | None = None,
        **settings: Any,
    ) -> ApplyResult:
        loaded = load_recipe(str(self.write_recipe(name, port=port, engine=engine, **settings)))

        def progress(step: Step) -> None:
            self.steps.append(step)
            if on_step is not None:
                on_step(step)

        return apply_recipe(
            loaded,
            name=as_name,
            is_dry_run=is_dry_run,
            is_forced=is_forced,
            progress=progress,
            tools=tools or make_tools(),
        )

    def ft(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*arguments), cwd=REPO, env={**os.environ, **(env or {})}, text=True,
                              capture_output=True, timeout=150)  # fmt: skip

    def start_ft(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(*arguments), cwd=REPO, env={**os.environ, **(env or {})}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.fakes.ft_fake", *arguments]

    def view(self, name: str = "lab") -> DeploymentView:
        return read_overview(name, tools=make_tools()).deployments[0]

    def life(self) -> lives.Life:
        (record,) = register.read_records()
        return lives.examine(record)

    def run_dirs(self) -> list[Path]:
        return sorted((self.state / "runs").iterdir())

    def event_kinds(self, run_dir: Path | None = None) -> list[str]:
        return [event.kind for event in read_events((run_dir or self.run_dirs()[-1]) / "events.jsonl")]

    def keeper_state(self, run_dir: Path | None = None) -> KeeperState | None:
        return read_state(run_dir or self.run_dirs()[-1], fallback_dir=register.states_dir())

    def kill(self, process: ProcessId | None, number: int = signal.SIGKILL) -> None:
        assert process is not None
        os.kill(process.pid, number)

    # -- a keeper alone, without the apply loop

    def write_launch(self, *flags: str, is_proven: bool = True, **changes: Any) -> Path:
        run_dir = self.state / "runs" / self.run_id
        run_dir.mkdir(parents=True, exist_ok=True)
        argv = (sys.executable, str(ENGINE), "--port", str(self.port), *flags)
        values: dict[str, Any] = {
            "run_id": run_dir.name, "name": "lab", "engine": "native", "argv": argv, "port": self.port, "grace_s": 1.0,
            "policy": make_tools().keeper_policy, "state_dir": str(self.state), "runtime_dir": str(paths.runtime_dir()),
        }  # fmt: skip
        write_launch(run_dir, Launch(**(values | changes)))
        if is_proven:
            (run_dir / "report.json").write_text("{}")
        return run_dir

    def start_keeper(self, run_dir: Path, *, is_adopting: bool = False) -> subprocess.Popen[bytes]:
        register.write_record(register.make_record(read_launch(run_dir), run_dir))  # type: ignore[arg-type]
        return lives.start_keeper(run_dir, is_adopting=is_adopting)

    def wait_state(self, run_dir: Path, state: str, timeout_s: float = WAIT_S) -> KeeperState:
        def look() -> KeeperState | None:
            found = self.keeper_state(run_dir)
            return found if found is not None and found.state == state else None

        try:
            return wait_for(look, timeout_s)  # type: ignore[no-any-return]
        except AssertionError:
            raise AssertionError(f"state `{state}` never came: {self.keeper_state(run_dir)}") from None


@pytest.fixture(name="lab")
def make_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A laboratory; afterwards nothing of it may run any more, unless the test stopped it on purpose."""
    token = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, token)
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "state").mkdir()
    yield Lab(tmp_path)
    # A keeper that has written the end needs a moment to leave; whatever is to stay does not go away by itself.
    deadline = time.monotonic() + 20.0
    while (orphans := find_orphans(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for orphan in orphans:
        os.kill(int(orphan.split()[0]), signal.SIGKILL)
    assert orphans == [], f"left behind: {orphans}"


def stop_all() -> None:
    from freetoken.deploy import stop

    for found in stop.find_targets(None, is_all=True):
        stop.stop_run(found)


def read_json_output(text: str) -> Any:
    return json.loads(text)


__all__ = ["Lab", "find_free_port", "is_alive", "make_lab", "read_json_output", "stop_all", "wait_for"]
