"""What `ft serve` refuses before it imports anything heavy, in words and with exit code 2."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from freetoken.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    return tmp_path / "tiny"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    return int(caught.value.code or 0)


def test_a_folder_that_is_not_there_or_holds_no_model_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path / "nowhere")) == 2
    assert capsys.readouterr().err == (
        f"error: no model folder {tmp_path / 'nowhere'}\n"
        "hint: `ft serve demo`, or `ft model fetch REPO` for a model of a hub\n"
    )
    assert run(str(tmp_path)) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} has no config.json, so it is no model folder\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_an_open_address_needs_a_key(folder: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(folder), "--host", host) == 2
    assert capsys.readouterr().err == (
        f"error: {host} can be reached from other machines, and no API key is set\n"
        "hint: `--api-key-env VAR` with the key in VAR, or `--host 127.0.0.1`\n"
    )


@pytest.mark.parametrize("value", [None, ""])
def test_a_key_variable_that_is_not_set_is_told(
    folder: Path, value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    assert run(str(folder), "--api-key-env", "MY_KEY") == 2
    assert capsys.readouterr().err == (
        "error: `--api-key-env MY_KEY`: that environment variable is not set\nhint: export MY_KEY=...\n"
    )


@pytest.mark.parametrize("arguments", [
    ("--kv-tokens", "eight"), ("--strategy", "hybrid"), ("--max-running-requests", "0"),
    ("--port", "70000"), ("--prefill-chunk-tokens", "0"),
])  # fmt: skip
def test_values_that_cannot_be_are_refused(
    folder: Path, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(folder), *arguments) == 2
    assert arguments[0].replace("-", "_").strip("_") in capsys.readouterr().err.replace("-", "_")


def test_a_busy_port_costs_no_heavy_import(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = (
            "import sys\nfrom freetoken.cli.main import main\n"
            f"try: main(['serve', {str(folder)!r}, '--port', '{port}'])\n"
            "except SystemExit as end:\n"
            "    print(end.code, sorted({'torch', 'transformers', 'fastapi'} & sys.modules.keys()))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.stdout.strip(), found.stderr.splitlines()[0]) == (
        "2 []",
        f"error: port {port} on 127.0.0.1 is already in use",
    )
