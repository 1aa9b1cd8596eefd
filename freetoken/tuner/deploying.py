"""The real launcher: `deploy`'s apply loop starts and resizes, `bench` measures. What an engine does is an outcome.

A start gets no second try here: a crash is what the trial has found out. Trials run under a name and on a port of
their own, so that nothing that a person declared is mistaken for one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from freetoken.deploy import ending, runs
from freetoken.deploy.apply import KeptError, RefusedError, apply_recipe
from freetoken.deploy.current import find_running
from freetoken.deploy.hits import make_hit_counter
from freetoken.deploy.start import find_free_port
from freetoken.deploy.tools import DEFAULT_TOOLS, Step, Tools
from freetoken.errors import FtError, NotReadyError
from freetoken.supervisor import register
from freetoken.supervisor.ports import can_bind
from freetoken.tuner.site import PlannedSite
from freetoken.tuner.values import Kind, Measurement, Outcome, Point

if TYPE_CHECKING:
    from freetoken.bench.result import BenchResult, Estimate
    from freetoken.deploy.values import ApplyResult
    from freetoken.recipe.load import LoadedRecipe

_SLOT_STRATEGIES = ("offload", "hybrid")
_MEMORY_KINDS = ("vram_oom", "ram_oom", "plan_floor", "kv_floor", "pin_refused", "killed")
#: Relative error that is assumed of a figure that rests on one request.
LONE_NOISE = 0.03
#: A measurement that takes so many times the longest one before it hangs, or might as well; but not below so many
#: seconds.
HANG_FACTOR, LEAST_HANG_S = 8.0, 60.0
#: Before there is one to go by.
LONGEST_MEASUREMENT_S = 900.0
#: Findings of the bench that speak of the engine's answers, not of the machine around it.
_GARBAGE = ("token_count", "repetition")


@dataclass
class DeployLauncher:
    """Starts points of `loaded` under `name`, one at a time."""

    loaded: LoadedRecipe
    site: PlannedSite
    name: str
    port: int
    repeats: int = 3
    seed: int = 0
    #: Seconds after which the first measurement is given up as hung; the others are held against those before them.
    deadline_s: float = LONGEST_MEASUREMENT_S
    log: Callable[[str], None] = lambda text: None
    tools: Tools = field(default_factory=lambda: replace(DEFAULT_TOOLS, max_retries=0))
    running: ApplyResult | None = field(default=None, init=False)
    #: The last result in full, for the store.
    result: BenchResult | None = field(default=None, init=False)
    _measured: int = field(default=0, init=False)
    _longest_s: float = field(default=0.0, init=False)

    @property
    def can_resize(self) -> bool:
        """By the adapter's word."""
        return "live_resize" in self.site.adapter.capabilities

    def recipe_at(self, point: Point) -> LoadedRecipe:
        """The recipe with `point` in place of its `auto` settings, on the port of trials."""
        slots = int(point["expert_slots"]) if "expert_slots" in point and self._has_slots(point) else None
        recipe = self.site.fix(point, slots=slots).recipe
        serve = recipe.serve.model_copy(update={"port": self.port})
        # Without a path no lock is written: a trial is nothing that a person has declared.
        return replace(self.loaded, recipe=recipe.model_copy(update={"name": self.name, "serve": serve}), path=None)

    def _has_slots(self, point: Point) -> bool:
        forecast = self.site.forecast(point)
        return forecast is not None and forecast.settings.strategy in _SLOT_STRATEGIES

    def start(self, point: Point) -> Outcome:
        """Ends the last trial's engine, then starts and proves this one."""
        self.stop()
        if not _is_free(self.port):
            self.port = pick_port()  # somebody else took it between two trials
        return self._apply(point)

    def resize(self, point: Point) -> Outcome:
        """The apply loop finds that a live resize is the least that gets there.

        Where the engine will not have it, it goes on as it was: a restart is for the search to decide.
        """
        return self._apply(point, confirm=lambda question: False)

    def _apply(self, point: Point, confirm: Callable[[str], bool] | None = None) -> Outcome:
        tools, is_default = self.tools, self.site.own_verdict(point) is not None
        if is_default:
            # As whoever gives no flags would have it: it need not hold a full chunk, only what the workload asks for.
            tools = replace(tools, most_proof_tokens=self.site.workload.first_prompt_tokens)
        try:
            self.running = apply_recipe(
                self.recipe_at(point), name=self.name, progress=self._show, tools=tools, is_waiting=True,
                is_forced=is_default, confirm=confirm,
            )  # fmt: skip
        except RefusedError as error:
            refusal, missing = error.refusal, max(1, error.refusal.missing_bytes)
            ledger = refusal.vram or refusal.ram
            short = ledger.missing_bytes if ledger is not None else None
            return Outcome(kind="refused", violation_bytes=missing, ledger_bytes=short, words=error.message)
        except NotReadyError as error:
            return self._classify(error)
        except KeptError as error:
            return self._classify_kept(error)
        except FtError as error:
            # A port that another process took in this moment says nothing of the settings.
            is_taken = error.message.startswith("port ") and "is taken" in error.message
            return Outcome(kind="invalid" if is_taken else "crash", words=_words(error))
        return Outcome(kind="ok", run_id=self.running.run_id)

    def _show(self, step: Step) -> None:
        if not step.is_update:
            self.log(f"{step.phase}: {step.message}")

    def _classify(self, error: FtError) -> Outcome:
        """What the failed start means; bytes only where memory is to blame."""
        found = self.site.adapter.classify_failure(_words(error))
        if (found is not None and found.kind == "hang") or "hung" in error.message:
            return Outcome(kind="hang", words=_words(error))
        is_memory = found is not None and found.kind in _MEMORY_KINDS
        missing = (found.missing_bytes or 1) if found is not None and is_memory else 0
        return Outcome(kind="crash", violation_bytes=missing, words=_words(error))

    def _classify_kept(self, error: KeptError) -> Outcome:
        """Refused where the engine goes on with what it had; else the resize went wrong, as a start would."""
        was = error.not_live
        outcome, found = self._classify(FtError(str(was.error)) if was is not None else error), find_running(self.name)
        is_declined = was is None or was.is_declined
        if not is_declined or found is None or not found.life.is_living:
            return outcome
        missing = outcome.violation_bytes if outcome.violation_bytes > 1 else None
        return Outcome(kind="refused", violation_bytes=missing or 1, ledger_bytes=missing, words=outcome.words)

    def measure(self, *, is_unseen: bool = False) -> Outcome:
        """The workload's figures on what runs. Prompts are the same text in every trial, each with a fresh start."""
        from freetoken.bench.run import BenchOptions, run_workload

        assert self.running is not None
        self.result = None
        run_id = self.running.run_id or ""
        record = register.read_record(run_id)
        engine = record.engine_process if record is not None else None
        self._measured += 1
        began_s = time.monotonic()
        try:
            self.result = run_workload(
                self.running.url.removesuffix("/v1"),
                self.site.workload,
                repeats=self.repeats,
                seed=self.seed + (self._measured if is_unseen else 0),
                unseen=is_unseen,
                api_key=self._api_key(),
                log=self.log,
                engine_pid=engine.pid if engine is not None else None,
                options=BenchOptions(
                    deadline_s=self._find_deadline(),
                    base_dir=self.loaded.base_dir,
                    read_hits=make_hit_counter(record.folder if record is not None else None),
                ),
            )
        except FtError as error:
            return Outcome(kind=self._why(error), words=_words(error), run_id=run_id)
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)
        return read_result(self.result, is_on_gpu=self.running.plan.vram is not None, run_id=run_id)

    def _find_deadline(self) -> float:
        """Seconds that the next measurement may take."""
        if not self._longest_s:
            return self.deadline_s
        return min(self.deadline_s, max(LEAST_HANG_S, HANG_FACTOR * self._longest_s))

    def _api_key(self) -> str | None:
        import os

        name = self.loaded.recipe.serve.api_key_env
        return os.environ.get(name) if name else None

    def _why(self, error: FtError) -> Kind:
        """Hung, dead, or alive and talking nonsense."""
        if "was not measured within" in error.message:
            return "hang"
        found = find_running(self.name)
        return "garbage" if found is not None and found.life.is_living else "crash"

    def stop(self) -> None:
        """Ends whatever runs under the trials' name, also what a killed tuner left behind."""
        self.running = None
        found = find_running(self.name)
        if found is not None:
            ending.end_life(found.life)
        # No person declared it, so that nothing of it is left to be shown, or to stand in the way of `ft rollback`.
        runs.forget_declaration(self.name)

    def settings_now(self) -> dict[str, Any]:
        """Effective settings of what runs; {} where nothing does."""
        return self.running.plan.settings.model_dump(mode="json") if self.running is not None else {}


def pick_port() -> int:
    """A free port with the one after it free too; at random, so that studies that begin at once take different ones."""
    chance = random.SystemRandom()
    for _ in range(200):
        port = chance.randrange(20_000, 32_000, 2)
        if _is_free(port):
            return port
    return find_free_port("127.0.0.1", 2)


def _is_free(port: int) -> bool:
    return all(can_bind("127.0.0.1", one) for one in (port, port + 1))


def read_result(result: BenchResult, *, is_on_gpu: bool, run_id: str | None = None) -> Outcome:
    """A bench result as an outcome: figures that may be compared, or why not."""
    bad = [one for one in result.findings if one.is_invalidating]
    if bad:
        kind: Kind = "garbage" if all(one.kind in _GARBAGE for one in bad) else "invalid"
        return Outcome(kind=kind, words=result.invalid_because, run_id=run_id)
    decode, ttft, turn = result.mean("decode_tps"), result.mean("ttft_ms"), result.mean("turn_time_s")
    if not decode or not ttft or not turn:
        return Outcome(kind="garbage", words="no token rate could be measured: too few tokens came", run_id=run_id)
    times = result.metrics["turn_time_s"]
    peak = result.mean("vram_peak_bytes" if is_on_gpu else "ram_peak_bytes")
    measurement = Measurement(
        decode_tps=decode,
        ttft_s=ttft / 1000,
        turn_time_s=turn,
        ttft_p50_s=_seconds(result.mean("ttft_p50_ms")),
        ttft_p95_s=_seconds(result.mean("ttft_p95_ms")),
        itl_p95_s=_seconds(result.mean("itl_p95_ms")),
        prefill_tps=result.mean("prefill_tps"),
        total_decode_tps=result.mean("total_decode_tps"),
        joules_per_token=result.mean("joules_per_token"),
        hit_ratio=result.mean("hit_ratio"),
        peak_bytes=round(peak) if peak else None,
        noise_ratio=_noise(times),
        decode_noise_ratio=_noise(result.metrics["decode_tps"]),
        total_noise_ratio=_noise(total) if (total := result.metrics.get("total_decode_tps")) is not None else None,
    )
    return Outcome(kind="ok", measurement=measurement, run_id=run_id)


def _noise(found: Estimate) -> float:
    """Relative standard error; one request has no interval of its own."""
    spread = found.half_width_ratio / 1.96 if found.n > 1 else LONE_NOISE
    return min(0.5, max(0.002, spread))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _words(error: FtError) -> str:
    return "; ".join((error.message, *error.details))[:1000]
