"""`ft bench run`: measure a workload on what runs now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import Align, emit, examples, json_option, note, print_table
from freetoken.cli.params import EngineUrl, read_api_key
from freetoken.errors import TargetMissedError
from freetoken.units import format_seconds, format_significant, parse_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.bench.result import Estimate
    from freetoken.deploy.measure import BenchReport, Target

#: Figures in the order of the table: name, what people read, unit, what the value is divided by.
FIGURES = (
    ("turn_time_s", "turn time", "s", 1), ("turn_time_p95_s", "turn time p95", "s", 1),
    ("ttft_ms", "TTFT", "ms", 1), ("ttft_p95_ms", "TTFT p95", "ms", 1),
    ("ttft_cold_ms", "TTFT of first turns", "ms", 1), ("ttft_warm_ms", "TTFT of later turns", "ms", 1),
    ("tpot_ms", "TPOT", "ms", 1), ("itl_p50_ms", "ITL p50", "ms", 1), ("itl_p95_ms", "ITL p95", "ms", 1),
    ("decode_tps", "decode", "tok/s", 1), ("total_decode_tps", "decode, all streams", "tok/s", 1),
    ("output_tps", "output, prefill included", "tok/s", 1), ("prefill_tps", "prefill, at least", "tok/s", 1),
    ("hit_ratio", "hit rate", "", 1), ("miss_bytes_per_token", "miss traffic", "MiB/token", 1 << 20),
    ("vram_peak_bytes", "VRAM peak", "GiB", 1 << 30), ("ram_peak_bytes", "RAM peak", "GiB", 1 << 30),
    ("power_w", "power", "W", 1), ("joules_per_token", "energy", "J/token", 1),
)  # fmt: skip


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Seconds, or a time with a unit: `90`, `90s`, `15m`."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds. Fails with the words of `units`."""
        try:
            return parse_seconds(value)  # type: ignore[arg-type]
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command("run", epilog=examples("ft bench run", "ft bench run demo --workload chat-2k --repeats 5 --strict"))
@click.argument("name", required=False)
@click.option("--workload", metavar="NAME", help="A shipped workload or a file; else the deployment's own.")
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=3, show_default=True, help="Rounds, fresh prompts each."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which text the prompts are made of.")
@click.option(
    "--base-url", type=EngineUrl(), metavar="URL", help="Any engine with the OpenAI API, instead of a deployment."
)
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the engine's API key.")
@click.option("--limit", "deadline_s", type=Duration(), metavar="TIME", help="Give up after so long, e.g. `15m`.")
@click.option("--strict", is_flag=True, help="Exit 5 where a target of the recipe's `good_enough` is missed.")
@json_option
def command(
    name: str | None, workload: str | None, repeats: int, seed: int, base_url: str | None, api_key_env: str | None,
    deadline_s: float | None, strict: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure a workload on what runs now: real text, fresh prompts, intervals.

    TTFT, ITL, tok/s, hit rate, memory and power, over several rounds; and whether the figures may be compared. The
    result is kept and shown by `ft results`.
    """
    from freetoken.deploy.measure import choose_workload, measure_target

    target = _find_target(name, base_url, api_key_env)
    chosen, base_dir = choose_workload(target, workload)
    report = measure_target(
        target, chosen, base_dir=base_dir, repeats=repeats, seed=seed, log=note, deadline_s=deadline_s
    )
    if report.warning:
        note(f"warning: {report.warning}")
    emit(report, as_json=as_json, render=lambda console: _render(report, console))
    if strict and report.missed:
        raise TargetMissedError(
            f"`{report.target}` misses {len(report.missed)} of {len(report.checks)} targets",
            details=tuple(one.words for one in report.missed),
        )


def _find_target(name: str | None, base_url: str | None, api_key_env: str | None) -> Target:
    from freetoken.deploy.connect import find_one, read_own_key
    from freetoken.deploy.measure import Target, find_target
    from freetoken.errors import UsageError

    key = read_api_key(api_key_env)
    if base_url is not None:
        if name is not None:
            raise UsageError("give the name of a deployment or `--base-url`, not both")
        return Target(base_url, base_url, key)
    found = find_one(name)
    return find_target(found, key or read_own_key(found))


def _render(report: BenchReport, console: Console) -> None:
    result = report.result
    rows = list(_rows(result.metrics))
    align: tuple[Align, ...] = ("left", "right", "right", "right", "left")
    tokens = result.tokens
    notes = [
        f"{len(result.requests)} requests, {tokens.prompt:,} prompt tokens ({tokens.cached:,} from the prefix cache), "
        f"{tokens.completion:,} generated, {format_seconds(result.measured_s)} timed",
        *(("not comparable: " if one.is_invalidating else "note: ") + one.message for one in result.findings),
        *(f"{'met' if one.is_met else 'missed'}: {one.words}" for one in report.checks),
    ]
    title = f"{result.workload} on {report.target}, {result.repeats} repeats"
    headings = ("", "mean", "95 % from", "to", "unit")
    print_table(console, headings, rows, align=align, title=title, notes=notes)


def _rows(metrics: dict[str, Estimate]) -> Iterator[tuple[str, ...]]:
    for name, words, unit, divisor in FIGURES:
        one = metrics.get(name)
        if one is None or (name == "ttft_cold_ms" and "ttft_warm_ms" not in metrics):
            continue
        ends = (one.low, one.high) if one.n > 1 else (None, None)
        cells = (format_significant(value / divisor) if value is not None else "" for value in (one.mean, *ends))
        yield (words, *cells, unit)
