"""The machine-local file `<state>/local.yaml`: facts and wishes of this machine that no recipe and no bundle holds.

Sections: `engines` (interpreters), `model_dirs` (folders), `defaults` (values that recipes inherit), `hub` (mirror and
place of the token), `watchdog` (what the keeper does about what it sees). Each is read by the room that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from freetoken import paths
from freetoken.errors import BadFileError, did_you_mean

#: Section -> what is in it, for the sentence about a wrong one.
SECTIONS = {
    "engines": "`engines: {freetoken: {python: PATH}}`",
    "model_dirs": "`model_dirs: [/data/models]`",
    "defaults": "`defaults: {headroom: desktop}`",
    "hub": "`hub: {endpoint: URL, token_file: PATH}`",
    "watchdog": "`watchdog: {idle: warn}`",
}


def read_section(name: str) -> Any:
    """What the file holds under `name`; None where there is no file or no such section. Raises BadFileError."""
    path = paths.local_file()
    try:
        seen = path.stat()
    except OSError:
        return None
    return _read(path, seen.st_mtime_ns, seen.st_size).get(name)


def read_mapping(name: str, known: tuple[str, ...]) -> dict[str, Any]:
    """The same for a section of keys, all of which have to be `known`; {} where it is missing. Raises BadFileError."""
    section = read_section(name)
    if section is None:
        return {}
    where = f"{paths.local_file()}: `{name}`"
    if not isinstance(section, dict):
        raise BadFileError(f"{where} is `{section}`, expected e.g. {SECTIONS[name]}")
    for key in section:
        if key not in known:
            raise BadFileError(f"{where} has the unknown key `{key}`{_suggest(str(key), known)}")
    return section


@lru_cache(maxsize=4)
def _read(path: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    """The sections of the file as it stood then: rooms ask often, a hub's address once for every range it reads."""
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadFileError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadFileError(f"{path} holds {type(value).__name__}, expected sections such as {SECTIONS['engines']}")
    for key in value:
        if key not in SECTIONS:
            raise BadFileError(f"{path}: unknown section `{key}`{_suggest(str(key), SECTIONS)}")
    return value


def _suggest(word: str, known: Iterable[str]) -> str:
    return did_you_mean(word, known) or f", expected {', '.join(f'`{one}`' for one in known)}"
