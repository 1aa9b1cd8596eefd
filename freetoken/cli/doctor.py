"""`ft doctor`: what is in the way on this machine, with the fix for each finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.doctor.model import Diagnosis, Status
    from freetoken.hardware.model import Hardware

_WORDS: dict[Status, str] = {"pass": "passed", "warn": "with a warning", "fail": "failed", "skip": "not checked"}


@click.command("doctor", epilog=examples("ft doctor", "ft doctor --json"))
@click.option("--pin", is_flag=True, help="Try how much host memory can be pinned (tried anyway under WSL with a GPU).")
@json_option
def command(pin: bool, as_json: bool) -> int:
    """Look for what is in the way on this machine and show the fix; exits 1 when a check failed."""
    from freetoken.doctor.diagnose import make_diagnosis
    from freetoken.doctor.gather import gather_facts, read_needs
    from freetoken.hardware.probe import probe_hardware

    hardware = probe_hardware()
    facts = gather_facts(hardware, pinnable_bytes=_probe_pin(hardware, pin))
    diagnosis = make_diagnosis(hardware, facts, read_needs())
    emit(diagnosis, as_json=as_json, render=lambda console: _render(diagnosis, console))
    return 1 if diagnosis.has_failed else 0


def _probe_pin(hardware: Hardware, is_asked: bool) -> int | None:
    has_nvidia = any(gpu.vendor == "nvidia" for gpu in hardware.gpus)
    if not has_nvidia or not (is_asked or hardware.os.is_wsl):
        return None
    from freetoken.hardware.pin import probe_pinnable

    note("trying how much host memory can be pinned")
    return probe_pinnable(hardware.ram.available_bytes)


def _render(diagnosis: Diagnosis, console: Console) -> None:
    rows: list[tuple[str, str, str]] = []
    for check in diagnosis.checks:
        if check.status != "skip":
            rows.append((check.status, check.name, check.found))
            rows += [("", "", f"fix: {check.fix}")] if check.fix else []
    summary = ", ".join(f"{diagnosis.count(status)} {word}" for status, word in _WORDS.items())
    print_table(console, ("", "check", "found"), rows, notes=(*_skipped_lines(diagnosis), summary))


def _skipped_lines(diagnosis: Diagnosis) -> list[str]:
    """One line for each reason, with the checks that it left out."""
    by_reason: dict[str, list[str]] = {}
    for check in diagnosis.checks:
        if check.status == "skip":
            by_reason.setdefault(check.found, []).append(check.name)
    return [f"not checked: {', '.join(names)} ({reason})" for reason, names in by_reason.items()]
