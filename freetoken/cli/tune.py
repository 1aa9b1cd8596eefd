"""`ft tune`: the fastest setting that really fits, in few restarts, with proof."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table
from freetoken.errors import TargetMissedError, UsageError
from freetoken.units import format_seconds, format_significant, parse_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.recipe.load import LoadedRecipe
    from freetoken.tuner.outcome import TunePreview, TuneResult
    from freetoken.tuner.seeds import Seeds
    from freetoken.tuner.site import PlannedSite
    from freetoken.tuner.status import Detached, TuneStatus
    from freetoken.tuner.study import Progress

#: Seconds that `--detach` waits for the study to begin, or to be refused; a busy machine imports slowly.
BEGIN_WAIT_S = 15.0
OBJECTIVES = ("turn_time", "decode_tps", "ttft", "throughput", "efficiency")


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Seconds, or a time with a unit: `90`, `45m`."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds. Fails with the words of `units`."""
        try:
            return parse_seconds(value)  # type: ignore[arg-type]
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    "tune",
    epilog=examples(
        "ft tune qwen3.6-35b-a3b-8gb --workload agent-8k --budget 45m",
        "ft tune recipes/demo.yaml --workload code-4k --budget 3m --json",
    ),
)
@click.argument("recipe", required=False)
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Override a value of the recipe; repeatable.")
@click.option("--workload", metavar="NAME", help="A shipped workload or a file; else the recipe's own.")
@click.option(
    "--budget", "budget_s", type=Duration(), metavar="TIME",
    help="Time for search, confirmation and starting again what ran, --soak aside; else the recipe's.",
)  # fmt: skip
@click.option("--trials", type=click.IntRange(1), metavar="N", help="At most so many measured settings.")
@click.option("--starts", type=click.IntRange(1), metavar="N", help="At most so many engine starts while searching.")
@click.option(
    "--objective", "objectives", metavar="NAME", multiple=True, help=f"{', '.join(OBJECTIVES)}; two give a front."
)
@click.option("--resume", is_flag=True, help="Go on with the study that was interrupted.")
@click.option("--detach", is_flag=True, help="Run in the background; `ft tune --status` shows how it stands.")
@click.option("--status", "is_status", is_flag=True, help="Show the studies of this state folder and how they stand.")
@click.option("--storage", metavar="URL", help="Any Optuna storage, so that equal machines share one study.")
@click.option(
    "--soak",
    "soak_s",
    type=Duration(),
    default=0.0,
    metavar="TIME",
    help="Run the winner so long at the end, and watch for crashes, growing memory and slow-down.",
)
@click.option(
    "--repeats", type=click.IntRange(1, 100), help="Rounds of each measurement; else 2, or 1 in under 10 minutes."
)
@click.option(
    "--free", "is_freeing", is_flag=True, help="Tune what the recipe fixes too, as in a tuned or an imported one."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which text the prompts are made of.")
@click.option("--dry-run", is_flag=True, help="Show what would be searched; start nothing.")
@click.option("--detached-log", hidden=True)
@json_option
def command(
    recipe: str | None, sets: tuple[str, ...], workload: str | None, budget_s: float | None, trials: int | None,
    starts: int | None, objectives: tuple[str, ...], resume: bool, detach: bool, is_status: bool, storage: str | None,
    soak_s: float, repeats: int | None, is_freeing: bool, seed: int, dry_run: bool, detached_log: str | None,
    as_json: bool,
) -> int | None:  # fmt: skip
    """Find the fastest setting that really fits this machine, and prove it.

    The engine's own default is measured first, then what the cost model predicts, then one knob at a time; the winner
    is held against the default on prompts that the search has not seen. A confirmed gain, or what runs where the
    default does not, is written as NAME.tuned.yaml and taken up by `ft apply`; else the default stays. RECIPE may be
    left out where one deployment runs. What runs under the recipe's name is ended for the study and started again
    after it.

    The budget holds all of that. A start or a measurement that has begun is not cut short, so a budget for less than
    two settings and the four measurements of the confirmation proves nothing or is exceeded; the result says so.
    """
    if is_status:
        return _show_status(as_json=as_json)
    from freetoken.tuner.outcome import Options, choose_workload, free_settings, parse_objectives
    from freetoken.tuner.session import Session

    loaded = choose_workload(_load(recipe, sets), workload)
    loaded = free_settings(loaded) if is_freeing else loaded
    options = Options(
        objectives=parse_objectives(objectives), budget_s=budget_s, trials=trials, starts=starts,
        is_resuming=resume, storage=storage, soak_s=soak_s, repeats=repeats, seed=seed, log=detached_log,
    )  # fmt: skip
    printer = Printer(as_json=as_json)
    session = Session(
        loaded, options, say=printer.say, on_progress=printer.show,
        find_seeds=lambda site: _find_seeds(loaded, site, session.objectives[0].name),
    )  # fmt: skip
    if dry_run:
        preview = session.preview()
        emit(preview, as_json=as_json, render=lambda console: _render_preview(preview, console))
        return 0
    if detach:
        session.preview()  # what can be refused is refused here, where somebody reads it
        session.check_storage()
        session.check_lock()
        return _detach(as_json=as_json)
    signal.signal(signal.SIGTERM, _interrupt)
    result = session.run()
    emit(result, as_json=as_json, render=lambda console: _render(result, console))
    for text in result.warnings:
        note(f"warning: {text}")
    if result.missed:
        raise TargetMissedError(f"the best setting misses {', '.join(f'`{one}`' for one in result.missed)}")
    return 0


def _load(recipe: str | None, sets: tuple[str, ...]) -> LoadedRecipe:
    from freetoken.deploy.target import load_target

    if recipe is not None:
        return load_target(recipe, sets=sets)
    from freetoken.supervisor import life

    names = sorted({one.record.name for one in life.examine_all() if one.is_living})
    if len(names) != 1:
        listed = ", ".join(f"`{one}`" for one in names) or "none"
        raise UsageError(f"which recipe? running here: {listed}", hint="`ft tune RECIPE`")
    return load_target(names[0], sets=sets)


def _find_seeds(loaded: LoadedRecipe, site: PlannedSite, objective: str) -> Seeds:
    """What the author of an imported recipe found, in this machine's counts; a bundle that is broken seeds nothing."""
    from freetoken.errors import FtError
    from freetoken.share.seeds import find_seeds
    from freetoken.tuner.seeds import Seeds

    forecast = site.forecast(site.planned_point())
    try:
        found = find_seeds(loaded.path, site.request, forecast.slot_bytes if forecast is not None else 0, objective)
    except FtError as error:
        note(f"no seeds: {error.message}")
        return Seeds()
    return Seeds(found.points, found.words)


def _interrupt(*_: object) -> None:
    """SIGTERM is Ctrl-C: the best is kept and what ran before runs again."""
    raise KeyboardInterrupt


def _detach(*, as_json: bool) -> int:
    """The same command in a session of its own, its output in a file; returns once the study has begun, or failed."""
    from freetoken.tuner.status import Detached, folder

    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / f"tune-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    arguments = [one for one in sys.argv[1:] if one != "--detach"]
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "freetoken", *arguments, "--detached-log", str(path)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    code = _await_begin(process, path)
    if code:
        click.echo(path.read_text(encoding="utf-8", errors="replace").rstrip(), err=True)
        return code
    detached = Detached(process=process.pid, log=str(path), has_begun=code == 0)
    emit(detached, as_json=as_json, render=lambda console: _render_detached(detached))
    return 0


def _await_begin(process: subprocess.Popen[bytes], log: Path) -> int | None:
    """0 once the study has begun, or is over already; the exit code of one that failed; None if neither is known."""
    from freetoken.tuner.status import list_statuses

    deadline_s = time.monotonic() + BEGIN_WAIT_S
    while time.monotonic() < deadline_s:
        if (code := process.poll()) is not None:
            return code if code >= 0 else 128 - code
        if any(one.log == str(log) for one in list_statuses()):
            return 0
        time.sleep(0.2)
    return None


def _render_detached(detached: Detached) -> None:
    how = "tuning" if detached.has_begun else "preparing to tune"
    click.echo(f"{how} in the background as process {detached.process}; log: {detached.log}")
    click.echo(f"see it: `ft tune --status`   end it and keep the best: `kill {detached.process}`")


class Printer:
    """Progress on stderr: what is tried and why, the best so far, the time left."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json, self.began_s = as_json, time.monotonic()

    def say(self, phase: str, message: str) -> None:
        """One line."""
        elapsed_s = time.monotonic() - self.began_s
        if self.as_json:
            click.echo(json.dumps({"elapsed_s": round(elapsed_s, 3), "phase": phase, "message": message}), err=True)
        else:
            click.echo(f"[{elapsed_s:6.1f} s] {phase}: {message}", err=True)

    def show(self, progress: Progress) -> None:
        """A trial that begins or ends."""
        if self.as_json:
            elapsed_s = round(time.monotonic() - self.began_s, 3)
            click.echo(json.dumps({"elapsed_s": elapsed_s, **progress._asdict()}), err=True)
            return
        best = f", best {format_significant(progress.best_figure)}" if progress.best_figure is not None else ""
        left = f", {format_seconds(progress.left_s)} left" if progress.left_s is not None else ""
        if progress.event == "trial":
            knobs = " ".join(f"{name}={value}" for name, value in progress.point.items())
            self.say(f"trial {progress.number}", f"{progress.stage}: {progress.message} [{knobs}]{best}{left}")
        elif progress.event == "done":
            self.say(f"trial {progress.number}", f"{progress.message}{best}{left}")
        else:
            self.say(progress.event, progress.message)


def _render(result: TuneResult, console: Console) -> None:
    from freetoken.deploy.current import find_running

    counts = f"{_count(result.trials, 'trial')} in {_count(result.starts, 'start')}"
    click.echo(f"{result.recipe}: {counts}, {format_seconds(result.duration_s)}; {result.reason}")
    shown = result.candidate or result.best
    heading = "tried" if result.candidate else "best"
    names = [*shown, *(name for name in result.baseline if name not in shown)]
    rows = [(name, str(result.baseline.get(name, "")), str(shown.get(name, ""))) for name in names]
    print_table(console, ("setting", "baseline", heading), rows, align=("left", "right", "right"))
    base, best = result.baseline_headline, result.best_headline
    click.echo(f"  baseline   {result.baseline_words}" + (f": {base.describe()}" if base is not None else ""))
    if result.confirmation is not None:
        click.echo(f"  proof      {result.confirmation.describe()}")
        if (versus := result.confirmation.imported) is not None:
            click.echo(f"  imported   against the best imported setting: {versus.describe_interval()}")
    if result.is_tuned and best is not None:
        click.echo(f"  best       {best.describe()}")
    figures = result.best_figures
    shown_figures = [("turn time", "turn_time_s", "s"), ("decode", "decode_tps", "tok/s"), ("TTFT", "ttft_s", "s")]
    for label, key, unit in shown_figures:
        if key in figures:
            click.echo(f"  {label:10} {format_significant(figures[key])} {unit}")
    if result.soak:
        click.echo(f"  soak       {result.soak}")
    _render_front(result, console)
    if result.is_tuned:
        click.echo(f"  written    {result.tuned_recipe}")
        first = f"`ft stop {result.recipe}` and " if find_running(result.recipe, is_repairing=False) else ""
        click.echo(f"run it: {first}`ft apply {result.tuned_recipe}`   see all: `ft report {result.study}`")
    else:
        click.echo("  kept       nothing was written, and `ft apply` runs what it ran before")
        click.echo(f"see all: `ft report {result.study}`")


def _count(number: int, singular: str) -> str:
    return f"{number:,} {singular}{'' if number == 1 else 's'}"


def _render_front(result: TuneResult, console: Console) -> None:
    """The front of two objectives, by the first one; of the settings those that differ along it."""
    if len(result.objectives) < 2:
        return
    if not result.front:
        click.echo("  front      empty: every setting misses a hard limit")
        return
    from freetoken.tuner.objectives import OBJECTIVES

    points = [one["point"] for one in result.front]
    names = list(dict.fromkeys(name for point in points for name in point))
    varied = [name for name in names if len({repr(point.get(name)) for point in points}) > 1]
    headings = [f"{name} {OBJECTIVES[name].unit}" for name in result.objectives] + varied
    rows = [
        [
            *(format_significant(one[name]) for name in result.objectives),
            *(str(one["point"].get(k, "")) for k in varied),
        ]
        for one in result.front
    ]
    title = f"front of {' and '.join(result.objectives)}: nothing that was tried is better in both"
    print_table(console, headings, rows, align=["right"] * len(headings), title=title)


def _render_preview(preview: TunePreview, console: Console) -> None:
    rows = [
        (
            one["name"],
            one["cost"],
            _bounds(one),
            *(str(at.get(one["name"])) for at in (preview.default, preview.planned)),
        )
        for one in preview.knobs
    ]
    print_table(console, ("knob", "cost", "values", "default", "planned"), rows)
    for number, seed in enumerate(preview.seeds, 1):
        click.echo(f"seed {number}: " + " ".join(f"{name}={value}" for name, value in seed.items()))
    if preview.seeds_words:
        click.echo(f"seeds: {preview.seeds_words}")
    click.echo(f"device {preview.device}; the engine's default {preview.default_words}; study `{preview.study}`")


def _bounds(knob: dict[str, Any]) -> str:
    if knob.get("choices"):
        return ", ".join(str(one) for one in knob["choices"])
    return f"{knob.get('low', 0):g} to {knob.get('high', 0):g}"


def _show_status(*, as_json: bool) -> int:
    from freetoken.tuner.status import list_statuses

    found = list_statuses()
    emit([_public(one) for one in found], as_json=as_json, render=lambda console: _render_status(found, console))
    return 0


def _public(status: TuneStatus) -> dict[str, Any]:
    return {**status.model_dump(mode="json"), "is_alive": status.is_alive}


def _render_status(found: tuple[TuneStatus, ...], console: Console) -> None:
    if not found:
        click.echo("nothing was tuned here yet")
        return
    rows = [
        (one.study, _state(one), str(one.trials), str(one.starts),
         format_significant(one.best_figure) if one.best_figure is not None else "",
         format_seconds(one.left_s) if one.left_s is not None and one.is_alive else "", one.message[:60])
        for one in found
    ]  # fmt: skip
    headings = ("study", "state", "trials", "starts", "best", "left", "")
    print_table(console, headings, rows, align=("left", "left", "right", "right", "right", "right", "left"))


def _state(status: TuneStatus) -> str:
    if status.state == "running" and not status.is_alive:
        return "killed; `--resume` goes on"
    return f"{status.state}: {status.phase}" if status.state == "running" else status.state
