"""`ft push` and `ft pull` against a hub, a git repository and a folder on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken.cli.main import main
from tests.fakes.git_server import GitServer, serve_git
from tests.fakes.hub import FakeHub, serve_hub

FIXTURE = Path(__file__).parents[1] / "fixtures" / "bundle-v1.ftbundle"
PROFILE = "rtx-3060-laptop-6gb"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE"))]:
        monkeypatch.delenv(name)
    with serve_hub(tmp_path / "hub") as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield served


@pytest.fixture
def ft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "runtime"))

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        said = capsys.readouterr()
        return int(str(caught.value.code)), said.out, said.err

    return call


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A bare repository with one commit on `main`."""
    bare, work = tmp_path / "team.git", tmp_path / "work"
    git(tmp_path, "init", "--quiet", "--bare", "-b", "main", str(bare))
    git(tmp_path, "clone", "--quiet", str(bare), str(work))
    (work / "README.md").write_text("recipes of the team\n")
    git(work, "add", ".")
    git(work, "commit", "--quiet", "-m", "begin")
    git(work, "push", "--quiet", "origin", "HEAD:main")
    return bare


def pulled(ft: Any, target: str, *more: str) -> bytes:
    code, _, said = ft("pull", target, *more, "-o", "pulled.ftbundle")
    assert code == 0, said
    return Path("pulled.ftbundle").read_bytes()


def test_what_is_pushed_to_the_hub_is_pulled_and_planned(hub: FakeHub, ft: Any) -> None:
    assert ft("push", "hf:me/recipes", str(FIXTURE), "--yes")[0] == 0
    assert hub.commits == {"datasets/me/recipes": [["bundles/mine.ftbundle", "index.json"]]}
    assert pulled(ft, "hf:me/recipes") == FIXTURE.read_bytes()
    code, out, said = ft("pull", "hf:me/recipes", "mine", "--profile", PROFILE)
    assert (code, "tok/s (41.0 to 43.0, 3 measurements)" in out) == (0, True)
    assert "state/imports/mine.yaml" in said


def test_a_connection_that_breaks_on_the_way_is_taken_up_again(hub: FakeHub, ft: Any) -> None:
    hub.cut_posts = 2
    assert ft("push", "hf:me/recipes", str(FIXTURE), "--yes")[0] == 0
    assert len(hub.commits["datasets/me/recipes"]) == 1
    hub.cuts = {"mine.ftbundle": [1000, 0, 2000], "index.json": [10]}
    assert pulled(ft, "hf:me/recipes") == FIXTURE.read_bytes()
    # What had come before the cut was not asked for again.
    assert hub.count("Range") == 0
    assert any("bytes=1000-" in one for one in hub.requests)


def test_another_bundle_of_the_same_name_is_replaced_when_asked(hub: FakeHub, ft: Any) -> None:
    ft("push", "hf:me/recipes", str(FIXTURE), "--yes")
    signed = FIXTURE.with_name("bundle-v1-signed.ftbundle")
    code, _, said = ft("push", "hf:me/recipes", str(signed), "--yes")
    assert (code, "hf:me/recipes holds another bundle `mine` already" in said) == (2, True)
    assert pulled(ft, "hf:me/recipes") == FIXTURE.read_bytes()
    assert ft("push", "hf:me/recipes", str(signed), "--yes", "--replace")[0] == 0
    index = json.loads((hub.root / "datasets/me/recipes/index.json").read_text())
    assert list(index["bundles"]) == ["mine"]
    assert pulled(ft, "hf:me/recipes@main") == signed.read_bytes()


def test_a_hub_that_gives_other_bytes_is_found_out(hub: FakeHub, ft: Any) -> None:
    ft("push", "hf:me/recipes", str(FIXTURE), "--yes")
    hub.damaged = {"mine.ftbundle"}
    code, _, said = ft("pull", "hf:me/recipes")
    assert code == 2
    assert "has SHA-256" in said


def test_what_is_not_there_is_said(hub: FakeHub, ft: Any) -> None:
    code, _, said = ft("pull", "hf:me/nothing")
    assert (code, "no dataset `me/nothing`" in said) == (2, True)
    ft("push", "hf:me/recipes", str(FIXTURE), "--yes")
    code, _, said = ft("pull", "hf:me/recipes", "mien")
    assert (code, "no bundle `mien`; did you mean `mine`?" in said) == (2, True)
    assert ft("pull", "hf:me/recipes@gone")[0] == 2


def test_a_token_that_may_not_write_is_said(hub: FakeHub, ft: Any) -> None:
    hub.token = "secret"
    code, _, said = ft("push", "hf:me/recipes", str(FIXTURE), "--yes")
    assert (code, "HF_TOKEN" in said) == (2, True)


def test_the_token_is_found_where_the_machine_keeps_it(hub: FakeHub, ft: Any, tmp_path: Path) -> None:
    hub.token = "secret"
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "local.yaml").write_text(f"hub: {{token_file: {tmp_path}/token}}\n")
    code, _, said = ft("push", "hf:me/recipes", str(FIXTURE), "--yes")
    assert (code, "secret" in said) == (0, False), said
    assert pulled(ft, "hf:me/recipes") == FIXTURE.read_bytes()


def test_a_git_repository_serves_as_registry(repository: Path, ft: Any) -> None:
    target = f"git+file://{repository}"
    code, out, said = ft("push", target, str(FIXTURE), "--yes")
    assert code == 0, said
    commit = git(repository, "rev-parse", "main").strip()
    assert out == f"bundles/mine.ftbundle  {commit}\n"
    assert git(repository, "log", "-1", "--format=%s%an").strip() == "Add mineft"
    assert pulled(ft, target) == FIXTURE.read_bytes()
    assert pulled(ft, f"{target}@main", "mine") == FIXTURE.read_bytes()
    # The same again is no new commit.
    assert ft("push", target, str(FIXTURE), "--yes")[0] == 0
    assert git(repository, "rev-parse", "main").strip() == commit


@pytest.fixture
def server(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    """The repository over https, with a certificate that this user's git trusts."""
    if not (Path(git(tmp_path, "--exec-path").strip()) / "git-http-backend").exists():
        pytest.skip("this git comes without `git http-backend`")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr("freetoken.share.git.PAUSE_S", 0.01)
    with serve_git(tmp_path, tmp_path) as served:
        monkeypatch.setenv("GIT_SSL_CAINFO", str(served.certificate))
        yield served


def test_a_git_host_serves_as_registry(server: GitServer, repository: Path, ft: Any) -> None:
    target = f"git+{server.url}/team.git"
    code, _, said = ft("push", target, str(FIXTURE), "--yes")
    assert code == 0, said
    assert git(repository, "log", "-1", "--format=%s").strip() == "Add mine"
    assert pulled(ft, f"{target}@main", "mine") == FIXTURE.read_bytes()


def test_a_connection_to_a_git_host_that_breaks_is_tried_again(server: GitServer, repository: Path, ft: Any) -> None:
    target = f"git+{server.url}/team.git"
    # Cut in the middle of the pack (the third answer of a clone), and refused once.
    server.cuts = [None, None, 60]
    server.statuses = [503]
    code, _, said = ft("push", target, str(FIXTURE), "--yes")
    assert code == 0, said
    assert server.cuts == []
    # Cut in the list of branches.
    server.cuts = [10]
    assert pulled(ft, target) == FIXTURE.read_bytes()
    assert server.cuts == []
    pushed = len(server.requests)
    server.cuts = [None, None, 1500]
    assert pulled(ft, target) == FIXTURE.read_bytes()
    assert len(server.requests) - pushed > 3
    # The answer to a push may be lost after the push was done.
    signed = FIXTURE.with_name("bundle-v1-signed.ftbundle")
    server.cuts = [None, None, None, None, 0]
    assert ft("push", target, str(signed), "--yes", "--replace")[0] == 0
    assert git(repository, "rev-list", "--count", "main").strip() == "3"
    assert pulled(ft, target) == signed.read_bytes()


def test_a_git_host_that_stays_away_is_said(server: GitServer, ft: Any) -> None:
    server.statuses = [503] * 20
    code, _, said = ft("pull", f"git+{server.url}/team.git")
    assert (code, "`git clone` failed" in said, "503" in said) == (1, True, True)
    server.statuses = []
    code, _, said = ft("pull", f"git+{server.url}/nothing.git")
    assert (code, "not found" in said) == (1, True)
    server.password = "secret"
    code, _, said = ft("pull", f"git+{server.url}/team.git")
    assert (code, "a credential helper" in said) == (1, True)


def test_two_that_push_at_once_lose_nothing(repository: Path, tmp_path: Path, ft: Any, monkeypatch: Any) -> None:
    from freetoken.share.registry import FolderPlace

    target = f"git+file://{repository}"
    write = FolderPlace.write
    rivals = ["a rival"]

    def slow_write(place: FolderPlace, files: Any, message: str) -> str:
        if rivals:  # somebody else pushes between our reading and our writing
            git(tmp_path / "work", "commit", "--quiet", "--allow-empty", "-m", rivals.pop())
            git(tmp_path / "work", "push", "--quiet", "origin", "HEAD:main")
        return write(place, files, message)

    monkeypatch.setattr(FolderPlace, "write", slow_write)
    assert ft("push", target, str(FIXTURE), "--yes")[0] == 0
    assert git(repository, "log", "--format=%s", "main").split("\n")[:2] == ["Add mine", "a rival"]


def test_a_hub_that_changed_meanwhile_is_read_again(hub: FakeHub, ft: Any) -> None:
    ft("push", "hf:me/recipes", str(FIXTURE), "--yes")
    signed = FIXTURE.with_name("bundle-v1-signed.ftbundle")
    hub.stale_commits = 1
    assert ft("push", "hf:me/recipes", str(signed), "--yes", "--replace")[0] == 0
    assert hub.count("/commit/") == 3
    assert pulled(ft, "hf:me/recipes") == signed.read_bytes()


def test_hooks_and_links_of_a_repository_do_nothing(repository: Path, tmp_path: Path, ft: Any) -> None:
    target = f"git+file://{repository}"
    ft("push", target, str(FIXTURE), "--yes")
    git(tmp_path / "work", "pull", "--quiet", "origin", "main")
    link = tmp_path / "work" / "bundles" / "mine.ftbundle"
    link.unlink()
    link.symlink_to("/etc/passwd")
    git(tmp_path / "work", "add", ".")
    git(tmp_path / "work", "commit", "--quiet", "-m", "link")
    git(tmp_path / "work", "push", "--quiet", "origin", "HEAD:main")
    code, _, said = ft("pull", target)
    assert code == 2
    assert "root:" not in said


@pytest.mark.parametrize(
    "target",
    [
        "git+ssh://host/x", "git+ext::sh -c id", "git+http://host/x", "git+file://host/x", "https://host/x", "hf:../x",
        "hf:a/b/c", "git+https://host/x --upload-pack=id", "ftp://host/x", "git+file:///x@-u",
    ],
)  # fmt: skip
def test_addresses_that_name_no_registry_are_refused(target: str, ft: Any) -> None:
    assert ft("pull", target)[0] == 2
    assert ft("push", target, str(FIXTURE), "--yes")[0] == 2


def test_nobody_is_asked_about_a_push_that_cannot_be(ft: Any) -> None:
    code, _, said = ft("push", "hf:me", str(FIXTURE))
    assert (code, "`hf:me` names no dataset" in said) == (2, True)


def test_a_repository_that_is_not_there_is_said(ft: Any, tmp_path: Path) -> None:
    code, _, said = ft("pull", f"git+file://{tmp_path}/none.git")
    assert code == 1
    assert "`git clone` failed" in said


def test_a_folder_serves_as_registry(ft: Any, tmp_path: Path) -> None:
    assert ft("push", "shared", str(FIXTURE), "--yes")[0] == 0
    assert pulled(ft, "shared") == FIXTURE.read_bytes()
    index = json.loads((tmp_path / "shared" / "index.json").read_text())
    assert index["bundles"]["mine"]["gpu"] == "NVIDIA GeForce RTX 4060 Ti"
    (tmp_path / "shared" / "index.json").unlink()
    assert pulled(ft, "shared", "mine") == FIXTURE.read_bytes()
    assert pulled(ft, "shared/bundles/mine.ftbundle") == FIXTURE.read_bytes()


def test_many_that_push_into_a_folder_at_once_lose_nothing(ft: Any, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from freetoken.share.bundle import make_bundle, read_bundle
    from freetoken.share.places import push

    base = read_bundle(FIXTURE.read_bytes(), "fixture")
    names = [f"mine-{number}" for number in range(12)]
    bundles = [make_bundle(base.recipe.model_copy(update={"name": name}), base.lock, base.evidence) for name in names]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda data: push("shared", data), bundles))
    assert sorted(json.loads((tmp_path / "shared" / "index.json").read_text())["bundles"]) == sorted(names)


def test_a_registry_is_listed_and_its_index_made_anew(ft: Any, tmp_path: Path) -> None:
    (tmp_path / "shared" / "bundles").mkdir(parents=True)
    bundles = tmp_path / "shared" / "bundles"
    (bundles / "mine.ftbundle").write_bytes(FIXTURE.read_bytes())
    (bundles / "other.ftbundle").write_bytes(FIXTURE.read_bytes())
    (bundles / "broken.ftbundle").write_bytes(b"PK")
    code, _, said = ft("pull", "shared", "--list")
    assert (code, "`ft push shared --reindex` makes one" in said) == (2, True)
    code, out, said = ft("push", "shared", "--reindex", "--yes")
    assert (code, out) == (0, "1 bundles in the index  shared\n")
    assert "left out: bundles/other.ftbundle: holds `mine`" in said
    assert "left out: bundles/broken.ftbundle is no bundle" in said
    code, out, _ = ft("pull", "shared", "--list")
    row = ["mine", "nvidia/Qwen3.6-35B-A3B-NVFP4", "freetoken", "agent-8k"]
    assert (code, out.splitlines()[1].split()[:4]) == (0, row)
    assert "NVIDIA GeForce RTX 4060 Ti" in out
    assert "42.0" in out


def test_an_index_that_lies_is_found_out_and_put_right(ft: Any, tmp_path: Path) -> None:
    ft("push", "shared", str(FIXTURE), "--yes")
    path = tmp_path / "shared" / "index.json"
    index = json.loads(path.read_text())
    told = dict(index["bundles"]["mine"])

    def lie(**changes: Any) -> str:
        path.write_text(json.dumps({**index, "bundles": {"mine": {**told, **changes}}}))
        code, _, said = ft("pull", "shared", "mine")
        assert code == 2
        return str(said)

    assert "the index has " + "0" * 64 in lie(sha256="0" * 64)
    assert "there is no bundles/gone.ftbundle" in lie(file="bundles/gone.ftbundle")
    assert "its index cannot be read" in lie(file="../../etc/passwd")
    assert "makes it anew: `ft push TARGET --reindex`" in lie(file="../../etc/passwd")
    assert "its index cannot be read" in lie(run="rm -rf ~")
    path.write_text("{" * 100_000)
    assert ft("pull", "shared", "mine")[0] == 2
    path.write_text(json.dumps({**index, "version": 2}))
    code, _, said = ft("pull", "shared", "mine")
    assert (code, "has version 2, this `ft` reads version 1" in said) == (2, True)
    assert ft("push", "shared", "--reindex", "--yes")[0] == 0
    assert pulled(ft, "shared", "mine") == FIXTURE.read_bytes()


def test_a_bundle_that_the_index_does_not_name_is_found_by_name(ft: Any, tmp_path: Path) -> None:
    ft("push", "shared", str(FIXTURE), "--yes")
    path = tmp_path / "shared" / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bundles": {}}))
    assert pulled(ft, "shared", "mine") == FIXTURE.read_bytes()
    code, _, said = ft("pull", "shared", "none")
    assert (code, "it has: `mine`" in said) == (2, True)


def test_nothing_is_pushed_without_being_asked(ft: Any, tmp_path: Path) -> None:
    assert ft("push", "shared", str(FIXTURE))[0] == 2
    assert ft("push", "shared", str(FIXTURE), "--dry-run")[0] == 0
    assert not (tmp_path / "shared").exists()
