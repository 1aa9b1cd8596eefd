"""Expert hit counters of an engine whose API has none: read off the end of its log, by its adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from freetoken.errors import FtError
from freetoken.supervisor import logs

if TYPE_CHECKING:
    from freetoken.adapters.replies import MoeHits
    from freetoken.supervisor.life import Life

#: Lines of the log's end that are looked at: some minutes of decoding.
LATEST_LINES = 400


def make_hit_reader(found: Life) -> Callable[[int], MoeHits | None]:
    """A function from the bytes of a slot to the hits of the latest decode steps, or None where nothing tells."""

    def read(slot_bytes: int) -> MoeHits | None:
        from freetoken.adapters import get_adapter

        if found.launch is None:
            return None
        try:
            adapter = get_adapter(found.record.engine)
            lines = logs.read_tail(found.launch.log_path(found.record.folder), LATEST_LINES)
        except (FtError, OSError):
            return None
        return adapter.parse_hits("\n".join(lines), slot_bytes)

    return read
