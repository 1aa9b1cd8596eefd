"""Compilers, CUDA toolkit and torch, found without running anything where a file tells."""

from pathlib import Path

import pytest

from freetoken.hardware.model import Software
from freetoken.hardware.toolchain import read_software
from tests.fakes.machines import CUDA_13, NVIDIA_DRIVER, FakePrograms, make_reader


def test_a_complete_toolchain_is_found_and_nothing_is_run(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, {**CUDA_13, **NVIDIA_DRIVER})
    assert read_software(reader) == Software(
        driver="580.95.05",
        cuda_toolkit="13.0.2",
        nvcc="/usr/local/bin/nvcc",
        gxx="/usr/bin/g++",
        ninja="/usr/bin/ninja",
    )
    assert isinstance(reader.run, FakePrograms)
    assert reader.run.asked == []


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"/opt/cuda/include/cuda.h": "#define CUDA_VERSION 12080\n"}, "12.8"),
        ({"/opt/cuda/version.txt": "CUDA Version 10.2.89\n"}, "10.2.89"),
        ({"/opt/cuda/version.json": "{broken"}, "13.1"),
        ({}, "13.1"),
    ],
)
def test_the_toolkits_version_is_read_from_its_files_else_nvcc_is_run(
    tmp_path: Path, files: dict[str, str], version: str
) -> None:
    programs = {"nvcc --version": b"Cuda compilation tools, release 13.1, V13.1.80\n"}
    reader = make_reader(
        tmp_path, {"/opt/cuda/bin/nvcc": "", **files}, environ={"CUDA_HOME": "/opt/cuda"}, programs=programs
    )
    software = read_software(reader)
    assert (software.nvcc, software.cuda_toolkit) == ("/opt/cuda/bin/nvcc", version)


def test_a_program_that_may_not_be_run_is_not_found(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, {"/usr/bin/g++": ""})
    reader.path("/usr/bin/g++").chmod(0o644)
    assert read_software(reader) == Software()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "__version__ = '2.14.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            ("2.14.0+cu130", "13.0"),
        ),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ("2.13.0+cpu", None)),
        ("", (None, None)),
    ],
)
def test_torch_is_read_from_its_version_file(tmp_path: Path, text: str, found: tuple[str | None, str | None]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text)
    software = read_software(make_reader(tmp_path / "root", {}, torch=tmp_path / "torch"))
    assert (software.torch, software.torch_cuda) == found
