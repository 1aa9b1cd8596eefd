"""A registry in a git repository: a shallow clone in a temporary folder, read or changed, pushed, thrown away.

Only https and local files are spoken. A repository from elsewhere is data: no hook, no filter, no submodule, no link
of it is run or followed, and git asks nobody for a password.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from freetoken.errors import FtError, UsageError
from freetoken.share.registry import FolderPlace, OutdatedError

_TIMEOUT_S = 300.0
_TRIES = 4
#: Seconds before a broken connection is tried again; twice as many each time.
PAUSE_S = 0.5
_SAFE = (
    "-c", "core.hooksPath=/dev/null", "-c", "core.symlinks=false", "-c", "core.fsmonitor=false",
    "-c", "protocol.allow=never", "-c", "protocol.https.allow=always", "-c", "protocol.file.allow=always",
    "-c", "core.attributesFile=/dev/null", "-c", "filter.lfs.smudge=", "-c", "filter.lfs.process=",
    "-c", "filter.lfs.required=false", "-c", "transfer.fsckObjects=true",
)  # fmt: skip
#: What git says where trying again changes nothing; connections break in too many words to list.
_FINAL = (
    "not found", "does not exist", "not appear to be a git", "rejected", "cannot lock ref", "verification failed",
    "not allowed", "dubious ownership", "Permission denied", "unable to read current working directory", "401", "403",
    "404", "Authentication failed", "could not read Username", "could not read Password", "No space left",
)  # fmt: skip
_REFUSED = ("Authentication failed", "could not read Username", "could not read Password", "403", "terminal prompts")


class GitPlace(FolderPlace):
    """A clone; writing commits and pushes."""

    def __init__(self, folder: Path, url: str, revision: str | None) -> None:
        super().__init__(folder, url)
        self.url, self.revision = url, revision

    def write(self, files: Mapping[str, bytes], message: str) -> str:
        """Commits `files` and pushes; the commit. Raises OutdatedError where somebody was faster."""
        super().write(files, message)
        run_git(self.folder, "add", "--", *files)
        if not run_git(self.folder, "status", "--porcelain").strip():
            return run_git(self.folder, "rev-parse", "HEAD").strip()
        identity = ("-c", "user.name=ft", "-c", "user.email=ft@localhost", "-c", "commit.gpgSign=false")
        run_git(self.folder, *identity, "commit", "--quiet", "-m", message)
        branch = self.revision or run_git(self.folder, "symbolic-ref", "--short", "HEAD").strip()
        try:
            run_git(self.folder, "push", "--quiet", "origin", f"HEAD:refs/heads/{branch}", tries=_TRIES)
        except FtError as error:
            if "[rejected]" in error.message or "cannot lock ref" in error.message:
                raise OutdatedError(error.message, hint="somebody else pushed meanwhile; try again") from error
            raise
        return run_git(self.folder, "rev-parse", "HEAD").strip()


@contextmanager
def open_git(url: str, revision: str | None) -> Iterator[GitPlace]:
    """A clone of `url` at `revision`, gone afterwards. Raises UsageError for an address that is not allowed."""
    if not url.startswith(("https://", "file:///")):
        raise UsageError(f"`git+{url}` is not allowed", hint="`git+https://HOST/REPO` or `git+file:///FOLDER`")
    if revision is not None and (revision.startswith("-") or ".." in revision):
        raise UsageError(f"`{revision}` is no branch or tag")
    with tempfile.TemporaryDirectory(prefix="ft-registry-") as folder:
        where = ["--branch", revision] if revision else []
        target = Path(folder) / "clone"
        options = ("--quiet", "--depth", "1", "--no-tags", "--no-recurse-submodules", "--template=")
        run_git(Path(folder), "clone", *options, *where, "--", url, str(target), tries=_TRIES)
        yield GitPlace(target, url, revision)


def run_git(folder: Path, *arguments: str, tries: int = 1) -> str:
    """What git prints; with `tries` above 1 it is tried again where that may help. FtError with what git said last."""
    kept = ("GIT_SSL_CAINFO", "GIT_SSL_CAPATH")
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key in kept}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "GIT_ASKPASS": "true", "LC_ALL": "C"}
    for attempt in range(tries):
        try:
            done = subprocess.run(
                ["git", *_SAFE, *arguments], cwd=folder, env=env, capture_output=True, text=True, errors="replace",
                timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise FtError("`git` is not installed here", hint="install it, or use `hf:` or a folder") from error
        except subprocess.TimeoutExpired as error:
            raise FtError(f"`git {arguments[0]}` did not end within {_TIMEOUT_S:.0f} s") from error
        if done.returncode == 0:
            return done.stdout
        if attempt + 1 < tries and not any(words in done.stderr for words in _FINAL):
            _clear(folder, arguments)
            time.sleep(PAUSE_S * 2**attempt)
            continue
        break
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    said = next(
        (line for line in lines if line.startswith(("fatal", "error", " !"))), lines[-1] if lines else "no reason"
    )
    verb = next((one for one in arguments if not one.startswith("-") and "=" not in one), "")
    is_refused = any(words in done.stderr for words in _REFUSED)
    hint = "git asks nobody here: set up a credential helper, so that `git clone URL` works by itself"
    raise FtError(f"`git {verb}` failed: {said.strip()[:200]}", hint=hint if is_refused else None)


def _clear(folder: Path, arguments: tuple[str, ...]) -> None:
    """What a broken clone left."""
    import shutil

    if arguments[0] == "clone":
        shutil.rmtree(folder / "clone", ignore_errors=True)
