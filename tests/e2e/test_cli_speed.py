"""What a command imports decides how fast it answers; counted here, timed in benchmarks/cli_start.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import freetoken

HEAVY = ("torch", "transformers", "optuna", "fastapi", "sqlalchemy", "uvicorn", "numpy", "scipy", "huggingface_hub")
#: Not needed either before a command is known.
LATER = (
    "pydantic", "rich", "yaml", "httpx", "sqlite3", "sqlite_utils", "psutil", "platformdirs", "filelock", "packaging",
    "importlib.metadata", "asyncio",
)  # fmt: skip
#: Nor to plan for a profile off a card: hashes, processes, headers and replies of engines are for other days.
NOT_FOR_A_CARD = (
    "httpx", "sqlite_utils", "rich", "asyncio", "hashlib", "email", "zipfile", "subprocess", "tempfile", "logging",
    "packaging.specifiers", "freetoken.adapters.replies",
    "freetoken.checkpoint.header",
)  # fmt: skip


def list_imported(*arguments, code=0, env=None):
    """The modules that `ft` with these arguments has imported when it ends."""
    command = [sys.executable, "-X", "importtime", "-m", "freetoken", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == code, done.stderr[-2000:]
    lines = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    return set(lines)


def pick(modules, names):
    return sorted(name for name in names if any(one == name or one.startswith(f"{name}.") for one in modules))


def test_help_imports_click_and_nothing_that_costs_time():
    modules = list_imported("--help")
    assert pick(modules, HEAVY + LATER) == []
    ours = {one for one in modules if one.startswith("freetoken")}
    assert ours == {"freetoken", "freetoken.cli", "freetoken.cli.main", "freetoken.cli.streams", "freetoken.errors"}


@pytest.mark.parametrize(
    "command", ["plan", "apply", "status", "stop", "results", "report", "recipe", "schema", "engine", "completion"]
)
def test_help_of_a_command_imports_nothing_heavy(command):
    modules = list_imported(command, "--help")
    assert pick(modules, HEAVY) == []
    assert "rich.console" not in modules


def test_wrong_usage_is_told_without_anything_heavy():
    assert pick(list_imported("aply", code=2), HEAVY + LATER) == []


def test_a_plan_off_a_bundled_card_imports_nothing_heavy(tmp_path):
    arguments = (
        "--state", str(tmp_path), "plan", "nvidia/Qwen3.6-35B-A3B-NVFP4", "--engine", "freetoken",
        "--workload", "agent-8k", "--profile", "rtx-3060-12gb",
    )  # fmt: skip
    modules = list_imported(*arguments)
    assert pick(modules, (*HEAVY, *NOT_FOR_A_CARD)) == []


def test_no_pattern_is_compiled_before_it_is_needed():
    # pydantic compiles `Field(pattern=...)` at import; one with `\\w` and a repeat took a fifth of `ft plan`.
    folder = Path(freetoken.__file__).parent
    assert [path for path in folder.rglob("*.py") if re.search(r"\bpattern=", path.read_text(encoding="utf-8"))] == []


def test_results_of_an_empty_state_folder_make_no_database(tmp_path):
    modules = list_imported("--state", str(tmp_path / "none"), "results")
    assert pick(modules, (*HEAVY, "sqlite_utils", "rich")) == []
    assert not (tmp_path / "none").exists()
