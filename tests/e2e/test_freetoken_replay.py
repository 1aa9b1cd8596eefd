"""`ft apply` on the upstream engine, replayed: launch, read-back, resize, restart, failures, recovery, growth."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from freetoken.adapters.freetoken_flags import list_flags
from freetoken.cli.target import connect
from freetoken.deploy.measure import find_target, measure_target
from freetoken.deploy.overview import read_overview
from freetoken.errors import NotReadyError
from freetoken.recipe.load import load_workload
from freetoken.store import open_store
from freetoken.units import GIB
from tests.e2e.life import make_lab, stop_all, wait_for  # noqa: F401
from tests.e2e.upstream import UpstreamLab, make_upstream_lab  # noqa: F401
from tests.fakes.planner_cases import make_machine
from tests.fakes.upstream_replay import SLOT_BYTES, install_upstream

REPO = Path(__file__).resolve().parents[2]
CHUNK = {"prefill_chunk_tokens": 1024, "strategy": "offload"}


def test_it_is_launched_from_a_folder_with_our_own_package_and_proven_by_what_is_read_back(
    up: UpstreamLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Everything that could lead the engine's interpreter to our package of the same name.
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("PYTHONHOME", os.environ.get("PYTHONHOME", ""))
    install_upstream(up.home, flags=list_flags("0.2.1"))
    result = up.apply(**CHUNK)
    assert (result.diff.action, result.plan.engine_version) == ("launch", "0.2.1")
    (start,) = up.starts
    assert start["cwd"] == result.run_dir
    assert start["pythonpath"] == str(up.home)
    assert "PYTHONHOME" not in start["env"]
    proof = result.proof
    assert proof is not None
    settings = result.plan.settings
    assert (proof.expert_slots, proof.kv_tokens) == (settings.expert_slots, settings.kv_tokens)
    assert (proof.strategy, proof.attention, proof.compile_s) == ("offload", "triton", 0.0)
    assert proof.chunk_prompt_tokens >= 1024
    assert proof.measured_bytes["expert_slots"] == settings.expert_slots * SLOT_BYTES
    assert up.apply(**CHUNK).diff.action == "nothing"
    rows = {row.field: row for row in read_overview("up", tools=up.tools()).deployments[0].rows}
    assert rows["hit_ratio"].measured == 0.718
    assert rows["hit_ratio"].planned is not None
    with connect("up") as client:
        hits = client.stats().moe_hits
    assert hits is not None
    assert hits.miss_bytes == hits.misses * SLOT_BYTES
    stop_all()
    state = up.lab.keeper_state()
    assert state is not None
    assert (state.state, state.cause) == ("stopped", "stopped on request: engine ended by SIGINT")


def test_a_measurement_has_the_hit_rate_of_its_own_time_from_the_log(up: UpstreamLab) -> None:
    up.play({"hit": "hit 40.0%, per layer-step miss 4.80 fetch 4.80 cpu 0.00"})
    up.apply(**CHUNK)
    target = find_target(up.lab.life())
    log = up.lab.run_dirs()[-1] / "engine.log"
    assert "hit 40.0%" in log.read_text()  # of the proof: no part of what is measured
    workload = load_workload("chat-2k").model_copy(update={"turns": 1, "output_tokens": 16})
    result = measure_target(target, workload, repeats=1).result
    assert result.mean("hit_ratio") == pytest.approx(0.4, abs=0.001)
    stop_all()


def test_more_slots_are_a_live_resize_that_may_be_busy_or_take_its_time_and_a_strategy_is_a_restart(
    up: UpstreamLab,
) -> None:
    up.play({"rebuilds": ["busy", "busy409", "timeout"], "rebuild_s": 0.3})
    up.apply(**CHUNK, expert_slots=900)
    resized = up.apply(**CHUNK, expert_slots=700)
    assert [change.describe() for change in resized.diff.changes] == ["settings.expert_slots: 900 -> 700 (live)"]
    assert resized.diff.action == "resize"
    assert resized.proof is not None
    assert resized.proof.expert_slots == 700
    assert len(up.starts) == 1
    restarted = up.apply(prefill_chunk_tokens=1024, strategy="cpu")
    assert restarted.diff.action == "restart"
    assert (up.flag("--moe-strategy"), up.flag("--moe-cache-size")) == ("cpu", None)
    stop_all()


@pytest.mark.parametrize("answer", ["rejected", "failed", "unsupported"])
def test_a_resize_that_the_engine_does_not_do_is_a_restart(up: UpstreamLab, answer: str) -> None:
    up.play({"rebuilds": [answer]}, {})
    up.apply(**CHUNK, expert_slots=700)
    result = up.apply(**CHUNK, expert_slots=900)
    assert result.diff.action == "restart"
    assert result.corrections[0].startswith(f"live resize: the engine answered `{answer}`: requested cache (moe=900")
    assert result.proof is not None
    assert result.proof.expert_slots == 900
    stop_all()


def test_a_start_that_runs_out_of_vram_is_planned_again_by_the_exact_overshoot(up: UpstreamLab) -> None:
    up.play({"ballast_gib": 1.2})
    result = up.apply(**CHUNK)
    assert len(up.starts) == 2
    assert result.proof is not None
    assert result.proof.expert_slots == int(up.flag("--moe-cache-size") or 0)
    (words,) = result.corrections
    found = re.fullmatch(
        r"the GPU ran out of memory: [\d.]+ MiB were asked for; planning again with exactly ([\d.]+) MiB more for "
        r"`expert_slots`",
        words,
    )
    assert found is not None, words
    failed = up.lab.run_dirs()[0]
    state = up.lab.keeper_state(failed)
    assert state is not None
    assert state.exit_code == -15
    assert state.cause.startswith("engine ended with SIGTERM (-15): OutOfMemoryError: CUDA out of memory.")
    asked, free = re.findall(r"([\d.]+) MiB", state.cause)[:2]
    assert float(found[1]) == pytest.approx(float(asked) - float(free), abs=0.6)
    stop_all()


def test_memory_that_went_away_after_the_plan_is_planned_without_and_blames_no_line(up: UpstreamLab) -> None:
    up.play({"ballast_gib": 1.2})
    less = up.gpu.model_copy(update={"vram_free_bytes": up.gpu.vram_free_bytes - int(1.2 * GIB)})
    tools = up.tools(probe=lambda _: make_machine(less if up.starts else up.gpu))
    result = up.apply(**CHUNK, tools=tools)
    assert len(up.starts) == 2
    (words,) = result.corrections
    assert words.endswith("; 1.20 GiB less VRAM is free by now; planning again with what there is")
    assert result.plan.vram is not None
    assert result.plan.vram.available_bytes == less.vram_free_bytes
    stop_all()


def test_an_out_of_memory_in_the_first_full_chunk_is_recovered_from_with_a_smaller_one(up: UpstreamLab) -> None:
    up.play({"most_tokens": 1500}, {})
    result = up.apply(strategy="offload")
    assert len(up.starts) == 2
    assert result.proof is not None
    assert "more for `prefill_transient`" in result.corrections[0]
    stop_all()


def test_what_fails_each_time_is_given_up_after_three_corrections_in_words(up: UpstreamLab) -> None:
    up.play({"ballast_gib": 7.0})
    with pytest.raises(NotReadyError) as failed:
        up.apply(**CHUNK)
    assert failed.value.exit_code == 4
    assert failed.value.message.startswith("`up` never became ready: the GPU ran out of memory: ")
    assert len(up.starts) <= 4


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ({"die": {"message": "ValueError: Model architecture OlmoeForCausalLM not supported"}},
         "the engine does not know the architecture `OlmoeForCausalLM`"),
        ({"die": {"message": "WeightLoadError: missing tensor model.norm.weight"}},
         "the checkpoint cannot be read: missing tensor model.norm.weight"),
        ({"exit": {"code": 2, "say": "ft serve: error: unrecognized arguments: --x"}},
         "the engine refused its command line: unrecognized arguments: --x"),
        ({"exit": {"code": 1, "say": "--gpu GPU-1: not found or not a unique prefix; run `nvidia-smi -L` to list"}},
         "the engine cannot use the GPU `GPU-1`: not found or not a unique prefix"),
        ({"hang": True}, "no progress, no CPU and no I/O for"),
        ({"attention": "fi"}, "it answers, but not as planned: `attention` is `fi`, planned `triton`"),
        ({"lie": {"moe_cache_size": 9}}, "it answers, but not as planned: `expert_slots` is 9, planned"),
    ],
)  # fmt: skip
def test_a_start_that_no_plan_can_mend_is_told_once(up: UpstreamLab, scenario: dict, message: str) -> None:
    up.play(scenario)
    with pytest.raises(NotReadyError) as failed:
        up.apply(**CHUNK)
    assert message in failed.value.message
    assert len(up.starts) == 1


def test_a_kill_for_host_memory_is_planned_again_with_more_room(up: UpstreamLab) -> None:
    up.play({"kill_self": True}, {})
    tools = up.tools(probe=lambda _: make_machine(up.gpu, ram_gib=48, ram_free_gib=40))
    result = up.apply(**CHUNK, tools=tools)
    assert "most likely for memory" in result.corrections[0]
    assert [up.flag("--expert-load", index) for index in (0, 1)] == ["parallel", "serial"]
    stop_all()


def test_a_silent_phase_in_which_a_child_works_is_no_hang(up: UpstreamLab) -> None:
    # The phase stays `other` with 0 of 0 bytes for twice the stall limit.
    up.play({"busy_child_s": 3.5})
    assert up.apply(**CHUNK).proof is not None
    stop_all()


def test_a_first_start_that_compiles_kernels_is_told_apart_and_not_timed(up: UpstreamLab) -> None:
    up.play({"compile_s": 40.0})
    result = up.apply(**CHUNK)
    assert result.proof is not None
    assert result.proof.compile_s == pytest.approx(36, abs=3)
    report = json.loads((up.lab.run_dirs()[-1] / "report.json").read_text())
    assert report["compile_s"] == result.proof.compile_s
    with open_store() as store:
        (run,) = store.list_runs()
    assert run.ready_s == max(0.0, report["ready_s"] - result.proof.compile_s)
    stop_all()


def test_growing_starts_lean_and_ends_at_the_plan_and_a_crash_is_grown_again_by_apply(up: UpstreamLab) -> None:
    # It could not start with what it then holds: the way from 512 to 940 slots of a 6 GB card.
    up.play({"most_slots": 512})
    result = up.apply("grow: true", **CHUNK, expert_slots=940)
    assert (up.flag("--moe-cache-size"), len(up.starts)) == ("512", 1)
    assert result.proof is not None
    assert (result.proof.expert_slots, result.plan.start_slots) == (940, 512)
    assert "grow: growing live from 512 to 940 expert slots" in up.steps
    engine = up.lab.life().engine
    up.lab.kill(engine)
    wait_for(lambda: (state := up.lab.keeper_state()) and state.restarts == 1 and state.state == "ready")
    view = read_overview("up", tools=up.tools()).deployments[0]
    assert view.drift == ("`expert_slots` is 512, planned 940",)
    again = up.apply("grow: true", **CHUNK, expert_slots=940)
    assert [change.describe() for change in again.diff.changes] == ["settings.expert_slots: 512 -> 940 (live)"]
    stop_all()


def test_growth_that_is_rejected_ends_at_what_fits_without_a_restart(up: UpstreamLab) -> None:
    up.play({"ballast_gib": 1.0})
    result = up.apply("grow: true", **CHUNK)
    assert (len(up.starts), up.flag("--moe-cache-size")) == (1, "512")
    assert result.proof is not None
    assert result.proof.expert_slots > 512
    assert result.plan.settings.expert_slots == result.proof.expert_slots
    (words,) = result.corrections
    assert "the old cache was kept; planning again with exactly" in words
    assert up.apply("grow: true", **CHUNK).diff.action == "nothing"
    stop_all()


def test_an_older_engine_is_told_only_what_it_knows(up: UpstreamLab) -> None:
    import shutil

    shutil.rmtree(up.home)
    install_upstream(up.home, version="0.1.2", flags=list_flags("0.1.2"))
    result = up.apply(**CHUNK)
    assert (result.plan.engine_version, up.flag("--moe-backend"), up.flag("--gpu")) == ("0.1.2", "offload", None)
    assert up.starts[0]["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    stop_all()


def test_both_ports_are_looked_at_before_the_start(up: UpstreamLab) -> None:
    import socket

    from freetoken.errors import FtError

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", up.port + 1))
        holder.listen()
        with pytest.raises(FtError, match=f"port {up.port + 1} is taken by"):
            up.apply(**CHUNK)
    assert up.starts == []
