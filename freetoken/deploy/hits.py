"""Expert hit counters of an engine whose API has none: read off the end of its log, by its adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken.errors import FtError
from freetoken.supervisor import logs
from freetoken.supervisor.launch import read_launch

if TYPE_CHECKING:
    from freetoken.adapters.replies import MoeHits
    from freetoken.supervisor.life import Life

#: Lines of the log's end that are looked at: some minutes of decoding.
LATEST_LINES = 400
#: What a counter keeps of the log at most, in characters; a line of statistics comes every 40 decode steps.
KEPT_CHARACTERS = 8 << 20


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


def make_hit_counter(run_dir: Path | None) -> Callable[[int], MoeHits | None] | None:
    """A function as above that counts from now on, for differences between two calls; None where there is no log.

    `run_dir` is the folder of a run of ours. Its first answer is zero lookups where the engine's log does tell hits.
    """
    launch = read_launch(run_dir) if run_dir is not None else None
    if launch is None or run_dir is None:
        return None
    from freetoken.adapters import get_adapter
    from freetoken.adapters.replies import MoeHits

    try:
        adapter = get_adapter(launch.engine)
    except FtError:
        return None
    follower, text = logs.Follower(launch.log_path(run_dir)), ""

    def read(slot_bytes: int) -> MoeHits | None:
        nonlocal text
        try:
            text = (text + "".join(f"{line}\n" for line in follower.read_new()))[-KEPT_CHARACTERS:]
        except OSError:
            return None
        return adapter.parse_hits(text, slot_bytes) or MoeHits()

    return read
