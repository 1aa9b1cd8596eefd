"""The page: one HTML file with plotly.js in it, which asks nobody for anything.

A content security policy in the file itself forbids every request, so that what a browser may do is not left to
what the scripts in it happen to do. All text is escaped by the template engine; data reach the script as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pydantic import BaseModel, ConfigDict

from freetoken.outfile import check_output, write_output
from freetoken.report import tables
from freetoken.report.figures import Drawing, draw_all

if TYPE_CHECKING:
    from freetoken.store.rows import MeasuredLine
    from freetoken.tuner.record import StudyRecord

_TEMPLATE = Path(__file__).with_name("page.html.j2")


class Report(BaseModel):
    """What was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = "report"
    path: str
    bytes: int
    study: str
    recipe: str
    trials: int
    measured: int
    starts: int
    crashes: int
    #: Plots by key and title, and why the others are missing.
    drawn: dict[str, str]
    missing: dict[str, str]


def write_page(study: StudyRecord, stream: TextIO, lines: Sequence[MeasuredLine] = ()) -> None:
    """Writes the report of `study` to `stream`."""
    stream.write(render(study, draw_all(study, lines)))


def write_report(study: StudyRecord, path: Path, lines: Sequence[MeasuredLine] = ()) -> Report:
    """Writes the report of `study` to `path`. Raises UsageError, FtError where it cannot be written."""
    path = path.expanduser()
    check_output(path)
    drawings = draw_all(study, lines)
    text = render(study, drawings)
    return Report(
        path=str(path), bytes=write_output(path, text), study=study.name, recipe=study.facts.recipe,
        trials=len(study.trials), measured=sum(one.measurement is not None for one in study.trials),
        starts=study.starts, crashes=study.crashes, drawn={one.key: one.title for one in drawings if one.data},
        missing={one.key: one.missing for one in drawings if not one.data},
    )  # fmt: skip


def render(study: StudyRecord, drawings: Sequence[Drawing]) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE.parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    headings, trials, same = tables.list_trials(study)
    has_script = any(one.data for one in drawings)
    return environment.get_template(_TEMPLATE.name).render(
        study=study,
        summary=tables.summarise(study),
        facts=tables.list_facts(study),
        winner=tables.describe_winner(study),
        figures=tables.compare_figures(study),
        settings=tables.list_settings(study),
        commands=tables.make_commands(study),
        front=tables.list_front(study),
        warnings=study.result.warnings if study.result is not None else (),
        drawings=drawings,
        plots={one.key: {"data": one.data, "layout": one.layout} for one in drawings if one.data},
        headings=headings,
        trials=trials,
        same=same,
        plotly=Markup(read_plotly()) if has_script else "",  # its own file, shipped for this very use
    )


def read_plotly() -> str:
    """plotly.js as it is shipped with the Python package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
