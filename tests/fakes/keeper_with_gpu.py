"""The keeper with a GPU that is as busy as a file says: `python -m tests.fakes.keeper_with_gpu RUN_FOLDER FILE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from freetoken.supervisor.keeper import Keeper
from freetoken.supervisor.launch import KEEPER_LOCK_FILE, read_launch
from freetoken.supervisor.locks import FileLock


def main(run_dir: Path, gauge: Path) -> int:
    launch = read_launch(run_dir)
    assert launch is not None
    assert FileLock(run_dir / KEEPER_LOCK_FILE, purpose="keeper").acquire(timeout_s=1.0)
    os.chdir(run_dir)
    return Keeper(run_dir, launch, read_gpu=lambda: float(gauge.read_text())).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
