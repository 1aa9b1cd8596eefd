"""The end of a run: its keeper is asked, what is left is ended, the register is cleaned. Strangers are not touched."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from freetoken.deploy import runs
from freetoken.deploy.values import StopOutcome
from freetoken.supervisor import life, register
from freetoken.supervisor.files import format_now
from freetoken.supervisor.gpu import GpuGauge
from freetoken.supervisor.launch import KEEPER_LOCK_FILE, KeeperState, read_state, write_state
from freetoken.supervisor.locks import FileLock
from freetoken.supervisor.ports import can_bind
from freetoken.supervisor.process import ProcessId, end_run, find_members, send_signal, wait_gone

_PORT_WAIT_S = 5.0
#: The driver takes a process's VRAM back a moment after its end: looked at until it no longer falls for so long.
_VRAM_PAUSE_S, _VRAM_QUIET_LOOKS, _VRAM_WAIT_S = 0.1, 3, 10.0


def end_life(found: life.Life) -> StopOutcome:
    """Ends a run for good and waits until its ports and its VRAM are free; harmless when nothing of it lives."""
    gauge = GpuGauge(found.launch.gpu) if found.launch and found.launch.gpu and found.is_living else None
    used_bytes = gauge.read_used_bytes() if gauge else None
    record, grace_s = found.record, found.launch.grace_s if found.launch else 10.0
    lock = FileLock(record.folder / KEEPER_LOCK_FILE, is_named=False)
    how = _end_keeper(found, lock, 2 * grace_s + 15.0)
    try:
        state = read_state(record.folder, fallback_dir=register.states_dir())
        leader = (state.engine if state else None) or found.engine or record.engine_process
        if find_members(record.run_id, leader):
            ended = end_run(record.run_id, leader, grace_s=grace_s)
            how = f"engine ended by {', '.join(ended.signals)}"
        state = _close_state(found, state, how)
    finally:
        lock.release()
    left = tuple(one.pid for one in find_members(record.run_id, leader))
    is_free = _await_ports(record)
    register.remove_record(record.run_id)
    return StopOutcome(
        run_id=record.run_id,
        name=record.name,
        was_running=found.is_living,
        how=state.cause if state and state.state == "stopped" else how,
        is_port_free=is_free,
        vram_freed_bytes=_await_vram(gauge, used_bytes) if gauge and used_bytes is not None else None,
        left=left,
        exit_code=state.exit_code if state else None,
    )


def _end_keeper(found: life.Life, lock: FileLock, limit_s: float) -> str:
    """Ends the keeper and takes its lock, so that none that was just spawned begins; says how that went."""
    how, keeper = "it was not running", found.keeper
    deadline = time.monotonic() + limit_s + 10.0
    while True:
        if keeper is not None:
            how = _ask(keeper, limit_s)
        if not found.record.folder.is_dir() or lock.try_acquire() or time.monotonic() > deadline:
            return how
        # A keeper that had not said its name yet holds the lock.
        time.sleep(0.02)
        keeper = life.examine(found.record).keeper


def _ask(keeper: ProcessId, limit_s: float) -> str:
    send_signal(keeper, signal.SIGTERM)
    if wait_gone([keeper], limit_s):
        return "its keeper ended it"
    send_signal(keeper, signal.SIGKILL)
    wait_gone([keeper], 5.0)
    return f"its keeper did not answer within {limit_s:g} s and was killed"


def _close_state(found: life.Life, state: KeeperState | None, how: str) -> KeeperState | None:
    """Writes the end where no keeper could; back comes the final state."""
    if (state is not None and state.is_final) or not found.record.folder.is_dir():
        return state
    before = state or KeeperState(found.record.run_id)
    cause = f"stopped on request: {how}"
    ended = replace(before, state="stopped", cause=cause, engine=None, ended_at=format_now())
    try:
        ended = write_state(found.record.folder, ended, fallback_dir=register.states_dir())
    except OSError:
        pass  # the register says it too: the record goes
    runs.record_event(found.record.folder, "engine_stopped", cause)
    return ended


def _await_ports(record: register.Deployment) -> bool:
    deadline = time.monotonic() + _PORT_WAIT_S
    while not all(can_bind(record.host, port) for port in (record.port, *record.extra_ports)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _await_vram(gauge: GpuGauge, used_before_bytes: int) -> int | None:
    """VRAM that came back, in bytes, once it no longer falls; None where the driver has stopped answering."""
    deadline, lowest, quiet = time.monotonic() + _VRAM_WAIT_S, gauge.read_used_bytes(), 0
    while lowest is not None and quiet < _VRAM_QUIET_LOOKS and time.monotonic() < deadline:
        time.sleep(_VRAM_PAUSE_S)
        used = gauge.read_used_bytes()
        if used is None:
            return None
        quiet = 0 if used < lowest else quiet + 1
        lowest = min(lowest, used)
    return None if lowest is None else max(0, used_before_bytes - lowest)
