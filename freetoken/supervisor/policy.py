"""How much the keeper may do by itself; apart from `launch.py`, so that `ft plan` loads nothing that reads /proc."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeeperPolicy:
    """Restarts, log sizes and how often it looks. Sizes in bytes, times in seconds."""

    max_restarts: int = 3
    window_s: float = 600.0
    backoff_s: float = 1.0
    log_bytes: int = 16 << 20
    log_files: int = 2
    poll_s: float = 3.0
