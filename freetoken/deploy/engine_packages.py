"""Running `pip` or `uv`: their lines as progress and into a log, and what their failures mean."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from freetoken.errors import BadFileError, FtError
from freetoken.supervisor.files import format_now
from freetoken.units import format_bytes

_MIRRORS = re.compile(r"^\s*(index-url|extra-index-url|find-links|no-index)\s*=", re.M)
_PIP_FILES = ("/etc/pip.conf", "/etc/xdg/pip/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")
_DOING = re.compile(r"^\s*(Collecting|Downloading|Using cached|Installing|Successfully installed|Building|Prepared)")
_FULL = re.compile(r"No space left on device|Errno 28|File too large|Errno 27")
_HASH = re.compile(r"DO NOT MATCH THE HASHES|hash mismatch", re.I)
_NONE = re.compile(r"No matching distribution|no wheels with a matching|Could not find a version")
_BROKEN = re.compile(
    r"BadZipFile|not a zip|invalid wheel|has an invalid|IncompleteRead|Connection|timed out|is invalid", re.I
)
_AGAIN = "run it again: what was downloaded is kept"


def run_installer(
    command: list[str], log_path: Path, failure: str, *, say: Callable[[str], None], lock_fd: int | None = None
) -> None:
    """Runs one installer command to its end. Raises FtError with what it said last.

    It runs in a session of its own, so that Ctrl-C reaches `ft` alone, which then ends all of it; it holds `lock_fd`,
    so that nobody else begins while it still runs behind an `ft` that was killed.
    """
    with log_path.open("a", encoding="utf-8") as log:
        log.write(f"{format_now()} {' '.join(command)}\n")
        log.flush()
        try:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                stdin=subprocess.DEVNULL, env=clean_environment(), start_new_session=True, cwd=log_path.parent,
                pass_fds=() if lock_fd is None else (lock_fd,),
            )  # fmt: skip
        except OSError as error:
            raise FtError(f"{failure}: `{command[0]}` cannot be started: {error.strerror}") from error
        said = _follow(child, log, say)
    if child.returncode:
        raise make_install_error(failure, said, child.returncode, log_path)


def _follow(child: subprocess.Popen[str], log: TextIO, say: Callable[[str], None]) -> list[str]:
    said: list[str] = []
    assert child.stdout is not None
    try:
        for line in child.stdout:
            said.append(line.rstrip())
            with contextlib.suppress(OSError):  # a full disk is the installer's to report
                log.write(line)
                log.flush()
            if _DOING.match(line):
                say(line.strip()[:100])
        child.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return said


def make_install_error(failure: str, said: list[str], code: int, log_path: Path) -> FtError:
    """What the end of an installer's output means, in a sentence with what to do."""
    text = "\n".join(said)
    last = next((one for one in reversed(said) if "error" in one.lower()), said[-1] if said else "").strip()
    if _FULL.search(text):
        free = format_bytes(shutil.disk_usage(log_path.parent).free)
        return FtError(
            f"{failure}: the disk is full ({free} free under {log_path.parent})", hint=f"free some space and {_AGAIN}"
        )
    if _HASH.search(text):
        words = f"{failure}: a download has another hash than its index says"
        return BadFileError(words, hint=f"see {log_path}")
    if _NONE.search(text):
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        hint = f"wheels exist for Python 3.11 and 3.12 on Linux x86_64 (this is {python}): `--python PATH`"
        return FtError(f"{failure}: {last}", hint=hint)
    if _BROKEN.search(text):
        return FtError(f"{failure}: a download broke off: {last}", hint=_AGAIN)
    code_words = f"code {code}" if code > 0 else f"signal {-code}"
    return FtError(f"{failure}: the installer ended with {code_words}: {last}", hint=f"see {log_path}")


def has_pip_mirror() -> bool:
    """Whether pip, and only pip, was told where packages come from."""
    if any(os.environ.get(name) for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS")):
        return False
    if any(os.environ.get(f"PIP_{name}") for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX")):
        return True
    files = [os.environ.get("PIP_CONFIG_FILE", ""), *_PIP_FILES]
    return any(_MIRRORS.search(_read_text(Path(one).expanduser())) for one in files if one)


def clean_environment() -> dict[str, str]:
    """This process's environment without what would lead an installer, or an engine, out of its environment."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    return {**{key: value for key, value in os.environ.items() if key not in dropped}, "PYTHONNOUSERSITE": "1"}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
