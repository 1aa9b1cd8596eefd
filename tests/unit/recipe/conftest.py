import textwrap

import pytest

from freetoken import paths


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with `recipes/`, and a state folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FT_STATE", raising=False)
    paths.set_state_dir(tmp_path / "state")
    (tmp_path / "recipes").mkdir()
    yield tmp_path
    paths.set_state_dir(None)


@pytest.fixture
def write(folder):
    """Writes `recipes/NAME.yaml` (or the path given) with the text, indentation taken out."""

    def put(name, text):
        path = folder / (name if "/" in name else f"recipes/{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return path

    return put


BASE = """
version: 1
name: base
model: {repo: nvidia/Qwen3.6-35B-A3B-NVFP4, revision: abc}
engine: {name: freetoken, version: ">=0.2.1,<0.3", env: {OMP_NUM_THREADS: 1}, extra_args: [--x]}
workload: agent-8k
settings: {kv_tokens: 8k, expert_slots: 3GiB}
"""


@pytest.fixture
def base(write):
    return write("base", BASE)
