"""What this machine's owner wants of the watchdog: the section `watchdog` of the machine-local file.

`watchdog: {idle: warn, idle_after: 5m, dead_port: restart, dead_after: 60s, too_large: ignore, max_restarts: 3,
window: 10m}`: each key may be left out. It holds from the next launch on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freetoken import paths
from freetoken.errors import BadFileError
from freetoken.local import read_mapping
from freetoken.supervisor.policy import KeeperPolicy
from freetoken.units import parse_seconds

_REACTIONS = {
    "idle": ("on_idle", ("ignore", "warn", "restart")),
    "dead_port": ("on_dead_port", ("ignore", "warn", "restart")),
    "too_large": ("on_too_large", ("ignore", "warn")),
}
_TIMES = {"idle_after": "idle_s", "dead_after": "dead_s", "window": "window_s"}
_MOST_RESTARTS = 100


def read_policy(base: KeeperPolicy) -> KeeperPolicy:
    """`base` with what the machine-local file says. Raises BadFileError for a wrong value."""
    found = read_mapping("watchdog", (*_REACTIONS, *_TIMES, "max_restarts"))
    return replace(base, **dict(_read(key, value) for key, value in found.items()))


def _read(key: str, value: Any) -> tuple[str, Any]:
    where = f"{paths.local_file()}: `watchdog.{key}` is `{value}`"
    if key in _REACTIONS:
        field, allowed = _REACTIONS[key]
        if value not in allowed:
            raise BadFileError(f"{where}, expected {' or '.join(f'`{one}`' for one in allowed)}")
        return field, value
    if key in _TIMES:
        try:
            seconds = parse_seconds(value)
        except (TypeError, ValueError) as error:
            raise BadFileError(f"{where}, expected a time such as `60s` or `5m`") from error
        if seconds < 1:
            raise BadFileError(f"{where}, expected at least `1s`: the watch itself looks every few seconds")
        return _TIMES[key], seconds
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_RESTARTS:
        raise BadFileError(f"{where}, expected a whole number from 0 to {_MOST_RESTARTS}")
    return "max_restarts", value
