"""`ft tune` on the upstream engine, replayed: its own default first, as whoever gives no flags would have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from freetoken.deploy.tools import DEFAULT_TOOLS
from freetoken.errors import FtError
from freetoken.recipe.load import load_recipe
from freetoken.recipe.workload import Workload
from freetoken.tuner.outcome import Options, TuneResult
from freetoken.tuner.session import Session
from tests.e2e.life import make_lab, stop_all  # noqa: F401
from tests.e2e.upstream import UpstreamLab, make_upstream_lab  # noqa: F401
from tests.fakes.planner_cases import make_gpu


@pytest.fixture
def tuned(up: UpstreamLab) -> Iterator[UpstreamLab]:
    """The laboratory as the machine that every command sees."""
    names = ("find_adapter", "probe", "locate", "connect", "keeper_policy")
    before = {name: getattr(DEFAULT_TOOLS, name) for name in names}
    tools = up.tools()
    for name in names:
        object.__setattr__(DEFAULT_TOOLS, name, getattr(tools, name))
    try:
        yield up
    finally:
        for name, value in before.items():
            object.__setattr__(DEFAULT_TOOLS, name, value)
        stop_all()


def tune(up: UpstreamLab, trials: int) -> TuneResult:
    loaded = load_recipe(str(up.write_recipe(strategy="offload", attention="triton")))
    load = Workload(name="short", prompt_tokens=600, output_tokens=48, context_tokens=4096)
    loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"workload": load}))
    up.play({"itl_s": 0.002})
    said: list[str] = []
    session = Session(loaded, Options(budget_s=600.0, trials=trials, repeats=1, objectives=("decode_tps",)))
    session.on_progress = lambda progress: said.append(progress.message)
    try:
        return session.run()
    except FtError as error:
        raise AssertionError(said) from error


def test_the_default_is_started_with_the_slots_and_requests_that_the_engine_takes_unasked(tuned: UpstreamLab) -> None:
    result = tune(tuned, 1)
    assert result.baseline_words == "the engine's own default; nothing else was measured"
    assert tuned.flag("--max-running-requests") == "4"
    assert tuned.flag("--max-prefill-length") == "4096"  # 8,192, where no prompt is longer
    assert tuned.flag("--embed-weights") in (None, "gpu")
    # Of 7.6 GiB free, at its own ratio: more than the planner would give beside such a chunk.
    assert tuned.flag("--moe-cache-size") == str(result.baseline["expert_slots"])
    assert int(result.baseline["expert_slots"]) > 1000
    # It was asked for what the workload asks for, not for a full chunk.
    log = "".join((path / "engine.log").read_text() for path in tuned.lab.run_dirs())
    assert max(int(part.split(",")[0]) for part in log.split("#new-token: ")[1:]) < 1000


def test_what_the_search_starts_after_it_has_no_more_requests_than_the_workload(tuned: UpstreamLab) -> None:
    tune(tuned, 7)
    found = [tuned.flag("--max-running-requests", index) for index in range(len(tuned.starts))]
    assert found[0] == "4"
    assert "1" in found
    # The default alone is started as it is: where it is confirmed against, or repeated.
    assert set(found[1:]) <= {"1", "4"}
    slots = {tuned.flag("--moe-cache-size", index) for index, one in enumerate(found) if one == "4"}
    assert len(slots) == 1


def test_a_default_that_the_engine_itself_refuses_costs_no_start(tuned: UpstreamLab) -> None:
    tuned.gpu = make_gpu(6, 4.6, uuid="GPU-1")
    result = tune(tuned, 2)
    assert {tuned.flag("--max-running-requests", index) for index in range(len(tuned.starts))} == {"1"}
    assert result.baseline_words.startswith(
        "the engine's default did not work (refused); the first setting that worked"
    )
    assert result.is_tuned
    assert result.tuned_recipe is not None
