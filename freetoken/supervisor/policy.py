"""How much the keeper may do by itself; apart from `launch.py`, so that `ft plan` loads nothing that reads /proc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What the keeper does about something it sees: nothing, say it, or end the engine and start it again.
Reaction = Literal["ignore", "warn", "restart"]


@dataclass(frozen=True)
class KeeperPolicy:
    """Restarts, log sizes, how often it looks, and what it does about what it sees. Sizes in bytes, times in seconds.

    Every restart, whatever asked for it, counts against `max_restarts` within `window_s`.
    """

    max_restarts: int = 3
    window_s: float = 600.0
    backoff_s: float = 1.0
    log_bytes: int = 16 << 20
    log_files: int = 2
    poll_s: float = 3.0
    #: How often the costly looks are taken: who listens on the port, what became of the last requests.
    look_s: float = 15.0
    #: A request waits, no token comes and the GPU (of a CPU engine: the CPU) does nothing for this long.
    idle_s: float = 300.0
    on_idle: Reaction = "restart"
    #: Before an engine is called idle it gets one token's work: a client that does not read looks the same.
    confirm_s: float = 10.0
    #: The engine's process lives, and its port has answered nothing for this long.
    dead_s: float = 60.0
    on_dead_port: Reaction = "restart"
    #: A request asks for more tokens than the KV pool holds: a restart would change nothing, so it is only said.
    on_too_large: Literal["ignore", "warn"] = "warn"
    #: After an engine's end, how long its port may be held by somebody else before the restart is given up.
    port_wait_s: float = 10.0
