"""What the tests of the upstream engine share: a machine with one card, the real adapter, and the replayed engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freetoken.adapters.control import ControlClient
from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.deploy.apply import apply_recipe
from freetoken.deploy.tools import Step, Tools
from freetoken.deploy.values import ApplyResult
from freetoken.recipe.load import load_recipe
from freetoken.supervisor.launch import KeeperPolicy
from tests.e2e.life import Lab
from tests.e2e.life import make_lab as make_lab  # the fixture that this one builds upon
from tests.fakes.planner_cases import make_gpu, make_machine, make_qwen_shape
from tests.fakes.upstream_replay import install_upstream, read_starts, write_scenarios


class QuickAdapter(FreetokenAdapter):
    """The adapter with short limits: what takes ten minutes to be a hang takes a second here."""

    def make_launch_spec(self, plan: Any, **options: Any) -> Any:
        spec = super().make_launch_spec(plan, **options)
        return spec.model_copy(update={"stall_timeout_s": 1.5, "ready_timeout_s": 30.0, "grace_s": 2.0})


class UpstreamLab:
    """A state folder whose `local.yaml` names the replayed engine, and a machine with a card of 8 GB."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.state, self.port = lab, lab.state, lab.port
        self.home = install_upstream(lab.folder / "upstream")
        self.gpu = make_gpu(8, 7.6, uuid="GPU-1")
        self.steps: list[str] = []
        (lab.state / "local.yaml").write_text(
            f"engines: {{freetoken: {{python: {sys.executable}, pythonpath: {self.home}}}}}\n"
        )

    def play(self, *scenarios: dict[str, Any]) -> None:
        """What the next starts do."""
        write_scenarios(self.home, *scenarios)

    @property
    def starts(self) -> list[dict[str, Any]]:
        return read_starts(self.home)

    def flag(self, name: str, start: int = -1) -> str | None:
        argv = self.starts[start]["argv"]
        return argv[argv.index(name) + 1] if name in argv else None

    def tools(self, **changes: Any) -> Tools:
        values: dict[str, Any] = {
            "find_adapter": lambda _: QuickAdapter(),
            "probe": lambda _: make_machine(self.gpu, ram_gib=64),
            "locate": lambda ref, base: SimpleNamespace(
                path=Path("/models/qwen"), shape=make_qwen_shape(), download_bytes=0, note=""
            ),
            "connect": lambda url, key: ControlClient(url, key, timeout_s=5.0),
            "keeper_policy": KeeperPolicy(max_restarts=2, window_s=60, backoff_s=0.05, poll_s=0.1),
        }
        return Tools(**(values | changes))

    def write_recipe(self, text: str = "", **settings: Any) -> Path:
        path = self.lab.folder / "up.yaml"
        values = ", ".join(f"{key}: {value}" for key, value in settings.items())
        path.write_text(
            "version: 1\nname: up\nmodel: {path: /models/qwen}\nengine: {name: freetoken}\nheadroom: server\n"
            f"serve: {{port: {self.port}}}\nworkload: {{prompt_tokens: 3072, output_tokens: 256}}\n"
            f"settings: {{{values}}}\n{text}"
        )
        return path

    def apply(self, text: str = "", *, tools: Tools | None = None, **settings: Any) -> ApplyResult:
        self.steps.clear()

        def note(step: Step) -> None:
            if not step.is_update:
                self.steps.append(f"{step.phase}: {step.message}")

        loaded = load_recipe(str(self.write_recipe(text, **settings)))
        return apply_recipe(loaded, progress=note, tools=tools or self.tools())


@pytest.fixture(name="up")
def make_upstream_lab(lab: Lab) -> Iterator[UpstreamLab]:
    """The laboratory; afterwards nothing of it may run any more."""
    return UpstreamLab(lab)  # type: ignore[return-value]
