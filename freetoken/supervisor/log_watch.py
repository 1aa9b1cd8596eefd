"""Keeps one engine's log below its cap, and knows whether the log has taken its last bytes."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from freetoken.supervisor import logs
from freetoken.supervisor.files import describe_os_error, format_now, is_no_space
from freetoken.supervisor.policy import KeeperPolicy


class LogWatch:
    """The log at `path` under `policy`."""

    def __init__(self, path: Path, policy: KeeperPolicy) -> None:
        self.path, self.policy = path, policy
        #: What is wrong with the log now; "" when nothing is.
        self.problem = ""
        self._has_hit_limit = False

    def keep(self) -> bool:
        """Rotates the log where it has grown over its cap, and looks at the space left; True when it rotated."""
        # An engine that was refused a write here may end after the rotation has made room again.
        self._has_hit_limit = self._has_hit_limit or self._is_at_limit()
        try:
            is_rotated = logs.rotate(self.path, logs.limit_bytes(self.policy.log_bytes), self.policy.log_files)
            free = logs.free_bytes(self.path)
            is_short = free is not None and free < logs.MIN_FREE_BYTES
            self.problem = f"only {free} bytes free for {self.path}" if is_short else ""
            return is_rotated
        except OSError as error:
            self.problem = describe_os_error(error, self.path)
            return False

    def find_end_problem(self) -> str:
        """After the engine ended: why the log took no more bytes; "" when it did."""
        try:
            logs.append_line(self.path, f"{format_now()} engine ended")
        except OSError as error:
            return describe_os_error(error, self.path) if is_no_space(error) else ""
        return describe_os_error(OSError(errno.EFBIG, ""), self.path) if self._has_hit_limit else ""

    def _is_at_limit(self) -> bool:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return soft != resource.RLIM_INFINITY and logs.size_bytes(self.path) >= soft

    def open(self, run_id: str, argv: tuple[str, ...]) -> int:
        """A descriptor for the engine's output, after a line that says what is started. Raises OSError."""
        self._has_hit_limit = False
        logs.append_line(self.path, f"{format_now()} run {run_id}: {' '.join(argv)}")
        return logs.open_log(self.path)
