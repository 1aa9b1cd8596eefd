"""Where an engine's own environment lies on this machine: an interpreter and the version it holds.

An embedded engine runs under our own interpreter. Another one is named in the machine-local file
(`engines: {freetoken: {python: PATH, version: X, env: {...}}}`, or just the path) or lies under
`<state>/engines/<name>-<version>/`. Installing one is `ft engine install`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import __version__, paths
from freetoken.errors import BadFileError, FtError

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.recipe.model import EngineRef


@dataclass(frozen=True)
class EngineHome:
    """An interpreter that can run the engine, its version where it is known, and variables it needs."""

    interpreter: Path
    version: str | None
    env: dict[str, str] = field(default_factory=dict)


def find_engine(ref: EngineRef, adapter: EngineAdapter) -> EngineHome | None:
    """Where the engine of a recipe runs here; None where it is not installed. Starts nothing."""
    if adapter.is_embedded:
        return EngineHome(Path(sys.executable), __version__)
    return _read_local(ref.name) or _find_installed(ref)


def require_engine(ref: EngineRef, adapter: EngineAdapter) -> EngineHome:
    """The same, or an FtError that says how to get it."""
    home = find_engine(ref, adapter)
    if home is None:
        local = paths.local_file()
        raise FtError(
            f"engine `{ref.name}{ref.version}` is not installed under {paths.engines_dir()} and not named in {local}",
            hint=f"name its interpreter in {local}: `engines: {{{ref.name}: /path/to/python}}`",
        )
    if not home.interpreter.exists():
        raise FtError(f"the interpreter of engine `{ref.name}` is not there: {home.interpreter}")
    return home


def _read_local(name: str) -> EngineHome | None:
    entry = _read_local_engines().get(name)
    if entry is None:
        return None
    if isinstance(entry, str):
        return EngineHome(Path(entry).expanduser(), None)
    if isinstance(entry, dict) and isinstance(entry.get("python"), str):
        version = entry.get("version")
        env = {str(key): str(value) for key, value in (entry.get("env") or {}).items()}
        return EngineHome(Path(entry["python"]).expanduser(), str(version) if version else None, env)
    raise BadFileError(f"{paths.local_file()}: `engines.{name}` needs the path of an interpreter, or `python: PATH`")


def _read_local_engines() -> dict[str, Any]:
    path = paths.local_file()
    if not path.exists():
        return {}
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise BadFileError(f"{path} cannot be read: {error}") from error
    engines = value.get("engines") if isinstance(value, dict) else None
    return engines if isinstance(engines, dict) else {}


def _find_installed(ref: EngineRef) -> EngineHome | None:
    found = []
    for folder in paths.engines_dir().glob(f"{ref.name}-*"):
        version = folder.name.removeprefix(f"{ref.name}-")
        if (folder / "bin" / "python").exists() and _is_wanted(ref.version, version):
            found.append((version, folder))
    if not found:
        return None
    version, folder = max(found, key=lambda one: _sort_key(one[0]))
    return EngineHome(folder / "bin" / "python", version)


def _is_wanted(specifier: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return not specifier or SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _sort_key(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", version))
