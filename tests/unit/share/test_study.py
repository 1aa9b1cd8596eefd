"""The tuner's trials in a bundle, and a tuner that starts from them on another machine."""

import json

import pytest

from freetoken.adapters import get_adapter
from freetoken.deploy.prepare import prepare_request
from freetoken.recipe.load import load_recipe
from freetoken.share.bundle import read_bundle
from freetoken.share.evidence import summarise_figures
from freetoken.share.seeds import find_seeds, make_seeds
from freetoken.share.study import MAX_BROKEN, MAX_OK, make_point, pick_points
from freetoken.tuner.facts import make_facts
from freetoken.tuner.history import tell
from freetoken.tuner.method import Method
from freetoken.tuner.objectives import pick_objectives
from freetoken.tuner.record import write_facts
from freetoken.tuner.seeds import Seeds, describe_seeds, fit_seeds, mark_study
from freetoken.tuner.site import PlannedSite
from freetoken.tuner.space import make_space
from freetoken.tuner.values import Measurement, Outcome

OPEN = """
version: 1
name: mine
model: {repo: nvidia/Qwen3.6-35B-A3B-NVFP4}
engine: {name: freetoken, version: ">=0.2.1,<0.3"}
workload: agent-8k
headroom: desktop
"""
#: Words of a crash that name its machine, as an engine's log would.
PERSONAL = "out of memory on beates-laptop: see /home/beate/engine.log"


def make_site(machine, path, *, is_here=False):
    """What the tuner knows of the recipe at `path` on a machine, or on the real one."""
    machine.enter()
    loaded = load_recipe(str(path))
    adapter = get_adapter(loaded.recipe.engine.name)
    request = prepare_request(loaded, hardware=None if is_here else machine.hardware)
    return PlannedSite(request, adapter, make_space(request, adapter)), loaded


def ok(decode_tps):
    figures = {"decode_tps": decode_tps, "ttft_s": 2.0, "turn_time_s": 256 / decode_tps + 2.0}
    return Outcome(kind="ok", measurement=Measurement(**figures), run_id="20310504-093000-125-3fa9c2")


def study(machine, path, *trials, is_here=False, has_facts=False):
    """Keeps a study with `trials`: changes of the default point, and what came of each."""
    from optuna.storages import RDBStorage

    from freetoken import paths
    from freetoken.tuner.sampler import ModelSampler
    from freetoken.tuner.storage import open_study

    site, loaded = make_site(machine, path, is_here=is_here)
    objectives = pick_objectives(("turn_time",))
    paths.studies_path().parent.mkdir(parents=True, exist_ok=True)
    opened = open_study(
        "mine-1", RDBStorage(f"sqlite:///{paths.studies_path()}"), objectives, ModelSampler(Method(site, objectives))
    )
    mark_study(opened, site, loaded.recipe)
    if has_facts:
        write_facts(opened, make_facts(loaded, site, objectives, (), 60.0))
    for changes, outcome in trials:
        opened.enqueue_trial(site.space.clip({**site.default_point(), **changes}))
        trial = opened.ask(site.space.distributions())
        trial.set_user_attr("host", "beates-laptop")
        tell(opened, trial, outcome, objectives)
    return site


TRIALS = (
    ({"prefill_chunk_tokens": 2048, "expert_slots": 900}, ok(40.0)),
    ({"prefill_chunk_tokens": 4096, "expert_slots": 3000}, ok(61.0)),
    ({"prefill_chunk_tokens": 4096, "expert_slots": 3000}, ok(63.0)),
    ({"prefill_chunk_tokens": 8192}, Outcome(kind="crash", violation_bytes=300 << 20, words=PERSONAL)),
    ({"strategy": "hybrid"}, Outcome(kind="hang", violation_bytes=0, words=PERSONAL)),
    ({"prefix_cache": False}, Outcome(kind="invalid", words="another process took the GPU")),
)


@pytest.fixture
def shared(big):
    """A bundle with a study in it."""
    path = big.write(OPEN)
    big.record(big.lock(path), 50.0)
    study(big, path, *TRIALS)
    code, _, said = big.ft("export", str(path), "-o", "mine.ftbundle")
    assert code == 0, said
    return big.folder / "mine.ftbundle"


def test_the_trials_travel_in_bytes_with_failures_and_without_whose_they_are(shared):
    data = shared.read_bytes()
    told = read_bundle(data, "x").evidence.study
    assert [(one.kind, one.settings["prefill_chunk_tokens"], one.missing_bytes) for one in told] == [
        ("ok", 4096, 0), ("ok", 2048, 0), ("hang", 8192, 0), ("crash", 8192, 300 << 20),
    ]  # fmt: skip
    assert told[0].settings["expert_slots_bytes"] == 3000 * 1_781_760
    assert told[0].figures["decode_tps"] == 62.0  # two trials of the same settings are told once
    assert [word for word in ("beate", "laptop", "engine.log", "20310504-093000") if word.encode() in data] == []


def test_settings_that_differ_in_what_does_nothing_are_told_once(big):
    path = big.write(OPEN)
    big.record(big.lock(path), 50.0)
    offload = {"strategy": "offload", "prefill_chunk_tokens": 4096, "expert_slots": 3000}
    hybrid = {**offload, "strategy": "hybrid", "cpu_threads": 3}
    trials = [({**offload, "cpu_threads": 3}, ok(61.0)), ({**offload, "cpu_threads": 6}, ok(63.0)), (hybrid, ok(50.0))]
    study(big, path, *trials, has_facts=True)
    assert big.ft("export", str(path), "-o", "mine.ftbundle")[0] == 0
    told = read_bundle((big.folder / "mine.ftbundle").read_bytes(), "x").evidence.study
    assert [(one.settings["strategy"], one.settings.get("cpu_threads")) for one in told] == [
        ("offload", None), ("hybrid", 3),
    ]  # fmt: skip
    assert told[0].figures["decode_tps"] == 62.0


def test_the_same_study_gives_the_same_bytes(shared, big):
    big.ft("export", "mine.yaml", "-o", "again.ftbundle")
    assert (big.folder / "again.ftbundle").read_bytes() == shared.read_bytes()


def test_an_import_of_it_goes_out_again_as_it_came(shared, small):
    assert small.ft("import", str(shared), "--profile", small.profile)[0] == 0
    assert small.ft("export", "state/imports/mine.yaml", "-o", "again.ftbundle")[0] == 0
    assert (small.folder / "again.ftbundle").read_bytes() == shared.read_bytes()


def test_a_tuner_elsewhere_tries_them_first_in_its_own_counts(shared, small):
    code, out, _ = small.ft("import", str(shared), "--profile", small.profile, "--json")
    assert code == 0
    path = json.loads(out)["recipe_path"]
    site, loaded = make_site(small, path)
    found = find_seeds(loaded.path, site.request, site.forecast(site.planned_point()).slot_bytes)
    assert [one["expert_slots"] for one in found.points[:2]] == [3000, 900]
    method = Method(site, pick_objectives(("turn_time",)))
    tried = fit_seeds(method, found.points)
    # Beside a chunk of 4096 a card of 6 GB holds fewer slots, and the embedding only on the host.
    assert [(one["prefill_chunk_tokens"], one["embed_on_host"]) for one in tried] == [(4096, True), (2048, True)]
    assert tried[0]["expert_slots"] == method.candidate(tried[0]).slots < 3000
    assert tried[1]["expert_slots"] == 900
    for one in tried:
        forecast = site.forecast(one)
        assert (forecast.missing_bytes, forecast.peak_at(one["expert_slots"]) <= forecast.limit_bytes) == (0, True)
    words = describe_seeds(tried, Seeds(found.points, found.words))
    counts = f"{len(tried)} of {len(found.points)} settings are tried first"
    assert words.startswith(f"{counts}; found with `mine` on NVIDIA")
    assert "VRAM: 16.0 GiB there, 6.00 GiB here (0.375 x)" in words


DEMO = """
version: 1
name: mine
model: {path: demo}
engine: {name: native}
workload: {name: short, prompt_tokens: 512, output_tokens: 48}
settings: {strategy: cpu}
"""


def test_ft_tune_says_what_it_starts_from_and_frees_what_the_recipe_fixes(big, small):
    path = big.write(DEMO)
    study(big, path, ({"prefill_chunk_tokens": 512}, ok(50.0)), ({"prefill_chunk_tokens": 256}, ok(40.0)), is_here=True)
    assert big.ft("export", str(path), "-o", "mine.ftbundle")[0] == 0
    assert small.ft("import", str(big.folder / "mine.ftbundle"))[0] == 0
    recipe = "state/imports/mine.yaml"
    code, out, said = small.ft("tune", recipe, "--dry-run", "--json")
    assert code == 0, said
    found = json.loads(out)
    assert [one["prefill_chunk_tokens"] for one in found["seeds"]] == [512, 256]
    assert "strategy" not in found["seeds"][0]
    assert found["seeds_words"] == "2 of 2 settings are tried first; found with `mine`"
    found = json.loads(small.ft("tune", recipe, "--free", "--dry-run", "--json")[1])
    assert {one["strategy"] for one in found["seeds"]} == {"cpu"}
    assert "seeds: 2 of 2 settings are tried first" in small.ft("tune", recipe, "--dry-run")[1]
    other = small.ft("tune", recipe, "--workload", "chat-2k", "--dry-run", "--json")[1]
    assert json.loads(other)["seeds_words"].endswith("found with `mine`; workload: short there, chat-2k here")
    # A bundle that is broken seeds nothing, and is no reason not to tune.
    (small.folder / "state" / "imports" / "mine.ftbundle").write_bytes(b"PK")
    code, out, said = small.ft("tune", recipe, "--dry-run", "--json")
    assert (code, json.loads(out)["seeds"], "no seeds: mine.ftbundle" in said) == (0, [], True)


def test_what_broke_there_is_no_seed(shared):
    chunks = {one["prefill_chunk_tokens"] for one in make_seeds(read_bundle(shared.read_bytes(), "x"), 4096)}
    assert 8192 not in chunks - {None}


def test_threads_travel_as_a_share_of_the_cores(shared):
    bundle = read_bundle(shared.read_bytes(), "x")
    there = [one.get("cpu_threads") for one in make_seeds(bundle, 4096)]
    assert (bundle.evidence.machine.cores, set(there)) == (6, {6, None})
    assert {one.get("cpu_threads") for one in make_seeds(bundle, 4096, cores=12)} == {12, None}


def test_the_study_of_a_recipe_that_meant_something_else_stays_here(shared, big):
    big.write(OPEN.replace("workload: agent-8k", "workload: {name: agent-8k, prompt_tokens: 64, output_tokens: 8}"))
    assert big.ft("export", "mine.yaml", "-o", "other.ftbundle")[0] == 0
    assert read_bundle((big.folder / "other.ftbundle").read_bytes(), "x").evidence.study == ()


def test_a_storage_that_is_broken_costs_a_note(shared, big):
    (big.folder / "state" / "studies.db").write_bytes(b"no database" * 1000)
    code, _, said = big.ft("export", "mine.yaml", "-o", "other.ftbundle")
    assert code == 0
    assert "the tuner's trials are left out: the storage" in said


def test_of_a_long_study_the_best_and_the_nearest_failures_travel():
    points = [make_point({"expert_slots": n}, 0, "ok", {"turn_time_s": float(n)}) for n in range(300, 0, -1)]
    points += [make_point({"expert_slots": n}, 0, "crash", {}, n) for n in range(900, 600, -1)]
    points += [make_point({"expert_slots": 5000}, 0, "refused", {}, 1)]
    told = pick_points(points, "turn_time")
    assert [one.settings["expert_slots"] for one in told if one.kind == "ok"] == list(range(1, MAX_OK + 1))
    assert [one.missing_bytes for one in told if one.kind != "ok"] == list(range(601, 601 + MAX_BROKEN))


def test_a_figure_is_told_with_the_noise_that_is_its_own():
    trial = {"turn_time_s": 2.0, "decode_tps": 200.0, "noise_ratio": 0.05, "decode_noise_ratio": 0.005}
    found = summarise_figures([trial])
    turn, decode = found["turn_time_s"], found["decode_tps"]
    assert (turn.low, turn.high) == (pytest.approx(1.8, abs=0.01), pytest.approx(2.2, abs=0.01))
    assert (decode.low, decode.high) == (198, 202)
