"""The figures of Qwen3.6-35B-A3B, exact, from headers alone, and what reading them costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from freetoken.checkpoint.header import read_shape
from freetoken.checkpoint.shape import ModelShape, TensorGroup
from tests.fakes.checkpoints import QWEN36_CONFIG, qwen36_nvfp4_tensors, write_checkpoint


@pytest.fixture(scope="module")
def shape(qwen36_folder: Path) -> ModelShape:
    return read_shape(qwen36_folder)


def test_every_part_has_its_exact_bytes(shape: ModelShape) -> None:
    assert shape.dense == TensorGroup(
        bytes=1_331_556_496,
        elements=1_305_408_128,
        tensors=751,
        format="fp8",
        by_format={"fp8": 1_279_263_760, "bf16": 52_288_896, "f32": 3_840},
        quantized_tensors=130,
        quantized_rows=542_720,
    )
    assert shape.shared_experts.bytes == 70_779_360
    assert shape.embedding.bytes == 1_017_118_720
    assert (shape.head.bytes, shape.head.format) == (286_064_644, "nvfp4")
    assert shape.dense_bytes == 2_705_519_220
    assert sum(shape.dense_bytes_by_layer) == shape.dense.bytes + shape.shared_experts.bytes - 2048 * 2


def test_state_dict_of_the_upstream_engine_follows_from_the_shape(shape: ModelShape) -> None:
    # It keeps a 32-bit scale a row instead of one a matrix, `dt_bias` in 32 bits, one input scale a fused projection.
    groups = (shape.dense, shape.shared_experts, shape.head)
    rows = sum(group.quantized_rows for group in groups)
    matrices = sum(group.quantized_tensors for group in groups)
    dt_bias, merged_input_scales = 30 * 32 * 2, (30 * 1 + 10 * 2) * 4
    assert shape.dense_bytes + 4 * rows - 4 * matrices + dt_bias - merged_input_scales == 2_709_175_616


def test_experts_are_known_by_layer(shape: ModelShape) -> None:
    experts = shape.experts
    assert (experts.layers, experts.per_layer, experts.top_k, experts.count) == (40, 256, 8, 10_240)
    assert (experts.hidden_size, experts.intermediate_size, experts.projections) == (2048, 512, 3)
    assert experts.expert_bytes == 1_769_472 + 3 * 4
    assert experts.bytes_by_layer == (256 * 1_769_484,) * 40
    assert experts.layer_ids == tuple(range(40))
    assert (experts.format, experts.has_bias, experts.has_input_scale, experts.is_stacked) == (
        "nvfp4",
        False,
        False,
        False,
    )


def test_kv_and_state_are_those_of_ten_full_and_thirty_linear_layers(shape: ModelShape) -> None:
    assert (shape.attention.count("full"), shape.attention.count("linear")) == (10, 30)
    assert shape.kv_bytes_per_token() == 20_480
    assert shape.state_bytes_per_sequence() == 64_389_120
    assert shape.state_bytes_per_sequence(state_bytes=2) == 32_931_840
    assert shape.rotary_dim == 64


def test_disk_bytes_are_those_of_the_files(shape: ModelShape, qwen36_folder: Path) -> None:
    assert shape.disk_bytes == sum(path.stat().st_size for path in qwen36_folder.glob("*.safetensors"))
    assert shape.notes == ()


@pytest.mark.parametrize(
    # Input scales: one a fused projection of the delta net, the attention, the shared expert's gate and up.
    ("dense", "total", "input_scales"),
    [("bf16", 4_896_715_776, 0), ("nvfp4", 2_879_559_296, 30 * 2 + 10 * 2 + 40 * 2)],
)
def test_other_recipes_give_the_documented_dense_part(
    tmp_path: Path, dense: str, total: int, input_scales: int
) -> None:
    tensors = {name: one for name, one in qwen36_nvfp4_tensors(dense=dense).items() if ".experts." not in name}
    config = {**QWEN36_CONFIG, "text_config": {**QWEN36_CONFIG["text_config"], "num_experts": 0}}
    read = read_shape(write_checkpoint(tmp_path / "m", config, tensors))
    groups = (read.dense, read.shared_experts, read.head)
    rows = sum(group.quantized_rows for group in groups)
    matrices = sum(group.quantized_tensors for group in groups)
    assert read.dense_bytes + 4 * rows - 4 * matrices + 30 * 32 * 2 + 4 * input_scales == total
    assert read.experts.count == 0


def test_93275_tensors_are_read_in_two_seconds_and_300_mebibytes(qwen36_folder: Path) -> None:
    code = (
        "import json, re, time\n"
        "from pathlib import Path\n"
        "from freetoken.checkpoint.header import read_shape\n"
        "begin = time.process_time()\n"
        f"shape = read_shape(Path({str(qwen36_folder)!r}))\n"
        # Not getrusage: its peak is inherited from the process that spawned this one.
        "peak = int(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
        "print(json.dumps([time.process_time() - begin, peak]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, kib = json.loads(done.stdout)
    assert seconds < 2
    assert kib < 300 * 1024
