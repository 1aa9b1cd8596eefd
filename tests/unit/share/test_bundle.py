import json
import zipfile
from pathlib import Path

import pytest

from freetoken.recipe.dump import dump_recipe
from freetoken.recipe.load import load_recipe
from freetoken.share import archive
from freetoken.share.bundle import read_bundle
from freetoken.share.export import export_recipe
from freetoken.share.personal import find_personal
from freetoken.share.portable import make_portable
from freetoken.share.seeds import make_seeds
from tests.fakes.hostile import make_base

FIXTURE = Path(__file__).parents[2] / "fixtures" / "bundle-v1.ftbundle"
STUDY = Path(__file__).parents[2] / "fixtures" / "bundle-v1-study.ftbundle"
SIGNED = Path(__file__).parents[2] / "fixtures" / "bundle-v1-signed.ftbundle"


def export(machine, path):
    machine.enter()
    notes = []
    return export_recipe(load_recipe(str(path)), say=notes.append), notes


def test_the_same_recipe_gives_the_same_bytes(big):
    path = big.write()
    big.record(big.lock(path), 41.0, 43.0)
    assert export(big, path)[0] == export(big, path)[0]


def test_a_bundle_is_a_zip_file_that_others_can_open(tmp_path):
    file = tmp_path / "x.zip"
    file.write_bytes(make_base())
    with zipfile.ZipFile(file) as opened:
        assert opened.testzip() is None
        assert opened.namelist() == ["bundle.json", "recipe.yaml", "lock.yaml", "evidence.json"]


def test_what_belongs_to_this_machine_does_not_travel(big):
    path = big.write()
    big.lock(path)
    data, notes = export(big, path)
    recipe = read_bundle(data, "x").recipe
    assert notes == [
        "`settings.cpu_threads` belongs to this machine and travels as `auto`",
        "left out: `--cors-origins=...` is not on the list of arguments that may come from elsewhere",
    ]
    assert recipe.settings.expert_slots.bytes == 4000 * 1_781_760
    assert (recipe.settings.cpu_threads, recipe.settings.prefill_chunk_tokens) == ("auto", 4096)
    assert recipe.engine.extra_args == ("--page-size", "1")


def test_what_runs_is_exported_with_the_lock_of_its_plan(big):
    path = big.write()
    plan = big.lock(path)
    folder = big.folder / "state" / "runs" / "20310504-093000-125-3fa9c2"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe(str(path)).recipe))
    (folder / "plan.json").write_text(plan.model_dump_json())
    running, written = (read_bundle(export(big, one)[0], "x") for one in (folder / "recipe.yaml", path))
    assert running.lock == written.lock
    assert running.recipe == written.recipe


def test_export_without_a_name_needs_something_that_runs(big):
    code, _, said = big.ft("export")
    assert (code, "hint: name a recipe: `ft export RECIPE`" in said) == (2, True)


def test_making_a_recipe_portable_twice_changes_nothing(big):
    recipe = load_recipe(str(big.write())).recipe
    once = make_portable(recipe, 4096)
    assert make_portable(once, 4096) == once
    assert make_portable(once, 0) == once


def test_evidence_has_intervals_failures_and_the_class_of_the_machine(big):
    path = big.write()
    plan = big.lock(path)
    big.record(plan, 41.0, 43.0, 42.0, failed=["engine out of memory: see /home/someone/engine.log"])
    evidence = read_bundle(export(big, path)[0], "x").evidence
    (measured,) = evidence.measured
    assert measured.figures["decode_tps"].model_dump() == {"median": 42.0, "low": 41.0, "high": 43.0, "n": 3}
    assert set(measured.figures) == {"decode_tps", "ttft_ms"}
    assert (measured.day, measured.settings["expert_slots_bytes"]) == ("2031-05-03", 4000 * 1_781_760)
    assert [one.kind for one in evidence.failed] == ["memory"]
    assert (evidence.machine.gpu, evidence.machine.vram_bytes) == ("NVIDIA GeForce RTX 4060 Ti", 16 << 30)


def test_nothing_personal_is_in_the_bytes(big, monkeypatch, tmp_path):
    """A machine, a user and secrets of known names; none of them may be anywhere in the file."""
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "annemarie"))
    monkeypatch.setenv("LOGNAME", "annemarie")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setattr("socket.gethostname", lambda: "annes-laptop")
    path = big.write()
    plan = big.lock(path)
    uuid = "GPU-12345678-1234-1234-1234-123456789abc"
    plan = plan.model_copy(update={"settings": plan.settings.model_copy(update={"gpu": uuid})})
    big.record(plan, 40.0, failed=[f"{tmp_path}/engine.log: prompt 'my secret diary' killed on annes-laptop"])
    data, _ = export(big, path)
    files = archive.unpack(data, "x")
    words = (
        str(tmp_path),
        "annemarie",
        "annes-laptop",
        uuid,
        "hf_",
        "diary",
        "topsecret",
        str(big.folder),
        "engine.log",
    )
    assert [word for word in words if word.encode() in data] == []
    assert list(find_personal(files, {word: word for word in words})) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see /home/ann/notes.txt", "a path"), ("C:\\Users\\ann", "a path"), ("~/models", "a path"),
        ("GPU-12345678-1234-1234-1234-123456789abc", "a GPU's serial"), ("hf_abcdefghijklmnopqrst", "a token"),
        ("write to ann@host.example", "an e-mail address"), ("at 192.168.1.4", "an address"),
        ("in /workspace/models/a", "a path"), ("file:///x/y", "a path"), ("C:/Users/ann", "a path"),
        ("\\\\server\\share", "a path"), ("~ann/models", "a path"), ("52:54:00:12:34:56", "an address"),
        ("fe80::1ff:fe23:4567:890a", "an address"), ("2001:db8:0:0:0:0:0:1", "an address"), ("$HOME/x", "a path"),
    ],
)  # fmt: skip
def test_a_personal_description_is_not_exported(big, text, what):
    path = big.write()
    path.write_text(path.read_text() + f"description: {json.dumps(text)}\n")
    code, _, said = big.ft("export", str(path))
    assert code == 2
    assert f"not exported: recipe.yaml holds {what}" in said
    assert not (big.folder / "mine.ftbundle").exists()


@pytest.mark.parametrize(
    "text",
    ["40 tok/s at 1/2 of the slots and/or more", "asks /v1/chat/completions", "see https://host.example/a/b",
     "12:30:15", "16:9", "ratio 3:1", "on 127.0.0.1", "version 0.2.1"],
)  # fmt: skip
def test_ordinary_words_are_not_personal(text):
    assert list(find_personal({"recipe.yaml": f"description: {text}".encode()}, {})) == []


def test_names_of_user_and_host_are_found_in_any_case_but_not_in_the_model_s_name():
    words = {"annemarie": "the user's name", "lion": "the host's name"}
    text = b"description: by Annemarie\nmodel:\n  repo: annemarie/million-experts\nengine: {}\n"
    assert list(find_personal({"recipe.yaml": text}, words)) == ["recipe.yaml holds the user's name"]
    assert list(find_personal({"recipe.yaml": text.replace(b"by Annemarie", b"a million")}, words)) == []


def test_versions_of_packages_are_no_addresses():
    assert list(find_personal({"lock.yaml": b"nvidia-curand: {version: 10.3.9.90}"}, {})) == []


def test_a_model_folder_of_this_machine_cannot_be_exported(big):
    path = big.write("version: 1\nname: mine\nmodel: {path: model}\nworkload: agent-8k\n")
    code, _, said = big.ft("export", str(path))
    assert code == 2
    assert "which nobody else has" in said


def test_a_bundle_of_version_1_imports_for_ever(small):
    code, out, _ = small.ft("import", str(FIXTURE), "--profile", "rtx-3060-laptop-6gb")
    assert code == 0
    assert "42.0 tok/s (41.0 to 43.0, 3 measurements) on NVIDIA GeForce RTX 4060 Ti" in out


def test_a_bundle_of_version_1_with_a_study_imports_and_seeds_for_ever(small):
    code, out, said = small.ft("import", str(STUDY), "--profile", "rtx-3060-laptop-6gb")
    assert code == 0
    assert "1 setting failed there; 4 settings tried by its tuner, 2 of which failed" in out
    assert "tune it, from what the author found: `ft tune state/imports/mine.yaml`" in said
    bundle = read_bundle(STUDY.read_bytes(), "fixture")
    assert [point["expert_slots"] for point in make_seeds(bundle, 1_781_760)[:2]] == [3000, 900]


@pytest.mark.parametrize("path", [FIXTURE, STUDY], ids=["plain", "with a study"])
def test_its_bytes_are_what_this_version_writes(path):
    data = path.read_bytes()
    assert archive.pack(archive.unpack(data, "fixture")) == data


def test_the_signed_bundle_of_version_1_verifies():
    bundle = read_bundle(SIGNED.read_bytes(), "fixture")
    assert bundle.signer.public_key == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
