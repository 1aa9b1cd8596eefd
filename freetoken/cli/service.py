"""`ft service`: a systemd unit that keeps a deployment over logout and reboot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table
from freetoken.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from freetoken.deploy.service import ServiceChange, ServiceView
    from freetoken.supervisor.systemd import Systemd


@click.group(
    "service", epilog=examples("ft service install demo --dry-run", "ft service status", "ft service remove demo")
)
def command() -> None:
    """Keep a deployment over logout and reboot: a systemd unit that brings it up and follows its keeper."""


@command.command("install", epilog=examples("ft service install demo", "ft service install demo --system --dry-run"))
@click.argument("name", required=False)
@click.option("--user", "scope", flag_value="user", default="user", help="A service of yours (the default).")
@click.option("--system", "scope", flag_value="system", help="A service of the machine, run as you; needs root.")
@click.option("--dry-run", is_flag=True, help="Show the unit and the commands; touch nothing.")
@click.option("--yes", is_flag=True, help="Replace a unit of that name that `ft` did not write.")
@json_option
def install(name: str | None, scope: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Install, enable and start the service of a deployment that was applied and proven.

    What runs already is followed, not restarted. Values that the engine needs from your environment are kept in a file
    that you alone can read, never in the unit.
    """
    from freetoken.deploy import service

    change = service.install(
        name, _make_systemd(scope), environ=os.environ, is_dry_run=dry_run, is_forced=yes
    )  # fmt: skip
    emit(change, as_json=as_json, render=lambda console: _render_install(change))
    return 0


@command.command("status", epilog=examples("ft service status", "ft service status demo --json"))
@click.argument("name", required=False)
@json_option
def status(name: str | None, as_json: bool) -> int:
    """Show the installed services: whether they run, start at boot and outlive your session.

    Exit code 6: one of them does not run, or would not run after a reboot.
    """
    from freetoken.deploy import service

    found = service.read_services((_make_systemd("user"), _make_systemd("system")), name)
    emit(list(found), as_json=as_json, render=lambda console: _render_status(found, console))
    return 0 if all(one.is_well for one in found) else 6


@command.command("remove", epilog=examples("ft service remove demo", "ft service remove demo --dry-run"))
@click.argument("name")
@click.option("--user", "scope", flag_value="user", help="The service of yours.")
@click.option("--system", "scope", flag_value="system", help="The service of the machine; needs root.")
@click.option("--dry-run", is_flag=True, help="Show what would be done; touch nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def remove(name: str, scope: str | None, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Stop the service and the deployment that it keeps, and delete its unit and environment file."""
    from freetoken.deploy import service

    systemd = _make_systemd(scope or _find_scope(name))
    planned = service.remove(name, systemd, is_dry_run=True)
    if not dry_run and not yes:
        click.confirm(f"stop `{name}` and delete {planned.unit_path}?", abort=True, err=True)
    change = planned if dry_run else service.remove(name, systemd)
    emit(change, as_json=as_json, render=lambda console: _render_remove(change))
    return 0


def _make_systemd(scope: str) -> Systemd:
    from freetoken.supervisor.systemd import Systemd

    return Systemd("system" if scope == "system" else "user")


def _find_scope(name: str) -> str:
    found = [scope for scope in ("user", "system") if _make_systemd(scope).unit_path(name).exists()]
    if len(found) == 2:
        raise UsageError(f"`{name}` has a user's and a system's service", hint="`--user` or `--system`")
    return found[0] if found else "user"


def _render_install(change: ServiceChange) -> None:
    if change.is_dry_run:
        click.echo(f"would write {change.unit_path}:")
        click.echo()
        click.echo(change.text)
        names = ", ".join(change.environment_names) or "nothing"
        click.echo(f"would write {change.environment_file} (0600) with the values of: {names}")
        for words in change.commands:
            click.echo(f"would run `{words}`")
    else:
        click.echo(f"{change.deployment}: {change.unit} is installed, enabled and started")
        click.echo(f"  unit  {change.unit_path}")
        click.echo(f"see it: `ft service status`   its log: `{_journal(change)}`   end it: `ft service remove`")
    for text in change.notes:
        note(f"note: {text}")


def _journal(change: ServiceChange) -> str:
    return f"journalctl{' --user' if change.scope == 'user' else ''} -u {change.unit}"


def _render_status(found: tuple[ServiceView, ...], console: Console) -> None:
    if not found:
        click.echo("no service is installed; `ft service install NAME` keeps a deployment over logout and reboot")
        return
    rows = [(one.deployment, one.scope, one.condition, one.enabled or "unknown", one.words) for one in found]
    print_table(console, ("deployment", "scope", "state", "at boot", ""), rows)
    for one in found:
        for problem in one.problems:
            click.echo(f"  {one.deployment}: {problem}")


def _render_remove(change: ServiceChange) -> None:
    would = "would " if change.is_dry_run else ""
    for words in change.commands:
        click.echo(f"{would}run `{words}`" if would else f"ran `{words}`")
    done = "would delete" if change.is_dry_run else "deleted"
    click.echo(f"{done} {change.unit_path}")
    click.echo(f"{done} {change.environment_file}")
    if not change.is_dry_run:
        click.echo(f"`ft apply` starts `{change.deployment}` again, without a service")
