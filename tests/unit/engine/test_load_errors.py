"""What `load_model` says of checkpoints and settings that it cannot use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken.engine import loader
from freetoken.engine.config import EngineConfig
from freetoken.engine.loader import load_model
from freetoken.errors import BadFileError, UsageError
from tests.fakes.tiny_models import make_tiny_checkpoint


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit all tensors of a checkpoint; afterwards they lie in one file without an index."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def load(folder: Path, **settings: Any) -> None:
    load_model(EngineConfig(model_path=folder, **settings)).close()


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    gone = ["model.norm.weight", "model.layers.1.mlp.gate.weight"]
    change(folder, lambda tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(BadFileError, match="lacks 2 tensors that the model needs: ") as caught:
        load(folder)
    assert all(f"`{name}`" in caught.value.message for name in gone)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    change(folder, lambda tensors: tensors.pop("model.layers.2.mlp.experts.5.up_proj.weight"))
    with pytest.raises(
        BadFileError, match=r"lacks 1 of 8 experts of `model.layers.2.mlp.experts.gate_up_proj`.*expert 5"
    ):
        load(folder)


def test_left_over_tensors_are_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "olmoe")
    change(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(1)}))
    with pytest.raises(
        BadFileError, match=r"has 1 tensor that the model has no place for: `model.layers.0.extra.weight`"
    ):
        load(folder)


def test_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "dense", "qwen3_moe")
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(
        BadFileError, match=r"`model.norm.weight` is stored with the shape \[63\], the model needs \[64\]"
    ):
        load(folder)
    folder = make_tiny_checkpoint(tmp_path / "expert", "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    change(folder, lambda tensors: tensors.update({name: torch.zeros(64, 31)}))
    with pytest.raises(BadFileError, match=r"experts.3.w2.weight` has the shape \[64, 31\]"):
        load(folder)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "gpt_oss")
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BadFileError, match="it is truncated") as caught:
        load(folder)
    assert caught.value.hint == "fetch the file again"


def test_a_half_quantised_weight_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen3_5_moe_nvfp4")
    change(folder, lambda tensors: tensors.pop("lm_head.weight_scale_2"))
    with pytest.raises(
        BadFileError, match=r"is stored in a format that is not known here \(scale float8_e4m3fn, weight"
    ):
        load(folder)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_other_quantisations_are_refused_by_name(tmp_path: Path, method: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    change_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(BadFileError, match=f"is quantised by `{method}`, the native engine reads `modelopt`, `mxfp4`"):
        load(folder)


def test_a_dense_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                    "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 32, "head_dim": 8})
    )  # fmt: skip
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        BadFileError, match=r"`qwen3` has no routed experts that transformers .* lets an engine compute"
    ):
        load(tmp_path)


def test_an_unknown_model_and_a_missing_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"has no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(BadFileError, match="cannot be used by transformers"):
        load(tmp_path)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
        )
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(BadFileError, match="cannot be used by transformers"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_cuda_without_a_gpu_is_a_usage_error(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(UsageError, match="no CUDA device can be used") as caught:
        load(make_tiny_checkpoint(tmp_path, "qwen3_moe"), device="cuda")
    assert caught.value.hint == "`--device cpu` runs on the CPU"


def test_progress_ends_at_the_total_of_each_stage(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe")

    def progress(stage: str, done: int, total: int) -> None:
        assert seen.get(stage, (0, 0))[0] <= done <= total
        seen[stage] = (done, total)

    load_model(EngineConfig(model_path=folder, strategy="cpu"), progress).close()
    assert {stage: done == total for stage, (done, total) in seen.items()} == {"dense": True, "experts": True}


def test_a_gpu_is_opened_without_attention_that_is_planned_for_every_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", opened.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        loader._open_device(EngineConfig(model_path=tmp_path, device="cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        loader._open_device(EngineConfig(model_path=tmp_path, device="cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert opened == [torch.device("cuda", 0)]
