"""Kernels against plain arithmetic: on a GPU as they run, without one in Triton's interpreter where Triton is there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from freetoken.engine.kernels import decode, packed

KERNELS = ("nvfp4", "mxfp4", "fp8", "plain", "unpack nvfp4", "unpack mxfp4")
PROGRAM = """
import sys, torch
from freetoken.engine.kernels import packed, packed_triton
kernels = packed._Kernels()
kernels._triton = packed_triton
print(*(packed._self_test(kernels, name, torch.device(sys.argv[1])) for name in sys.argv[2:]))
"""


DECODE_PROGRAM = """
import sys, torch
from freetoken.engine.kernels import decode, decode_triton
kernel, device = getattr(decode_triton, sys.argv[2]), torch.device(sys.argv[1])
print(*(decode.self_test(sys.argv[2], kernel, device, dtype) for dtype in (torch.float32, torch.bfloat16)))
"""


def run_decode_self_test(device: str, name: str, **environment: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", DECODE_PROGRAM, device, name], env=os.environ | environment, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    exact, rounded = (float(word) for word in done.stdout.split())
    return exact, rounded


def run_self_tests(device: str, **environment: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device, *KERNELS], env=os.environ | environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def test_kernels_compute_what_formats_say_in_the_interpreter() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed (it comes with CUDA builds of PyTorch)")
    assert max(run_self_tests("cpu", TRITON_INTERPRET="1")) < 0.01


@pytest.mark.gpu
def test_kernels_compute_what_formats_say_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    assert max(run_self_tests("cuda:0")) < 0.01


@pytest.mark.gpu
def test_every_kernel_is_taken_on_this_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    assert packed.describe(torch.device("cuda:0")) is None


@pytest.mark.parametrize("name", decode.KERNELS)
def test_decode_kernels_compute_what_torch_does_in_the_interpreter(name: str) -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed (it comes with CUDA builds of PyTorch)")
    exact, rounded = run_decode_self_test("cpu", name, TRITON_INTERPRET="1")
    assert exact < 1e-5
    assert rounded < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", decode.TOLERANCE)
@pytest.mark.parametrize("name", decode.KERNELS)
def test_decode_kernels_compute_what_torch_does_on_the_gpu(name: str, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from freetoken.engine.kernels import decode_triton

    error = decode.self_test(name, getattr(decode_triton, name), torch.device("cuda:0"), dtype)
    assert error < decode.TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_step_is_right_at_the_sizes_of_a_large_model(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from freetoken.engine.kernels import decode_triton

    kernel, device = decode_triton.delta_step, torch.device("cuda:0")
    error = decode.self_test("delta_step", kernel, device, dtype, sizes=(16, 32, 128, 128))
    assert error < decode.TOLERANCE[dtype]


@pytest.mark.gpu
def test_every_decode_kernel_is_taken_on_this_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    assert decode.describe(torch.device("cuda:0")) is None


def test_without_a_gpu_torch_operations_are_taken_and_nothing_is_said() -> None:
    hidden = torch.zeros(1, 32)
    weight, scale, whole = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2), torch.ones(1)
    assert packed.packed_linear(hidden, weight, scale, whole) is None
    assert packed.unpack("nvfp4", weight[None], scale[None], whole[None], torch.bfloat16) is None
    assert packed.grouped_product(hidden, hidden[None], [0, 1]) is None
    assert packed.describe(torch.device("cpu")) is None
