"""`ft report`: a study as one HTML file with plots, readable offline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from freetoken.cli.complete import complete_study
from freetoken.cli.output import emit, examples, json_option, note
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.report.page import Report
    from freetoken.store.rows import MeasuredLine
    from freetoken.tuner.record import StudyRecord


@click.command("report", epilog=examples("ft report demo", "ft report demo-code-4k-turn_time-1a2b3c4d -o demo.html"))
@click.argument("study", metavar="[STUDY|RECIPE]", required=False, shell_complete=complete_study)
@click.option("-o", "--output", "--out", metavar="FILE", help="Where the page goes; else STUDY.html in this folder.")
@click.option("--storage", metavar="URL", help="The Optuna storage of the study, where `ft tune` was given one.")
@json_option
def command(study: str | None, output: str | None, storage: str | None, as_json: bool) -> None:
    """Write a study of `ft tune` as one HTML file: winner, plots, every trial.

    The page is readable offline: it asks the network for nothing. STUDY is a study's name or its beginning, or the
    name of a recipe, whose newest study is meant; `ft tune --status` lists studies. It may be left out where there is
    one. A study that still runs is shown as it stands. `-o -` writes to stdout.
    """
    from freetoken.report.page import write_page, write_report
    from freetoken.tuner.reading import pick_study, read_study
    from freetoken.tuner.storage import open_known_storage

    opened = open_known_storage(storage)
    picked = pick_study(opened, study)
    if picked.note:
        note(picked.note)
    found = read_study(opened, picked.name)
    lines = _read_lines(found)
    if output == "-":
        write_page(found, sys.stdout, lines)
        return
    report = write_report(found, Path(output or f"{found.name}.html"), lines)
    emit(report, as_json=as_json, render=lambda _: _render(report))


def _read_lines(study: StudyRecord) -> tuple[MeasuredLine, ...]:
    """The ledger of the best trial's run, where this state folder keeps it."""
    from freetoken.store.results import read_store

    best = study.trial(study.best)
    store = read_store() if best is not None and best.run_id else None
    if store is None or best is None or best.run_id is None:
        return ()
    with store:
        return store.list_measured_lines(best.run_id)


def _render(report: Report) -> None:
    click.echo(f"{report.path}  {format_bytes(report.bytes)}, {len(report.drawn)} plots of {report.trials} trials")
    for key, why in report.missing.items():
        note(f"not drawn: {key}: {why}")
