"""The embedded engine's expert arithmetic as something to measure: a process beside this one, asked for its rate.

Nothing of the engine is imported here; the process prints what `freetoken.engine.measure` says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import freetoken
from freetoken.errors import FtError, UsageError

MODULE = "freetoken.engine.measure"


@dataclass(frozen=True)
class ExpertShape:
    """Experts of one format: [2 inter, hidden] and [hidden, inter], `top_k` of them for a token."""

    format: str
    hidden: int
    inter: int
    top_k: int


class ExpertKernel:
    """A context manager; inside it `expert_bytes` is a record's size and rates can be asked for."""

    def __init__(self, shape: ExpertShape, *, threads: int, bank_bytes: int, dtype: str = "float32") -> None:
        self.shape, self.threads = shape, threads
        self._asked = {**asdict(shape), "threads": threads, "bank_bytes": bank_bytes, "dtype": dtype}
        self._process: subprocess.Popen[str] | None = None
        #: Bytes of one expert as the engine keeps it.
        self.expert_bytes = 0

    def __enter__(self) -> ExpertKernel:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, json.dumps(self._asked)],
            cwd=Path(freetoken.__file__).resolve().parent.parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self.expert_bytes = int(self._read()["expert_bytes"])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def measure(self, seconds: float) -> float:
        """Bytes of experts per second."""
        self.begin(seconds)
        return self.end()

    def begin(self, seconds: float) -> None:
        """Starts measuring for `seconds`; `end` waits for the answer."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        except OSError as error:
            raise FtError(f"the expert kernel ended: {error}") from error

    def end(self) -> float:
        """The rate of what `begin` started."""
        return float(self._read()["bytes_per_s"])

    def _read(self) -> dict[str, Any]:
        process = self._running()
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            _, said = process.communicate()
            last = said.strip().splitlines()[-1:] or [f"code {process.returncode}"]
            raise FtError(f"the expert kernel ended: {last[0]}")
        value: dict[str, Any] = json.loads(line)
        if "error" in value:
            raise UsageError(str(value["error"]))
        return value

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise FtError("the expert kernel does not run")
        return self._process
