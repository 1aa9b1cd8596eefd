"""Processes of ours: who one is (boot id, pid, start ticks), whether it lives, and how a whole tree of it is ended.

A pid alone names nothing: it is used again after its process ended, and after a reboot. Every signal goes through
a pidfd whose owner was checked after it was opened, so that a stranger who inherited the number is never hit.
Standard library only: the keeper runs on this and must stay small. Knows nothing of any one engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Set in the environment of every engine, so that a child which left session and group is still known as ours.
RUN_MARKER = "FT_RUN_ID"
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessId:
    """One process of one boot; equal only to itself, also when its pid is given away later."""

    boot_id: str
    pid: int
    start_ticks: int

    def to_dict(self) -> dict[str, Any]:
        """As written to JSON."""
        return {"boot_id": self.boot_id, "pid": self.pid, "start_ticks": self.start_ticks}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any] | None) -> ProcessId | None:
        """The identity in `value`; None where there is none or it is malformed."""
        try:
            return cls(str(value["boot_id"]), int(value["pid"]), int(value["start_ticks"])) if value else None
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class Stat:
    """What `/proc/PID/stat` says; CPU time in seconds, children's included once they were waited for."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int
    cpu_s: float
    major_faults: int
    thread_count: int = 1

    @property
    def is_running(self) -> bool:
        """False for a zombie: it holds no memory and serves nobody.

        A process is shown as one when its first thread has ended. While others have not (the last one gives the memory
        back, which takes a large engine a second), it lives, and nobody can have its exit code yet.
        """
        return self.state not in "Xx" and (self.state != "Z" or self.thread_count > 1)


def read_boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_stat(pid: int) -> Stat | None:
    """The process `pid` now, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself.
    head, _, tail = text.rpartition(")")
    part = tail.split()
    if len(part) < 20:
        return None
    return Stat(
        pid=pid,
        name=head.partition("(")[2],
        state=part[0],
        parent=int(part[1]),
        group=int(part[2]),
        session=int(part[3]),
        start_ticks=int(part[19]),
        cpu_s=sum(int(one) for one in part[11:15]) / _CLOCK_TICKS,
        major_faults=int(part[9]),
        thread_count=int(part[17]),
    )


def identify(pid: int) -> ProcessId | None:
    """The identity of the process that has the number `pid` now; None when there is none."""
    stat = read_stat(pid)
    return ProcessId(read_boot_id(), pid, stat.start_ticks) if stat else None


def identify_self() -> ProcessId:
    """The identity of this process."""
    own = identify(os.getpid())
    if own is None:  # /proc is not there: nothing here can work without it
        raise OSError("/proc is not mounted, so processes cannot be told apart")
    return own


def is_alive(process: ProcessId | None) -> bool:
    """True while exactly this process runs; a zombie, a reused pid and another boot are all False."""
    if process is None or process.boot_id != read_boot_id():
        return False
    stat = read_stat(process.pid)
    return stat is not None and stat.start_ticks == process.start_ticks and stat.is_running


def send_signal(process: ProcessId, number: int) -> bool:
    """Sends `number` to exactly this process; False when it is gone."""
    fd = open_pidfd(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def open_pidfd(process: ProcessId) -> int | None:
    """A descriptor that becomes readable when `process` ends; None when it is gone already."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    # Checked after opening: from here on the descriptor stays with this very process.
    if is_alive(process):
        return fd
    os.close(fd)
    return None


def wait_gone(processes: Sequence[ProcessId], timeout_s: float) -> bool:
    """Waits until none of `processes` runs; False when `timeout_s` passed first. Wakes on the exits themselves."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        waiting = 0
        for process in processes:
            fd = open_pidfd(process)
            if fd is not None:
                stack.callback(os.close, fd)
                poll.register(fd, select.POLLIN)
                waiting += 1
        while waiting:
            left = deadline - time.monotonic()
            ready = poll.poll(max(0.0, left) * 1000)
            if not ready:
                return False
            for fd, _ in ready:
                poll.unregister(fd)
                waiting -= 1
    return True


def read_environment(pid: int) -> dict[str, str] | None:
    """The environment that `pid` was started with; None where it cannot be read or was overwritten.

    Programs that rename themselves (`setproctitle`) write over this memory, so what comes back is only trusted
    when it still looks like an environment.
    """
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    entries = [entry.partition(b"=") for entry in raw.split(b"\0") if entry]
    if not entries or not all(separator and name for name, separator, _ in entries):
        return None
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}


def read_stats() -> dict[int, Stat]:
    """Every process that can be seen, by pid."""
    stats = (read_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {stat.pid: stat for stat in stats if stat is not None}


def find_marked(run_id: str) -> tuple[ProcessId, ...]:
    """Every living process of this user that carries the marker of `run_id`, oldest first."""
    boot_id = read_boot_id()
    found = [stat for stat in read_stats().values() if stat.is_running and _has_marker(stat.pid, run_id)]
    return tuple(ProcessId(boot_id, one.pid, one.start_ticks) for one in sorted(found, key=lambda s: s.start_ticks))


def find_members(
    run_id: str, leader: ProcessId | None, *, reaper: int | None = None, is_thorough: bool = True
) -> tuple[ProcessId, ...]:
    """Every living process of the run: leader, its session and group, marked ones, and all their descendants.

    `reaper` is the pid of a keeper that orphans are handed to: its children are members as well. This process
    itself is never among them. Without `is_thorough` markers are not looked for, which is what costs time.
    """
    boot_id = read_boot_id()
    stats = read_stats()
    members = {pid for pid, stat in stats.items() if _is_member(stat, leader, boot_id, reaper)}
    if is_thorough:
        members |= {pid for pid in stats if pid not in members and _has_marker(pid, run_id)}
    children: dict[int, list[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    pending = list(members)
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in members:
                members.add(child)
                pending.append(child)
    members.discard(os.getpid())
    living = [stats[pid] for pid in sorted(members) if stats[pid].is_running]
    return tuple(ProcessId(boot_id, stat.pid, stat.start_ticks) for stat in living)


def _is_member(stat: Stat, leader: ProcessId | None, boot_id: str, reaper: int | None) -> bool:
    if reaper is not None and stat.parent == reaper:
        return True
    if leader is None or leader.boot_id != boot_id or stat.start_ticks < leader.start_ticks:
        return False
    if stat.pid == leader.pid:
        return stat.start_ticks == leader.start_ticks
    if leader.pid not in (stat.session, stat.group):
        return False
    # The leader's number may have been given away after its whole session ended; a process with an intact
    # environment but without our marker is then taken for a stranger.
    return is_alive(leader) or (_is_own_user(stat.pid) and read_environment(stat.pid) is None)


def _has_marker(pid: int, run_id: str) -> bool:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{RUN_MARKER}={run_id}".encode() in raw.split(b"\0")


def _is_own_user(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False


def launch_process(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str | os.PathLike[str], output: int
) -> tuple[subprocess.Popen[bytes], ProcessId]:
    """Starts `argv` in a session of its own, with stdin closed and stdout and stderr on the descriptor `output`.

    The caller reaps it. Raises OSError where it cannot be started.
    """
    child = subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    # Even when it ended at once its entry stays until it is reaped, so there is an identity to write down.
    identity = identify(child.pid)
    if identity is None:
        raise OSError(f"process {child.pid} vanished as it was started")
    return child, identity


@dataclass(frozen=True)
class Ending:
    """How a tree was ended: the signals that were needed, and who is left (nobody, unless the kernel holds on)."""

    signals: tuple[str, ...]
    left: tuple[ProcessId, ...]


def end_run(run_id: str, leader: ProcessId | None, *, grace_s: float, reaper: int | None = None) -> Ending:
    """Ends every process of the run: SIGINT to the leader, grace, SIGTERM to all, grace, SIGKILL to all.

    Only members are touched, each by its identity. What the leader leaves behind after an orderly exit gets
    SIGTERM and a short grace, then SIGKILL. A process held by the kernel is waited for 10 s at most.
    """
    signals: list[str] = []
    # Taken while the leader lives: a child without session, marker and parent cannot be told apart afterwards.
    known = set(find_members(run_id, leader, reaper=reaper))

    def find_left() -> tuple[ProcessId, ...]:
        known.update(find_members(run_id, leader, reaper=reaper))
        return tuple(one for one in known if is_alive(one))

    if leader is not None and send_signal(leader, signal.SIGINT):
        signals.append("SIGINT")
        wait_gone([leader], grace_s)
    members = find_left()
    if members:
        was_orderly = bool(signals) and not is_alive(leader)
        for member in members:
            send_signal(member, signal.SIGTERM)
        signals.append("SIGTERM")
        wait_gone(members, min(grace_s, 2.0) if was_orderly else grace_s)
    deadline = time.monotonic() + 10.0
    while members := find_left():
        if "SIGKILL" not in signals:
            signals.append("SIGKILL")
        for member in members:
            send_signal(member, signal.SIGKILL)
        # Looked for again after each round: a member may have forked while it was being hit.
        if not wait_gone(members, max(0.0, deadline - time.monotonic())):
            break
    return Ending(tuple(signals), members)


def become_subreaper() -> bool:
    """Makes orphans below this process its own children, so that none can slip away; False where not supported."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


@dataclass(frozen=True)
class Activity:
    """What a set of processes has used so far: CPU seconds, bytes read and written, pages read from disk."""

    cpu_s: float
    io_bytes: int
    major_faults: int


def read_activity(processes: Sequence[ProcessId]) -> Activity:
    """The sum over `processes`; those that are gone count nothing."""
    stats = [stat for stat in (read_stat(one.pid) for one in processes) if stat is not None]
    return Activity(
        cpu_s=sum(stat.cpu_s for stat in stats),
        io_bytes=sum(_read_io_bytes(one.pid) for one in processes),
        major_faults=sum(stat.major_faults for stat in stats),
    )


def _read_io_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    pairs = dict(line.split(": ", 1) for line in lines if ": " in line)
    return int(pairs.get("rchar", 0)) + int(pairs.get("wchar", 0)) + int(pairs.get("read_bytes", 0))


@dataclass(frozen=True)
class Resident:
    """Host memory of a set of processes in bytes, shared pages counted once."""

    total_bytes: int
    #: The part that comes free when they end; the rest are pages of files, which the kernel may drop at any time.
    anonymous_bytes: int


def read_resident(processes: Sequence[ProcessId]) -> Resident:
    """What `processes` hold in host memory; those that cannot be read count nothing."""
    parts = [_read_resident(one.pid) for one in processes]
    return Resident(sum(one.total_bytes for one in parts), sum(one.anonymous_bytes for one in parts))


def _read_resident(pid: int) -> Resident:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    except OSError:
        return Resident(0, 0)
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        part = line.split()
        if len(part) >= 3 and part[2] == "kB":
            sizes[part[0]] = int(part[1]) * 1024
    anonymous = sizes.get("Pss_Anon:", 0) + sizes.get("Pss_Shmem:", 0)
    return Resident(sizes.get("Pss:", 0), anonymous)
