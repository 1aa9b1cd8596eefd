"""Holds device memory until it is ended, so that a large GPU has as much free as a small card.

    python benchmarks/gpu/hold.py --free-gib 8 [--less-mib 700 --after-file FILE]

Prints one line once it holds. With `--after-file` it waits for FILE to exist and then takes `--less-mib` more: the
memory that goes away after a plan was made.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

PIECE_BYTES = 2 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--free-gib", type=float, required=True)
    parser.add_argument("--less-mib", type=float, default=0.0)
    parser.add_argument("--after-file", type=Path)
    parser.add_argument("--for-s", type=float, default=1800.0)
    options = parser.parse_args()
    ends_s = time.monotonic() + options.for_s
    held = take(options.free_gib * 2**30)
    print(f"{free_bytes() / 2**30:.3f} GiB free", flush=True)
    if options.after_file is not None:
        while not options.after_file.exists() and time.monotonic() < ends_s:
            time.sleep(0.01)
        held += take(free_bytes() - options.less_mib * 2**20)
        print(f"{free_bytes() / 2**30:.3f} GiB free after {options.less_mib:.0f} MiB more were taken", flush=True)
    time.sleep(max(0.0, ends_s - time.monotonic()))
    held.clear()


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


def take(leave_bytes: float) -> list[torch.Tensor]:
    """Allocations until at most a piece more than `leave_bytes` is free."""
    held = []
    while (over := int(free_bytes() - leave_bytes)) >= PIECE_BYTES:
        pieces = min(over, 8 << 30) // PIECE_BYTES
        held.append(torch.empty(pieces * PIECE_BYTES, dtype=torch.uint8, device="cuda"))
    return held


if __name__ == "__main__":
    main()
