"""Profiles: machines as YAML files, in the working folder, the state folder or the package.

A profile is the same `Hardware` that a probe gives, less what is one person's: uuids, hosts, paths, processes.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from freetoken import paths
from freetoken.errors import UsageError
from freetoken.hardware.model import Hardware, Software
from freetoken.hardware.yaml_file import read_yaml_file, write_yaml_file

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")


class ProfileInfo(BaseModel):
    """A profile that can be named."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    path: str
    description: str


def load_profile(name_or_path: str | Path) -> Hardware:
    """The machine that a profile's name or a path to a YAML file describes.

    Raises UsageError where there is none of that name, BadFileError where the file is wrong.
    """
    path = _find(str(name_or_path))
    hardware = read_yaml_file(path, Hardware)
    # A probe's own mark has no place in a file: what stands there was not read a moment ago.
    named = {"name": path.stem} if hardware.name == Hardware.model_fields["name"].default else {}
    return hardware.model_copy(update={"is_probed": False, **named})


def list_profiles() -> tuple[ProfileInfo, ...]:
    """Every profile by name, the first of several with one name (working folder, state folder, package)."""
    found: dict[str, Path] = {}
    for folder in paths.search_dirs("profiles"):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return tuple(
        ProfileInfo(name=name, path=str(path), description=read_yaml_file(path, Hardware).description)
        for name, path in sorted(found.items())
    )


def write_profile(hardware: Hardware, path: Path) -> Path:
    """Writes `hardware` to `path` without personal facts, by a temporary name that is renamed. Returns the path."""
    write_yaml_file(anonymous(hardware).model_copy(update={"name": path.stem}), path)
    return path


def profile_path(name: str) -> Path:
    """Where `ft probe --save NAME` writes: the working folder's `profiles/` where it has one, else the state folder's.

    Raises UsageError for a name that is not lower-case letters, digits, `.`, `_` and `-`.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"`{name}` cannot name a profile: lower-case letters, digits, `.`, `_` and `-`, at most 80")
    local = Path.cwd() / "profiles"
    folder = local if local.is_dir() else paths.state_dir() / "profiles"
    return folder / f"{name}.yaml"


def anonymous(hardware: Hardware) -> Hardware:
    """`hardware` without what tells whose machine it is, and without what was true for a moment only."""
    kernel = re.match(r"[\d.]+", hardware.os.kernel or "")
    tools = {name: Path(value).name for name in ("nvcc", "gxx", "ninja") if (value := getattr(hardware.software, name))}
    software: Software = hardware.software.model_copy(update=tools)
    return hardware.model_copy(
        update={
            "gpus": tuple(gpu.model_copy(update={"uuid": None, "holders": ()}) for gpu in hardware.gpus),
            "disk": hardware.disk.model_copy(update={"path": None}),
            "os": hardware.os.model_copy(update={"kernel": kernel[0].rstrip(".") if kernel else None}),
            "software": software,
            "notes": (),
            "is_probed": False,
        }
    )


def _find(name_or_path: str) -> Path:
    looks_like_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    if looks_like_path:
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise UsageError(
                f"there is no profile file {name_or_path}", hint="`ft probe --list` lists profiles by name"
            )
        return path
    folders = paths.search_dirs("profiles")
    for folder in folders:
        if (path := folder / f"{name_or_path}.yaml").is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    near = difflib.get_close_matches(name_or_path, known, n=1, cutoff=0.5)
    guess = f"; did you mean `{near[0]}`?" if near else ""
    raise UsageError(f"no profile `{name_or_path}`{guess}", hint="`ft probe --list` lists them")
