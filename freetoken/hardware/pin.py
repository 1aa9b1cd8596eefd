"""How much host memory CUDA will page-lock here, tried out in a process of its own.

WSL caps page-locked memory at a share of RAM that differs from version to version; the only honest answer is to ask for
it. Through the driver library alone (no torch), in steps, and everything is given back when the process ends.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

from freetoken.units import GIB, MIB

STEP_BYTES = 256 * MIB
TIMEOUT_S = 60.0
#: Left to the system whatever the driver would give.
_LEFT_BYTES = 3 * GIB
_LIBRARIES = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")


def probe_pinnable(available_bytes: int, *, timeout_s: float = TIMEOUT_S) -> int | None:
    """Bytes that could be pinned, at most `available_bytes` less 3 GiB; None where it cannot be tried."""
    most = max(0, available_bytes - _LEFT_BYTES)
    argv = (sys.executable, "-m", "freetoken.hardware.pin", str(most))
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout.strip()
    return int(text) if done.returncode == 0 and text.isdigit() else None


def pin_in_steps(cuda: Any, most_bytes: int) -> int:
    """Bytes that `cuda` pinned in steps of 256 MiB before it refused, or `most_bytes` was reached.

    `cuda` is the driver library. Raises OSError where there is no device or no context.
    """
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for call, arguments in (
        (cuda.cuInit, (0,)),
        (cuda.cuDeviceGet, (ctypes.byref(device), 0)),
        (cuda.cuCtxCreate_v2, (ctypes.byref(context), 0, device)),
    ):
        if (code := call(*arguments)) != 0:
            raise OSError(f"the CUDA driver answered {code}")
    pinned = 0
    while pinned + STEP_BYTES <= most_bytes:
        pointer = ctypes.c_void_p()
        if cuda.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(STEP_BYTES), 0) != 0:
            break
        pinned += STEP_BYTES
    return pinned


def _main(argv: list[str]) -> int:
    for name in _LIBRARIES:
        try:
            print(pin_in_steps(ctypes.CDLL(name), int(argv[1])), flush=True)
        except OSError:
            continue
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv))
