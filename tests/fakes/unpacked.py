"""A packed checkpoint as a plain float32 one, unpacked by our own `engine.formats`, for stock transformers to load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from freetoken.engine import formats


def unpack_checkpoint(source: Path, target: Path) -> Path:
    """Write `source` with every FP8, NVFP4 and MXFP4 tensor as float32 into `target` and return it."""
    target.mkdir(parents=True, exist_ok=True)
    stored = {name: value for path in sorted(source.glob("*.safetensors")) for name, value in load_file(path).items()}
    plain: dict[str, torch.Tensor] = {}
    for name, value in stored.items():
        stem = name.removesuffix(".weight")
        if name.endswith(("_scale", "_scale_2", "_scales")):
            continue
        if f"{stem}.weight_scale_2" in stored:
            scales = formats.scale_of_nvfp4(stored[f"{stem}.weight_scale"], stored[f"{stem}.weight_scale_2"].reshape(1))
            plain[name] = formats.dequantize_fp4(value, scales, torch.float32)
        elif f"{stem}.weight_scale" in stored:
            plain[name] = formats.dequantize_fp8(value, stored[f"{stem}.weight_scale"].reshape(1), torch.float32)
        elif name.endswith("_blocks"):
            scales = formats.scale_of_mxfp4(stored[name.replace("_blocks", "_scales")])
            flat = formats.dequantize_fp4(value.flatten(-2), scales, torch.float32)
            plain[name.removesuffix("_blocks")] = flat.transpose(1, 2)
        else:
            plain[name] = value
    save_file({name: value.contiguous() for name, value in plain.items()}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config))
    for extra in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / extra, target / extra)
    return target
