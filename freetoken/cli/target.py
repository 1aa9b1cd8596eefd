"""Which engine `ft ctl` and `ft chat` mean: the one deployment that runs, one by name, or any address."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from freetoken.cli.params import read_api_key
from freetoken.errors import UsageError

if TYPE_CHECKING:
    from freetoken.adapters.control import ControlClient
    from freetoken.supervisor.life import Life


def connect(
    name: str | None = None, base_url: str | None = None, api_key_env: str | None = None, timeout_s: float = 10.0
) -> ControlClient:
    """A client of the engine that is meant. Raises UsageError, listing what runs, where that is not clear."""
    from freetoken.adapters.control import ControlClient

    key = read_api_key(api_key_env)
    if base_url is not None:
        if name is not None:
            raise UsageError("give `--name` or `--base-url`, not both")
        address = base_url if "://" in base_url else f"http://{base_url}"
        return ControlClient(address, key, timeout_s)
    from freetoken.deploy.hits import make_hit_reader

    found = find_one(name)
    own = found.launch.api_key_env if found.launch else None
    key = key or (os.environ.get(own) if own else None)
    return ControlClient(found.record.base_url, key, timeout_s, read_hits=make_hit_reader(found))


def find_one(name: str | None) -> Life:
    """The one living deployment, or the one called `name`. Raises UsageError."""
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
