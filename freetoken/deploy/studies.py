"""Studies of `ft tune` on this machine: which devices they hold, and how an apply keeps out of their way.

A study holds a lock of its own on its device from the first trial to the last. Its trials come through the same apply
loop: what this very process holds is never in its own way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from freetoken.deploy.values import DeployModel
from freetoken.errors import FtError
from freetoken.supervisor import register
from freetoken.supervisor.locks import LockHolder, find_holder
from freetoken.supervisor.process import identify_self

_POLL_S = 0.5


class StudyView(DeployModel):
    """A study that is at work: `purpose` says of what, in words."""

    device: str
    purpose: str
    pid: int | None = None
    since: str = ""


class StudyRunningError(FtError):
    """A study measures on `device`: an engine started beside it would spoil its figures and take its memory."""

    def __init__(self, device: str, holder: LockHolder) -> None:
        pid = holder.process.pid if holder.process else 0
        super().__init__(
            f"{holder.describe()} is measuring on `{device}`, where nothing else may start meanwhile",
            hint=f"wait for its end (`ft tune --status`), or `kill {pid}`, which keeps the best it has found",
        )
        self.device = device


def list_studies() -> tuple[StudyView, ...]:
    """Every study of this user that is at work now, by device."""
    found = ((device, _find_holder(device)) for device in register.list_studied_devices())
    return tuple(
        StudyView(
            device=device, purpose=one.purpose, pid=one.process.pid if one.process else None, since=one.since
        )
        for device, one in found
        if one is not None
    )  # fmt: skip


def refuse_beside_study(device: str) -> None:
    """Raises StudyRunningError where a study of another process holds `device`."""
    holder = _find_holder(device)
    if holder is not None and holder.process != identify_self():
        raise StudyRunningError(device, holder)


def wait_for_study(device: str, is_stopped: Callable[[], bool]) -> None:
    """Returns once no study holds `device`, or `is_stopped` says that nobody waits any more."""
    while _find_holder(device) is not None and not is_stopped():
        time.sleep(_POLL_S)


def _find_holder(device: str) -> LockHolder | None:
    return find_holder(register.study_lock(device).path)
