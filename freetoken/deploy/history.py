"""Which run's log or events are meant by a name, and events as lines for people."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from freetoken import paths
from freetoken.deploy import runs
from freetoken.errors import UsageError
from freetoken.supervisor import life
from freetoken.supervisor.launch import EVENTS_FILE, LOG_FILE, read_launch


@dataclass(frozen=True)
class LogFile:
    """A log and whose it is."""

    name: str
    run_id: str
    path: Path


def find_log(name: str | None, *, is_events: bool = False) -> LogFile:
    """The log of the living run called `name`, else of its last one. UsageError where none or several are meant."""
    lives = life.find_deployments(name, life.reconcile())
    here = [one for one in lives if Path(one.record.state_dir).resolve() == paths.state_dir().resolve()] or list(lives)
    names = sorted({one.record.name for one in here})
    if len(names) > 1:
        listed = ", ".join(f"`{one}`" for one in names)
        raise UsageError(f"several deployments run: {listed}", hint="`ft logs NAME`")
    if here:
        newest = max(here, key=lambda one: one.record.run_id)
        return _make(newest.record.name, newest.record.folder, is_events)
    return _find_last(name, is_events)


def _find_last(name: str | None, is_events: bool) -> LogFile:
    declared = [one for one in runs.read_declarations() if name in (None, one.name)]
    if not declared:
        raise UsageError(f"no deployment `{name}`" if name else "nothing runs and nothing is declared here")
    newest = max(declared, key=lambda one: one.run_id)
    folder = paths.runs_dir() / newest.run_id
    if not folder.is_dir():
        raise UsageError(f"the run folder of `{newest.name}` is gone: {folder}")
    return _make(newest.name, folder, is_events)


def _make(name: str, folder: Path, is_events: bool) -> LogFile:
    launch = read_launch(folder)
    log = launch.log_path(folder) if launch else folder / LOG_FILE
    return LogFile(name, folder.name, folder / EVENTS_FILE if is_events else log)


def format_event(line: str) -> str:
    """`2031-05-04T09:30:00.000Z  engine_ready  engine answers on port 1919`."""
    try:
        event = json.loads(line)
        return f"{event['at']}  {event['kind']:<17}  {event['message']}"
    except (ValueError, KeyError, TypeError):
        return line
