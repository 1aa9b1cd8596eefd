"""Where an engine's interpreter lies: named in the machine-local file, installed, or made by an apply."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.adapters.llamacpp import LlamaCppAdapter
from freetoken.deploy import engine_install
from freetoken.deploy.engine_install import install_missing
from freetoken.deploy.engines import EngineHome, choose_version, detect_version, find_engine, has_package, list_lacking
from freetoken.errors import BadFileError, UsageError
from freetoken.recipe.model import EngineRef

REF = EngineRef(name="freetoken")


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_STATE", str(tmp_path))


def write_local(folder: Path, entry: str) -> None:
    (folder / "local.yaml").write_text(f"engines: {{freetoken: {entry}}}\n")


def make_packages(folder: Path, version: str) -> Path:
    (folder / f"freetoken-{version}.dist-info").mkdir(parents=True)
    # Ours has nearly the same name.
    (folder / "freetoken_deploy-9.9.dist-info").mkdir()
    return folder


def test_an_interpreter_and_its_folders_are_named_with_the_version_that_lies_there(tmp_path: Path) -> None:
    first, second = make_packages(tmp_path / "a", "0.2.1"), tmp_path / "b"
    write_local(tmp_path, f"{{python: {sys.executable}, pythonpath: [{first}, {second}], env: {{LOG_LEVEL: INFO}}}}")
    assert find_engine(REF, FreetokenAdapter()) == EngineHome(
        Path(sys.executable), "0.2.1", {"LOG_LEVEL": "INFO", "PYTHONPATH": f"{first}:{second}"}
    )
    write_local(tmp_path, f"{{python: {sys.executable}, pythonpath: '{second}:{first}', version: 0.2.0}}")
    home = find_engine(REF, FreetokenAdapter())
    assert home is not None
    assert (home.version, home.env["PYTHONPATH"]) == ("0.2.0", f"{second}:{first}")


def test_a_relative_folder_is_refused_since_it_would_be_another_one_in_each_run(tmp_path: Path) -> None:
    write_local(tmp_path, f"{{python: {sys.executable}, pythonpath: packages}}")
    with pytest.raises(BadFileError, match=r"`engines\.freetoken\.pythonpath` holds `packages`"):
        find_engine(REF, FreetokenAdapter())


def test_the_version_is_read_off_the_environment_and_the_interpreter_asked_only_without_one(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    make_packages(tmp_path / "venv" / "lib" / "python3.11" / "site-packages", "0.1.3")
    assert detect_version(python, (), "freetoken") == "0.1.3"
    assert detect_version(Path(sys.executable), (), "no-such-distribution") is None
    assert detect_version(tmp_path / "nowhere", (), "freetoken") is None
    asking = tmp_path / "python"
    asking.write_text("#!/bin/sh\necho 0.2.0\n")
    asking.chmod(0o755)
    assert detect_version(asking, (), "freetoken") == "0.2.0"


def test_packages_that_an_environment_lacks_are_known_without_a_start_of_the_engine(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    assert list_lacking(REF, FreetokenAdapter()) == {"flashinfer"}, "it is installed without extras"
    write_local(tmp_path, f"{{python: {sys.executable}, pythonpath: {packages}, version: 0.2.1}}")
    assert list_lacking(REF, FreetokenAdapter()) == {"flashinfer"}
    (packages / "flashinfer").mkdir(parents=True)
    assert list_lacking(REF, FreetokenAdapter()) == set()
    write_local(tmp_path, f"{{python: {tmp_path / 'nowhere'}, version: 0.2.1}}")
    assert list_lacking(REF, FreetokenAdapter()) == set(), "an interpreter that does not answer is not said to lack it"


def test_a_package_is_asked_for_where_the_folders_do_not_tell(tmp_path: Path) -> None:
    home = EngineHome(Path(sys.executable), None)
    assert has_package(home, "json") is True
    assert has_package(home, "no_such_package") is False
    assert has_package(EngineHome(tmp_path / "nowhere", None), "json") is None


@pytest.mark.parametrize(
    ("specifier", "expected"),
    [("", "0.2.1"), (">=0.2.1,<0.3", "0.2.1"), ("<0.2", "0.1.3"), ("==0.1.2", "0.1.2"), (">=0.3", None)],
)
def test_the_newest_known_version_that_a_recipe_allows_is_installed(specifier: str, expected: str | None) -> None:
    assert choose_version(EngineRef(name="freetoken", version=specifier), FreetokenAdapter()) == expected


def test_an_apply_installs_what_is_missing_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(engine_install.Installer, "install", lambda self: installed.append(self.version))
    said: list[str] = []
    ref = EngineRef(name="freetoken", version=">=0.2,<0.2.1")
    assert install_missing(ref, FreetokenAdapter(), lambda step: said.append(step.message))
    assert (installed, said) == (["0.2.0"], ["installing `freetoken` 0.2.0 into an environment of its own"])
    with pytest.raises(UsageError, match="no version of engine `freetoken` is known that is `>=9`"):
        install_missing(EngineRef(name="freetoken", version=">=9"), FreetokenAdapter(), lambda step: None)
    assert not install_missing(EngineRef(name="llamacpp"), LlamaCppAdapter(), lambda step: None)
    write_local(tmp_path, sys.executable)
    assert not install_missing(REF, FreetokenAdapter(), lambda step: None)
    assert installed == ["0.2.0"]
