"""Facts of the GPU that an engine runs on, for those rooms that import no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def describe_gpu(device: torch.device) -> dict[str, Any] | None:
    """Index, name, uuid (`GPU-...`, as NVML writes it) and total bytes; None on the CPU."""
    if device.type != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(device)
    uuid = str(getattr(found, "uuid", ""))
    named = uuid if uuid.startswith("GPU-") or not uuid else f"GPU-{uuid}"
    return {"index": device.index or 0, "name": found.name, "uuid": named, "total_bytes": found.total_memory}
