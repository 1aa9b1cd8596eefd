"""What can be wrong with an engine whose process lives: it hangs, idles, is deaf, or is asked for too much.

Four watches over one engine. Each look costs what it must and no more: `/v1/stats` seldom, all of /proc more seldom,
the GPU's driver only while a request waits and nothing comes. What is seen becomes an `Alarm` with the reaction that
the policy has for it, once for each onset; `problems` says what stands now. The keeper acts, nothing is ended here.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freetoken.supervisor import logs
from freetoken.supervisor.gpu import GpuGauge
from freetoken.supervisor.health import HealthLook, Work, can_generate, read_requests, read_work
from freetoken.supervisor.launch import EndKind, Launch
from freetoken.supervisor.policy import Reaction
from freetoken.supervisor.ports import UNSEEN, find_listener, is_listening
from freetoken.supervisor.process import ProcessId, find_members, read_activity, read_stat
from freetoken.supervisor.watch import IDLE_CPU_RATIO, IDLE_GPU_RATIO, CpuMeter, DeadPortWatch, HangWatch, IdleWatch

AlarmKind = Literal["engine_hung", "engine_idle", "port_dead", "request_too_large"]
_SILENCE_POLL_S = 10.0
#: Looks in a row at which a listener without a visible process is believed to be a stranger.
_UNSEEN_LOOKS = 3
#: A request that was too large is told as a standing problem for this long.
REMEMBER_S = 3600.0
_LOG_BYTES = 256 << 10
#: Ways in which engines refuse a request that their KV pool can never hold.
_TOO_LARGE = re.compile(
    r"context_length_exceeded|prompt is too long|exceeds the (?:available )?(?:maximum )?(?:model )?context"
    r"|maximum context length",
    re.IGNORECASE,
)
_SIZES = re.compile(r"(\d[\d,]*) tokens > (\d[\d,]*) maximum")
#: Alarm -> what an engine that is ended for it has died of.
END_KINDS: dict[AlarmKind, EndKind] = {"engine_hung": "hang", "engine_idle": "idle", "port_dead": "dead_port"}


@dataclass(frozen=True)
class Alarm:
    """Something that is wrong, in words, and what the policy does about it."""

    kind: AlarmKind
    words: str
    reaction: Reaction


class Watchdog:
    """Looks at one engine. `now_s` comes from a steady clock; `read_gpu` says how busy its GPU is, 0 to 1."""

    def __init__(
        self,
        launch: Launch,
        run_dir: Path,
        *,
        read_gpu: Callable[[], float | None] | None = None,
        generate: Callable[..., bool] = can_generate,
    ) -> None:
        self.launch, self.log = launch, launch.log_path(run_dir)
        self.read_gpu = read_gpu or (GpuGauge(launch.gpu) if launch.gpu is not None else None)
        self.generate = generate
        self.problems: dict[AlarmKind, str] = {}
        self._hang, self._idle = HangWatch(launch.stall_timeout_s), IdleWatch()
        self._dead, self._cpu = DeadPortWatch(), CpuMeter()
        self._next_silence_s = self._next_look_s = 0.0
        self._unseen_count = 0
        self._too_large: deque[tuple[float, str]] = deque()
        self._cursor: int | None = None
        self._log: logs.Follower | None = None

    def reset(self, *, is_restart: bool = False) -> None:
        """A new engine: nothing of the old one is held against it. After a restart its request ring starts empty."""
        for watch in (self._hang, self._idle, self._dead):
            watch.reset()
        self._cpu = CpuMeter()
        self._next_silence_s = self._next_look_s = 0.0
        self._unseen_count = 0
        self._cursor, self._log = (0 if is_restart else None), None
        for kind in ("engine_hung", "engine_idle", "port_dead"):
            self.problems.pop(kind, None)

    def look(
        self,
        now_s: float,
        health: HealthLook,
        engine: ProcessId | None,
        *,
        is_up: bool,
        is_proven: bool,
        api_key: str | None = None,
    ) -> list[Alarm]:
        """What is newly wrong. `is_up`: the engine has been ready, so it has to answer."""
        alarms = []
        if now_s >= self._next_silence_s:
            self._next_silence_s = now_s + self._pace_s()
            alarms += self._look_for_silence(now_s, health, engine, api_key)
        if not is_up:
            return alarms
        is_due = now_s >= self._next_look_s
        if is_due:
            self._next_look_s = now_s + self.launch.policy.look_s
        alarms += self._look_at_port(now_s, health, engine, is_due=is_due)
        if is_due and is_proven and health.status == "ready":
            alarms += self._look_at_requests(now_s, api_key)
        return alarms

    def _pace_s(self) -> float:
        return min(_SILENCE_POLL_S, self.launch.stall_timeout_s / 4, self.launch.policy.idle_s / 4)

    # -- silence ----------------------------------------------------------------------------------------------

    def _look_for_silence(
        self, now_s: float, health: HealthLook, engine: ProcessId | None, api_key: str | None
    ) -> list[Alarm]:
        """A hang or an idle device. An engine that answers and has nothing to do may be as silent as it likes."""
        work: Work | None = None
        if health.status == "ready":
            work = read_work(self.launch.host, self.launch.port, api_key=api_key)
            if work is None or work.active_count == 0 or work.is_flowing:
                self._hang.reset()
                self._clear_idle()
                return []
        # The look at all of /proc is the costly part of the watch: it is taken seldom, and without the markers.
        members = find_members(self.launch.run_id, engine, reaper=os.getpid(), is_thorough=False)
        activity = read_activity(members)
        silence_s = self._hang.observe(now_s, (health.progress, work and work.progress), activity)
        if self._hang.is_hung(silence_s):
            what = f"{work.active_count} requests waiting" if work else f"/health {health.status}"
            return self._raise(
                "engine_hung", f"no progress, no CPU and no I/O for {silence_s:.0f} s ({what})", "restart"
            )
        if work is None:
            self._clear_idle()
            return []
        return self._look_for_idleness(now_s, work, activity.cpu_s, api_key)

    def _look_for_idleness(self, now_s: float, work: Work, cpu_s: float, api_key: str | None) -> list[Alarm]:
        policy, cpu_ratio = self.launch.policy, self._cpu.observe(now_s, cpu_s)
        busy, least = (self.read_gpu(), IDLE_GPU_RATIO) if self.read_gpu is not None else (cpu_ratio, IDLE_CPU_RATIO)
        is_idle = busy is not None and busy < least  # where nobody knows, nobody is blamed
        idle_s = self._idle.observe(now_s, work.done_count, is_idle=is_idle)
        if idle_s < policy.idle_s or policy.on_idle == "ignore":
            if idle_s == 0.0:
                self.problems.pop("engine_idle", None)
            return []
        if "engine_idle" in self.problems:
            return []
        where = (self.launch.host, self.launch.port, self.launch.model)
        if self.generate(*where, api_key=api_key, timeout_s=policy.confirm_s):
            self._clear_idle()  # it serves others: whoever waits does not read, which is no fault of the engine
            return []
        device = "GPU" if self.read_gpu is not None else "CPU"
        words = (
            f"{work.active_count} requests wait, no token came and the {device} was idle for {idle_s:.0f} s; "
            "one more token was not generated either"
        )
        return self._raise("engine_idle", words, policy.on_idle)

    def _clear_idle(self) -> None:
        self._idle.reset()
        self.problems.pop("engine_idle", None)

    # -- the port ---------------------------------------------------------------------------------------------

    def _look_at_port(self, now_s: float, health: HealthLook, engine: ProcessId | None, *, is_due: bool) -> list[Alarm]:
        """Nobody answers although the process lives, or somebody else does."""
        policy, port = self.launch.policy, self.launch.port
        if policy.on_dead_port == "ignore":
            return []
        deaf_s = self._dead.observe(now_s, is_answered=health.status != "unreachable")
        pid = engine.pid if engine else None
        if deaf_s >= policy.dead_s:
            reason = health.message.lower() or "no answer"
            words = f"process {pid} lives, but port {port} has not answered for {deaf_s:.0f} s ({reason})"
            return self._raise("port_dead", words, policy.on_dead_port)
        if deaf_s == 0.0 and is_due and (other := self._find_stranger(engine)):
            words = f"process {pid} lives, but port {port} is answered by {other}, not by this engine"
            return self._raise("port_dead", words, policy.on_dead_port)
        if deaf_s == 0.0 and is_due:
            self.problems.pop("port_dead", None)
        return []

    def _find_stranger(self, engine: ProcessId | None) -> str | None:
        port = self.launch.port
        members = find_members(self.launch.run_id, engine, reaper=os.getpid(), is_thorough=False)
        if not members or find_listener(port, [one.pid for one in members]) is not None or not is_listening(port):
            self._unseen_count = 0
            return None
        other = find_listener(port)
        if stat := read_stat(other) if other is not None else None:
            self._unseen_count = 0
            return f"`{stat.name}` (process {other})"
        # A socket that its process is closing is listed for a moment without an owner: the next look tells.
        self._unseen_count += 1
        return UNSEEN if self._unseen_count >= _UNSEEN_LOOKS else None

    # -- requests ---------------------------------------------------------------------------------------------

    def _look_at_requests(self, now_s: float, api_key: str | None) -> list[Alarm]:
        """Requests that the KV pool can never hold, or that the engine cut short without telling the client."""
        if self.launch.policy.on_too_large == "ignore":
            return []
        errors, cursor = read_requests(self.launch.host, self.launch.port, self._cursor or 0, api_key=api_key)
        # What was asked before the launch was proven is the proof's own search for the longest prompt.
        is_first, self._cursor = self._cursor is None, cursor
        found = [] if is_first else [one for one in errors if _TOO_LARGE.search(one)]
        found += self._read_log(is_first)
        while self._too_large and now_s - self._too_large[0][0] > REMEMBER_S:
            self._too_large.popleft()
        self._too_large.extend((now_s, _describe_too_large(one)) for one in found)
        if not self._too_large:
            self.problems.pop("request_too_large", None)
            return []
        words = f"{_count_words(len(self._too_large))} than the KV pool holds (the last: {self._too_large[-1][1]})"
        words += "; raise `settings.kv_tokens`, or ask for less"
        self.problems["request_too_large"] = words
        return [Alarm("request_too_large", words, "warn")] if found else []

    def _read_log(self, is_first: bool) -> list[str]:
        if not self.launch.shortened_log:
            return []
        if self._log is None:
            self._log = logs.Follower(self.log, max_bytes=_LOG_BYTES)
        pattern = re.compile(self.launch.shortened_log)
        try:
            lines = self._log.read_new()
        except OSError:
            return []
        return [] if is_first else [match[0] for line in lines if (match := pattern.search(line))]

    def _raise(self, kind: AlarmKind, words: str, reaction: Reaction) -> list[Alarm]:
        """One alarm for each onset; a restart is asked for as often as the cause is seen."""
        is_new = kind not in self.problems
        self.problems[kind] = words
        return [Alarm(kind, words, reaction)] if is_new or reaction == "restart" else []


def _describe_too_large(text: str) -> str:
    sizes = _SIZES.search(text)
    if sizes:
        wanted, most = (int(one.replace(",", "")) for one in sizes.groups())
        return f"{wanted:,} tokens, {most:,} at most"
    return " ".join(text.split())[:120]


def _count_words(count: int) -> str:
    return "1 request asked for more tokens" if count == 1 else f"{count} requests asked for more tokens"
