"""Compilers, the CUDA toolkit and our own torch: found by looking, run only where a file does not tell.

Nothing is imported: torch's version is read from its `version.py`.
"""

from __future__ import annotations

import json
import re

from freetoken.hardware.model import Software
from freetoken.hardware.reader import Reader

_RUN_TIMEOUT_S = 3.0


def read_software(reader: Reader, driver: str | None = None, cuda_driver: str | None = None) -> Software:
    """Toolchain facts below `reader`; `driver` and `cuda_driver` come from whoever asked the driver."""
    nvcc = _find_nvcc(reader)
    torch_version, torch_cuda = _read_torch(reader)
    return Software(
        driver=driver or _driver_in_proc(reader),
        cuda_driver=cuda_driver,
        cuda_toolkit=_toolkit_version(reader, nvcc) if nvcc else None,
        nvcc=nvcc,
        gxx=reader.which("g++"),
        ninja=reader.which("ninja"),
        torch=torch_version,
        torch_cuda=torch_cuda,
    )


def _driver_in_proc(reader: Reader) -> str | None:
    """The kernel module's version: there even where user-space libraries are not."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", reader.text("/proc/driver/nvidia/version"))
    return match[1] if match else None


def _find_nvcc(reader: Reader) -> str | None:
    homes = [reader.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    found = reader.which("nvcc")
    candidates = [found] if found else []
    candidates += [f"{home.rstrip('/')}/bin/nvcc" for home in homes if home.startswith("/")]
    return next((path for path in candidates if reader.exists(path)), None)


def _toolkit_version(reader: Reader, nvcc: str) -> str | None:
    """`13.0.2` of the toolkit that holds `nvcc`: from its version file or header, else by running it."""
    home = reader.resolve(nvcc).rsplit("/", 2)[0]
    try:
        recorded = json.loads(reader.text(f"{home}/version.json"))
        return str(recorded["cuda"]["version"])
    except (ValueError, KeyError, TypeError):
        pass
    if match := re.search(r"CUDA Version (\d+\.\d+(?:\.\d+)?)", reader.text(f"{home}/version.txt")):
        return match[1]
    for header in (f"{home}/include/cuda.h", f"{home}/targets/x86_64-linux/include/cuda.h"):
        if match := re.search(r"#define\s+CUDA_VERSION\s+(\d+)", reader.text(header)):
            return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
    output = (reader.run((nvcc, "--version"), _RUN_TIMEOUT_S) or b"").decode(errors="replace")
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else None


def _read_torch(reader: Reader) -> tuple[str | None, str | None]:
    """(version, CUDA it was built for) of the torch that this interpreter would import; None where it is not there."""
    folder = reader.package_folder("torch")
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        return None, None
    version = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= ['\"]([^'\"]+)", text, re.MULTILINE)
    return (version[1] if version else None), (cuda[1] if cuda else None)
