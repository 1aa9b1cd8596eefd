"""`ft model` against a local hub: what a user types, sees, and gets as exit code; and a fetch that is killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from freetoken.cli.main import main
from tests.fakes.checkpoints import (
    QWEN36_CONFIG,
    qwen3_moe_config,
    qwen3_moe_tensors,
    qwen36_nvfp4_tensors,
    write_checkpoint,
)
from tests.fakes.hub import COMMIT, FakeHub, serve_hub

REPO = "org/tiny-moe"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FakeHub]:
    config = qwen3_moe_config(hidden_size=256, moe_intermediate_size=512, vocab_size=4096)
    tensors = qwen3_moe_tensors(hidden=256, inner=512, vocab=4096)
    write_checkpoint(tmp_path / "hub" / REPO, config, tensors, shards=2, fill=bytes(range(251)))
    with serve_hub(tmp_path / "hub") as hub:
        hub.add(REPO, "tokenizer.json", b"{}")
        yield hub


def make_environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "HUGGINGFACE", "FT_", "MODELSCOPE"))
    }
    return kept | {
        "HF_ENDPOINT": hub.url,
        "MODELSCOPE_DOMAIN": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "FT_STATE": str(tmp_path / "state"),
        "MODELSCOPE_CACHE": str(tmp_path / "ms"),
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def ft(hub: FakeHub, tmp_path: Path, *arguments: str, command: str = "model", **changes: str) -> Done:
    """`ft model ...`, or another command, in this process, since starting one costs more than most of what it does."""
    out, err = io.StringIO(), io.StringIO()
    environment = make_environment(hub, tmp_path) | changes
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("sys.stdin", io.StringIO("")),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main([command, *arguments])
    code = ended.value.code
    return Done(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def test_a_model_is_planned_fetched_listed_verified_and_removed(served: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "hf/hub/models--org--tiny-moe/snapshots" / COMMIT
    dry = ft(served, tmp_path, "fetch", REPO, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    plan = json.loads(dry.stdout)
    assert (plan["repo"], plan["commit"], plan["held_bytes"]) == (REPO, COMMIT, 0)
    assert plan["needed_bytes"] == plan["total_bytes"] == sum(one["bytes"] for one in plan["files"])
    assert not (tmp_path / "hf").exists()

    fetched = ft(served, tmp_path, "fetch", REPO)
    assert (fetched.returncode, fetched.stdout) == (0, f"{folder}\n")
    again = ft(served, tmp_path, "fetch", REPO, "--json")
    assert (again.returncode, json.loads(again.stdout)) == (0, {"path": str(folder)})

    listed = json.loads(ft(served, tmp_path, "list", "--json").stdout)
    (local,) = listed["local"]
    assert (local["repo"], local["path"], local["is_complete"], local["revisions"]) == (
        REPO,
        str(folder),
        True,
        ["main"],
    )

    verified = ft(served, tmp_path, "verify", REPO, "--json", HF_HUB_OFFLINE="1")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["is_ok"] is True
    events = [json.loads(line) for line in verified.stderr.splitlines()]
    assert (events[-1]["event"], events[-1]["done_bytes"]) == ("progress", events[-1]["total_bytes"])

    inspected = json.loads(ft(served, tmp_path, "inspect", REPO, "--json", HF_HUB_OFFLINE="1").stdout)
    assert inspected["path"] == str(folder)
    assert inspected["shape"]["experts"]["per_layer"] == 4

    asked = ft(served, tmp_path, "remove", REPO)
    assert asked.returncode == 130
    would = ft(served, tmp_path, "remove", REPO, "--dry-run")
    assert would.stdout.startswith(f"would remove {REPO}: 10.")
    assert folder.exists()
    removed = ft(served, tmp_path, "remove", REPO, "--yes")
    assert removed.returncode == 0, removed.stderr
    assert not (tmp_path / "hf/hub/models--org--tiny-moe").exists()
    assert json.loads(ft(served, tmp_path, "list", "--json").stdout)["local"] == []


def test_a_damaged_file_is_exit_code_2(served: FakeHub, tmp_path: Path) -> None:
    assert ft(served, tmp_path, "fetch", REPO).returncode == 0
    folder = tmp_path / "hf/hub/models--org--tiny-moe/snapshots" / COMMIT
    blob = (folder / "model-00001-of-00002.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    done = ft(served, tmp_path, "verify", REPO)
    assert done.returncode == 2
    assert f"error: {folder}: 1 of 5 files are not what they should be" in done.stderr
    assert "model-00001-of-00002.safetensors: sha256 is " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fetch_whose_progress_cannot_be_printed_is_finished_all_the_same(served: FakeHub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "freetoken", "model", "fetch", REPO, "--json"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, env=make_environment(served, tmp_path), stdout=full, stderr=subprocess.PIPE, check=False
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"error: stdout cannot be written: No space left on device"
    (local,) = json.loads(ft(served, tmp_path, "list", "--json").stdout)["local"]
    assert local["is_complete"] is True


def test_a_fetch_killed_in_the_middle_goes_on_and_leaves_nothing_twice(served: FakeHub, tmp_path: Path) -> None:
    large = served.add(
        REPO, "model-00001-of-00002.safetensors", (served.root / REPO / "model-00001-of-00002.safetensors").read_bytes()
    )
    served.slow = {large.name: 0.02}
    process = subprocess.Popen(
        [sys.executable, "-m", "freetoken", "model", "fetch", REPO],
        env=make_environment(served, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    blobs = tmp_path / "hf/hub/models--org--tiny-moe/blobs"
    partial = blobs / f"{served.find_hash(large, is_lfs=True)}.incomplete"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 500_000):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    held = partial.stat().st_size
    assert held < large.stat().st_size
    served.slow = {}
    served.requests.clear()
    listed = json.loads(ft(served, tmp_path, "list", "--json").stdout)["local"]
    assert [(one["repo"], one["is_complete"]) for one in listed] == [(REPO, False)]
    assert ft(served, tmp_path, "fetch", REPO).returncode == 0
    assert served.count(f"/cdn/{REPO}/{large.name} bytes={held}-") == 1
    assert not list(blobs.glob("*.incomplete"))
    stored = sum(path.stat().st_size for path in blobs.iterdir())
    assert stored == sum(path.stat().st_size for path in (served.root / REPO).iterdir())


def test_a_model_that_does_not_exist_is_told_in_a_sentence(served: FakeHub, tmp_path: Path) -> None:
    done = ft(served, tmp_path, "fetch", "org/nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: no repository `org/nothing` on {served.url}, or it is private\n"
        "hint: check the spelling; a private repository needs HF_TOKEN\n"
    )
    done = ft(served, tmp_path, "inspect", "gpt-os-20b")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: no model `gpt-os-20b`: not a path, and on no card; did you mean `gpt-oss-20b`"
    )
    done = ft(served, tmp_path, "remove", "org/nothing", "--yes")
    assert (done.returncode, done.stderr) == (
        2, "error: no model `org/nothing` on this machine\nhint: `ft model list` shows what is here\n",
    )  # fmt: skip


def test_the_headers_of_93275_tensors_move_under_20_megabytes(tmp_path: Path) -> None:
    tensors = qwen36_nvfp4_tensors()
    source = write_checkpoint(tmp_path / "hub" / "org" / "q36", QWEN36_CONFIG, tensors, shards=10)
    assert sum(path.stat().st_size for path in source.iterdir()) > 20e9
    with serve_hub(tmp_path / "hub") as hub:
        done = ft(hub, tmp_path, "inspect", "org/q36", "--json")
        assert done.returncode == 0, done.stderr
        value: dict[str, Any] = json.loads(done.stdout)
        assert hub.sent_bytes < 20e6
    shape = value["shape"]
    assert (shape["experts"]["expert_bytes"], shape["experts"]["layers"], shape["dense"]["tensors"]) == (
        1_769_484,
        40,
        751,
    )
    assert value["download_bytes"] == sum(path.stat().st_size for path in source.iterdir())


def test_modelscope_models_are_listed_and_removed_from_the_state_folder(served: FakeHub, tmp_path: Path) -> None:
    done = ft(served, tmp_path, "fetch", REPO, "--source", "modelscope")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/state/models/org/tiny-moe\n")
    (local,) = json.loads(ft(served, tmp_path, "list", "--json").stdout)["local"]
    assert (local["repo"], local["place"], local["is_complete"]) == (REPO, "state", True)
    assert ft(served, tmp_path, "verify", REPO, "--source", "modelscope", HF_HUB_OFFLINE="1").returncode == 0
    assert ft(served, tmp_path, "remove", "tiny-moe", "--yes").returncode == 0
    assert not (tmp_path / "state/models/org").exists()


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--json",)])
def test_fetching_what_is_no_model_is_refused_and_a_folder_with_one_is_named(
    served: FakeHub, tmp_path: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "../" + tmp_path.name + "/recipes", str(tmp_path / "recipes")):
        refused = ft(served, tmp_path, "fetch", name, *more)
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[0].endswith("recipes: has neither config.json nor a .gguf file: not a model")
    folder = tmp_path / "hub" / REPO
    here = ft(served, tmp_path, "fetch", str(folder), *more)
    assert (here.returncode, str(folder) in here.stdout) == (0, True)
    assert here.stderr == f"`{folder}` is on this machine: there is nothing to fetch\n"
