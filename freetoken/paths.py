"""Where files lie. Every answer is computed on access, so that an environment variable set late still counts.

Order for the state folder: an explicit `--state`, `FT_STATE`, `./state` where the working folder has one,
else the platform's user state folder. Running deployments and GPU locks are registered machine-wide in the
user's runtime folder, whichever state folder they belong to.
"""

from __future__ import annotations

import os
from pathlib import Path

# Not `importlib.resources`: it costs a third of `ft --help`, and the package is never run out of a zip file.
_PACKAGE = Path(__file__).resolve().parent
_override: Path | None = None


def set_state_dir(path: str | os.PathLike[str] | None) -> None:
    """Make `path` the state folder of this process (`--state`); `None` takes the choice back."""
    global _override
    _override = Path(path).expanduser().absolute() if path is not None else None


def state_dir() -> Path:
    """The state folder, absolute; it may not exist yet."""
    if _override is not None:
        return _override
    if named := os.environ.get("FT_STATE"):
        return Path(named).expanduser().absolute()
    local = Path.cwd() / "state"
    if local.is_dir():
        return local
    import platformdirs

    return Path(platformdirs.user_state_dir("freetoken-deploy", appauthor=False))


def runtime_dir() -> Path:
    """The machine-wide register of this user: running deployments and GPU locks (`FT_RUNTIME_DIR` overrides)."""
    if named := os.environ.get("FT_RUNTIME_DIR"):
        return Path(named).expanduser().absolute()
    import warnings

    import platformdirs

    with warnings.catch_warnings():
        # In a container there is no folder of a session; the one in /tmp that is taken then does as well.
        warnings.simplefilter("ignore")
        return Path(platformdirs.user_runtime_dir("freetoken-deploy", appauthor=False))


def runs_dir() -> Path:
    """`<state>/runs`: one folder a run."""
    return state_dir() / "runs"


def database_path() -> Path:
    """`<state>/ft.db`."""
    return state_dir() / "ft.db"


def studies_path() -> Path:
    """`<state>/studies.db`, Optuna's storage."""
    return state_dir() / "studies.db"


def engines_dir() -> Path:
    """`<state>/engines`: one environment an engine and version."""
    return state_dir() / "engines"


def models_dir() -> Path:
    """`<state>/models`: what `ft model fetch` puts where no hub cache is wanted."""
    return state_dir() / "models"


def local_file() -> Path:
    """`<state>/local.yaml`: facts of this machine that never leave it."""
    return state_dir() / "local.yaml"


def package_data(*parts: str) -> Path:
    """A file or folder of `freetoken/data/`, whether installed or in a checkout."""
    return _PACKAGE / "data" / Path(*parts)


def shipped_dir(kind: str) -> Path:
    """`recipes` or `profiles` as shipped: inside the installed package, else beside it in a checkout."""
    packed = _PACKAGE / "data" / kind
    return packed if packed.is_dir() else _PACKAGE.parent / kind


def search_dirs(kind: str) -> tuple[Path, ...]:
    """Where a name of `kind` (`recipes`, `profiles`) is looked up: working folder, state folder, package."""
    return (Path.cwd() / kind, state_dir() / kind, shipped_dir(kind))
