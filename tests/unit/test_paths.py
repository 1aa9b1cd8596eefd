from pathlib import Path

import pytest

from freetoken import paths


@pytest.fixture(autouse=True)
def _no_override(monkeypatch, tmp_path):
    monkeypatch.delenv("FT_STATE", raising=False)
    monkeypatch.delenv("FT_RUNTIME_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    paths.set_state_dir(None)
    yield
    paths.set_state_dir(None)


def test_state_folder_is_the_option_then_the_variable_then_here_then_the_user_s(monkeypatch, tmp_path):
    by_user = paths.state_dir()
    (tmp_path / "state").mkdir()
    by_folder = paths.state_dir()
    monkeypatch.setenv("FT_STATE", "elsewhere")
    by_variable = paths.state_dir()
    paths.set_state_dir("chosen")
    by_option = paths.state_dir()
    assert "freetoken-deploy" in str(by_user)
    assert (by_folder, by_variable, by_option) == (tmp_path / "state", tmp_path / "elsewhere", tmp_path / "chosen")


def test_every_path_of_the_state_folder_follows_it(tmp_path):
    paths.set_state_dir(tmp_path / "s")
    found = [paths.runs_dir(), paths.database_path(), paths.studies_path(), paths.engines_dir(), paths.models_dir(),
             paths.local_file()]  # fmt: skip
    names = ["runs", "ft.db", "studies.db", "engines", "models", "local.yaml"]
    assert found == [tmp_path / "s" / name for name in names]


def test_runtime_folder_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "run"))
    assert paths.runtime_dir() == tmp_path / "run"


def test_names_are_looked_up_here_then_in_the_state_folder_then_in_the_package(tmp_path):
    paths.set_state_dir(tmp_path / "s")
    here, state, shipped = paths.search_dirs("recipes")
    assert (here, state) == (tmp_path / "recipes", tmp_path / "s" / "recipes")
    assert shipped.name == "recipes"
    assert shipped.is_dir()


def test_workloads_and_demo_lie_in_the_package():
    assert paths.package_data("workloads", "agent-8k.yaml").is_file()
    assert paths.shipped_dir("workloads") == paths.package_data("workloads")
    assert Path(paths.package_data("demo-moe")).parent.name == "data"
