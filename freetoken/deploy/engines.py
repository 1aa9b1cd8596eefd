"""Where an engine's own environment lies on this machine: an interpreter and the version it holds.

An embedded engine runs under our own interpreter. Another one is named in the machine-local file
(`engines: {freetoken: {python: PATH, pythonpath: PATH, version: X, env: {...}}}`, or just the interpreter's path) or
lies under `<state>/engines/<name>-<version>/`, where `ft engine install` (`engine_install.py`) puts it. These are
facts of one machine, so a recipe can name none of them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import __version__, paths
from freetoken.errors import BadFileError, FtError
from freetoken.local import read_section

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.recipe.model import EngineRef

#: What an interpreter is asked only where its folders do not tell.
_ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
_ASK_PACKAGE = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]) is not None)"
_ASK_LIMIT_S = 20.0


@dataclass(frozen=True)
class EngineHome:
    """An interpreter that can run the engine, its version where it is known, and variables it needs."""

    interpreter: Path
    version: str | None
    env: dict[str, str] = field(default_factory=dict)
    #: The environment that `ft` made; None for an interpreter of the user's.
    folder: Path | None = None


def find_engine(ref: EngineRef, adapter: EngineAdapter) -> EngineHome | None:
    """Where the engine of a recipe runs here; None where it is not installed."""
    if adapter.is_embedded:
        return EngineHome(Path(sys.executable), __version__)
    return _read_local(ref.name, adapter) or _find_installed(ref)


def require_engine(ref: EngineRef, adapter: EngineAdapter) -> EngineHome:
    """The same, or an FtError that says how to get it."""
    home = find_engine(ref, adapter)
    if home is None:
        local = paths.local_file()
        hint = f"name its interpreter in {local}: `engines: {{{ref.name}: /path/to/python}}`"
        if adapter.distribution is not None:
            hint = f"`ft engine install {ref.name}`, or {hint}"
        raise FtError(
            f"engine `{ref.name}{ref.version}` is not installed under {paths.engines_dir()} and not named in {local}",
            hint=hint,
        )
    if not home.interpreter.exists():
        raise FtError(f"the interpreter of engine `{ref.name}` is not there: {home.interpreter}")
    return home


def choose_version(ref: EngineRef, adapter: EngineAdapter) -> str | None:
    """The newest version that we know and the recipe allows; None where it allows none of them."""
    return next((one for one in adapter.installable if _is_wanted(ref.version, one)), None)


def _read_local(name: str, adapter: EngineAdapter) -> EngineHome | None:
    entry = _read_local_engines().get(name)
    if entry is None:
        return None
    if isinstance(entry, str):
        entry = {"python": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("python"), str):
        where = f"{paths.local_file()}: `engines.{name}`"
        raise BadFileError(f"{where} needs the path of an interpreter, or `python: PATH`")
    python = Path(entry["python"]).expanduser()
    env = {str(key): str(value) for key, value in (entry.get("env") or {}).items()}
    if folders := _read_pythonpath(name, entry.get("pythonpath")):
        env["PYTHONPATH"] = os.pathsep.join(folders)
    version = entry.get("version")
    return EngineHome(python, str(version) if version else detect_version(python, folders, adapter.distribution), env)


def _read_pythonpath(name: str, value: Any) -> tuple[str, ...]:
    """Folders of `pythonpath`, a path or a list of them. Raises BadFileError: a relative one would mean each run's."""
    listed = value if isinstance(value, list) else str(value).split(os.pathsep) if value else []
    folders = tuple(str(Path(str(one)).expanduser()) for one in listed if str(one))
    for one in folders:
        if not os.path.isabs(one):
            where = f"{paths.local_file()}: `engines.{name}.pythonpath`"
            raise BadFileError(f"{where} holds `{one}`, which is not an absolute path")
    return folders


def _read_local_engines() -> dict[str, Any]:
    engines = read_section("engines")
    return engines if isinstance(engines, dict) else {}


def detect_version(python: Path, pythonpath: tuple[str, ...], distribution: str | None) -> str | None:
    """The version of `distribution` that `python` would import; None where it has none.

    Read off the names of its folders; only an interpreter that keeps packages elsewhere is started and asked, once.
    """
    if distribution is None or not python.exists():
        return None
    for folder in _package_folders(python, pythonpath):
        for found in sorted(folder.glob(f"{distribution.replace('-', '_')}-*.dist-info")):
            return found.name.removesuffix(".dist-info").partition("-")[2]
    return _ask(_ASK, str(python), pythonpath, distribution)


def list_lacking(ref: EngineRef, adapter: EngineAdapter) -> frozenset[str]:
    """Packages (import names) that knobs of the engine need and its environment here surely does not have.

    An engine that is yet to be installed gets none of its extras.
    """
    home = find_engine(ref, adapter)
    wanted = {package for knob in adapter.knobs for package in knob.packages.values()}
    return frozenset(one for one in wanted if home is None or has_package(home, one) is False)


def has_package(home: EngineHome, package: str) -> bool | None:
    """Whether the environment of `home` holds `package` (import name); None where its interpreter does not answer."""
    folders = tuple(one for one in home.env.get("PYTHONPATH", "").split(os.pathsep) if one)
    for folder in _package_folders(home.interpreter, folders):
        if (folder / package).is_dir():
            return True
    answer = _ask(_ASK_PACKAGE, str(home.interpreter), folders, package)
    return None if answer is None else answer == "True"


def _package_folders(python: Path, pythonpath: tuple[str, ...]) -> Iterator[Path]:
    yield from map(Path, pythonpath)
    # Not resolved: the link itself lies in the environment.
    for name in ("lib", "lib64"):
        yield from (python.parent.parent / name).glob("python3*/site-packages")


@lru_cache(maxsize=16)
def _ask(code: str, python: str, pythonpath: tuple[str, ...], name: str) -> str | None:
    """What `python` prints for `code` with `name` as its argument; None where it fails or prints nothing."""
    import subprocess  # Slow to import, and `ft plan` comes here only where an engine is named without its version.

    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    if pythonpath:
        env["PYTHONPATH"] = os.pathsep.join(pythonpath)
    try:
        done = subprocess.run(
            [python, "-c", code, name], env=env, cwd="/", text=True, capture_output=True, timeout=_ASK_LIMIT_S,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def list_installed(name: str) -> tuple[EngineHome, ...]:
    """The environments of `name` under the state folder, the newest first; half-made ones have other names."""
    found = []
    for folder in paths.engines_dir().glob(f"{name}-*"):
        python = folder / "bin" / "python"
        if python.exists():
            found.append(EngineHome(python, folder.name.removeprefix(f"{name}-"), folder=folder))
    return tuple(sorted(found, key=lambda home: _sort_key(home.version or ""), reverse=True))


def _find_installed(ref: EngineRef) -> EngineHome | None:
    return next((home for home in list_installed(ref.name) if _is_wanted(ref.version, home.version or "")), None)


def _is_wanted(specifier: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return not specifier or SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _sort_key(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", version))
