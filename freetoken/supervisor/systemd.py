"""This machine's systemd: whether it is there, where units lie, what it says of one, and the few verbs that are needed.

Files and programs are asked through a root folder and a runner that tests replace. Knows nothing of recipes or engines.
"""

from __future__ import annotations

import configparser
import os
import pwd
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from freetoken.errors import FtError
from freetoken.supervisor.unit import MARK, Scope, make_unit_name

RUN_TIMEOUT_S = 90.0
_SHOWN = "LoadState,ActiveState,SubState,UnitFileState,Result,NRestarts,MainPID"


@dataclass(frozen=True)
class Answer:
    """What a program said."""

    code: int
    output: str
    problem: str = ""


def run_program(argv: Sequence[str]) -> Answer:
    """Runs `argv` without a terminal; a program that is not there answers with 127."""
    try:
        done = subprocess.run(
            list(argv), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        return Answer(127, "", f"`{argv[0]}` is not installed")
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"`{' '.join(argv)}` gave no answer within {RUN_TIMEOUT_S:.0f} s")
    return Answer(done.returncode, done.stdout, done.stderr.strip())


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit, in its own words: `active`, `enabled`, `success`."""

    active: str = "unknown"
    sub: str = ""
    enabled: str = ""
    result: str = ""
    restarts: int = 0
    main_pid: int | None = None


@dataclass(frozen=True)
class Systemd:
    """systemd of one scope."""

    scope: Scope
    run: Callable[[Sequence[str]], Answer] = run_program
    root: Path = Path("/")
    home: Path = field(default_factory=Path.home)

    # -- what is here -----------------------------------------------------------------------------------------

    def find_problem(self) -> FtError | None:
        """Why no unit can be started here, with what to do; None where systemd runs."""
        if (self.root / "run/systemd/system").is_dir():
            return None
        first = _read(self.root / "proc/1/comm") or "unknown"
        message = f"systemd does not run here (the first process is `{first}`), so nothing starts a service at boot"
        if self.is_wsl:
            conf = self.root / "etc/wsl.conf"
            told = (
                "it stands in /etc/wsl.conf already"
                if _is_systemd_in(conf)
                else ("put `systemd=true` under `[boot]` in /etc/wsl.conf")
            )
            hint = f"{told}; `wsl --shutdown` in Windows, then open it again"
            return FtError(message, hint=hint)
        return FtError(
            message,
            hint="let whatever starts this machine or container run `ft apply RECIPE`; `--dry-run` shows the unit",
        )

    @property
    def is_wsl(self) -> bool:
        """Whether Windows is underneath."""
        return "microsoft" in _read(self.root / "proc/sys/kernel/osrelease").lower()

    def is_lingering(self, user: str) -> bool:
        """Whether the user's services run without a session of theirs."""
        return (self.root / "var/lib/systemd/linger" / user).exists()

    @property
    def unit_dir(self) -> Path:
        """Where units of this scope lie."""
        if self.scope == "system":
            return self.root / "etc/systemd/system"
        config = os.environ.get("XDG_CONFIG_HOME")
        return (Path(config) if config else self.home / ".config") / "systemd/user"

    def unit_path(self, deployment: str) -> Path:
        """The unit file of a deployment; it may not exist."""
        return self.unit_dir / make_unit_name(deployment)

    def list_deployments(self) -> tuple[str, ...]:
        """Deployments for which a unit of ours lies here."""
        try:
            found = sorted(self.unit_dir.glob("ft-*.service"))
        except OSError:
            return ()
        ours = (path for path in found if is_ours(path))
        return tuple(path.name.removeprefix("ft-").removesuffix(".service") for path in ours)

    # -- what systemd says ------------------------------------------------------------------------------------

    def show(self, deployment: str) -> UnitState:
        """The state of a unit; `unknown` where systemd does not answer."""
        answer = self.run(self.command("show", make_unit_name(deployment), f"--property={_SHOWN}"))
        if answer.code != 0:
            return UnitState()
        pairs = dict(line.split("=", 1) for line in answer.output.splitlines() if "=" in line)
        pid = int(pairs.get("MainPID") or 0)
        return UnitState(
            active=pairs.get("ActiveState") or "unknown",
            sub=pairs.get("SubState", ""),
            enabled=pairs.get("UnitFileState", ""),
            result=pairs.get("Result", ""),
            restarts=int(pairs.get("NRestarts") or 0),
            main_pid=pid or None,
        )

    # -- verbs ------------------------------------------------------------------------------------------------

    def command(self, *words: str) -> tuple[str, ...]:
        """The command line of `systemctl` for this scope."""
        return ("systemctl", *(["--user"] if self.scope == "user" else []), "--no-pager", *words)

    def do(self, *words: str) -> None:
        """Carries out a verb. Raises FtError with systemd's own words."""
        argv = self.command(*words)
        answer = self.run(argv)
        if answer.code != 0:
            said = " ".join((answer.problem or answer.output).split()) or f"code {answer.code}"
            raise FtError(f"`{' '.join(argv)}` failed: {said}", hint=self._hint(said))

    def _hint(self, said: str) -> str | None:
        if "bus" in said.lower():
            return "a user's systemd answers in a login session only: log in as that user (not by `su` or `sudo`)"
        if "denied" in said.lower() or "authentication" in said.lower():
            return "system units need root: `sudo`, or `--user`"
        return None


def is_ours(path: Path) -> bool:
    """Whether `path` is a unit that `ft service install` wrote."""
    return _read(path).startswith(MARK)


def find_user(uid: int | None = None) -> str:
    """The name of a user, else the number."""
    number = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _is_systemd_in(path: Path) -> bool:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    try:
        parser.read_string(_read(path))
        return parser.getboolean("boot", "systemd", fallback=False)
    except (configparser.Error, ValueError):
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
