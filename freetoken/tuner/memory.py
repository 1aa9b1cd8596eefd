"""How far plans are off in memory, learned from peaks and crashes: what the next point must leave free.

A measured peak minus the planned one is a constant of the machine (context, allocator, what nobody counts) plus a
part that grows with the prefill chunk. Two numbers with priors, so that one start already says most of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from freetoken.units import KIB, MIB

#: Prior deviation of the constant part, of the part per 1024 chunk tokens, and of a peak from one run to the next.
CONSTANT_SD, PER_CHUNK_SD, RUN_SD = 200 * MIB, 24 * MIB, 12 * MIB
#: A crash says that at least the rest was missing; how much more is unknown.
CRASH_MEAN, CRASH_SD = 96 * MIB, 96 * MIB


class Peak(NamedTuple):
    """What one trial said of memory: measured peak, or a crash at the planned peak."""

    chunk_tokens: int
    planned_bytes: int
    measured_bytes: int | None
    limit_bytes: int
    missing_bytes: int = 0


class MemoryCorrection:
    """The expected excess over the plan in bytes, with its deviation, for a chunk size.

    `scale_bytes` shrinks the priors on small devices: 200 MiB are nothing to expect beyond a plan of 300 MiB.
    """

    def __init__(self, peaks: Iterable[Peak] = (), scale_bytes: int | None = None) -> None:
        factor = 1.0 if scale_bytes is None else min(1.0, max(0.02, scale_bytes / (4096 * MIB)))
        sds = np.array([CONSTANT_SD, PER_CHUNK_SD]) * factor
        precision, pull = np.diag(1 / sds**2), np.zeros(2)
        excess: float
        for peak in peaks:
            row = np.array([1.0, peak.chunk_tokens / KIB])
            if peak.measured_bytes is not None:
                excess, sd = peak.measured_bytes - peak.planned_bytes, RUN_SD * factor
            else:
                excess = peak.limit_bytes - peak.planned_bytes + (peak.missing_bytes or CRASH_MEAN * factor)
                sd = (RUN_SD if peak.missing_bytes else CRASH_SD) * factor
            precision += np.outer(row, row) / sd**2
            pull += row * excess / sd**2
        self.covariance = np.linalg.inv(precision)
        self.mean = self.covariance @ pull
        self.run_sd = RUN_SD * factor

    def excess_bytes(self, chunk_tokens: int, deviations: float = 0.0) -> float:
        """What the plan lacks at `chunk_tokens`, `deviations` standard deviations on the safe side."""
        row = np.array([1.0, chunk_tokens / KIB])
        spread = float(np.sqrt(row @ self.covariance @ row + self.run_sd**2))
        return float(row @ self.mean) + deviations * spread
