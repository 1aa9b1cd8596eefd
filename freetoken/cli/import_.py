"""`ft import`: judge a bundle from elsewhere, plan it for this machine, show what changes; run it only when asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from freetoken.cli.complete import complete_profile
from freetoken.cli.output import emit, examples, json_option, note, print_error, print_table
from freetoken.units import format_significant

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.share.compare import Comparison
    from freetoken.share.receive import Received

#: Settings that a search turns first; a recipe that fixes one leaves it little to do.
_TUNED = ("expert_slots", "strategy", "prefill_chunk_tokens")


@click.command(
    "import", epilog=examples("ft import qwen3.6-35b-a3b-6gb.ftbundle", "ft import mine.ftbundle --apply --yes")
)
@click.argument("file", metavar="FILE")
@click.option("--apply", "is_applied", is_flag=True, help="Run it afterwards; asks first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Judge and plan only; keep nothing.")
@click.option("--name", metavar="NAME", help="Import it under this name.")
@click.option("--replace", "is_replacing", is_flag=True, help="Replace what was imported under the name.")
@click.option("--trusted", "is_trusted_only", is_flag=True, help="Refuse what no key of your trust list signed.")
@click.option("--trust", "trust_as", metavar="NAME", help="Put the key that signed it on your trust list; asks first.")
@click.option("--profile", metavar="NAME", shell_complete=complete_profile, help="Plan for a machine that is not here.")
@json_option
def command(
    file: str, is_applied: bool, yes: bool, dry_run: bool, name: str | None, is_replacing: bool, is_trusted_only: bool,
    trust_as: str | None, profile: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Judge a recipe from elsewhere, and show what this machine would run.

    Nothing in the file is obeyed: it is checked, planned anew for this machine, and kept in the state folder's
    imports/. It runs when you say so: `--apply`, or `ft apply` of the recipe that is named at the end.
    """
    from freetoken.share.receive import receive

    outcome = receive(
        Path(file), name=name, is_kept=not dry_run, is_replacing=is_replacing, is_trusted_only=is_trusted_only,
        profile=profile, confirm_trust=_make_asker(yes) if trust_as else None, trust_as=trust_as,
    )  # fmt: skip
    code = finish(outcome, as_json=as_json)
    if code == 0 and is_applied and outcome.path is not None:
        return _apply(outcome.path, yes=yes, as_json=as_json)
    return code


def finish(outcome: Received, *, as_json: bool) -> int:
    """Prints what came of an import; its exit code."""
    value = {**outcome.comparison.model_dump(mode="json"), "recipe_path": str(outcome.path) if outcome.path else None}
    emit(value, as_json=as_json, render=lambda console: render_comparison(outcome.comparison, console))
    from freetoken.recipe.lookup import show_path

    if outcome.path is not None:
        note(f"kept as {show_path(outcome.path)}")
    if outcome.answer.kind == "refusal":
        from freetoken.cli import render

        print_error(render.make_refusal_error(outcome.answer))
        return 3
    if outcome.path is not None:
        distance = outcome.comparison.distance
        same = outcome.bundle.lock is not None and distance is not None and distance.is_same_class
        shown = show_path(outcome.path)
        _note_freedom(outcome.comparison, shown)
        note(f"run it: `ft apply {shown}`" + (" (`--locked`: exactly as the author ran it)" if same else ""))
        evidence = outcome.bundle.evidence
        if evidence.study or evidence.measured:
            is_fixed = any(outcome.bundle.recipe.settings.model_dump()[row] not in ("auto", "model") for row in _TUNED)
            note(f"tune it, from what the author found: `ft tune {shown}{' --free' if is_fixed else ''}`")
    return 0


def _note_freedom(found: Comparison, shown: str) -> None:
    """Says which of the author's values cost speed here, and how to leave them open."""
    if found.open_decode_tps is None:
        return
    names = ", ".join(f"`{name}`" for name in found.open_names)
    sets = " ".join(f"--set settings.{name}=auto" for name in found.open_names)
    note(
        f"the recipe fixes {names}; left open, {format_significant(found.open_decode_tps)} tok/s are predicted here: "
        f"`ft apply {shown} {sets}`"
    )


def _make_asker(yes: bool):  # type: ignore[no-untyped-def]
    def ask(question: str) -> bool:
        return yes or (sys.stdin.isatty() and click.confirm(question, err=True))

    return ask


def _apply(path: Path, *, yes: bool, as_json: bool) -> int:
    from freetoken.cli.apply import command as apply_command
    from freetoken.errors import UsageError

    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                "nobody can be asked here whether to run it", hint="`--apply --yes`, once you have read it"
            )
        if not click.confirm(f"run {path} now?", err=True):
            note("not run")
            return 0
    arguments = [str(path), *(["--yes"] if yes else []), *(["--json"] if as_json else [])]
    return int(apply_command.main(args=arguments, prog_name="ft apply", standalone_mode=False) or 0)


#: Characters of the widest value that stands in a column of the change table.
_WIDEST = 40


def render_comparison(found: Comparison, console: Console) -> None:
    """The change table with what is expected of it."""
    click.echo(f"{found.name}: {found.signer}")
    click.echo(f"  evidence   {found.evidence}")
    if found.distance is not None:
        words = "the same class of machine" if found.distance.is_same_class else "; ".join(found.distance.differences)
        click.echo(f"  distance   {words}")
    if not found.is_planned:
        return
    changed = [
        (row.setting.removesuffix("_bytes"), row.author, row.here, row.reason)
        for row in found.rows
        if row.author != row.here
    ]
    # A list of needs would make the column as wide as a screen: told below the table.
    lengthy = [row for row in changed if max(len(row[1]), len(row[2])) > _WIDEST]
    changed = [row for row in changed if row not in lengthy]
    same = [f"{row.setting.removesuffix('_bytes')} {row.author}" for row in found.rows if row.author == row.here]
    if changed:
        click.echo()
        print_table(console, ("setting", "author", "here", "why"), changed, align=("left", "right", "right", "left"))
    for setting, author, here, reason in lengthy:
        click.echo()
        click.echo(f"{setting}: {here}: {reason}")
        click.echo(f"  the author's: {author}")
    if same:
        click.echo()
        click.echo("as the author ran it: " + ", ".join(same))
    if found.predicted_decode_tps is not None:
        click.echo()
        click.echo(describe_speed(found, found.predicted_decode_tps))


def describe_speed(found: Comparison, predicted: float) -> str:
    """What to expect here, beside what the author measured: a loss or a gain."""
    words = f"predicted here {format_significant(predicted)} tok/s"
    if found.predicted_low_tps is not None and found.predicted_high_tps is not None:
        words += f" ({format_significant(found.predicted_low_tps)} to {format_significant(found.predicted_high_tps)})"
    if found.author_decode_tps is None:
        return words
    measured = format_significant(found.author_decode_tps)
    if found.expected_ratio is None:
        return f"{words}; {measured} were measured on the same class of machine"
    change = "gain" if found.expected_ratio >= 1 else "loss"
    return f"{words}, the author measured {measured}: a {change} of {abs(found.expected_ratio - 1) * 100:.0f} %"
