"""`ft apply`: makes a recipe run, with the least that gets there."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.output import emit, examples, json_option, note, print_error
from freetoken.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.deploy.tools import Step
    from freetoken.deploy.values import ApplyResult


@click.command(
    "apply",
    epilog=examples(
        "ft apply recipes/demo.yaml",
        "ft apply qwen3.6-35b-a3b-8gb --set settings.expert_slots=1024 --dry-run",
    ),
)
@click.argument("recipe")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Override a value of the recipe; repeatable.")
@click.option("--name", metavar="NAME", help="Name of the deployment; else the recipe's.")
@click.option("--dry-run", is_flag=True, help="Show the plan, the changes and the exact command line; touch nothing.")
@click.option("--force", is_flag=True, help="Launch what the planner refused; recorded, and shown by `ft status`.")
@click.option("--yes", is_flag=True, help="Replace what runs under this name without asking.")
@click.option("--locked", is_flag=True, help="Hold to the recipe's lock; refuse any difference from it.")
@click.option("--no-wait", is_flag=True, help="Fail at once where another `ft` is at work on it, or on its device.")
@json_option
def command(
    recipe: str, sets: tuple[str, ...], name: str | None, dry_run: bool, force: bool, yes: bool, no_wait: bool,
    locked: bool, as_json: bool,
) -> int:  # fmt: skip
    """Make a recipe run: plan it, do the least that gets there, and prove it by a real generation.

    RECIPE is a recipe's name or file, the name of a model card, a hub repository, or a model's folder. A second
    apply of the same changes nothing; other slots are resized live; what needs a restart asks first on a terminal.
    """
    from freetoken.deploy.apply import RefusedError, apply_recipe
    from freetoken.deploy.target import load_target

    loaded = load_target(recipe, sets=sets)
    for text in loaded.notes:
        note(f"note: {text}")
    lock = None
    if locked:
        from freetoken.deploy.lock import find_lock_path, pin, read_lock

        lock = read_lock(find_lock_path(loaded.path, loaded.recipe.name))
        loaded = pin(loaded, lock)
    is_asking = sys.stdin.isatty() and sys.stderr.isatty() and not yes and not dry_run
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        result = apply_recipe(
            loaded,
            name=name,
            is_dry_run=dry_run,
            is_forced=force,
            is_waiting=not no_wait,
            confirm=confirm_change if is_asking else None,
            progress=Printer(as_json=as_json),
            locked=lock,
        )
    except RefusedError as error:
        return _refuse(error, as_json=as_json)
    emit(result, as_json=as_json, render=lambda console: render_result(result, console))
    return 0


def _interrupt(*_: object) -> None:
    """SIGTERM is Ctrl-C: what was started is ended."""
    raise KeyboardInterrupt


def confirm_change(question: str) -> bool:
    """Asks before what runs is ended."""
    return click.confirm(question, default=True, err=True)


def _refuse(error: Any, *, as_json: bool) -> int:
    from freetoken.cli import render

    refusal = error.refusal
    emit(refusal, as_json=as_json, render=lambda console: render.render_refusal(refusal, console))
    print_error(render.make_refusal_error(refusal))
    return int(error.exit_code)


#: Seconds until a line that only updates is printed where it cannot be overwritten, and between two of a phase.
_FIRST_UPDATE_S, _NEXT_UPDATE_S = 1.0, 10.0


class Printer:
    """Progress on stderr: a line a step, lines that only update overwritten on a terminal and thinned elsewhere."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.started_s = time.monotonic()
        self._due_s, self._shown_phase, self._is_open = 0.0, "", False

    def __call__(self, step: Step) -> None:
        """Shows one step."""
        elapsed_s = time.monotonic() - self.started_s
        if self.as_json:
            self._print_json(step, elapsed_s)
        elif step.is_update and sys.stderr.isatty():
            click.echo(f"\r\x1b[2K{self._line(step, elapsed_s)}", err=True, nl=False)
            self._is_open = True
        elif not step.is_update or self._is_due(step, elapsed_s):
            click.echo(("\r\x1b[2K" if self._is_open else "") + self._line(step, elapsed_s), err=True)
            self._is_open = False

    def _is_due(self, step: Step, elapsed_s: float) -> bool:
        """Where lines cannot be overwritten: a phase that goes on for a second says so, and then every ten."""
        phase = f"{step.phase} {step.message.partition(' ')[0]}"
        if phase != self._shown_phase:
            self._shown_phase, self._due_s = phase, elapsed_s + _FIRST_UPDATE_S
        if elapsed_s < self._due_s:
            return False
        self._due_s = elapsed_s + _NEXT_UPDATE_S
        return True

    def _line(self, step: Step, elapsed_s: float) -> str:
        amount = ""
        if step.total_bytes:
            done, total = format_bytes(step.done_bytes), format_bytes(step.total_bytes)
            amount = f" {done} of {total} ({100 * step.done_bytes // step.total_bytes} %)"
        return f"[{elapsed_s:6.1f} s] {step.phase}: {step.message}{amount}"

    def _print_json(self, step: Step, elapsed_s: float) -> None:
        if not step.is_update or self._is_due(step, elapsed_s):
            event = {"elapsed_s": round(elapsed_s, 3), "phase": step.phase, "message": step.message}
            click.echo(json.dumps(event), err=True)


def render_result(result: ApplyResult, console: Console) -> None:
    """What was done, and what runs now; or what would be done."""
    if result.kind == "dry_run":
        _render_dry_run(result, console)
        return
    done = {
        "nothing": "runs already, nothing changed",
        "resize": "resized live and proven",
        "restart": "restarted and proven",
        "launch": "launched and proven",
    }
    if result.diff.action == "nothing" and result.proof is not None:
        done["nothing"] = "ran already and is proven now"
    click.echo(f"{result.name}: {done[result.diff.action]} in {format_seconds(result.duration_s)}")
    if result.proof is not None and result.proof.compile_s:
        compiled = format_seconds(result.proof.compile_s)
        click.echo(f"  first start: kernels were compiled for {compiled}, which no timing counts")
    for words in result.corrections:
        click.echo(f"  corrected: {words}")
    click.echo(f"  url     {result.url}")
    click.echo(f"  model   {result.model}")
    settings = result.plan.settings
    click.echo(
        f"  runs    {settings.strategy}, {settings.expert_slots:,} expert slots, {settings.kv_tokens:,} KV tokens"
    )
    if result.proof is not None:
        proof = result.proof
        speed = f", {proof.decode_tps:.3g} tok/s" if proof.decode_tps else ""
        click.echo(f"  proof   first token after {format_seconds(proof.ttft_s)}{speed}")
        prefill = f"prefill of {proof.chunk_prompt_tokens:,} tokens"
        click.echo(f"          {prefill}: first token after {format_seconds(proof.chunk_ttft_s)}")
    click.echo(f"  run     {result.run_dir}")
    click.echo(f"chat with it: `ft chat --name {result.name}`   see it: `ft status`   stop it: `ft stop {result.name}`")


def _render_dry_run(result: ApplyResult, console: Console) -> None:
    import shlex

    from freetoken.cli import render

    render.render_plan(result.plan, console)
    click.echo()
    click.echo(f"would {result.diff.action}: {result.diff.reason}")
    for change in result.diff.changes:
        click.echo(f"  {change.describe()}")
    if result.plan.start_slots is not None:
        slots = f"{result.plan.start_slots:,} to {result.plan.settings.expert_slots:,}"
        click.echo(f"then grows live from {slots} expert slots")
    environment = " ".join(f"{key}={shlex.quote(value)}" for key, value in result.env.items())
    click.echo("command line:")
    click.echo("  " + (environment + " " if environment else "") + shlex.join(result.argv))
