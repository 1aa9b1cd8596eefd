"""Plans, refusals and ledgers as tables: what `ft plan` shows and `ft apply --dry-run` shows again.

Everything is read off the values; no arithmetic of its own but sums that the ledger defines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import note, print_table
from freetoken.errors import DoesNotFitError
from freetoken.planner.memory import PHASES, Finding, Ledger, Line
from freetoken.planner.plan import Plan, Prediction, Refusal
from freetoken.units import GIB, format_bytes, format_count, format_seconds, format_significant

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.planner.suggest import Suggestions

KINDS = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}
_LIMITS = {
    "vram": "reads from VRAM", "pcie": "the PCIe link", "dram": "reads from RAM", "disk": "the disk",
    "overhead": "launch overhead", "compute": "arithmetic",
}  # fmt: skip


def render_plan(plan: Plan, console: Console) -> None:
    """The whole plan: verdict, ledgers, settings with their origin, prediction, findings."""
    forced = " (forced: the planner said no)" if plan.is_forced else ""
    click.echo(f"{describe_subject(plan)}: {'does not fit' if plan.is_forced else 'fits'}{forced}")
    if said := describe_model(plan):
        click.echo(said)
    _render_ledgers(plan, console)
    rows = make_setting_rows(plan)
    click.echo()
    print_table(console, ("setting", "value", "from"), rows, align=("left", "right"), title="settings")
    if plan.prediction is not None:
        click.echo()
        render_prediction(plan.prediction, console)
    if plan.admission is not None and plan.admission.message:
        click.echo(f"the engine's own check: {plan.admission.message}")
    if plan.track_record:
        click.echo(plan.track_record)
    render_findings(plan.findings)


def render_refusal(refusal: Refusal, console: Console) -> None:
    """The least demanding settings that were tried, with their ledgers; the no itself is `make_refusal_error`."""
    if refusal.ram is None:
        return
    click.echo(f"{describe_subject(refusal)}: does not fit; the least that was tried:")
    if said := describe_model(refusal):
        click.echo(said)
    _render_ledgers(refusal, console, blamed=refusal.blamed_line)


def show_sets(sets: Mapping[str, str]) -> str:
    """A repair as arguments to type: `--set settings.kv_tokens=8192`."""
    return f"`{' '.join(f'--set {key}={value}' for key, value in sets.items())}`"


def make_refusal_error(refusal: Refusal, show: Callable[[Mapping[str, str]], str] = show_sets) -> DoesNotFitError:
    """The no as an error: every finding, the missing bytes, and what would make it a yes, as `show` writes it."""
    said = [finding.message for finding in refusal.findings if finding.is_fatal]
    details = [one for one in said if one not in refusal.message]
    details += [f"warning: {one.message}" for one in refusal.findings if not one.is_fatal]
    ledgers = {"vram": refusal.vram, "ram": refusal.ram, "disk": refusal.disk}
    ledger = ledgers[refusal.ledger] if refusal.ledger is not None else None
    blamed = ledger.line(refusal.blamed_line) if ledger is not None and refusal.blamed_line else None
    if ledger is not None and blamed is not None:
        size = f"{format_bytes(blamed.bytes)} of {KINDS[ledger.kind]}"
        details.append(
            f"to blame is the line `{blamed.label}`: {size}" + (f", {blamed.formula}" if blamed.formula else "")
        )
    details += [f"instead: {one}" for one in refusal.alternatives]
    return DoesNotFitError(refusal.message, hint=describe_repairs(refusal, show), details=tuple(details))


def describe_repairs(refusal: Refusal, show: Callable[[Mapping[str, str]], str] = show_sets) -> str | None:
    """Changes that were planned again and fit, or else the findings' own hints; None where nothing helps."""
    repairs = []
    for repair in refusal.repairs:
        rate = repair.predicted_decode_tps
        words = repair.description
        if rate is not None and "tok/s" not in words:
            words += f", {format_significant(rate)} tok/s"
        repairs.append(f"{show(repair.sets)} ({words})" if repair.sets else words)
    hints = repairs or [finding.hint for finding in refusal.findings if finding.hint]
    return ", or ".join(dict.fromkeys(hints)) or None


def render_findings(findings: tuple[Finding, ...]) -> None:
    """Warnings, one line each, hints below."""
    for finding in findings:
        click.echo(f"warning: {finding.message}")
        if finding.hint:
            click.echo(f"         {finding.hint}")


def describe_subject(answer: Plan | Refusal) -> str:
    """`demo: demo-moe with native 0.1.0 on this machine`."""
    version = getattr(answer, "engine_version", None)
    engine = f"{answer.engine} {version}" if version else answer.engine
    machine = getattr(answer, "hardware_name", "")
    return f"{answer.recipe_name}: {answer.model_name} with {engine}" + (f" on {machine}" if machine else "")


def describe_model(answer: Plan | Refusal) -> str:
    """Where the model's figures come from and what a download would move; empty for a model that is here."""
    if not answer.download_bytes:
        return ""
    size = f"{answer.download_bytes / 1e9:.3g} GB ({format_bytes(answer.download_bytes)})"
    return f"{answer.model_note or 'not on this machine'}; a download of {size}"


def _render_ledgers(answer: Plan | Refusal, console: Console, *, blamed: str | None = None) -> None:
    for ledger in (answer.vram, answer.ram, answer.disk):
        if ledger is not None and (ledger.lines or ledger.kind != "disk"):
            click.echo()
            render_ledger(ledger, console, blamed=blamed)


def render_ledger(ledger: Ledger, console: Console, *, blamed: str | None = None) -> None:
    """One ledger: every line with bytes, phases, formula and source; what each phase takes; what is left."""
    rows = [_line_row(line, line.key == blamed) for line in ledger.lines]
    rows.append(_sum_row(f"peak ({ledger.peak_phase})" if ledger.kind != "disk" else "sum", ledger.peak_bytes))
    headings = ("line", "bytes", "GiB", "phases", "formula", "source")
    notes = [describe_balance(ledger)]
    if ledger.kind != "disk":
        notes.append("by phase, GiB: " + describe_phases(ledger))
    print_table(console, headings, rows, align=("left", "right", "right"), title=KINDS[ledger.kind], notes=notes)


def _line_row(line: Line, is_blamed: bool) -> tuple[str, ...]:
    phases = "all" if set(line.phases) == set(PHASES) else ", ".join(line.phases)
    label = f"{line.label}  <- to blame" if is_blamed else line.label
    return (label, format_count(line.bytes), format_gib(line.bytes), phases, line.formula, line.source)


def _sum_row(label: str, count: int) -> tuple[str, ...]:
    return (label, format_count(count), format_gib(count), "", "", "")


def describe_phases(ledger: Ledger) -> str:
    """`load 3.10, capture 3.40, prefill 5.12 (peak), decode 4.90`."""
    peak = ledger.peak_phase
    return ", ".join(
        f"{phase} {format_gib(ledger.phase_bytes(phase))}{' (peak)' if phase == peak else ''}" for phase in PHASES
    )


def describe_balance(ledger: Ledger) -> str:
    """`5.40 GiB free, 0.20 GiB kept as headroom: 0.08 GiB left`, or what is missing."""
    kept = f", {format_bytes(ledger.headroom_bytes)} kept as headroom" if ledger.headroom_bytes else ""
    if ledger.missing_bytes:
        balance = f"{format_bytes(ledger.missing_bytes)} ({format_count(ledger.missing_bytes)} bytes) missing"
    else:
        balance = f"{format_bytes(ledger.left_bytes - ledger.headroom_bytes)} left"
    return f"{format_bytes(ledger.available_bytes)} of {format_bytes(ledger.total_bytes)} free{kept}: {balance}"


def format_gib(count: int) -> str:
    """GiB to the hundredth, so that a column adds up by eye."""
    return f"{count / GIB:,.2f}"


def make_setting_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Every setting that applies: name, value, where it came from."""
    rows = []
    for name, value in plan.settings.model_dump().items():
        if value is not None:
            rows.append((name, _show(name, value), plan.provenance.get(f"settings.{name}", "")))
    return rows


def _show(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return format_count(value) if isinstance(value, int) and name != "gpu" else str(value)


def render_prediction(prediction: Prediction, console: Console) -> None:
    """What speed to expect and what limits it."""
    p = prediction
    spread = f"{format_significant(p.decode_tps_low)} to {format_significant(p.decode_tps_high)}"
    rows = [
        ("decode", format_significant(p.decode_tps), "tok/s", f"{spread}; limited by {_LIMITS[p.limited_by]}"),
        ("prefill", format_significant(p.prefill_tps), "tok/s", f"limited by {_LIMITS[p.prefill_limited_by]}"),
        ("TTFT", format_significant(p.ttft_s), "s", _describe_ttft(p)),
    ]
    if p.mean_turn_time_s is not None:
        rows.append(("turn", format_significant(p.mean_turn_time_s), "s", "mean of the workload's turns"))
    if p.hit_ratio is not None:
        rows.append(("hit rate", format_significant(p.hit_ratio), "0 to 1", "experts found resident"))
    if p.miss_bytes_per_token:
        rows.append(("miss traffic", format_significant(p.miss_bytes_per_token / 1e6), "MB/token", ""))
    print_table(
        console, ("predicted", "figure", "unit", ""), rows, align=("left", "right"), title="speed", notes=p.notes
    )


def _describe_ttft(p: Prediction) -> str:
    if p.ttft_low_s is None or p.ttft_high_s is None:
        return "longest prompt of the workload"
    return f"{format_seconds(p.ttft_low_s)} to {format_seconds(p.ttft_high_s)}; longest prompt of the workload"


def _shorten(quantization: str) -> str:
    """What stands before the first `;` or `,` outside brackets; 16-bit weights by their name."""
    words = re.split(r"[;,](?![^(]*\))", quantization)[0].strip()
    return "16 bit" if words in ("", "none") else words


def render_suggestions(found: Suggestions, console: Console) -> None:
    """What runs well, fastest first, with the command that shows each plan; then what does not, and why."""
    headings = ("model", "stored as", "engine", "tok/s", "TTFT s", "VRAM GiB", "RAM GiB", "disk GB", "limited by")
    rows = []
    for one in found.suggestions:
        vram = format_gib(one.vram_bytes) if one.vram_bytes is not None else "-"
        figures = (format_significant(one.decode_tps), format_significant(one.ttft_s), vram, format_gib(one.ram_bytes))
        stored, disk = _shorten(one.quantization), f"{one.disk_bytes / 1e9:.1f}"
        engine = one.engine if one.is_launched else f"{one.engine} (plan only)"
        rows.append((one.checkpoint, stored, engine, *figures, disk, _LIMITS[one.limited_by]))
    click.echo(f"on {found.hardware_name}, workload `{found.workload}`; predicted, fastest first")
    if rows:
        print_table(console, headings, rows, align=("left", "left", "left", *("right",) * 5))
        click.echo()
        for one in found.suggestions:
            click.echo(one.command)
    else:
        click.echo("nothing among the model cards runs well here")
    if found.unsuitable:
        click.echo("\nnot, or not well:")
        for other in found.unsuitable:
            click.echo(f"  {other.checkpoint} with {other.engine}: {other.reason}")


def say_notes(notes: tuple[str, ...]) -> None:
    """What was read and has no effect yet, on stderr."""
    for text in notes:
        note(f"note: {text}")
