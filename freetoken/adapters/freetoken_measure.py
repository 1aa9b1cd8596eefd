"""Ledger lines of a start that the upstream engine's API does not tell, from its log and what torch has reserved.

The log states free memory to a hundredth of a GiB before the weights, after the pools and around graph capture; what
is left between two of them, less the lines that are exact, is one line's own.
"""

from __future__ import annotations

import re

from freetoken.adapters.log_patterns import ANSI
from freetoken.planner.memory import Ledger
from freetoken.planner.plan import Plan
from freetoken.units import GIB

_FREE = re.compile(
    r"Free (?:GPU )?memory (before loading model|after initialization|before capturing CUDA graphs"
    r"|after capturing CUDA graphs): ([\d.]+) GiB"
)
#: Lines that the pools and weights between the first two statements come to, the allocator's own rounding aside.
_POOLS = (
    "rope", "dense_weights", "shared_experts", "head", "embedding", "vision", "expert_slots", "kv_cache",
    "linear_state", "page_tables",
)  # fmt: skip
#: Outside torch's allocator: it does not count them as reserved.
_OUTSIDE = ("cuda_context", "allocator")
_TRANSIENT = ("prefill_transient", "autotune_scratch")


def measure_lines(plan: Plan, log: str, reserved_bytes: int) -> dict[str, int]:
    """Ledger key -> bytes of what this start took; lines that the log does not tell apart are left out.

    `reserved_bytes` is what torch had reserved after a full prefill chunk (`vram_bytes` of `/v1/stats`); 0 = unknown.
    """
    ledger = plan.vram
    if ledger is None:
        return {}
    stated: dict[str, int] = {}
    for when, gib in _FREE.findall(ANSI.sub("", log)):
        # A rebuild prints some of it again, with other slots: the start's own lines come first.
        stated.setdefault(when, round(float(gib) * GIB))
    found = {
        "cuda_context": _context(ledger, stated),
        "allocator": _allocator(ledger, stated),
        "cuda_graphs": _between(stated, "before capturing CUDA graphs", "after capturing CUDA graphs"),
    }
    found |= _transient(ledger, reserved_bytes)
    return {key: size for key, size in found.items() if size is not None and size > 0 and ledger.line(key) is not None}


def _between(stated: dict[str, int], before: str, after: str) -> int | None:
    return stated[before] - stated[after] if before in stated and after in stated else None


def _context(ledger: Ledger, stated: dict[str, int]) -> int | None:
    before = stated.get("before loading model")
    return None if before is None else ledger.available_bytes - before


def _allocator(ledger: Ledger, stated: dict[str, int]) -> int | None:
    taken = _between(stated, "before loading model", "after initialization")
    return None if taken is None else taken - _sum(ledger, _POOLS)


def _transient(ledger: Ledger, reserved_bytes: int) -> dict[str, int]:
    """The larger of prefill and tuner scratch, which share their memory: the one that is planned larger is meant."""
    sizes = {key: line.bytes for key in _TRANSIENT if (line := ledger.line(key)) is not None}
    if not reserved_bytes or not sizes:
        return {}
    steady = sum(line.bytes for line in ledger.lines if line.key not in (*_OUTSIDE, *_TRANSIENT))
    return {max(sizes, key=lambda key: sizes[key]): reserved_bytes - steady}


def _sum(ledger: Ledger, keys: tuple[str, ...]) -> int:
    return sum(line.bytes for line in ledger.lines if line.key in keys)
