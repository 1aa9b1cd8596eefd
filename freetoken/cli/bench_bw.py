"""`ft bench bw`: how fast this machine moves bytes and computes experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table
from freetoken.errors import UsageError
from freetoken.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.checkpoint.shape import Experts
    from freetoken.deploy.bandwidth import BandwidthReport
    from freetoken.hardware.model import ExpertRates


@click.command(
    "bw", epilog=examples("ft bench bw --model qwen3.6-35b-a3b", "ft bench bw --import ~/.cache/freetoken/benchbw.json")
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda:0 or a GPU's uuid.")
@click.option("--model", metavar="MODEL", help="Take the experts' format and shape from a recipe or a model.")
@click.option("--expert-format", metavar="FORMAT", help="nvfp4, bf16, mxfp4, fp8, fp8_block.")
@click.option("--hidden", type=click.IntRange(min=1), help="Width of the model.")
@click.option("--inter", type=click.IntRange(min=1), help="Inner width of an expert.")
@click.option("--top-k", type=click.IntRange(min=1), help="Experts of a token in each layer.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; else the cores that this process may use.")
@click.option(
    "--import", "source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
    help="Take over the upstream engine's own profile instead of measuring.",
)  # fmt: skip
@click.option(
    "--write-profile", is_flag=False, flag_value="", default=None, metavar="[PATH]",
    help="Also write a profile in the upstream engine's format, where it looks or to PATH.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Replace a row that the upstream engine measured itself.")
@json_option
def command(
    device: str, model: str | None, expert_format: str | None, hidden: int | None, inter: int | None,
    top_k: int | None, threads: int | None, source: Path | None, write_profile: str | None, yes: bool, as_json: bool,
) -> int:  # fmt: skip
    """Measure the link, memory and expert arithmetic of this machine, alone and at once; some seconds.

    What is measured is kept for each GPU and expert format, and later plans start from it. It is a prior: which
    strategy is fastest, a run decides.
    """
    from freetoken.deploy import bandwidth
    from freetoken.hardware.probe import probe_hardware

    if source is not None and write_profile is not None:
        raise UsageError("`--import` reads a profile and `--write-profile` writes one", hint="leave one out")
    path = _find_profile(write_profile) if write_profile else None
    hardware = probe_hardware()
    if source is not None:
        report = bandwidth.import_profile(hardware, device, source)
    else:
        experts = _find_experts(model) if model is not None else None
        shape = bandwidth.choose_shape(expert_format, hidden, inter, top_k, experts)
        _ = bandwidth.find_gpu(hardware, device) if write_profile is None else bandwidth.require_gpu(hardware, device)
        note(f"measuring {shape.format} experts of {shape.hidden} x {shape.inter}, {shape.top_k} for a token")
        report = bandwidth.measure_machine(hardware, device, shape, bandwidth.make_meters(), threads=threads)
    if write_profile is not None:
        report = bandwidth.write_upstream_profile(hardware, report, path, is_forced=yes)
    emit(report, as_json=as_json, render=lambda console: _render(report, console))
    return 0


def _find_profile(name: str) -> Path:
    from freetoken.outfile import check_output

    path = check_output(Path(name))
    if path.exists() and not path.is_file():
        raise UsageError(f"{name} is no plain file, and a profile's rows are added to it")
    return path


def _find_experts(model: str) -> Experts:
    from freetoken.checkpoint.locate import locate_model
    from freetoken.deploy.target import load_target

    loaded = load_target(model)
    found = locate_model(loaded.recipe.model, loaded.base_dir)
    if found.shape is None:
        raise UsageError(f"nothing is known of the model `{model}`: {found.note}")
    return found.shape.experts


def _render(report: BandwidthReport, console: Console) -> None:
    title = report.gpu or "CPU"
    if report.imported_from is None:
        print_table(console, ("what", "rate", "known"), _general_rows(report), align=("left", "right"), title=title)
        click.echo()
    rows = [_row_cells(row) for row in report.rows]
    headings = ("experts", "threads", "CPU", "link", "CPU, both", "link, both", "kernel")
    print_table(console, headings, rows, align=("left", *("right",) * 5))
    for doubt in report.doubts:
        click.echo(f"  {'disturbed' if report.is_disturbed else 'note'}: {doubt}")
    if report.is_disturbed:
        click.echo("  no plan starts from these figures: measure again in peace")
    if report.rule:
        click.echo(f"  {report.rule}")
    click.echo(f"  {report.note}")
    click.echo(f"  kept in {report.stored_at}")
    if report.profile_path is not None:
        click.echo(
            f"  wrote {report.profile_path}, from streaming rates; the engine's own bench is better where it runs"
        )


def _general_rows(report: BandwidthReport) -> list[tuple[str, str, str]]:
    labels = (
        ("host to GPU, pinned", "h2d_bytes_per_s"),
        ("host to GPU, pageable", "h2d_pageable_bytes_per_s"),
        ("VRAM, streaming read", "vram_bytes_per_s"),
        ("RAM, streaming read", "dram_bytes_per_s"),
        ("RAM, expert by expert", "cpu_experts_bytes_per_s"),
        ("host to GPU while the CPU reads", "h2d_overlap_bytes_per_s"),
        ("RAM while the GPU is fed", "cpu_experts_overlap_bytes_per_s"),
    )
    rates = report.bandwidth
    known = [(label, getattr(rates, name), rates.sources.get(name, "measured")) for label, name in labels]
    return [(label, format_rate(rate), source) for label, rate, source in known if rate is not None]


def _row_cells(row: ExpertRates) -> tuple[str, ...]:
    size = f" of {format_bytes(row.expert_bytes)}" if row.expert_bytes else ""
    rates = (
        row.cpu_experts_bytes_per_s, row.h2d_bytes_per_s, row.cpu_experts_overlap_bytes_per_s,
        row.h2d_overlap_bytes_per_s,
    )  # fmt: skip
    cells = (format_rate(rate) if rate is not None else "" for rate in rates)
    name = f"{row.format} {row.hidden} x {row.inter}, top {row.top_k}{size}"
    return (name, str(row.threads), *cells, f"{row.engine} {row.kernel}".strip())
