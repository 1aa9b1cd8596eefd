"""How much memory the caches of a running engine may take: what they take now, and what is still free beside them."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from freetoken.units import MIB

#: Left free by a live resize, for the next prefill's activations and the allocator.
RESERVE_BYTES = 256 * MIB


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now: VRAM, or RAM within the control group's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(int(psutil.virtual_memory().available), _cgroup_free_bytes())


def _cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What the control group (v2) still allows; a huge number without a limit. Page cache counts as free."""
    try:
        limit, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return 1 << 62 if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 1 << 62
