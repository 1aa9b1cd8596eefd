import json

import pytest

from freetoken import paths
from freetoken.cli.main import main


@pytest.fixture
def ft(capsys, monkeypatch, tmp_path):
    """Runs `ft` in an empty working folder with a state folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "runtime"))
    paths.set_state_dir(None)

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


@pytest.fixture
def ft_json(ft):
    """The same with `--json`: exit code and the document on stdout, which must be the only thing there."""

    def call(*arguments):
        code, out, _ = ft(*arguments, "--json")
        return code, json.loads(out)

    return call
