"""Fetching, planning before the download and verifying, against a local hub that misbehaves."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from freetoken import paths
from freetoken.checkpoint import fetch, hub, transfer
from freetoken.checkpoint.fetch import FetchProgress, fetch_model, locate_model, make_fetch_plan
from freetoken.checkpoint.header import read_shape
from freetoken.checkpoint.verify import verify_model
from freetoken.errors import BadFileError, DoesNotFitError, FtError, UsageError
from freetoken.recipe.model import ModelRef
from freetoken.units import format_bytes
from tests.fakes.checkpoints import qwen3_moe_config, qwen3_moe_tensors, write_checkpoint, write_gguf
from tests.fakes.hub import COMMIT, FakeHub, serve_hub

REPO = "org/tiny-moe"
MIB = 1 << 20


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one repository: 3 shards of about 2.7 MB, config, tokenizer, and things that must not be taken."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(hub.time, "sleep", lambda _: None)
    monkeypatch.setattr("freetoken.checkpoint.fetch.MIN_OWN_BYTES", 1)
    root = tmp_path / "hub"
    config = qwen3_moe_config(hidden_size=256, moe_intermediate_size=512, vocab_size=4096)
    tensors = qwen3_moe_tensors(hidden=256, inner=512, vocab=4096)
    write_checkpoint(root / REPO, config, tensors, shards=3, fill=bytes(range(251)))
    with serve_hub(root) as served:
        served.add(REPO, "tokenizer.json", b'{"version": "1.0"}')
        served.add(REPO, "pytorch_model.bin", b"pickle" * 1000)
        served.add(REPO, "modeling_evil.py", b"import os")
        served.add(REPO, "README.md", b"# tiny")
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("MODELSCOPE_DOMAIN", served.url)
        yield served


def ref(repo: str = REPO, **changes: Any) -> ModelRef:
    return ModelRef(repo=repo, **changes)


def shard(served: FakeHub, number: int) -> Path:
    return served.root / REPO / f"model-{number:05d}-of-00003.safetensors"


def test_shape_is_read_by_ranges_and_equals_that_of_the_files(local_hub: FakeHub) -> None:
    found = locate_model(ref())
    local = read_shape(local_hub.root / REPO)
    assert found.shape is not None
    assert found.path is None
    same = {"name", "source", "source_note"}
    assert found.shape.model_dump(exclude=same) == local.model_dump(exclude=same)
    assert found.shape.source == "remote_headers"
    wanted = (
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        *(f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)),
    )
    assert found.download_bytes == sum((local_hub.root / REPO / name).stat().st_size for name in wanted)
    assert local_hub.sent_bytes < 5 * 64 * 1024
    assert local_hub.count("index.json") == 0


def test_second_look_at_a_repository_moves_nothing_but_the_list_of_files(local_hub: FakeHub) -> None:
    first = locate_model(ref())
    local_hub.requests.clear()
    second = locate_model(ref())
    assert second.shape == first.shape
    assert [request.split("?")[0] for request in local_hub.requests] == [f"GET /api/models/{REPO}/revision/main"]


def test_shape_seen_once_is_known_offline(local_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = locate_model(ref())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    local_hub.requests.clear()
    again = locate_model(ref())
    assert again.shape == first.shape
    assert again.note.startswith("offline; ")
    assert local_hub.requests == []


def test_unknown_model_offline_has_no_shape_and_says_why(local_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = locate_model(ref())
    assert (found.path, found.shape, found.download_bytes) == (None, None, 0)
    assert found.note == f"`{REPO}` is not on this machine, and HF_HUB_OFFLINE forbids asking the hub"
    assert local_hub.requests == []


def test_headers_survive_cut_connections(local_hub: FakeHub) -> None:
    local_hub.cuts = {shard(local_hub, n).name: [1, 100, 7] for n in (1, 2, 3)}
    assert locate_model(ref()).shape is not None


def test_headers_are_read_from_a_server_that_ignores_ranges(local_hub: FakeHub) -> None:
    local_hub.ignores_range = True
    assert locate_model(ref()).shape is not None


def test_remote_header_that_claims_two_gigabytes_is_refused_unread(local_hub: FakeHub) -> None:
    path = shard(local_hub, 2)
    path.write_bytes((2 << 30).to_bytes(8, "little") + path.read_bytes()[8:])
    found = locate_model(ref())
    assert found.shape is None
    assert found.note == (
        f"{REPO}/{path.name}: claims a header of 2,147,483,648 bytes, at most 100,000,000 are allowed: "
        "not a safetensors file"
    )
    assert local_hub.sent_bytes < MIB


def test_fetch_lays_the_cache_as_every_tool_expects_it(local_hub: FakeHub) -> None:
    folder = fetch_model(ref())
    assert folder == hub.hub_cache_dir() / "models--org--tiny-moe" / "snapshots" / COMMIT
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        *(f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    for path in folder.iterdir():
        assert path.read_bytes() == (local_hub.root / REPO / path.name).read_bytes()
    found = locate_model(ref())
    assert (found.path, found.download_bytes) == (folder, 0)
    assert found.shape is not None
    assert found.shape.source == "headers"


def test_fetch_stores_every_byte_once(local_hub: FakeHub) -> None:
    folder = fetch_model(ref())
    storage = folder.parents[1]
    stored = sum(path.lstat().st_size for path in storage.rglob("*") if path.is_file() and not path.is_symlink())
    model = sum(path.stat().st_size for path in folder.iterdir())
    assert stored - model < 64 * 1024  # refs and huggingface_hub's own listing


def test_second_fetch_moves_no_file(local_hub: FakeHub) -> None:
    fetch_model(ref())
    local_hub.sent_bytes = 0
    fetch_model(ref())
    assert local_hub.sent_bytes == 0


def test_fetch_goes_on_where_connections_were_cut(local_hub: FakeHub) -> None:
    sizes = {n: shard(local_hub, n).stat().st_size for n in (1, 2, 3)}
    local_hub.cuts = {shard(local_hub, n).name: [300_000, 5, 700_001] for n in (1, 2, 3)}
    folder = fetch_model(ref())
    assert verify_model(folder).is_ok
    # Cut connections may lose what is on its way, never what was written: no shard is begun again.
    assert local_hub.sent_bytes < sum(sizes.values()) + MIB


def test_fetch_goes_on_after_the_process_died(local_hub: FakeHub) -> None:
    path = shard(local_hub, 1)
    blob = hub.hub_cache_dir() / "models--org--tiny-moe" / "blobs" / local_hub.find_hash(path, is_lfs=True)
    blob.parent.mkdir(parents=True)
    blob.with_name(f"{blob.name}.incomplete").write_bytes(path.read_bytes()[:1_000_000])
    plan = make_fetch_plan(ref())
    assert plan.held_bytes == 1_000_000
    folder = fetch_model(ref())
    assert (folder / path.name).read_bytes() == path.read_bytes()
    assert local_hub.count(f"/cdn/{REPO}/{path.name} bytes=1000000-") == 1


def test_damaged_beginning_is_fetched_anew(local_hub: FakeHub) -> None:
    path = shard(local_hub, 1)
    blob = hub.hub_cache_dir() / "models--org--tiny-moe" / "blobs" / local_hub.find_hash(path, is_lfs=True)
    blob.parent.mkdir(parents=True)
    blob.with_name(f"{blob.name}.incomplete").write_bytes(b"rotten" * 1000)
    assert (fetch_model(ref()) / path.name).read_bytes() == path.read_bytes()


def test_wrong_hash_is_refused_and_deleted(local_hub: FakeHub) -> None:
    path = shard(local_hub, 2)
    local_hub.damaged = {path.name}
    right = local_hub.find_hash(path, is_lfs=True)
    wrong = sha256(bytes(byte ^ 1 for byte in path.read_bytes())).hexdigest()
    with pytest.raises(BadFileError) as caught:
        fetch_model(ref())
    assert caught.value.message == f"{REPO}/{path.name}: its SHA-256 is {wrong}, the hub says {right}; it was deleted"
    assert caught.value.exit_code == 2
    blobs = hub.hub_cache_dir() / "models--org--tiny-moe" / "blobs"
    assert not [one for one in blobs.iterdir() if one.name.startswith(right)]
    found = locate_model(ref())
    assert found.path is None


def test_hub_that_stays_down_is_given_up_and_what_came_is_kept(local_hub: FakeHub) -> None:
    path = shard(local_hub, 3)
    local_hub.cuts = {path.name: [400_000] + [0] * 50}
    with pytest.raises(FtError, match="5 times in a row"):
        fetch_model(ref())
    local_hub.cuts = {}
    assert make_fetch_plan(ref()).held_bytes >= 300_000
    assert verify_model(fetch_model(ref())).is_ok


def test_busy_hub_is_asked_again(local_hub: FakeHub) -> None:
    local_hub.statuses = {shard(local_hub, 1).name: [503, 429]}
    assert verify_model(fetch_model(ref())).is_ok


def test_progress_ends_at_the_whole_with_every_file_done(local_hub: FakeHub) -> None:
    seen: list[FetchProgress] = []
    fetch_model(ref(), progress=seen.append)
    total = make_fetch_plan(ref()).total_bytes
    assert (seen[-1].done_bytes, seen[-1].total_bytes) == (total, total)
    assert seen[-1].files_done == seen[-1].files_total == 6
    assert all(one.done_bytes <= one.total_bytes for one in seen)


def test_disk_too_small_is_told_before_a_byte_moves(local_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10 * MIB, 9 * MIB, MIB)  # type: ignore[attr-defined]
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    plan = make_fetch_plan(ref())
    with pytest.raises(DoesNotFitError) as caught:
        fetch_model(ref())
    root = hub.hub_cache_dir() / "models--org--tiny-moe"
    assert caught.value.message == (
        f"`{REPO}` needs {format_bytes(plan.needed_bytes)} on the disk of {root} and 256 MiB to spare, "
        f"1.00 MiB are free: {format_bytes(plan.needed_bytes + 255 * MIB)} are missing"
    )
    assert local_hub.count("/cdn/") == 0
    assert not root.exists()


def test_disk_that_fills_up_keeps_what_came(local_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: memoryview) -> int:
            if self.file.tell() >= 1_000_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.file.write(data[: 1_000_000 - self.file.tell()]))

    real = transfer._open_partial
    monkeypatch.setattr(transfer, "_open_partial", lambda one: Full(real(one)))
    with pytest.raises(FtError, match=r"no space left for model-0000\d-of-00003.safetensors: .* are here and are kept"):
        fetch_model(ref())
    monkeypatch.setattr(transfer, "_open_partial", real)
    held = make_fetch_plan(ref()).held_bytes
    assert held >= 1_000_000
    assert verify_model(fetch_model(ref())).is_ok


def test_a_half_fetched_model_says_what_is_left(local_hub: FakeHub) -> None:
    local_hub.cuts = {shard(local_hub, 3).name: [400_000] + [0] * 50}
    with pytest.raises(FtError):
        fetch_model(ref())
    local_hub.cuts = {}
    plan, found = make_fetch_plan(ref()), locate_model(ref())
    assert found.path is None
    assert plan.total_bytes > found.download_bytes == plan.needed_bytes


def test_missing_repository_is_a_usage_error(local_hub: FakeHub) -> None:
    with pytest.raises(UsageError) as caught:
        fetch_model(ref("org/nothing"))
    assert caught.value.message == f"no repository `org/nothing` on {local_hub.url}, or it is private"
    with pytest.raises(UsageError, match=f"`{REPO}` has no revision `v9` on {local_hub.url}"):
        fetch_model(ref(revision="v9"))


def test_gated_repository_says_where_to_ask(local_hub: FakeHub) -> None:
    local_hub.is_gated = True
    with pytest.raises(UsageError) as caught:
        fetch_model(ref())
    assert caught.value.message == f"`{REPO}` is gated"
    assert caught.value.hint == f"ask for access at {local_hub.url}/{REPO}, then set HF_TOKEN"


def test_token_is_sent_to_the_hub(local_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    local_hub.token = "hf_secret"
    with pytest.raises(FtError):
        fetch_model(ref())
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert verify_model(fetch_model(ref())).is_ok


def test_mirror_and_token_of_the_machine_local_file_are_used(
    local_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_hub.token = "hf_secret"
    monkeypatch.delenv("HF_ENDPOINT")
    (tmp_path / "token").write_text("hf_secret\n")
    paths.local_file().parent.mkdir(parents=True, exist_ok=True)
    paths.local_file().write_text(f"hub: {{endpoint: '{local_hub.url}', token_file: {tmp_path / 'token'}}}\n")
    assert verify_model(fetch_model(ref())).is_ok


def test_hub_out_of_reach_is_told_in_a_sentence(local_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = locate_model(ref())
    assert found.shape is None
    assert found.note.startswith("http://127.0.0.1:9 cannot be reached: ")


def test_repository_of_pickles_alone_is_refused(local_hub: FakeHub) -> None:
    local_hub.add("org/old", "config.json", json.dumps(qwen3_moe_config()).encode())
    local_hub.add("org/old", "pytorch_model.bin", b"x")
    with pytest.raises(BadFileError) as caught:
        fetch_model(ref("org/old"))
    assert caught.value.message == (
        "org/old: its weights are pickles (`pytorch_model.bin`), which can run code; "
        "only safetensors and GGUF are loaded"
    )


def test_one_gguf_of_several_is_chosen_by_pattern(local_hub: FakeHub) -> None:
    metadata = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 256,
        "llama.attention.head_count": 4, "tokenizer.ggml.tokens": [f"t{n}" for n in range(5000)],
    }  # fmt: skip
    tensors = {"token_embd.weight": ("q4_k", (5000, 256)), "blk.0.attn_k.weight": ("q4_k", (256, 256))}
    for kind in ("Q4_K_M", "Q8_0"):
        (local_hub.root / "org/gguf").mkdir(exist_ok=True)
        write_gguf(local_hub.root / "org/gguf" / f"tiny-{kind}.gguf", metadata, tensors)
    with pytest.raises(UsageError) as caught:
        fetch_model(ref("org/gguf"))
    assert caught.value.message == "org/gguf: 2 GGUF models: tiny-Q4_K_M, tiny-Q8_0"
    found = locate_model(ref("org/gguf"), include=["*Q4_K_M*"])
    assert found.shape is not None
    assert (found.shape.file_format, found.shape.embedding.bytes) == ("gguf", 720_000)
    folder = fetch_model(ref("org/gguf"), include=["*Q4_K_M*"])
    assert [path.name for path in folder.iterdir()] == ["tiny-Q4_K_M.gguf"]


def test_modelscope_is_fetched_resumed_and_verified(local_hub: FakeHub) -> None:
    wanted = ref(source="modelscope")
    before = locate_model(wanted)
    assert before.shape is not None
    local_hub.cuts = {shard(local_hub, n).name: [300_000, 1] for n in (1, 2, 3)}
    folder = fetch_model(wanted)
    assert folder == paths.models_dir() / "org" / "tiny-moe"
    assert not list(folder.glob("*.part"))
    report = verify_model(folder)
    assert report.is_ok
    assert {file.status for file in report.files} == {"ok"}
    after = locate_model(wanted)
    assert (after.path, after.download_bytes) == (folder, 0)
    local_hub.sent_bytes = 0
    fetch_model(wanted)
    assert local_hub.sent_bytes == 0


def test_unfinished_modelscope_download_is_not_taken_for_the_model(local_hub: FakeHub) -> None:
    wanted = ref(source="modelscope")
    folder = fetch_model(wanted)
    name = shard(local_hub, 2).name
    (folder / name).rename(folder / f"{name}.part")
    found = locate_model(wanted)
    assert found.path is None
    assert f"{name}.part is not whole" in found.note


def test_changed_byte_in_the_cache_is_found(local_hub: FakeHub) -> None:
    folder = fetch_model(ref())
    path = (folder / shard(local_hub, 2).name).resolve()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = verify_model(folder)
    wrong = [file for file in report.files if file.status != "ok"]
    assert [(file.name, file.status, file.expected) for file in wrong] == [
        (shard(local_hub, 2).name, "mismatch", path.name)
    ]
    with pytest.raises(BadFileError, match="1 of 6 files are not what they should be"):
        report.raise_for_mismatch()


def test_hashes_of_a_lock_are_held_against_the_files(local_hub: FakeHub) -> None:
    folder = fetch_model(ref())
    hashes = verify_model(folder).hashes | {"tokenizer.json": sha256(b'{"version": "1.0"}').hexdigest()}
    assert verify_model(folder, expected=hashes).is_ok
    report = verify_model(folder, expected=hashes | {"gone.json": "0" * 64, "tokenizer.json": "1" * 64})
    assert {file.name: file.status for file in report.files if file.status in ("missing", "mismatch")} == {
        "gone.json": "missing",
        "tokenizer.json": "mismatch",
    }


def test_two_fetches_at_once_do_not_mix(local_hub: FakeHub) -> None:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(fetch_model(ref()))
        except FtError as error:
            results.append(error.message)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [one for one in results if isinstance(one, Path)]
    assert done
    assert set(results) - set(done) <= {f"`{REPO}` is being fetched by another `ft` now"}
    assert verify_model(done[0]).is_ok


def test_a_recipe_names_one_gguf_of_several(local_hub: FakeHub) -> None:
    metadata = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 256,
        "llama.attention.head_count": 4, "tokenizer.ggml.tokens": [f"t{n}" for n in range(5000)],
    }  # fmt: skip
    tensors = {"token_embd.weight": ("q4_k", (5000, 256)), "blk.0.attn_k.weight": ("q4_k", (256, 256))}
    folder = local_hub.root / "org/quants"
    folder.mkdir()
    for kind in ("Q4_K_M", "Q8_0"):
        write_gguf(folder / f"tiny-{kind}.gguf", metadata, tensors)
    with pytest.raises(UsageError) as caught:
        fetch_model(ref("org/quants"))
    assert caught.value.hint is not None
    assert "`--set model.file=Q4_K_M`" in caught.value.hint
    chosen = ref("org/quants", file="Q4_K_M")
    found = locate_model(chosen)
    assert found.shape is not None
    assert (found.path, found.download_bytes) == (None, (folder / "tiny-Q4_K_M.gguf").stat().st_size)
    path = fetch_model(chosen)
    assert path.name == "tiny-Q4_K_M.gguf"
    assert locate_model(chosen).path == path
    other = locate_model(ref("org/quants", file="tiny-Q8_0.gguf"))
    assert other.path is None
    assert fetch_model(ref("org/quants", file="tiny-Q8_0.gguf")).name == "tiny-Q8_0.gguf"
    # Both lie side by side now, and each is still found by its name.
    assert locate_model(chosen).path == path
    local = ModelRef(path=str(path.parent), file="Q8_0")
    assert locate_model(local).path == path.with_name("tiny-Q8_0.gguf")


def test_a_file_that_leaves_the_repository_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves the repository"):
        ref("org/quants", file="a/../../secret.gguf")
