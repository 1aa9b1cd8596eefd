"""`ft plan owner/repo` before any download, against a local hub: headers by ranges, cache, offline, token, mirror."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.planner.plan import Plan, Refusal
from tests.contract.test_hub_commands import Done
from tests.contract.test_hub_commands import ft as ft_model
from tests.fakes.checkpoints import (
    QWEN36_CONFIG,
    qwen3_moe_config,
    qwen3_moe_tensors,
    qwen36_nvfp4_tensors,
    write_checkpoint,
)
from tests.fakes.hub import FakeHub, serve_hub

REPO = "someone/finetune-of-qwen3.6"
TINY = "someone/tiny"
MACHINE = ("--profile", "rtx-3060-12gb", "--engine", "freetoken")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    write_checkpoint(folder / REPO, QWEN36_CONFIG, qwen36_nvfp4_tensors(), shards=10)
    write_checkpoint(folder / TINY, qwen3_moe_config(max_position_embeddings=8192), qwen3_moe_tensors())
    return folder


@pytest.fixture
def hub(root: Path) -> Iterator[FakeHub]:
    with serve_hub(root) as served:
        yield served


def plan(hub: FakeHub, tmp_path: Path, *arguments: str, **changes: str) -> Done:
    return ft_model(hub, tmp_path, *arguments, command="plan", **changes)


def size_of(hub: FakeHub) -> int:
    return sum(path.stat().st_size for path in (hub.root / REPO).iterdir())


def test_a_repository_without_a_card_is_planned_from_its_headers_alone(hub: FakeHub, tmp_path: Path) -> None:
    done = plan(hub, tmp_path, REPO, *MACHINE, "--json")
    assert done.returncode == 0, done.stderr
    answer = Plan.model_validate_json(done.stdout)
    assert hub.sent_bytes < 20e6
    assert (answer.model_name, answer.model_path, answer.download_bytes) == (REPO, None, size_of(hub))
    download = answer.disk.line("download")
    assert download is not None
    assert download.bytes == size_of(hub) > 20e9
    assert answer.vram is not None
    slots = answer.vram.line("expert_slots")
    assert slots is not None
    assert slots.bytes == answer.settings.expert_slots * 1_781_760
    done = plan(hub, tmp_path, REPO, "--engine", "freetoken", "--gpu", "RTX 3060 12GB", "--ram", "16GiB", "--json")
    assert done.returncode == 3
    refusal = Refusal.model_validate(json.loads(done.stdout))
    assert (refusal.ledger, refusal.blamed_line, refusal.download_bytes) == ("ram", "expert_banks", size_of(hub))
    assert refusal.missing_bytes > 4 * 2**30
    assert not (tmp_path / "hf").exists()


def test_a_repository_seen_once_is_planned_offline_and_an_unseen_one_is_not(hub: FakeHub, tmp_path: Path) -> None:
    assert plan(hub, tmp_path, REPO, *MACHINE).returncode == 0
    asked = len(hub.requests)
    done = plan(hub, tmp_path, REPO, *MACHINE, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert len(hub.requests) == asked
    said = next(line for line in done.stdout.splitlines() if "a download of" in line)
    assert said.startswith("offline; ")
    assert said.endswith(f"a download of {size_of(hub) / 1e9:.3g} GB ({size_of(hub) / 2**30:.3g} GiB)")
    done = plan(hub, tmp_path, "someone/else", *MACHINE, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: nothing is known of the model `someone/else`: ")
    assert "offline" in done.stderr.lower()


def test_a_private_repository_needs_its_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    done = plan(hub, tmp_path, TINY, "--gpu", "none")
    assert done.returncode == 1
    assert "HF_TOKEN" in done.stderr
    done = plan(hub, tmp_path, TINY, "--gpu", "none", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert "hf_secret" not in done.stdout + done.stderr


def test_what_hf_home_holds_is_planned_without_asking_for_anything(hub: FakeHub, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    storage = tmp_path / "hf/hub" / f"models--{REPO.replace('/', '--')}"
    (storage / "refs").mkdir(parents=True)
    (storage / "refs/main").write_text(commit)
    (storage / "snapshots").mkdir()
    (storage / "snapshots" / commit).symlink_to(hub.root / REPO)
    done = plan(hub, tmp_path, REPO, *MACHINE, "--json")
    assert done.returncode == 0, done.stderr
    answer = Plan.model_validate_json(done.stdout)
    assert (answer.model_path, answer.download_bytes) == (str(storage / "snapshots" / commit), 0)
    assert hub.requests == []
