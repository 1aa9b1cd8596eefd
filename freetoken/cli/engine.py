"""`ft engine`: which engines can be driven, whether they are here, and their environments: install, verify, remove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.output import emit, examples, json_option, note, print_table
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.deploy.engine_folders import Verification
    from freetoken.deploy.engine_install import InstallResult
    from freetoken.deploy.tools import Step


@click.group("engine", epilog=examples("ft engine list", "ft engine install freetoken@0.2.1"))
def command() -> None:
    """List the engines that can be driven; install, verify and remove their environments."""


@command.command("list", epilog=examples("ft engine list", "ft engine list --json"))
@json_option
def list_command(as_json: bool) -> None:
    """List every engine: what it is, the versions known, and whether it is here."""
    entries = list_engines()
    keys = ("name", "state", "version", "known_versions", "title")
    rows = [tuple(str(one[key] or "") for key in keys) for one in entries]
    headings = ("engine", "here", "version", "versions known", "what it is")
    emit(entries, as_json=as_json, render=lambda console: print_table(console, headings, rows))


def list_engines() -> list[dict[str, Any]]:
    """Each engine that a recipe may name, with its state on this machine."""
    from freetoken.adapters import ADAPTERS, PLANNED, get_adapter
    from freetoken.deploy.engine_folders import list_half_made
    from freetoken.deploy.engines import find_engine, list_installed
    from freetoken.recipe.model import EngineRef

    entries = []
    for name in ADAPTERS:
        adapter = get_adapter(name)
        home, half = find_engine(EngineRef(name=name), adapter), list_half_made(name)
        state = "half made" if half and home is None else "not installed" if home is None else "installed"
        entries.append({
            "name": name,
            "state": "embedded" if adapter.is_embedded else state,
            "version": home.version if home is not None else None,
            "interpreter": str(home.interpreter) if home is not None else None,
            "installed": [one.version for one in list_installed(name)],
            "half_made": list(half),
            "known_versions": adapter.known_versions,
            "title": adapter.title,
            "capabilities": sorted(adapter.capabilities),
        })  # fmt: skip
    nothing: dict[str, Any] = {
        "version": None, "interpreter": None, "installed": [], "half_made": [], "known_versions": "",
        "capabilities": [],
    }  # fmt: skip
    return entries + [{"name": name, "state": "not driven yet", **nothing, "title": ""} for name in PLANNED]


@command.command(
    "install",
    epilog=examples("ft engine install freetoken", "ft engine install freetoken@0.2.1 --accel --find-links ./wheels"),
)
@click.argument("engine", metavar="ENGINE[@VERSION]")
@click.option("--accel", is_flag=True, help="With the extra `accel`: FlashInfer and further kernels.")
@click.option("--index-url", metavar="URL", help="Package index; else pip's own settings.")
@click.option("--find-links", metavar="PLACE", multiple=True, help="Folder or page of wheels; repeatable.")
@click.option("--no-index", is_flag=True, help="Ask no index: `--find-links` alone.")
@click.option("--python", metavar="PATH", help="Interpreter of the environment; else the one that runs `ft`.")
@click.option("--sha256", metavar="HEX", help="Hash that the engine's archive must have.")
@click.option("--dry-run", is_flag=True, help="Say where it would go and what it would take; touch nothing.")
@json_option
def install_command(
    engine: str, accel: bool, index_url: str | None, find_links: tuple[str, ...], no_index: bool, python: str | None,
    sha256: str | None, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Install an engine into an environment of its own under the state folder.

    The newest known version unless one is named. A second run finds it installed; one that was interrupted is gone on
    with. Mirrors are what pip's environment and configuration say.
    """
    from freetoken.adapters import get_adapter
    from freetoken.deploy.engine_install import Source, make_installer

    name, version = _split(engine)
    source = Source(index_url, find_links, no_index, python, sha256)
    installer = make_installer(
        get_adapter(name), version, is_accelerated=accel, source=source, progress=_say
    )  # fmt: skip
    if dry_run:
        plan = installer.preview()
        emit(plan, as_json=as_json, render=lambda _: click.echo(plan["words"]))
        return 0
    result = installer.install()
    emit(result, as_json=as_json, render=lambda _: _show_installed(result))
    return 0


@command.command("verify", epilog=examples("ft engine verify", "ft engine verify freetoken@0.2.1"))
@click.argument("engine", metavar="[ENGINE[@VERSION]]", required=False)
@json_option
def verify_command(engine: str | None, as_json: bool) -> int:
    """Hash every file of an environment, or of all, against what was installed.

    Exit code 1: something is wrong.
    """
    from freetoken.deploy.engine_folders import verify_engine

    found = [verify_engine(*one) for one in _find(engine)]
    if not found:
        note("no environment is installed; `ft engine install freetoken` makes one")
    emit(found, as_json=as_json, render=lambda _: _show_verified(found))
    return 1 if any(one.problems for one in found) else 0


@command.command("remove", epilog=examples("ft engine remove freetoken@0.1.3", "ft engine remove freetoken --yes"))
@click.argument("engine", metavar="ENGINE[@VERSION]")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed; touch nothing.")
@json_option
def remove_command(engine: str, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Remove an environment; refused while something runs out of it."""
    from freetoken.deploy.engine_folders import list_half_made, remove_engine
    from freetoken.errors import UsageError

    name, version = _split(engine)
    if version is None:
        known = sorted({found for _, found, _ in _find(name, must_exist=False)} | set(list_half_made(name)))
        if len(known) != 1:
            raise UsageError(
                f"`{name}` is installed in {len(known)} versions: {', '.join(known)}"
                if known
                else f"no environment of `{name}` is installed here",
                hint=f"`ft engine remove {name}@{known[0]}`" if known else "`ft engine list`",
            )
        version = known[0]
    if not dry_run:
        if not yes:
            click.confirm(f"remove the environment of {name} {version}?", default=True, abort=True, err=True)
        remove_engine(name, version)
    words = f"{name} {version} {'would be' if dry_run else 'was'} removed"
    emit({"engine": name, "version": version, "is_removed": not dry_run}, as_json=as_json,
         render=lambda _: click.echo(words))  # fmt: skip
    return 0


def _split(engine: str) -> tuple[str, str | None]:
    """`freetoken@0.2.1` -> its two parts. Raises UsageError for what cannot be a version."""
    from freetoken.errors import UsageError

    name, at, version = engine.partition("@")
    if (at and not version) or "/" in version or version.startswith("."):
        raise UsageError(f"`{engine}` is not an engine or `ENGINE@VERSION`", hint="`ft engine install freetoken@0.2.1`")
    return name, version or None


def _find(engine: str | None, *, must_exist: bool = True) -> list[tuple[str, str, Any]]:
    """(name, version, folder) of every environment that is meant."""
    from freetoken.adapters import ADAPTERS, get_adapter
    from freetoken.deploy.engines import list_installed
    from freetoken.errors import UsageError

    name, version = _split(engine) if engine else (None, None)
    if name is not None:
        get_adapter(name)
    found = [
        (one, home.version or "", home.folder)
        for one in (ADAPTERS if name is None else [name])
        for home in list_installed(one)
        if version in (None, home.version)
    ]
    if engine and must_exist and not found:
        raise UsageError(f"no environment of `{engine}` is installed", hint="`ft engine list`")
    return found


def _say(step: Step) -> None:
    note(f"{step.phase}: {step.message}")


def _show_installed(result: InstallResult) -> None:
    manifest = result.manifest
    size = format_bytes(manifest.size_bytes)
    how = "installed" if result.is_new else "is installed already"
    packages = f"{len(manifest.packages)} packages, {size}, Python {manifest.python_version}"
    click.echo(f"{result.engine} {result.version} {how}: {packages}")
    click.echo(f"  {result.folder}")


def _show_verified(found: list[Verification]) -> None:
    for one in found:
        click.echo(f"{one.engine} {one.version}: {'as installed' if not one.problems else 'damaged'}")
        for problem in one.problems:
            click.echo(f"  {problem}")
        if one.problems:
            note(f"`ft engine install {one.engine}@{one.version}` installs what is missing")
