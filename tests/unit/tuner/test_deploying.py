import socket
from types import SimpleNamespace

import pytest

from freetoken.adapters.base import DefaultSlots
from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.bench.result import BenchResult, Estimate
from freetoken.deploy import runs
from freetoken.deploy.apply import KeptError, NotLive
from freetoken.errors import FtError
from freetoken.recipe.load import load_recipe, load_workload
from freetoken.tuner import deploying
from freetoken.tuner.deploying import DeployLauncher, pick_port, read_result


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "run"))
    loaded = load_recipe("demo")
    request = SimpleNamespace(recipe=loaded.recipe)
    site = SimpleNamespace(
        fix=lambda point, slots: request, forecast=lambda point: None, own_verdict=lambda point: point.get("own"),
        workload=load_workload("agent-8k"),
    )  # fmt: skip
    return DeployLauncher(loaded, site, "demo-tune", pick_port())


def test_a_port_that_somebody_took_between_two_trials_is_given_up_for_another(launcher, monkeypatch):
    seen = []
    monkeypatch.setattr(
        deploying,
        "apply_recipe",
        lambda loaded, **_: seen.append(loaded.recipe.serve.port) or SimpleNamespace(run_id="1"),
    )
    first = launcher.port
    assert launcher.start({}).kind == "ok"
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert launcher.start({}).kind == "ok"
    assert seen[0] == first
    assert seen[1] == launcher.port != first


@pytest.mark.parametrize(
    ("message", "kind"), [("port 1919 is taken by `python` (process 7)", "invalid"), ("the disk is full", "crash")]
)
def test_a_port_taken_in_the_last_moment_says_nothing_of_the_settings(launcher, monkeypatch, message, kind):
    def fail(*_, **__):
        raise FtError(message)

    monkeypatch.setattr(deploying, "apply_recipe", fail)
    outcome = launcher.start({})
    assert (outcome.kind, outcome.words) == (kind, message)


def test_the_engines_default_is_started_whatever_the_planner_says_and_proven_by_what_the_workload_asks(
    launcher, monkeypatch
):
    seen = []

    def note(loaded, *, is_forced, tools, **_):
        seen.append((is_forced, tools.most_proof_tokens, tools.max_retries))
        return SimpleNamespace(run_id="1")

    monkeypatch.setattr(deploying, "apply_recipe", note)
    launcher.start({"own": DefaultSlots(slots=1366)})
    launcher.start({})
    assert seen == [(True, 2816, 0), (False, None, 0)]


def test_ports_of_trials_lie_below_those_of_outgoing_connections():
    found = {pick_port() for _ in range(20)}
    assert len(found) > 10
    assert all(20_000 <= port < 32_768 for port in found)


def test_what_ran_for_the_study_leaves_no_declaration(launcher):
    runs.write_declaration("demo", "20310504-093000-125-3fa9c2", is_wanted=True)
    runs.write_declaration("demo-tune", "20310504-093000-125-3fa9c3", is_wanted=True)
    launcher.stop()
    assert [one.name for one in runs.read_declarations()] == ["demo"]
    launcher.stop()  # harmless where there is none


def resize_with(launcher, monkeypatch, said, *, is_declined=True, is_living=True):
    """The outcome of a resize that was not had, for which the engine or its proof `said` why; None = none was tried."""

    def apply(loaded, *, confirm, **_):
        assert confirm("end what runs?") is False, "a trial that turns a live knob ends nothing"
        raise KeptError("demo-tune", NotLive(FtError(said), is_declined) if said else None)

    monkeypatch.setattr(deploying, "apply_recipe", apply)
    found = SimpleNamespace(life=SimpleNamespace(is_living=is_living))
    monkeypatch.setattr(deploying, "find_running", lambda name: found)
    launcher.site.adapter = FreetokenAdapter()
    return launcher.resize({})


REJECTED = (
    "the engine answered `rejected`: requested cache (moe=2937 slots, kv=8192 pages, mamba=1 slots) needs 5.03 GiB > "
    "budget 4.89 GiB; old cache kept, still serving"
)


def test_a_resize_that_the_engine_rejects_is_refused_and_restarts_nothing(launcher, monkeypatch):
    outcome = resize_with(launcher, monkeypatch, REJECTED)
    assert outcome.kind == "refused"
    assert outcome.violation_bytes > 0
    assert "5.03 GiB > budget 4.89 GiB" in outcome.words


@pytest.mark.parametrize("said", ["the engine answered `busy`: a request needs 4,096 tokens", None])
def test_a_resize_that_is_declined_for_any_other_reason_is_refused_too(launcher, monkeypatch, said):
    """Not now; or what differs cannot be turned live at all."""
    outcome = resize_with(launcher, monkeypatch, said)
    assert (outcome.kind, outcome.ledger_bytes) == ("refused", None)


def test_a_resize_that_failed_half_way_is_a_crash_though_the_engine_answers(launcher, monkeypatch):
    assert resize_with(launcher, monkeypatch, "the engine answered `failed`: gone", is_declined=False).kind == "crash"


def test_a_resize_that_breaks_the_engine_is_a_crash(launcher, monkeypatch):
    assert resize_with(launcher, monkeypatch, REJECTED, is_living=False).kind == "crash"
    assert resize_with(launcher, monkeypatch, "CUDA out of memory", is_declined=False).kind == "crash"


def test_each_figure_of_the_bench_brings_its_own_noise():
    def told(mean, half, n):
        return Estimate(mean=mean, low=mean - half, high=mean + half, n=n)

    metrics = {
        "decode_tps": told(200.0, 1.96, 6), "ttft_ms": told(400.0, 100.0, 6), "turn_time_s": told(2.0, 0.196, 6),
        "total_decode_tps": told(210.0, 1.0, 1),
    }  # fmt: skip
    found = read_result(BenchResult(workload="w", repeats=1, seed=0, metrics=metrics), is_on_gpu=True).measurement
    assert found.noise_ratio == pytest.approx(0.05)
    assert found.decode_noise_ratio == pytest.approx(0.005)
    assert found.total_noise_ratio == deploying.LONE_NOISE
