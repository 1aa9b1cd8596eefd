"""The tuner's method against what studies on an H200 held down to 8 GiB measured: what it asks for next.

The measurements stand in tests/fixtures/tuner_gpu.json; benchmarks/gpu/README.md has the studies. Nothing is launched:
the same observations are told to the method of today, on the plan of today.
"""

import json
from pathlib import Path

import pytest

from freetoken.deploy.prepare import prepare_request
from freetoken.hardware.model import Hardware
from freetoken.recipe.load import load_recipe
from freetoken.tuner.method import Method
from freetoken.tuner.objectives import pick_objectives
from freetoken.tuner.site import PlannedSite
from freetoken.tuner.space import make_space
from freetoken.tuner.values import Measurement, Observation, Outcome

ROOT = Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "tests/fixtures/tuner_gpu.json").read_text(encoding="utf-8"))
HAND = str(ROOT / "benchmarks/gpu/hand-2k.yaml")


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "run"))


def make_method(workload, *objectives, sets=()):
    from freetoken.adapters import get_adapter

    loaded = load_recipe("qwen3.6-35b-a3b-8gb", sets=("headroom=150MiB", f"workload={workload}", *sets))
    request = prepare_request(loaded, hardware_now=Hardware.model_validate(DOCUMENT["hardware"]))
    adapter = get_adapter("freetoken")
    # FlashInfer was not in the engine's environment.
    site = PlannedSite(request, adapter, make_space(request, adapter, {"flashinfer"}))
    return Method(site, pick_objectives(objectives))


def read_history(name, count):
    """The first `count` observations of a study."""
    found = []
    for number, one in enumerate(DOCUMENT["studies"][name][:count]):
        measurement = Measurement(**one["measurement"]) if one["measurement"] else None
        outcome = Outcome(kind=one["outcome"], measurement=measurement, violation_bytes=one["violation_bytes"])
        found.append(Observation(
            number=number, point=one["point"], stage=one["stage"], start=one["start"], outcome=outcome,
            predicted_cost=one["predicted_cost"],
        ))  # fmt: skip
    return found


def test_after_one_calibrated_start_each_objective_asks_for_another_prefill_chunk():
    """A chunk of 8,192 computes a long prompt at once; one of 2,048 leaves its memory to hundreds of slots."""
    history, asked = read_history("agent-8k", 2), {}
    for objective in ("turn_time", "decode_tps"):
        proposal = make_method("agent-8k", objective).propose(history)
        assert (proposal.stage, proposal.point["strategy"]) == ("predicted", "offload")
        asked[objective] = proposal.point
    assert asked["turn_time"]["prefill_chunk_tokens"] == 8192
    assert asked["decode_tps"]["prefill_chunk_tokens"] == 2048
    assert asked["decode_tps"]["expert_slots"] > asked["turn_time"]["expert_slots"] + 250


def test_of_both_starts_measured_each_objective_takes_its_own():
    """Both studies of one day in one history: 1.67 s and 196 tok/s against 2.25 s and 216 tok/s."""
    both = [*read_history("agent-8k, turn_time", 5), *read_history("agent-8k, decode_tps", 6)]
    history = [
        one.model_copy(update={"number": number, "start": one.start + 2 * (number >= 5)})
        for number, one in enumerate(both)
    ]
    method = make_method("agent-8k", "turn_time")
    turn, decode = (method.best(history, one) for one in pick_objectives(("turn_time", "decode_tps")))
    assert turn.point["prefill_chunk_tokens"] == 8192
    assert decode.point["prefill_chunk_tokens"] == 2048
    assert turn.measurement.turn_time_s < 0.8 * decode.measurement.turn_time_s
    assert decode.measurement.decode_tps > 1.05 * turn.measurement.decode_tps
    # The first measurement of the default had kernels compiled in it, so that it was made once more.
    assert [one.stage for one in both[:2]] == ["default", "repeat"]
    assert method.propose(history[:1], running=1).stage == "repeat"


def test_with_two_objectives_the_best_of_each_is_started_before_another_strategy():
    method = make_method("agent-8k", "decode_tps", "turn_time")
    history = read_history("agent-8k", 4)
    # The study's own second start was the one for `turn_time`.
    assert history[2].point["prefill_chunk_tokens"] == 8192
    assert history[2].stage == "predicted"
    proposal = method.propose(history)
    assert (proposal.stage, proposal.point["strategy"]) == ("predicted", "offload")
    assert proposal.point["prefill_chunk_tokens"] == 2048


@pytest.mark.parametrize(("study", "sets"), [
    ("hand-2k", ()),
    ("hand-2k, state_dtype", ("allow_quality_changes=[state_dtype]",)),
])  # fmt: skip
def test_offload_is_started_before_hybrid_of_which_nobody_has_measured_the_pair(study, sets):
    proposal = make_method(HAND, "decode_tps", sets=sets).propose(read_history(study, 2))
    assert (proposal.stage, proposal.point["strategy"]) == ("predicted", "offload")
    assert proposal.point["expert_slots"] > 2750
    if sets:
        assert proposal.point["state_dtype"] in ("bfloat16", "float16")


def test_what_nobody_measured_of_the_pair_is_said():
    site = make_method(HAND, "decode_tps").site
    assert "`ft bench bw` measures them" in site.describe_doubt()
    site._rates = site.rates._replace(cpu_overlap=50e9)
    assert site.describe_doubt() == ""
    assert make_method(HAND, "decode_tps", sets=("settings.strategy=offload",)).site.describe_doubt() == ""


def test_a_refused_resize_is_asked_for_again_with_what_was_missing_left_out():
    study, sets = "hand-2k, state_dtype", ("allow_quality_changes=[state_dtype]",)
    method = make_method(HAND, "decode_tps", sets=sets)
    assert DOCUMENT["studies"][study][3]["outcome"] == "refused"
    first = method.propose(read_history(study, 3), running=2)
    told = read_history(study, 4)[-1]
    missing = DOCUMENT["studies"][study][3]["violation_bytes"]
    method.note_refusal(told.point, told.outcome.model_copy(update={"ledger_bytes": missing}), is_live=True)
    second = method.propose(read_history(study, 4), running=2)
    assert (first.stage, second.stage) == ("grow", "grow")
    forecast = method.site.forecast(second.point)
    refused = DOCUMENT["studies"][study][3]["point"]["expert_slots"]
    assert second.point["expert_slots"] <= refused - missing // forecast.slot_bytes
    assert second.point["expert_slots"] > 1.02 * DOCUMENT["studies"][study][2]["point"]["expert_slots"]


def test_beside_a_default_that_stays_the_best_no_start_takes_over_what_only_the_default_has():
    """Four requests, where the workload has one: they only take memory."""
    method = make_method(HAND, "decode_tps")
    history = read_history("hand-2k", 3)
    best = history[0].measurement.model_copy(update={"decode_tps": 400.0})
    history[0] = history[0].model_copy(update={"outcome": history[0].outcome.model_copy(update={"measurement": best})})
    assert history[0].point["max_running_requests"] == 4
    for _ in range(4):
        proposal = method.propose(history)
        assert proposal.point is None or proposal.point["max_running_requests"] == 1
        if proposal.point is None:
            break
        slow = history[2].measurement.model_copy(update={"decode_tps": 150.0})
        number = len(history)
        history.append(history[2].model_copy(update={
            "number": number, "start": number, "point": proposal.point, "stage": proposal.stage,
            "outcome": Outcome(kind="ok", measurement=slow),
        }))  # fmt: skip


def test_what_a_study_measured_is_predicted_from_the_start_before_it():
    """Slots, requests, cache and embedding all changed at once between the two starts."""
    method = make_method("agent-8k", "turn_time")
    method.learn(read_history("agent-8k", 2))
    measured = read_history("agent-8k", 3)[-1]
    forecast = method.site.forecast(measured.point)
    found = method.model.predict([(measured.point, forecast, int(measured.point["expert_slots"]))])
    # The random router's hit rate rises faster with slots than the law of real models: 0.92 where it says 0.76.
    assert 1 / float(found.step_s[0]) == pytest.approx(measured.measurement.decode_tps, rel=0.15)
    assert float(found.prefill_s[0]) == pytest.approx(measured.measurement.ttft_s, rel=0.12)
