"""Environments of engines, installed from a folder of tiny wheels: whole, or recognised as not whole."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pip
import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.adapters.native import NativeAdapter
from freetoken.deploy import engine_folders, engine_packages
from freetoken.deploy.engine_folders import remove_engine, verify_engine
from freetoken.deploy.engine_install import Installer, Source, make_installer
from freetoken.deploy.engine_manifest import read_manifest
from freetoken.deploy.engines import find_engine, list_installed, require_engine
from freetoken.errors import BadFileError, DoesNotFitError, FtError, UsageError
from freetoken.recipe.model import EngineRef
from freetoken.units import GIB
from tests.fakes.wheels import ENGINE_FILES, make_engine_wheels, make_index, make_wheel

REPO = Path(__file__).resolve().parents[3]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip and nothing else, made once; it plays an installation that was just begun."""
    folder = tmp_path_factory.mktemp("venv") / "bare"
    # pip is copied with its compiled files: unpacking and compiling it again takes seconds.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for one in Path(pip.__file__).parent.parent.glob("pip*"):
        if one.is_dir() and (one.name == "pip" or one.suffix == ".dist-info"):
            shutil.copytree(one, site / one.name)
    return folder


@pytest.fixture(scope="module")
def installed(bare_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole environment, made once."""
    folder = tmp_path_factory.mktemp("installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FT_STATE", str(folder))
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setattr(FreetokenAdapter, "install_bytes", {})
        return Path(make(make_engine_wheels(folder / "wheels"), bare_venv).install().folder)


@pytest.fixture
def whole(installed: Path, tmp_path: Path) -> Path:
    """The same in this test's state folder."""
    return Path(shutil.copytree(installed, tmp_path / "state" / "engines" / installed.name, symlinks=True))


@pytest.fixture(autouse=True)
def _small_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(FreetokenAdapter, "install_bytes", {"": 1 << 20})


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return make_engine_wheels(tmp_path / "wheels")


def make(wheels: Path, bare_venv: Path | None = None, said: list[str] | None = None, **options: object) -> Installer:
    source = Source(find_links=(str(wheels),), is_without_index=True, **options)  # type: ignore[arg-type]
    progress = (lambda step: said.append(step.message)) if said is not None else (lambda step: None)
    installer = make_installer(FreetokenAdapter(), "0.2.1", source=source, progress=progress)
    if bare_venv is not None and not installer.partial.exists():
        shutil.copytree(bare_venv, installer.partial, symlinks=True)
    return installer


def test_an_engine_is_installed_found_verified_and_a_second_time_left_alone(wheels: Path) -> None:
    said: list[str] = []
    first = make(wheels, said=said).install()
    assert first.is_new
    assert said[0].startswith("about 1.00 MiB of disk are needed, ")
    assert said[1] == "making the environment"
    assert said[-2].startswith("Successfully installed fake-torch-2.14.0 freetoken-0.2.1")
    archive = hashlib.sha256((wheels / "freetoken-0.2.1-py3-none-any.whl").read_bytes()).hexdigest()
    packages = {one.name: (one.version, one.archive_sha256) for one in first.manifest.packages}
    assert packages["freetoken"] == ("0.2.1", archive)
    assert packages["fake-torch"][0] == "2.14.0"
    assert "fake-kernels" not in packages
    home = require_engine(EngineRef(name="freetoken", version=">=0.2"), FreetokenAdapter())
    assert (home.version, home.folder) == ("0.2.1", Path(first.folder))
    assert sorted(path.name for path in Path(first.folder).parent.iterdir()) == [
        ".freetoken-0.2.1.lock",
        "freetoken-0.2.1",
    ]
    # Its scripts name the folder in which it lies now, and its Python is not led back to ours.
    assert f"{first.folder}/bin/python" in (home.folder / "bin" / "pip").read_text()  # type: ignore[operator]
    said_by = subprocess.run([str(home.interpreter), "-m", "freetoken.cli"], capture_output=True, text=True, cwd="/")
    assert said_by.stdout == "freetoken version 0.2.1\n"
    before = (Path(first.folder) / "engine.json").stat().st_mtime_ns
    said.clear()
    second = make(wheels, said=said).install()
    assert (second.is_new, second.manifest, said) == (False, first.manifest, [])
    assert (Path(first.folder) / "engine.json").stat().st_mtime_ns == before
    assert verify_engine("freetoken", "0.2.1", Path(first.folder)).problems == ()


def test_a_damaged_environment_is_named_file_by_file_and_installed_again(
    wheels: Path, bare_venv: Path, whole: Path
) -> None:
    folder = whole
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "freetoken" / "kernel.bin").write_text("K" + "k" * 3999)
    assert verify_engine("freetoken", "0.2.1", folder).problems == (
        "`freetoken-0.2.1`: kernel.bin has other contents than were installed",
    )
    (site / "fake_torch.py").unlink()
    said: list[str] = []
    assert make(wheels, bare_venv, said).install().is_new
    assert said[0] == "`fake_torch-2.14.0`: fake_torch.py is missing; installing it again"
    assert verify_engine("freetoken", "0.2.1", folder).problems == ()


def test_a_download_that_broke_off_leaves_no_environment_and_is_gone_on_with(wheels: Path, bare_venv: Path) -> None:
    wheel = wheels / "freetoken-0.2.1-py3-none-any.whl"
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    installer = make(wheels, bare_venv)
    with pytest.raises(FtError, match="could not be installed: a download broke off") as broken:
        installer.install()
    assert broken.value.hint == "run it again: what was downloaded is kept"
    assert find_engine(EngineRef(name="freetoken"), FreetokenAdapter()) is None
    assert engine_folders.list_half_made("freetoken") == ("0.2.1",)
    wheel.write_bytes(whole)
    said: list[str] = []
    assert make(wheels, said=said).install().is_new
    assert "going on with an installation that was interrupted" in said
    assert engine_folders.list_half_made("freetoken") == ()


def test_a_disk_that_cannot_hold_it_is_said_in_bytes_before_anything_is_made(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreetokenAdapter, "install_bytes", {"": 9 * GIB, "accel": 12 * GIB})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(20 * GIB, 17 * GIB, 3 * GIB))
    installer = make(wheels)
    installer.extras = ("accel",)
    with pytest.raises(DoesNotFitError) as full:
        installer.install()
    where = installer.folder.parent
    assert full.value.message == (
        f"`freetoken-0.2.1` needs about 12.0 GiB of disk, {where} has 3.00 GiB free: 9.00 GiB are missing"
    )
    assert not installer.partial.exists()


def test_a_disk_that_fills_while_it_installs_is_told_and_leaves_it_half_made(wheels: Path, bare_venv: Path) -> None:
    make_wheel(wheels, "freetoken", "0.2.1", {**ENGINE_FILES, "freetoken/big.bin": "b" * (3 << 20)},
               requires=("fake-torch>=2",))  # fmt: skip
    installer = make(wheels, bare_venv)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(FtError, match="could not be installed: the disk is full"):
            installer.install()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list_installed("freetoken") == ()


def test_another_hash_than_the_index_says_is_a_bad_file(wheels: Path, bare_venv: Path, tmp_path: Path) -> None:
    url = make_index(tmp_path / "index", wheels, hashes={"freetoken": "0" * 64})
    installer = make_installer(FreetokenAdapter(), "0.2.1", source=Source(index_url=url))
    shutil.copytree(bare_venv, installer.partial, symlinks=True)
    with pytest.raises(BadFileError, match="a download has another hash than its index says") as refused:
        installer.install()
    assert refused.value.exit_code == 2
    assert list_installed("freetoken") == ()


def test_another_hash_than_was_asked_for_keeps_nothing(wheels: Path, bare_venv: Path) -> None:
    installer = make(wheels, bare_venv, sha256="f" * 64)
    with pytest.raises(BadFileError, match=f"{'f' * 64} was asked for; nothing was kept"):
        installer.install()
    assert not installer.partial.exists()


def test_an_environment_from_another_archive_is_not_taken_for_the_one_asked_for(wheels: Path, whole: Path) -> None:
    with pytest.raises(BadFileError, match="was installed from an archive with SHA-256"):
        make(wheels, sha256="f" * 64).install()


def test_a_distribution_that_a_kill_left_half_there_is_mended(wheels: Path, whole: Path) -> None:
    installer = make(wheels)
    whole.rename(installer.partial)
    (site,) = installer.partial.glob("lib/python3*/site-packages")
    (site / "freetoken" / "kernel.bin").write_text("k")
    said: list[str] = []
    installer = make(wheels, said=said)
    assert installer.install().is_new
    assert "mending freetoken==0.2.1" in said
    assert verify_engine("freetoken", "0.2.1", installer.folder).problems == ()


def test_a_kill_in_the_middle_leaves_what_the_next_run_finishes(wheels: Path, bare_venv: Path, tmp_path: Path) -> None:
    many = {f"freetoken/part{index}.py": f"x = {index}\n" for index in range(400)}
    make_wheel(wheels, "freetoken", "0.2.1", {**ENGINE_FILES, **many}, requires=("fake-torch>=2",))
    installer = make(wheels, bare_venv)
    script = (
        "import sys; from freetoken.adapters.freetoken import FreetokenAdapter as A; A.install_bytes = {};"
        "from freetoken.cli.main import main; main(sys.argv[1:])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, "engine", "install", "freetoken", "--no-index", "--find-links", str(wheels)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=REPO,
    )  # fmt: skip
    assert child.stderr is not None
    for line in child.stderr:
        if "Installing collected packages" in line:
            break
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stderr.close()
    assert list_installed("freetoken") == ()
    assert engine_folders.list_half_made("freetoken") == ("0.2.1",)
    # What pip still does behind the killed `ft` is waited for: it holds the lock.
    assert make(wheels).install().is_new
    assert verify_engine("freetoken", "0.2.1", installer.folder).problems == ()


def test_an_environment_in_use_is_not_removed(whole: Path) -> None:
    folder = whole
    user = subprocess.Popen([str(folder / "bin" / "python"), "-c", "import time; time.sleep(60)"])
    try:
        deadline = time.monotonic() + 5
        while user.pid not in engine_folders.find_users(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(FtError, match=rf"`freetoken-0.2.1` is in use by python\S* \(process {user.pid}\)"):
            remove_engine("freetoken", "0.2.1")
    finally:
        user.kill()
        user.wait()
    assert remove_engine("freetoken", "0.2.1") == folder
    assert list(folder.parent.iterdir()) == []
    with pytest.raises(UsageError, match=r"no environment `freetoken-0\.2\.1`"):
        remove_engine("freetoken", "0.2.1")


def test_uv_does_the_work_where_it_is_there(
    wheels: Path, bare_venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = venv ]; then exec cp -a {bare_venv} "$5"; fi\n'
        'python="$4"; shift 4; exec "$python" -m pip install --disable-pip-version-check "$@"\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(engine_packages, "_PIP_FILES", ())
    assert make(wheels).install().manifest.installer == "uv"


@pytest.mark.parametrize(
    ("env", "text", "expected"),
    [
        ({}, "", False),
        ({}, "[global]\nindex-url = https://mirror/simple\n", True),
        ({}, "[global]\ntimeout = 3\n", False),
        ({"PIP_FIND_LINKS": "/wheels"}, "", True),
        ({"PIP_FIND_LINKS": "/wheels", "UV_INDEX_URL": "https://mirror/simple"}, "", False),
    ],
)
def test_a_mirror_that_only_pip_knows_keeps_pip_at_work(
    env: dict[str, str], text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text(text)
    monkeypatch.setattr(engine_packages, "_PIP_FILES", (str(tmp_path / "pip.conf"),))
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert engine_packages.has_pip_mirror() is expected


def test_what_cannot_be_installed_is_said() -> None:
    with pytest.raises(UsageError, match="engine `native` is part of `ft`"):
        make_installer(NativeAdapter(), None)
    with pytest.raises(UsageError, match=r"`\.\./x` is not a version"):
        make_installer(FreetokenAdapter(), "../x")
    assert make_installer(FreetokenAdapter(), None).version == "0.2.1"


def test_the_commands_say_the_same(
    wheels: Path, bare_venv: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ft(*arguments: str) -> tuple[int, str]:
        from freetoken.cli.main import main

        with pytest.raises(SystemExit) as ended:
            main(["engine", *arguments])
        return int(ended.value.code or 0), capsys.readouterr().out

    folder = make(wheels, bare_venv).folder
    code, out = ft("install", "freetoken", "--dry-run")
    assert (code, out) == (0, f"would install freetoken 0.2.1 into {folder}, about 0 B of disk\n")
    assert ft("verify")[1] == ""
    code, out = ft("install", "freetoken@0.2.1", "--accel", "--no-index", "--find-links", str(wheels))
    assert (code, out.splitlines()[1]) == (0, f"  {folder}")
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.extras == ("accel",)
    assert "fake-kernels" in {one.name for one in manifest.packages}
    assert out.startswith("freetoken 0.2.1 installed: ")
    assert ft("verify", "freetoken") == (0, "freetoken 0.2.1: as installed\n")
    entry = next(one for one in json.loads(ft("list", "--json")[1]) if one["name"] == "freetoken")
    assert (entry["state"], entry["installed"]) == ("installed", ["0.2.1"])
    assert ft("remove", "freetoken", "--yes") == (0, "freetoken 0.2.1 was removed\n")
    assert ft("remove", "freetoken", "--yes")[0] == 2
    assert ft("install", "freetoken@")[0] == 2
