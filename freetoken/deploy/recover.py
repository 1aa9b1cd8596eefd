"""A start failed: what the log means, and what the next plan must allow for. Arithmetic on values; starts nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetoken.adapters.base import Failure
from freetoken.units import MIB, format_bytes

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.hardware.model import Hardware
    from freetoken.planner.memory import Ledger
    from freetoken.planner.plan import Plan, PlanRequest

#: Causes that another plan can avoid. The others would fail again in the same way.
_CORRECTABLE = {
    "vram_oom": "vram", "plan_floor": "vram", "kv_floor": "vram", "paging": "vram",
    "ram_oom": "ram", "pin_refused": "ram", "killed": "ram",
}  # fmt: skip
_MIN_STEP_BYTES = 64 * MIB
#: From here on memory that is gone counts as taken by somebody; less is what readings differ by.
_LOST_BYTES = 64 * MIB
#: The keeper's line before each start.
_START = re.compile(r"\[keeper\] \S+ run ")
#: What an error line looks like in the logs of engines: `error: ...`, `ValueError: ...`, `[FATAL] ...`.
_ERROR = re.compile(r"\b(?:error|fatal|panic|\w+(?:Error|Exception))\b", re.IGNORECASE)
_LABEL = re.compile(r"^(?:error|fatal)\s*:\s*", re.IGNORECASE)
_TROUBLE = re.compile(r"\b(?:failed|failure|cannot|could not|unable|no such file|not found|aborted)\b", re.IGNORECASE)


class StartFailure(Exception):
    """An engine that was started and did not come up, or died while it was being proven."""

    def __init__(
        self, kind: str, cause: str, *, exit_code: int | None = None, log: str = "", run_dir: str = ""
    ) -> None:
        super().__init__(cause)
        self.kind, self.cause, self.exit_code, self.log, self.run_dir = kind, cause, exit_code, log, run_dir


@dataclass(frozen=True)
class Correction:
    """A request that allows for what the failed start lacked, and that in words."""

    request: PlanRequest
    words: str
    #: Memory went away since the plan was made; no line of it was wrong.
    is_loss: bool = False


def classify(adapter: EngineAdapter, failure: StartFailure) -> Failure:
    """What the failed start means: the adapter's reading of the log, else what the keeper saw and the log said last."""
    fixed = {"log_full": "log_full", "hang": "hang", "foreign_port": "port_taken", "spawn": "engine_died"}
    if failure.kind in ("log_full", "foreign_port", "spawn"):
        return Failure.model_validate({"kind": fixed[failure.kind], "cause": failure.cause})
    for text in (failure.log, failure.cause):
        found = adapter.classify_failure(text, failure.exit_code)
        if found is not None and found.kind not in ("unknown", "engine_died"):
            return found
    if failure.exit_code == -9:
        return Failure(kind="killed", cause=f"{failure.cause}: killed from outside, often by the out-of-memory killer")
    if failure.kind == "hang":
        return Failure(kind="hang", cause=failure.cause)
    line = find_telling_line(failure.log)
    said = _LABEL.sub("", line)
    if not said or said in failure.cause:
        return Failure(kind="engine_died", cause=failure.cause)
    return Failure(kind="engine_died", cause=f"{failure.cause}: {said}", excerpt=line)


def find_telling_line(log: str) -> str:
    """The last line of the newest start in `log` that speaks of an error, 300 characters of it; "" without one."""
    lines = log.splitlines()
    starts = [index for index, line in enumerate(lines) if _START.match(line)]
    newest = [line.strip() for line in lines[starts[-1] if starts else 0 :] if not line.startswith("[keeper]")]
    for pattern in (_ERROR, _TROUBLE):
        if found := next((line for line in reversed(newest) if pattern.search(line)), ""):
            return found[:300]
    return ""


def correct(
    request: PlanRequest,
    plan: Plan,
    failure: Failure,
    attempt: int,
    *,
    pushes: int = 0,
    machine: Hardware | None = None,
) -> Correction | None:
    """`request` with the ledger corrected by what `failure` lacked; None where no plan can avoid it.

    `machine` is what this machine is now, with the failed engine gone: where less memory is free than was planned
    with, that was what failed, and no line was too small. Otherwise the overshoot is exact where the message had it;
    else a step of 4 % of the ledger, doubled at each attempt. A correction that vanished in what the plan had left
    over anyway is pushed: doubled as many times as `pushes` says.
    """
    from freetoken.planner.plan import Residual

    ledger = _pick_ledger(plan, failure)
    if ledger is None:
        return None
    if machine is not None and (lost := _find_lost(request, plan, ledger.kind, machine)) is not None:
        words = f"{failure.cause}{_place(failure)}; {lost[1]}; planning again with what there is"
        return Correction(lost[0], words, is_loss=True)
    key = _pick_line(ledger, failure)
    if key is None:
        return None
    step = failure.missing_bytes or max(_MIN_STEP_BYTES, ledger.available_bytes // 25) * 2**attempt
    step *= 2**pushes
    known = {one.key: one for one in request.calibration.residuals}
    before = known.get(key)
    known[key] = Residual(key=key, bytes=(before.bytes if before else 0) + step, runs=before.runs if before else 1)
    calibration = request.calibration.model_copy(update={"residuals": tuple(known.values())})
    amount = "exactly" if failure.missing_bytes and not pushes else "a guessed"
    words = f"{failure.cause}; planning again with {amount} {format_bytes(step)} more for `{key}`"
    return Correction(request.model_copy(update={"calibration": calibration}), words)


def _place(failure: Failure) -> str:
    """Where it ran out and by how much, as far as the log told."""
    amount = f"{format_bytes(failure.missing_bytes)} too much" if failure.missing_bytes else ""
    place = f"at `{failure.line}`" if failure.line else ""
    told = ", ".join(part for part in (place, amount) if part)
    return f" ({told})" if told else ""


def _find_lost(request: PlanRequest, plan: Plan, kind: str, machine: Hardware) -> tuple[PlanRequest, str] | None:
    """The request with the memory that is free now, and how much less that is; None where as much is free."""
    before = request.hardware
    if kind != "vram":
        lost = before.ram.available_bytes - machine.ram.available_bytes
        if lost < _LOST_BYTES:
            return None
        hardware = before.model_copy(update={"ram": machine.ram})
        return request.model_copy(update={"hardware": hardware}), f"{format_bytes(lost)} less RAM is free by now"
    try:
        was, now = before.pick_gpu(plan.settings.gpu or "auto"), machine.pick_gpu(plan.settings.gpu or "auto")
    except KeyError:  # it has fallen off the bus: no plan helps
        return None
    if was is None or now is None:
        return None
    # What ran before has ended, so that its memory is among what is free now.
    lost = was.vram_free_bytes + request.reclaimable_vram_bytes - now.vram_free_bytes
    if lost < _LOST_BYTES:
        return None
    hardware = before.model_copy(update={"gpus": tuple(now if gpu is was else gpu for gpu in before.gpus)})
    fresh = request.model_copy(update={"hardware": hardware, "reclaimable_vram_bytes": 0})
    return fresh, f"{format_bytes(lost)} less VRAM is free by now"


def _pick_ledger(plan: Plan, failure: Failure) -> Ledger | None:
    kind = _CORRECTABLE.get(failure.kind)
    if kind is None:
        return None
    return plan.vram if kind == "vram" and plan.vram is not None else plan.ram


def _pick_line(ledger: Ledger, failure: Failure) -> str | None:
    """The line that the failure blames, else one that stands for what cannot be known, else the largest."""
    for key in (failure.line, "allocator", "runtime", "prefill_transient"):
        if key is not None and ledger.line(key) is not None:
            return key
    largest = max(ledger.lines, key=lambda line: line.bytes, default=None)
    return largest.key if largest else None
