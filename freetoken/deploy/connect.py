"""Which deployment is meant, and a control client of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from freetoken.errors import UsageError

if TYPE_CHECKING:
    from freetoken.adapters.control import ControlClient
    from freetoken.supervisor.life import Life


def find_one(name: str | None) -> Life:
    """The one living deployment, or the one called `name`. Raises UsageError, listing what runs."""
    from freetoken.supervisor import life

    lives = life.examine_all()
    living, found = life.find_deployments(None, lives), life.find_deployments(name, lives)
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"`{one.record.name}` at {one.record.base_url} ({one.condition})" for one in found or living)
    if found:
        raise UsageError(f"{len(found)} deployments run: {listed}", hint=f"`--name {found[0].record.name}`")
    if name is not None and living:
        raise UsageError(f"no deployment `{name}` runs, but {listed}")
    raise UsageError(
        f"no deployment{f' `{name}`' if name else ''} runs",
        hint="`ft apply recipes/demo.yaml` starts one; `--base-url http://127.0.0.1:1919` names any engine",
    )


def read_own_key(found: Life) -> str | None:
    """The key that the engine of `found` asks for, from this process's environment."""
    own = found.launch.api_key_env if found.launch else None
    return os.environ.get(own) if own else None


def connect_deployment(
    name: str | None = None, *, api_key: str | None = None, timeout_s: float = 10.0
) -> ControlClient:
    """A client of the one deployment that runs, or of the one called `name`; hit counters from its log if need be."""
    from freetoken.adapters.control import ControlClient
    from freetoken.deploy.hits import make_hit_reader

    found = find_one(name)
    key = api_key or read_own_key(found)
    return ControlClient(found.record.base_url, key, timeout_s, read_hits=make_hit_reader(found))
