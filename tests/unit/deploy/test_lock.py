import os
import shutil
from hashlib import sha256

import pytest

from freetoken import __version__, paths
from freetoken.adapters import get_adapter
from freetoken.cli.main import main
from freetoken.deploy import hashes
from freetoken.deploy.hashes import HashingAhead, LockedFile, LockedPackage, hash_model, read_packages
from freetoken.deploy.lock import (
    Lock,
    LockedEngine,
    ModelLock,
    dump_lock,
    find_differences,
    find_lock_path,
    make_lock,
    parse_lock,
    pin,
    write_lock,
)
from freetoken.deploy.prepare import prepare_plan
from freetoken.errors import BadFileError
from freetoken.recipe.load import load_recipe

RECIPE = """
version: 1
name: copy
model: {path: model}
serve: {port: 21931}
workload: {name: short, prompt_tokens: 512, output_tokens: 64}
settings: {strategy: offload}
"""
HASH = "ab" * 32


def make_value(**changes):
    values = {
        "recipe": "copy",
        "ft": __version__,
        "engine": LockedEngine(name="native", version="1", packages={"torch": LockedPackage(version="2", sha256=HASH)}),
        "model": ModelLock(name="a/b", repo="a/b", commit="1" * 40, files={"w": LockedFile(bytes=3, sha256=HASH)}),
        "settings": {"expert_slots": 16, "kv_tokens": 2048, "strategy": "offload"},
        "slot_bytes": 4096,
    }
    return Lock(**(values | changes))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


@pytest.fixture
def copy(home):
    """A recipe with a model of its own beside it, and its lock as `ft apply` would have written it."""
    shutil.copytree(paths.package_data("demo-moe"), home / "model")
    path = home / "copy.yaml"
    path.write_text(RECIPE)
    loaded = load_recipe(str(path))
    lock = make_lock(loaded.recipe, prepare_plan(loaded), get_adapter("native"))
    write_lock(lock, find_lock_path(path, "copy"))
    return path


def ft(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return caught.value.code


def test_a_lock_comes_back_from_its_yaml():
    lock = make_value()
    assert parse_lock(dump_lock(lock), "x.lock") == lock


def test_a_lock_of_the_same_plan_has_the_same_bytes(copy):
    before = copy.with_suffix(".lock").read_bytes()
    loaded = load_recipe(str(copy))
    assert dump_lock(make_lock(loaded.recipe, prepare_plan(loaded), get_adapter("native"))).encode() == before
    assert str(copy.parent).encode() not in before


def test_a_newer_lock_is_refused_in_words():
    with pytest.raises(BadFileError, match="has version 2, this `ft` reads version 1"):
        parse_lock("version: 2\nrecipe: x\n", "x.lock")


@pytest.mark.parametrize("name", ["../w", "/etc/w", "a//b", "a\\b", "c:w", "a\u202eb"])
def test_a_lock_names_only_files_inside_a_model(name):
    text = dump_lock(make_value()).replace("    w:\n", f"    {name!r}:\n")
    with pytest.raises(BadFileError):
        parse_lock(text, "x.lock")


def test_every_difference_is_told():
    now = make_value(
        ft="9",
        engine=LockedEngine(name="native", version="2"),
        model=ModelLock(name="a/b", repo="a/b", commit="2" * 40, files={"w": LockedFile(bytes=4, sha256=HASH)}),
        settings={"expert_slots": 8, "kv_tokens": 2048},
    )
    assert list(find_differences(make_value(), now, "here")) == [
        f"`ft` is 9, the lock was written by {__version__}",
        "engine `native` is 2, the lock has 1",
        f"the model's commit is {'2' * 40}, the lock has {'1' * 40}",
        "w has 4 bytes, the lock has 3",
        "`settings.expert_slots` would be 8, the lock has 16",
        "`settings.strategy` would be not set, the lock has `offload`",
    ]


def test_open_values_are_taken_from_the_lock_and_contradictions_are_refused(copy):
    lock = make_value(model=ModelLock(name="local"))
    loaded = pin(load_recipe(str(copy)), lock)
    assert (loaded.recipe.settings.expert_slots, loaded.recipe.settings.kv_tokens) == (16, 2048)
    assert loaded.provenance["settings.kv_tokens"] == "lock"
    with pytest.raises(BadFileError, match=r"`settings\.kv_tokens` is 4,096 in the recipe, 2,048 in the lock"):
        pin(load_recipe(str(copy), sets=("settings.kv_tokens=4k",)), lock)
    # A size in the recipe is the same as that many slots.
    pin(load_recipe(str(copy), sets=("settings.expert_slots=64KiB",)), lock)


def test_a_locked_dry_run_plans_exactly_what_was_locked(copy, capsys):
    assert ft("apply", str(copy), "--locked", "--dry-run") == 0
    assert "would launch" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["fused", "cpu", "auto"])
def test_a_strategy_without_slots_is_held_to_its_lock(home, capsys, strategy):
    path = home / "copy.yaml"
    path.write_text(RECIPE.replace("path: model", "path: demo").replace("strategy: offload", f"strategy: {strategy}"))
    loaded = load_recipe(str(path))
    plan = prepare_plan(loaded)
    assert plan.settings.expert_slots == 0
    write_lock(make_lock(loaded.recipe, plan, get_adapter("native")), find_lock_path(path, "copy"))
    assert ft("apply", str(path), "--locked", "--dry-run") == 0, capsys.readouterr().err


@pytest.mark.parametrize("keeps_time", [True, False])
def test_a_tampered_file_is_found_before_any_launch(copy, keeps_time, capsys):
    weights = copy.parent / "model" / "model.safetensors"
    stat = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    if keeps_time:
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert ft("apply", str(copy), "--locked") == 2
    told = capsys.readouterr().err
    assert "not as locked (1 difference): model.safetensors has SHA-256" in told
    assert ft("model", "verify", str(copy.parent / "model"), "--lock", str(copy.with_suffix(".lock"))) == 2
    assert "model.safetensors: sha256 is" in capsys.readouterr().err
    assert not (copy.parent / "state" / "runs").exists()


def test_an_untouched_model_verifies_against_its_lock(copy):
    assert ft("model", "verify", str(copy.parent / "model"), "--lock", str(copy.with_suffix(".lock"))) == 0


def test_locked_without_a_lock_says_how_to_get_one(home, capsys):
    (home / "copy.yaml").write_text(RECIPE.replace("path: model", "path: demo"))
    assert ft("apply", str(home / "copy.yaml"), "--locked") == 2
    assert "`ft apply` without `--locked` writes one" in capsys.readouterr().err


def test_a_known_file_is_not_read_again(home, monkeypatch):
    model = home / "model"
    model.mkdir()
    (model / "a.json").write_text("{}")
    first = hash_model(model)
    monkeypatch.setattr("freetoken.deploy.hashes.hash_file", lambda *_: pytest.fail("read again"))
    assert hash_model(model) == first


def test_what_was_hashed_ahead_is_not_read_again(home, monkeypatch):
    model = home / "model"
    model.mkdir()
    for index in range(12):
        (model / f"{index}.safetensors").write_text(f"{index}")
    ahead = HashingAhead(model)
    ahead.start()
    ahead.finish()
    monkeypatch.setattr("freetoken.deploy.hashes.hash_file", lambda *_: pytest.fail("read again"))
    assert {name: one.sha256 for name, one in hash_model(model).items()} == {
        f"{index}.safetensors": sha256(f"{index}".encode()).hexdigest() for index in range(12)
    }


def test_hashing_ahead_that_is_abandoned_ends_after_the_file_in_hand(home, monkeypatch):
    model = home / "model"
    model.mkdir()
    for index in range(9):
        (model / f"{index}.json").write_text("{}")
    read, ahead = [], HashingAhead(model)

    def hash_one(file, *_):
        read.append(file.name)
        ahead.abandon()
        return "0" * 64

    monkeypatch.setattr("freetoken.deploy.hashes.hash_file", hash_one)
    ahead.start()
    ahead.finish()
    assert read[:1] == ["0.json"]
    assert len(read) < 9


def test_hashing_ahead_leaves_trouble_to_whoever_needs_the_hash(home, monkeypatch):
    gone = HashingAhead(home / "gone")
    gone.start()
    gone.finish()
    (home / "model").mkdir()
    (home / "model" / "a.json").symlink_to(home / "nowhere")
    broken = HashingAhead(home / "model")
    broken.start()
    broken.finish()


def test_packages_of_an_environment_are_hashed_once_and_again_when_they_change(home, monkeypatch):
    folder = home / "env" / "lib" / "python3.12" / "site-packages" / "thing-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "RECORD").write_text("thing/a.py,sha256=abc,3\n")
    python = home / "env" / "bin" / "python"
    first = read_packages(python)
    assert first["thing"].version == "1.0"
    real = hashes._hash_record
    monkeypatch.setattr(hashes, "_hash_record", lambda _: pytest.fail("read again"))
    assert read_packages(python) == first
    monkeypatch.setattr(hashes, "_hash_record", real)
    (folder / "RECORD").write_text("thing/a.py,sha256=abd,3\n")
    changed = read_packages(python)
    assert changed["thing"].sha256 != first["thing"].sha256
    assert read_packages(python) == changed
    (folder / "RECORD").unlink()
    assert read_packages(python)["thing"].sha256 is None


def test_locks_of_shipped_recipes_lie_in_the_state_folder(home):
    shipped = paths.shipped_dir("recipes") / "demo.yaml"
    assert find_lock_path(shipped, "demo") == home / "state" / "locks" / "demo.lock"
    assert find_lock_path(home / "mine.yaml", "mine") == home / "mine.lock"
    assert find_lock_path(None, "mine") == home / "state" / "locks" / "mine.lock"


def test_our_own_packages_are_locked_with_their_hashes():
    found = read_packages(None)
    assert found["freetoken-deploy"].version == __version__
    assert {"torch", "transformers", "safetensors"} <= found.keys()
    assert all(one.sha256 for one in found.values())
