"""How busy a GPU is and how much of its memory is in use, asked of the driver's own library (NVML) through ctypes.

Neither torch nor `pynvml`: the keeper must stay small, and loads even this only while it has a suspicion. The figure is
the whole card's, since the driver tells no process's share under WSL: another program's work hides an idle engine.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuGauge:
    """Reads one GPU, named by uuid or by index in the driver's order."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu

    def __call__(self) -> float | None:
        """Share of the last second or less in which a kernel ran, 0 to 1; None where the driver does not say.

        Opens and closes the library each time: between two looks the keeper holds nothing of the driver.
        """
        with _open_driver() as nvml:
            handle, found = self._find(nvml), _Utilization()
            if handle is None or nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) != 0:
                return None
            return float(found.gpu) / 100

    def read_used_bytes(self) -> int | None:
        """VRAM in use by all processes, in bytes; None where the driver does not say."""
        with _open_driver() as nvml:
            handle, found = self._find(nvml), _Memory()
            if handle is None or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)) != 0:
                return None
            return int(found.used)

    def is_present(self) -> bool:
        """Whether the driver is up and has this GPU; at boot that may take a while."""
        with _open_driver() as nvml:
            return self._find(nvml) is not None

    def _find(self, nvml: Any) -> Any:
        if nvml is None:
            return None
        handle = ctypes.c_void_p()
        if self.gpu.isdigit():
            code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(self.gpu)), ctypes.byref(handle))
        else:
            code = nvml.nvmlDeviceGetHandleByUUID(self.gpu.encode(), ctypes.byref(handle))
        return handle if code == 0 else None


@contextlib.contextmanager
def _open_driver() -> Iterator[Any]:
    """The driver's library, ready to be asked; None where it does not load or start."""
    nvml = _load()
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _load() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
