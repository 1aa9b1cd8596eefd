"""The machine-local file: its sections, what the rooms make of them, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.checkpoint import hub
from freetoken.checkpoint.locate import read_model_dirs
from freetoken.deploy.watch_policy import read_policy
from freetoken.errors import BadFileError
from freetoken.local import read_section
from freetoken.supervisor.policy import KeeperPolicy


@pytest.fixture(name="local")
def make_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FT_STATE", str(tmp_path))
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "local.yaml"


def test_without_a_file_or_with_an_empty_one_all_is_as_it_is(local: Path) -> None:
    for text in (None, "", "# nothing yet\n", "hub:\nwatchdog:\n"):
        if text is not None:
            local.write_text(text)
        assert (read_section("engines"), read_model_dirs(), hub.hf_token()) == (None, (), None)
        assert hub.hf_endpoint() == "https://huggingface.co"
        assert read_policy(KeeperPolicy(dead_s=7.0)) == KeeperPolicy(dead_s=7.0)


@pytest.mark.parametrize(("text", "words"), [
    ("engine: {}", "unknown section `engine`; did you mean `engines`?"),
    ("- a", "holds list, expected sections such as `engines:"),
    ("hub: [1", "cannot be read: "),
    ("hub: mirror", "`hub` is `mirror`, expected e.g. `hub: {endpoint: URL, token_file: PATH}`"),
    ("hub: {endpoynt: x}", "`hub` has the unknown key `endpoynt`; did you mean `endpoint`?"),
    ("hub: {endpoint: mirror.example}", "`hub.endpoint` is `mirror.example`, expected https://MIRROR"),
    ("hub: {endpoint: 7}", "`hub.endpoint` is `7`, expected https://MIRROR"),
])  # fmt: skip
def test_a_wrong_file_is_told_with_its_path(local: Path, text: str, words: str) -> None:
    local.write_text(text)
    with pytest.raises(BadFileError) as told:
        hub.hf_endpoint()
    assert words in told.value.message
    assert str(local) in told.value.message


def test_the_mirror_and_the_token_of_the_file_are_taken_where_no_variable_says_otherwise(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("hf_of_file\n")
    local.write_text(f"hub: {{endpoint: 'https://mirror.example/', token_file: {tmp_path / 'token'}}}\n")
    assert (hub.hf_endpoint(), hub.hf_token()) == ("https://mirror.example", "hf_of_file")
    monkeypatch.setenv("HF_ENDPOINT", "https://other.example")
    monkeypatch.setenv("HF_TOKEN", "hf_of_shell")
    assert (hub.hf_endpoint(), hub.hf_token()) == ("https://other.example", None)
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").unlink()
    with pytest.raises(BadFileError, match=r"hub\.token_file"):
        hub.hf_token()


def test_one_folder_or_several_are_model_folders(local: Path) -> None:
    local.write_text("model_dirs: /data/models\n")
    assert read_model_dirs() == (Path("/data/models"),)
    local.write_text("model_dirs: [/data/models, ~/more]\n")
    assert read_model_dirs() == (Path("/data/models"), Path("~/more").expanduser())


def test_the_owner_says_what_the_watchdog_does(local: Path) -> None:
    local.write_text(
        "watchdog: {idle: warn, idle_after: 5m, dead_port: ignore, dead_after: 90s, too_large: ignore,\n"
        "           max_restarts: 0, window: 1h}\n"
    )
    assert read_policy(KeeperPolicy(poll_s=1.0)) == KeeperPolicy(
        poll_s=1.0, on_idle="warn", idle_s=300.0, on_dead_port="ignore", dead_s=90.0, on_too_large="ignore",
        max_restarts=0, window_s=3600.0,
    )  # fmt: skip


@pytest.mark.parametrize(("entry", "words"), [
    ("idle: kill", "`watchdog.idle` is `kill`, expected `ignore` or `warn` or `restart`"),
    ("too_large: restart", "`watchdog.too_large` is `restart`, expected `ignore` or `warn`"),
    ("idle: [warn]", "`watchdog.idle` is `['warn']`, expected"),
    ("dead_after: soon", "`watchdog.dead_after` is `soon`, expected a time such as `60s` or `5m`"),
    ("dead_after: [1]", "expected a time such as `60s` or `5m`"),
    ("dead_after: 0s", "`watchdog.dead_after` is `0s`, expected at least `1s`"),
    ("max_restarts: -1", "`watchdog.max_restarts` is `-1`, expected a whole number from 0 to 100"),
    ("max_restarts: true", "expected a whole number from 0 to 100"),
    ("restarts: 3", "`watchdog` has the unknown key `restarts`; did you mean `max_restarts`?"),
])  # fmt: skip
def test_a_wrong_wish_is_told(local: Path, entry: str, words: str) -> None:
    local.write_text(f"watchdog: {{{entry}}}\n")
    with pytest.raises(BadFileError) as told:
        read_policy(KeeperPolicy())
    assert words in told.value.message


def test_the_file_is_read_once_until_it_changes(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    seen: list[str] = []
    monkeypatch.setattr("yaml.safe_load", lambda text: (seen.append(text), yaml.load(text, yaml.SafeLoader))[1])
    local.write_text("hub: {endpoint: 'https://one.example'}\n")
    assert [hub.hf_endpoint() for _ in range(5)] == ["https://one.example"] * 5
    assert len(seen) == 1
    local.write_text("hub: {endpoint: 'https://another.example'}\n")
    assert (hub.hf_endpoint(), len(seen)) == ("https://another.example", 2)
    local.unlink()
    assert hub.hf_endpoint() == "https://huggingface.co"
