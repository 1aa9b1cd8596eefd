"""The text of a systemd unit that brings a deployment up at boot and keeps it, and of its environment file.

Pure. The unit runs `freetoken.supervisor.service`, which applies what was applied last and follows its keeper; it holds
no secret: those stand in an environment file that the user alone may read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Scope = Literal["user", "system"]
#: First line of every unit of ours: a file without it belongs to somebody else.
MARK = "# Written by `ft service install`; `ft service remove` takes it away."
#: Tries before systemd gives up, and the time within which they count.
START_LIMIT_BURST, START_LIMIT_S, RESTART_S = 4, 1800, 15


@dataclass(frozen=True)
class UnitSpec:
    """What a unit is made of. Paths are absolute; times in seconds."""

    deployment: str
    scope: Scope
    python: str
    state_dir: str
    runtime_dir: str
    environment_file: str
    #: Whose deployment it is; a system unit runs as this user.
    user: str
    uid: int
    stop_timeout_s: float

    @property
    def name(self) -> str:
        """The unit's name."""
        return make_unit_name(self.deployment)


def make_unit_name(deployment: str) -> str:
    """`ft-demo.service`. Names of deployments hold nothing that a unit's name may not."""
    return f"ft-{deployment}.service"


def make_unit(spec: UnitSpec) -> str:
    """The unit as text."""
    return "\n".join([MARK, *_unit_section(spec), "", *_service_section(spec), "", *_install_section(spec), ""])


def _unit_section(spec: UnitSpec) -> list[str]:
    lines = [
        "[Unit]",
        f"Description=ft deployment {spec.deployment}",
        # How often it is tried: what fails again and again must not be started for ever.
        f"StartLimitIntervalSec={START_LIMIT_S}",
        f"StartLimitBurst={START_LIMIT_BURST}",
    ]
    if spec.scope == "user":
        return lines
    lines.append("After=network.target local-fs.target")
    runtime = f"user-runtime-dir@{spec.uid}.service"
    if Path(spec.runtime_dir).is_relative_to(f"/run/user/{spec.uid}"):
        # The register of running deployments lies there, and is to outlive the user's last session.
        lines += [f"Requires={runtime}", f"After={runtime}"]
    return lines


def _service_section(spec: UnitSpec) -> list[str]:
    argv = (spec.python, "-m", "freetoken.supervisor.service", "--state", spec.state_dir, spec.deployment)
    lines = [
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(quote_argument(one) for one in argv)}",
        # Not the folder of a checkout: what lies there must not shadow the package.
        f"WorkingDirectory={escape_specifiers(spec.state_dir)}",
        f"Environment={quote_argument(f'FT_RUNTIME_DIR={spec.runtime_dir}', is_command=False)}",
        f"EnvironmentFile={escape_specifiers(spec.environment_file)}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        # A bad file or wrong usage is the same at the next try.
        "RestartPreventExitStatus=2",
        # SIGTERM reaches the service alone; it lets the keeper stop its engine in order. Then the rest is killed.
        "KillMode=mixed",
        f"TimeoutStopSec={spec.stop_timeout_s:.0f}",
        # The kernel may kill an engine for memory: the keeper sees that, and restarts it within its own cap.
        "OOMPolicy=continue",
        "NoNewPrivileges=yes",
    ]
    return [*lines, f"User={spec.user}"] if spec.scope == "system" else lines


def _install_section(spec: UnitSpec) -> list[str]:
    return ["[Install]", f"WantedBy={'default.target' if spec.scope == 'user' else 'multi-user.target'}"]


def escape_specifiers(text: str) -> str:
    """`%` is the start of a specifier in a unit."""
    return text.replace("%", "%%")


def quote_argument(text: str, *, is_command: bool = True) -> str:
    """One word of a unit's setting: quoted where it holds blanks or quotes; `$` is doubled in command lines."""
    text = escape_specifiers(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    if is_command:
        text = text.replace("$", "$$")
    return text if re.fullmatch(r"[\w@%+=:,./~$-]+", text) else f'"{text}"'


def make_environment_file(variables: Mapping[str, str]) -> str:
    """Variables as an `EnvironmentFile=`: one a line, in double quotes, what the shell would read escaped."""
    lines = ["# Values that a service of `ft` needs; readable by its user alone."]
    for name, value in sorted(variables.items()):
        escaped = re.sub(r'(["\\$`])', r"\\\1", value)
        lines.append(f'{name}="{escaped}"')
    return "\n".join(lines) + "\n"
