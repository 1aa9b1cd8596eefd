"""Which engine `ft ctl` and `ft chat` mean: the one deployment that runs, one by name, or any address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.cli.params import read_api_key
from freetoken.errors import UsageError

if TYPE_CHECKING:
    from freetoken.adapters.control import ControlClient


def connect(
    name: str | None = None, base_url: str | None = None, api_key_env: str | None = None, timeout_s: float = 10.0
) -> ControlClient:
    """A client of the engine that is meant. Raises UsageError, listing what runs, where that is not clear."""
    key = read_api_key(api_key_env)
    if base_url is None:
        from freetoken.deploy.connect import connect_deployment

        return connect_deployment(name, api_key=key, timeout_s=timeout_s)
    from freetoken.adapters.control import ControlClient

    if name is not None:
        raise UsageError("give `--name` or `--base-url`, not both")
    return ControlClient(base_url, key, timeout_s)
