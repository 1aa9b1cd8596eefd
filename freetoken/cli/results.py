"""`ft results`: what was measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table
from freetoken.units import format_significant

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.store.rows import ResultRow

#: Figures shown as columns: name in `metrics`, heading with its unit.
COLUMNS = (
    ("decode_tps", "decode tok/s"), ("total_decode_tps", "total tok/s"), ("prefill_tps", "prefill tok/s"),
    ("ttft_ms", "TTFT ms"), ("tpot_ms", "TPOT ms"), ("turn_time_s", "turn s"), ("hit_ratio", "hit rate"),
    ("vram_peak_bytes", "VRAM GiB"),
)  # fmt: skip
#: Columns of an export, in this order.
_RESULT_COLUMNS = (
    "id", "measured_at", "recipe_name", "workload", "engine", "engine_version", "model_name", "kind", "run_id",
    "machine_id", "is_estimated", "invalid_because", "metrics", "settings",
)  # fmt: skip


@click.command("results", epilog=examples("ft results --recipe demo", "ft results --workload code-4k --json"))
@click.option("--recipe", metavar="NAME", help="Only results of this recipe.")
@click.option("--workload", metavar="NAME", help="Only results of this workload.")
@click.option("--engine", metavar="NAME", help="Only results of this engine.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="Newest so many.")
@click.option(
    "--export",
    "export_format",
    type=click.Choice(("csv", "json")),
    help="Write every column to stdout, as CSV or JSON.",
)
@click.option("--rebuild", "is_rebuilding", is_flag=True, help="Make the database anew from the run folders first.")
@json_option
def command(
    recipe: str | None, workload: str | None, engine: str | None, limit: int, is_rebuilding: bool,
    export_format: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what was measured on this machine.

    The run folders are the truth: `--rebuild` sets a damaged database aside and reads them again.
    """
    from freetoken.store.results import read_store

    if is_rebuilding:
        _rebuild()
    store = read_store()
    rows: tuple[ResultRow, ...] = ()
    if store is not None:
        with store:
            rows = store.list_results(recipe=recipe, workload=workload, engine=engine, limit=limit)
    if export_format == "csv":
        click.echo(format_csv(rows), nl=False)
        return
    emit(list(rows), as_json=as_json or export_format == "json", render=lambda console: _render(rows, console))


def format_csv(rows: Sequence[ResultRow]) -> str:
    """One line a result: what it is of, then `metrics.NAME` and `settings.NAME` for every name that any row has."""
    import csv
    import io

    plain = [row.model_dump(mode="json") for row in rows]
    fixed = [name for name in _RESULT_COLUMNS if name not in ("metrics", "settings")]
    parts = ("metrics", "settings")
    nested = [(part, name) for part in parts for name in sorted({key for row in plain for key in row[part]})]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*fixed, *(f"{part}.{name}" for part, name in nested)])
    for row in plain:
        values = [*(row[name] for name in fixed), *(row[part].get(name) for part, name in nested)]
        writer.writerow([_cell(one) for one in values])
    return stream.getvalue()


def _cell(value: object) -> object:
    """A cell that a spreadsheet takes for a text and not for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def _rebuild() -> None:
    from freetoken import paths
    from freetoken.store.rebuild import rebuild_from_runs
    from freetoken.tuner import status

    report = rebuild_from_runs(paths.runs_dir(), paths.database_path(), status.folder())
    note(f"read {report.runs:,} runs with {report.events:,} events and {report.results:,} results")
    if report.set_aside is not None:
        note(f"the old database is kept as {report.set_aside}")
    for text in report.skipped:
        note(f"left out: {text}")


def _render(rows: Sequence[ResultRow], console: Console) -> None:
    if not rows:
        click.echo("nothing has been measured here yet")
        return
    shown = [(name, heading) for name, heading in COLUMNS if any(name in row.metrics for row in rows)]
    headings = ("measured", "recipe", "workload", "engine", "kind", *(heading for _, heading in shown), "")
    table = [_row(row, [name for name, _ in shown]) for row in rows]
    print_table(console, headings, table, align=(*["left"] * 5, *["right"] * len(shown)))  # type: ignore[arg-type]


def _row(row: ResultRow, names: list[str]) -> tuple[str, ...]:
    engine = f"{row.engine} {row.engine_version}" if row.engine_version else row.engine
    remarks = [f"not comparable: {row.invalid_because}"] if row.invalid_because else []
    remarks += ["counts estimated"] if row.is_estimated else []
    figures = [_figure(name, row.metrics.get(name)) for name in names]
    when = row.measured_at[:16].replace("T", " ")
    return (when, row.recipe_name, row.workload, engine, row.kind, *figures, ", ".join(remarks))


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return format_significant(value / (1 << 30) if name.endswith("_bytes") else value)
