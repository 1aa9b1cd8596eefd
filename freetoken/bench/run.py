"""A workload on a running engine: warm up, hold its conversations, take the times, watch the machine, judge.

`run_workload` starts and stops nothing but requests. It raises where there is no figure to give (the engine refuses,
breaks off, says nothing); where there are figures that must not be compared, the result says so.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from freetoken.adapters.control import ControlClient
from freetoken.adapters.replies import MoeHits
from freetoken.bench import guard, sample
from freetoken.bench.client import RequestFailedError, StreamClient, Timed, calm
from freetoken.bench.metrics import Measurements, RepeatTotals, RequestTimes, compute_metrics, make_figures
from freetoken.bench.result import BenchResult, Finding, TokenCounts
from freetoken.bench.sample import HostReader, ReadGpu, ReadHost, Sampler, find_gpu_reader
from freetoken.bench.script import TEMPERATURE, Conversation, Request, Script, make_nonce
from freetoken.bench.sizing import Sizer
from freetoken.bench.stream import BadAnswerError
from freetoken.errors import FtError
from freetoken.recipe.workload import Workload

Log = Callable[[str], None]
#: Experts settle within so many decoded tokens; before, misses are those of a cold cache.
WARM_UP_TOKENS = 96
WARM_UP_PROMPT_TOKENS = 512
CALIBRATION_CHARACTERS = 3000
LEAST_CALIBRATION_CHARACTERS = 200
_MOST_TRIES = 6
#: Optional fields of a request, left out where an engine refuses to know them.
_OPTIONAL = ("seed", "ignore_eos")


class BenchFailedError(FtError):
    """The workload could not be measured: no figure is worth giving."""


@dataclass(frozen=True)
class BenchOptions:
    """Limits of a run, and the doors to the machine that tests replace."""

    request_timeout_s: float = 1800.0
    #: Seconds without a byte after which an answer is given up; a long prompt is silent until its first token.
    stall_timeout_s: float = 900.0
    #: Seconds for all of it; None = as long as its requests may take.
    deadline_s: float | None = None
    warm_up_tokens: int = WARM_UP_TOKENS
    #: What a relative `recording` is relative to.
    base_dir: Path | None = None
    read_gpu: ReadGpu | None = None
    read_host: ReadHost | None = None
    #: Expert hits so far of an engine whose API does not count them, from the bytes of one slot.
    read_hits: Callable[[int], MoeHits | None] | None = None
    sample_period_s: float = sample.PERIOD_S


@dataclass
class _Log:
    """What the timed part leaves behind."""

    times: list[RequestTimes] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    repeats: list[RepeatTotals] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def run_workload(
    base_url: str, workload: Workload, *, repeats: int = 3, seed: int = 0, unseen: bool = False,
    api_key: str | None = None, log: Log | None = None, engine_pid: int | None = None,
    options: BenchOptions | None = None,
) -> BenchResult:  # fmt: skip
    """The figures of `workload` on the engine at `base_url`, over `repeats` rounds with fresh prompts.

    `unseen` takes prompts that no run without it ever sees. `log` gets a line for each step. Raises
    BenchFailedError, EngineUnreachableError, and BadFileError for a recording that cannot be used.
    """
    started = time.perf_counter()
    options = options or BenchOptions()
    with ControlClient(base_url, api_key, read_hits=options.read_hits) as control:
        run = _Run(control, base_url, api_key, workload, seed, unseen, log or (lambda _: None), options)
        gpu = options.read_gpu or find_gpu_reader(run.gpu_uuid)
        host = options.read_host or HostReader(engine_pid)
        with Sampler(gpu, host, period_s=options.sample_period_s) as sampler:
            try:
                asyncio.run(run.hold(repeats, sampler))
            except TimeoutError as error:
                raise BenchFailedError(f"`{workload.name}` was not measured within {options.deadline_s:g} s") from error
            except (RequestFailedError, BadAnswerError) as error:
                raise _explain(workload, error) from error
        return run.judge(sampler, repeats, time.perf_counter() - started)


def _explain(workload: Workload, error: FtError) -> BenchFailedError:
    hint = None
    if getattr(error, "code", None) == "context_length_exceeded":
        hint = f"the workload needs {workload.kv_tokens:,} KV tokens: `ft ctl cache rebuild --kv {workload.kv_tokens}`"
    return BenchFailedError(f"`{workload.name}` was not measured: {error.message}", hint=hint)


class _Run:
    """One call of `run_workload`: the engine, the script, and what was seen."""

    def __init__(
        self, control: ControlClient, base_url: str, api_key: str | None, workload: Workload, seed: int,
        is_unseen: bool, log: Log, options: BenchOptions,
    ) -> None:  # fmt: skip
        self._control, self._base_url, self._api_key, self._options = control, base_url, api_key, options
        self._workload, self._seed, self._is_unseen, self._log = workload, seed, is_unseen, log
        self._left_out: set[str] = set()
        self._can_flush: bool | None = None
        self.found = _Log()
        health = control.health()
        self.model, self.instance_id = health.model or "default", health.instance_id
        self.gpu_uuid = self._read_gpu_uuid()

    def _read_gpu_uuid(self) -> str | None:
        try:
            gpus = self._control.stats().gpus
        except FtError:  # an engine without counters still has times
            return None
        return str(gpus[0]["uuid"]) if gpus and gpus[0].get("uuid") else None

    async def hold(self, repeats: int, sampler: Sampler) -> None:
        """Everything that needs the event loop."""
        async with asyncio.timeout(self._options.deadline_s), self._connect() as client:
            sizer = Sizer()
            script = Script(
                self._workload, sizer, seed=self._seed, is_unseen=self._is_unseen, model=self.model,
                base_dir=self._options.base_dir,
            )  # fmt: skip
            for text in script.notes:
                self.found.findings.append(Finding(kind="sizing", message=text, is_invalidating=False))
            await self._calibrate(client, sizer, script)
            await self._warm_up(client, sizer, script)
            for repeat in range(repeats):
                self._log(f"{self._workload.name}: repeat {repeat + 1} of {repeats}")
                await self._repeat(client, script, repeat, sampler)

    def _connect(self) -> StreamClient:
        limits = self._options
        return StreamClient(
            self._base_url, self._api_key, request_timeout_s=limits.request_timeout_s,
            stall_timeout_s=limits.stall_timeout_s,
        )  # fmt: skip

    async def _calibrate(self, client: StreamClient, sizer: Sizer, script: Script) -> None:
        """Learns how many tokens a known text has, and whether the engine counts on request."""
        self._log("warming up, and learning how many tokens a text has")
        most = max(64, self._workload.context_tokens * 2)
        text = f"# {make_nonce()}\n" + script.take_text(min(CALIBRATION_CHARACTERS, most))
        while True:
            try:
                timed = await self._ask(client, text, 1)
                break
            except (RequestFailedError, BadAnswerError) as error:
                # A tokenizer of one token a byte needs four times the context that English or code should.
                if error.code != "context_length_exceeded" or len(text) < LEAST_CALIBRATION_CHARACTERS:
                    raise
                text = text[: len(text) // 2]
        counted = timed.answer.prompt_tokens
        if counted is None:
            return
        sizer.note(text, counted)
        with_template = await client.count_tokens(text)
        # The template adds a constant; where it takes the text apart otherwise, its count is of no use.
        if with_template is None or not 0 <= with_template - counted <= 4096 or script.is_recorded:
            return
        overhead = with_template - counted
        loop = asyncio.get_running_loop()

        def count(text: str) -> int | None:
            found = asyncio.run_coroutine_threadsafe(client.count_tokens(text), loop).result()
            return found - overhead if found is not None else None

        sizer.use_count(count)

    async def _warm_up(self, client: StreamClient, sizer: Sizer, script: Script) -> None:
        """Lets kernels load and experts settle; as many requests at once as the workload has."""
        load = self._workload
        prompt = min(WARM_UP_PROMPT_TOKENS, load.prompt_tokens or 1, load.context_tokens // 2)
        output = max(1, min(self._options.warm_up_tokens, load.context_tokens - prompt - 16))
        texts = [
            await asyncio.to_thread(sizer.cut, f"# {make_nonce()}\n" + script.take_text(4 * prompt + 200), prompt)
            for _ in range(load.concurrency)
        ]
        await asyncio.gather(*(self._ask(client, text or "#", output) for text in texts))

    async def _ask(self, client: StreamClient, text: str, tokens: int) -> Timed:
        body = {"model": self.model, "prompt": text, "max_tokens": tokens, "temperature": TEMPERATURE,
                "ignore_eos": True, "seed": self._seed}  # fmt: skip
        return await self._send(client, Request("/v1/completions", body, 0, tokens, 0, None))

    async def _send(self, client: StreamClient, request: Request) -> Timed:
        """The answer; a field that this engine refuses to know is left out from then on."""
        while True:
            body = {key: value for key, value in request.body.items() if key not in self._left_out}
            try:
                return await client.send(request.path, body)
            except RequestFailedError as error:
                refused = [one for one in _OPTIONAL if one in body and f"{one}" in error.message]
                if error.status_code not in (400, 422) or not refused:
                    raise
                self._left_out.update(refused)

    async def _repeat(self, client: StreamClient, script: Script, repeat: int, sampler: Sampler) -> None:
        conversations = await asyncio.to_thread(_prepare, script, repeat)
        await asyncio.to_thread(self._flush)
        before = await asyncio.to_thread(self._read_counters)
        gate = asyncio.Semaphore(self._workload.concurrency)
        first = sampler.look()
        with calm():
            started = time.perf_counter()
            tasks = [
                asyncio.ensure_future(self._converse(client, one, repeat, index, gate))
                for index, one in enumerate(conversations)
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            ended = time.perf_counter()
        last = sampler.look()
        after = await asyncio.to_thread(self._read_counters)
        totals = RepeatTotals(started, ended, energy_j=sample.energy_between(sampler.samples(first.at_s, last.at_s)))
        self.found.repeats.append(_with_counters(totals, before, after))

    async def _converse(
        self, client: StreamClient, conversation: Conversation, repeat: int, index: int, gate: asyncio.Semaphore
    ) -> None:  # fmt: skip
        async with gate:
            for turn in range(conversation.turns):
                make = conversation.make_request
                request = make(0) if turn == 0 else await asyncio.to_thread(make, turn)
                timed, request = await self._try(client, conversation, turn, request)
                conversation.note_answer(turn, timed.answer)
                self._note(timed, request, repeat, index, turn)

    async def _try(
        self, client: StreamClient, conversation: Conversation, turn: int, request: Request
    ) -> tuple[Timed, Request]:
        """Sends, shorter each time that the prompt was too long for the context."""
        for _ in range(_MOST_TRIES):
            try:
                return await self._send(client, request), request
            except (RequestFailedError, BadAnswerError) as error:  # said by HTTP, or within a stream that had begun
                is_too_long = error.code == "context_length_exceeded"
                if not is_too_long or not conversation.shorten(turn, _find_surplus(error.message)):
                    raise
                last = error
            request = await asyncio.to_thread(conversation.make_request, turn)
        raise last

    def _note(self, timed: Timed, request: Request, repeat: int, index: int, turn: int) -> None:
        answer = timed.answer
        fresh = request.fresh_tokens if answer.prompt_tokens is None or request.fresh_tokens is None else (
            answer.prompt_tokens
        )  # fmt: skip
        self.found.requests.append(request)
        self.found.texts.append(answer.text + answer.reasoning)
        self.found.times.append(RequestTimes(
            repeat=repeat, conversation=index, turn=turn, sent_s=timed.sent_s, pieces_s=answer.pieces_s,
            last_s=answer.last_s, completion_tokens=answer.completion_tokens, prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens, fresh_tokens=fresh, is_estimated=answer.is_estimated,
        ))  # fmt: skip

    def _flush(self) -> None:
        """Drops the prefix cache where the engine can; the first line of each prompt is fresh in any case."""
        if self._can_flush is False:
            return
        try:
            self._control.flush(timeout_s=30.0)
            self._can_flush = True
        except FtError:
            self._can_flush = False

    def _read_counters(self) -> MoeHits | None:
        try:
            return self._control.stats().moe_hits
        except FtError:
            return None

    def judge(self, sampler: Sampler, repeats: int, duration_s: float) -> BenchResult:
        """The result: figures and findings."""
        found, times = self.found, tuple(self.found.times)
        timed = sampler.samples(found.repeats[0].started_s - 1, found.repeats[-1].ended_s + 1)
        measurements = Measurements(
            requests=times, repeats=tuple(found.repeats), vram_peak_bytes=sample.peak_vram(timed),
            ram_peak_bytes=sample.peak_ram(timed), power_w=sample.mean_power(timed),
        )  # fmt: skip
        findings = (
            *found.findings,
            *self._find_restart(),
            *guard.judge_machine(timed),
            *guard.judge_requests(
                times, output_tokens=[one.output_tokens for one in found.requests],
                prompt_tokens=[one.prompt_tokens for one in found.requests],
                reusable_tokens=[one.reusable_tokens for one in found.requests], texts=found.texts,
            ),
        )  # fmt: skip
        return BenchResult(
            workload=self._workload.name, model=self.model, instance_id=self.instance_id, repeats=repeats,
            seed=self._seed, is_unseen=self._is_unseen, metrics=compute_metrics(measurements, self._seed),
            findings=findings, is_valid=not any(one.is_invalidating for one in findings),
            tokens=TokenCounts(
                prompt=sum(one.prompt_tokens or 0 for one in times),
                cached=sum(one.cached_tokens or 0 for one in times),
                completion=sum(one.completion_tokens for one in times),
                is_estimated=any(one.is_estimated for one in times),
            ),
            measured_s=sum(one.ended_s - one.started_s for one in found.repeats), duration_s=duration_s,
            requests=tuple(make_figures(one) for one in times),
        )  # fmt: skip

    def _find_restart(self) -> list[Finding]:
        try:
            now = self._control.health().instance_id
        except FtError:
            return [Finding(kind="restart", message="the engine no longer answers")]
        if now == self.instance_id:
            return []
        return [Finding(kind="restart", message="the engine was restarted during the run")]


def _find_surplus(message: str) -> int | None:
    """Tokens too many, from `prompt is too long: 812 tokens > 800 maximum`; None where it is told otherwise."""
    match = re.search(r"(\d+) tokens > (\d+)", message)
    return max(1, int(match[1]) - int(match[2])) if match else None


def _prepare(script: Script, repeat: int) -> list[Conversation]:
    conversations = script.make_conversations(repeat)
    for one in conversations:
        one.prepare()
    return conversations


def _with_counters(totals: RepeatTotals, before: MoeHits | None, after: MoeHits | None) -> RepeatTotals:
    """`totals` with the differences of the hit counters; without them where they were set back in between, or stand."""
    if before is None or after is None or after.lookups <= before.lookups:
        return totals
    return replace(
        totals, hits=after.hits - before.hits, lookups=after.lookups - before.lookups,
        miss_bytes=after.miss_bytes - before.miss_bytes,
    )  # fmt: skip
