import json

from freetoken.adapters import get_adapter
from freetoken.deploy.lock import compute_slot_bytes
from freetoken.deploy.prepare import prepare_plan, prepare_request
from freetoken.recipe.load import load_recipe
from freetoken.share.bundle import read_bundle
from freetoken.share.seeds import find_seeds


def bring(big, *figures):
    path = big.write()
    plan = big.lock(path)
    big.record(plan, *figures)
    assert big.ft("export", str(path), "-o", "mine.ftbundle")[0] == 0
    return big.folder / "mine.ftbundle", plan


def test_a_recipe_of_a_large_card_is_planned_anew_for_a_small_one(big, small):
    file, theirs = bring(big, 60.0, 64.0, 62.0)
    code, out, _ = small.ft("import", str(file), "--profile", small.profile, "--json")
    found = json.loads(out)
    rows = {row["setting"]: row for row in found["rows"]}
    assert code == 0
    assert found["relaxed"] == ["expert_slots"]
    slots = rows["expert_slots_bytes"]
    assert slots["author"] == "6.64 GiB (4,000)"
    assert slots["reason"].startswith("the author's value does not fit here; what VRAM leaves after KV and headroom")
    # Whatever is equal has no reason, whatever is not has one.
    assert all(bool(row["reason"]) == (row["author"] != row["here"]) for row in found["rows"])
    assert rows["prefill_chunk_tokens"]["here"] == rows["prefill_chunk_tokens"]["author"] == "4,096"
    assert found["author_decode_tps"] == 62.0
    assert 0.2 < found["expected_ratio"] < 0.95
    assert found["distance"]["is_same_class"] is False
    assert any(one.startswith("VRAM: 16.0 GiB there, 6.00 GiB here") for one in found["distance"]["differences"])
    # What was kept is a recipe that fits here as it stands.
    plan = prepare_plan(load_recipe(found["recipe_path"]), hardware=small.hardware)
    assert plan.kind == "plan"
    assert plan.settings.expert_slots < theirs.settings.expert_slots


SMALL = """
version: 1
name: mine
model: {repo: nvidia/Qwen3.6-35B-A3B-NVFP4}
engine: {name: freetoken, version: ">=0.2.1,<0.3"}
hardware: {gpu: {vram: ">=5GiB", compute_capability: ">=8.6"}, cpu: {cores: 4}}
workload: agent-8k
settings: {expert_slots: 900}
headroom: desktop
"""


def test_a_recipe_of_a_small_card_says_what_a_large_one_gives_away(big, small):
    path = small.write(SMALL)
    small.record(small.lock(path), 27.0)
    assert small.ft("export", str(path), "-o", "mine.ftbundle")[0] == 0
    file = str(small.folder / "mine.ftbundle")
    code, out, said = big.ft("import", file, "--profile", big.profile, "--json")
    found = json.loads(out)
    assert (code, found["relaxed"], found["open_names"]) == (0, [], ["expert_slots"])
    assert found["open_decode_tps"] > 1.5 * found["predicted_decode_tps"]
    assert "the recipe fixes `expert_slots`; left open, " in said
    assert "`ft apply state/imports/mine.yaml --set settings.expert_slots=auto`" in said
    # With it open, that is what the planner says.
    again = load_recipe(found["recipe_path"], sets=("settings.expert_slots=auto",))
    plan = prepare_plan(again, hardware=big.hardware)
    assert plan.prediction.decode_tps == found["open_decode_tps"]
    # Back on a card of its own size nothing is given away.
    found = json.loads(small.ft("import", file, "--profile", small.profile, "--json")[1])
    assert found["open_names"] == []


def test_needs_that_a_machine_does_not_meet_are_told_as_they_were_asked(big, small):
    path = big.write(SMALL.replace(">=5GiB", ">=12GiB"))
    big.lock(path)
    big.ft("export", str(path), "-o", "mine.ftbundle")
    _, out, _ = small.ft("import", str(big.folder / "mine.ftbundle"), "--profile", small.profile, "--json")
    (row,) = [row for row in json.loads(out)["rows"] if row["setting"] == "hardware"]
    assert (row["author"], row["here"]) == ("vram >= 12.0 GiB, compute_capability >= 8.6, cores >= 4", "given up")


def test_a_machine_of_the_same_class_may_run_it_as_it_was(big, tmp_path, monkeypatch, capsys):
    file, _ = bring(big, 60.0)
    twin = type(big)(tmp_path / "twin", big.profile, monkeypatch, capsys)
    code, out, said = twin.ft("import", str(file), "--profile", twin.profile)
    assert code == 0
    assert "the same class of machine" in out
    assert out.endswith("; 60.0 were measured on the same class of machine\n")
    assert "`--locked`: exactly as the author ran it" in said


def test_the_tuner_starts_from_what_the_author_found_rescaled(big, small):
    file, plan = bring(big, 60.0)
    big.record(plan, 70.0, slots=900)
    big.ft("export", "mine.yaml", "-o", "mine.ftbundle")
    _, out, _ = small.ft("import", str(file), "--profile", small.profile, "--json")
    recipe = load_recipe(json.loads(out)["recipe_path"])
    request = prepare_request(recipe, hardware=small.hardware)
    here = prepare_plan(recipe, hardware=small.hardware)
    seeds = find_seeds(recipe.path, request, compute_slot_bytes(here))
    # The fastest first.
    assert [seed["expert_slots"] for seed in seeds.points] == [900, 4000]
    assert {seed["prefill_chunk_tokens"] for seed in seeds.points} == {4096}
    assert seeds.words.startswith("found with `mine` on NVIDIA GeForce RTX 4060 Ti; GPU: ")
    known = {knob.name for knob in get_adapter("freetoken").knobs}
    assert {"expert_slots", "kv_tokens", "strategy", "prefill_chunk_tokens"} <= set(seeds.points[0]) & known


def test_a_bundle_of_another_model_seeds_nothing(big, small):
    file, _ = bring(big, 60.0)
    small.ft("import", str(file), "--profile", small.profile)
    path = small.write(name="mine")
    path.write_text(path.read_text().replace("Qwen3.6-35B-A3B-NVFP4", "Qwen3-30B-A3B"))
    loaded = load_recipe(str(path))
    shown = load_recipe(str(small.folder / "state" / "imports" / "mine.yaml"))
    request = prepare_request(shown, hardware=small.hardware).model_copy(update={"recipe": loaded.recipe})
    assert find_seeds(loaded.path, request, 4096).points == ()


def test_export_import_export_gives_the_same_bytes(big, small):
    file, _ = bring(big, 60.0, 61.0)
    assert small.ft("import", str(file), "--profile", small.profile)[0] == 0
    again = small.ft("export", "state/imports/mine.yaml", "-o", "again.ftbundle")
    assert again[0] == 0
    assert (small.folder / "again.ftbundle").read_bytes() == file.read_bytes()


def test_what_was_measured_here_replaces_what_came(big, small):
    file, _ = bring(big, 60.0)
    small.ft("import", str(file), "--profile", small.profile)
    small.record(small.lock(small.folder / "state" / "imports" / "mine.yaml"), 20.0)
    assert small.ft("export", "state/imports/mine.yaml", "-o", "again.ftbundle")[0] == 0
    bundle = read_bundle((small.folder / "again.ftbundle").read_bytes(), "x")
    assert bundle.evidence.best().figures["decode_tps"].median == 20.0
    assert bundle.evidence.machine.vram_bytes == 6 << 30


def test_a_proof_or_a_failure_here_does_not_replace_what_came(big, small):
    file, _ = bring(big, 60.0)
    small.ft("import", str(file), "--profile", small.profile)
    plan = small.lock(small.folder / "state" / "imports" / "mine.yaml")
    small.record(plan, 12.0, kind="proof", failed=["engine out of memory"])
    assert small.ft("export", "state/imports/mine.yaml", "-o", "again.ftbundle")[0] == 0
    evidence = read_bundle((small.folder / "again.ftbundle").read_bytes(), "x").evidence
    assert evidence == read_bundle(file.read_bytes(), "x").evidence


def test_an_import_keeps_nothing_outside_its_folder(big, small):
    file, _ = bring(big, 60.0)
    before = set(small.folder.rglob("*"))
    small.ft("import", str(file), "--profile", small.profile)
    fresh = {path.relative_to(small.folder).as_posix() for path in set(small.folder.rglob("*")) - before}
    names = {"mine.ftbundle", "mine.yaml", "mine.kept", "mine.lock"}
    assert fresh == {"state", "state/imports", *(f"state/imports/{name}" for name in names)}


def test_a_second_bundle_of_the_same_name_asks_for_a_decision(big, small):
    file, plan = bring(big, 60.0)
    small.ft("import", str(file), "--profile", small.profile)
    assert small.ft("import", str(file), "--profile", small.profile)[0] == 0  # the very same is no conflict
    big.record(plan, 61.0)
    big.ft("export", "mine.yaml", "-o", "mine.ftbundle")
    code, _, said = small.ft("import", str(file), "--profile", small.profile)
    assert code == 2
    assert "`--replace` takes the new one, `--name NAME` keeps both" in said
    assert small.ft("import", str(file), "--profile", small.profile, "--name", "theirs")[0] == 0
    assert small.ft("import", str(file), "--profile", small.profile, "--replace")[0] == 0


def test_a_machine_that_cannot_run_it_says_why_and_runs_nothing(big, small):
    file, _ = bring(big, 60.0)
    code, out, said = small.ft("import", str(file), "--profile", "cpu-only-16gb", "--apply", "--yes")
    assert code == 3
    assert "error:" in said
    assert "predicted" not in out


def test_it_never_runs_without_being_asked(big, small):
    file, _ = bring(big, 60.0)
    code, _, said = small.ft("import", str(file), "--profile", small.profile, "--apply")
    assert code == 2
    assert "nobody can be asked here whether to run it" in said
    assert not (small.folder / "state" / "runs").exists()
