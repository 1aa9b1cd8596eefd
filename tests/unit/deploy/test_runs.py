"""Run ids, run folders, declarations, and where an engine's interpreter lies."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from freetoken.deploy import runs
from freetoken.deploy.engines import find_engine, require_engine
from freetoken.errors import BadFileError, FtError
from freetoken.recipe.model import EngineRef
from tests.fakes.fake_adapter import FakeAdapter


class ForeignAdapter(FakeAdapter):
    name = "freetoken"
    is_embedded = False


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_STATE", str(tmp_path))


def test_run_ids_sort_by_time_and_differ_within_a_millisecond() -> None:
    moment = datetime(2031, 5, 4, 9, 30, 0, 125_999, tzinfo=UTC)
    ids = [runs.make_run_id(moment + timedelta(milliseconds=step)) for step in range(50)]
    assert ids == sorted(ids)
    assert re.fullmatch(r"20310504-093000-125-[0-9a-f]{6}", ids[0])
    assert len({runs.make_run_id(moment) for _ in range(100)}) == 100


def test_a_state_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(FtError, match="cannot write"):
        runs.create_run_dir()


def test_a_declaration_remembers_the_last_run_that_worked() -> None:
    runs.write_declaration("demo", "1", is_wanted=True, is_proven=True)
    runs.write_declaration("demo", "2", is_wanted=True)
    found = runs.read_declaration("demo")
    assert found is not None
    assert (found.run_id, found.is_wanted, found.last_good_run) == ("2", True, "1")
    assert runs.read_declarations() == (found,)
    assert runs.read_declaration("other") is None


def test_an_embedded_engine_needs_no_environment_and_a_foreign_one_says_what_is_missing(tmp_path: Path) -> None:
    ref = EngineRef(name="freetoken", version=">=0.2,<0.3")
    assert find_engine(EngineRef(), FakeAdapter()) is not None
    assert find_engine(ref, ForeignAdapter()) is None
    with pytest.raises(FtError, match=r"engine `freetoken<0\.3,>=0\.2`|engine `freetoken>=0\.2,<0\.3`") as missing:
        require_engine(ref, ForeignAdapter())
    assert "engines: {freetoken: /path/to/python}" in (missing.value.hint or "")


def test_the_newest_installed_version_in_range_is_taken_and_the_local_file_comes_first(tmp_path: Path) -> None:
    for version in ("0.1.2", "0.2.1", "0.2.10", "0.3.0"):
        python = tmp_path / "engines" / f"freetoken-{version}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    ref = EngineRef(name="freetoken", version=">=0.2,<0.3")
    assert find_engine(ref, ForeignAdapter()).version == "0.2.10"  # type: ignore[union-attr]
    (tmp_path / "local.yaml").write_text("engines: {freetoken: {python: /opt/python, version: 0.2.1, env: {A: b}}}\n")
    home = find_engine(ref, ForeignAdapter())
    assert home is not None
    assert (str(home.interpreter), home.version, home.env) == ("/opt/python", "0.2.1", {"A": "b"})
    (tmp_path / "local.yaml").write_text("engines: {freetoken: 7}\n")
    with pytest.raises(BadFileError, match="needs the path of an interpreter"):
        find_engine(ref, ForeignAdapter())


def test_a_run_folders_recipe_names_a_relative_model_by_its_place_so_that_it_can_be_applied_again(
    tmp_path: Path,
) -> None:
    from freetoken.planner.plan import PlanRequest
    from freetoken.recipe.load import load_recipe
    from freetoken.supervisor.launch import Launch
    from tests.fakes.fake_adapter import locate, make_hardware, make_plan

    path = tmp_path / "lab.yaml"
    path.write_text("version: 1\nname: lab\nmodel: {path: ../fake}\nengine: {name: native}\nworkload: chat-2k\n")
    recipe = load_recipe(str(path)).recipe
    request = PlanRequest(
        recipe=recipe, hardware=make_hardware(), shape=locate(None, tmp_path).shape, model_path="/m/fake"
    )
    plan = make_plan(request, FakeAdapter(), False)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    runs.write_run(run_dir, recipe, plan, Launch("run", "lab", "native", (), 1919))  # type: ignore[arg-type]
    again = runs.read_recipe(run_dir)
    assert again is not None
    assert again.model.path == "/m/fake"
    assert again.model_copy(update={"model": recipe.model}) == recipe
