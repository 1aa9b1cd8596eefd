"""Units as text: exact, held against `systemd-analyze verify` where it is and against a strict reader everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from freetoken.supervisor.unit import UnitSpec, make_environment_file, make_unit, quote_argument

SPEC = UnitSpec(
    deployment="demo",
    scope="user",
    python="/opt/ft/bin/python",
    state_dir="/home/ada/.local/state/freetoken-deploy",
    runtime_dir="/run/user/1000/freetoken-deploy",
    environment_file="/home/ada/.local/state/freetoken-deploy/services/demo.env",
    user="ada",
    uid=1000,
    stop_timeout_s=60.0,
)
EXPECTED = """\
# Written by `ft service install`; `ft service remove` takes it away.
[Unit]
Description=ft deployment demo
StartLimitIntervalSec=1800
StartLimitBurst=4

[Service]
Type=exec
ExecStart=/opt/ft/bin/python -m freetoken.supervisor.service --state /home/ada/.local/state/freetoken-deploy demo
WorkingDirectory=/home/ada/.local/state/freetoken-deploy
Environment=FT_RUNTIME_DIR=/run/user/1000/freetoken-deploy
EnvironmentFile=/home/ada/.local/state/freetoken-deploy/services/demo.env
Restart=on-failure
RestartSec=15
RestartPreventExitStatus=2
KillMode=mixed
TimeoutStopSec=60
OOMPolicy=continue
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""
#: Every setting that our units may hold, by section: one in the wrong section is ignored by systemd without a word.
KNOWN = {
    "Unit": {"Description", "StartLimitIntervalSec", "StartLimitBurst", "After", "Requires"},
    "Service": {
        "Type", "ExecStart", "WorkingDirectory", "Environment", "EnvironmentFile", "Restart", "RestartSec",
        "RestartPreventExitStatus", "KillMode", "TimeoutStopSec", "OOMPolicy", "NoNewPrivileges", "User",
    },
    "Install": {"WantedBy"},
}  # fmt: skip


def test_a_users_unit_is_exactly_this() -> None:
    assert make_unit(SPEC) == EXPECTED


def test_a_system_unit_runs_as_the_user_and_needs_the_users_runtime_folder() -> None:
    lines = make_unit(replace(SPEC, scope="system")).splitlines()
    added = [line for line in lines if line not in EXPECTED.splitlines()]
    assert added == [
        "After=network.target local-fs.target",
        "Requires=user-runtime-dir@1000.service",
        "After=user-runtime-dir@1000.service",
        "User=ada",
        "WantedBy=multi-user.target",
    ]


def test_a_register_elsewhere_needs_no_runtime_folder() -> None:
    assert "user-runtime-dir" not in make_unit(replace(SPEC, scope="system", runtime_dir="/var/lib/ft/run"))


@pytest.mark.parametrize("scope", ["user", "system"])
@pytest.mark.parametrize("folder", ["state", "my state", 'a"b', "50%", "cost$HOME", "back\\slash"])
def test_units_with_awkward_folders_are_read_back_as_they_were_meant(tmp_path: Path, scope: str, folder: str) -> None:
    state = tmp_path / folder
    state.mkdir()
    (state / "demo.env").touch()
    spec = replace(SPEC, scope=scope, python=sys.executable, state_dir=str(state), user="root", uid=0,
                   environment_file=str(state / "demo.env"), runtime_dir=str(state / "run"))  # fmt: skip
    sections = read_unit(make_unit(spec))
    argv = [sys.executable, "-m", "freetoken.supervisor.service", "--state", str(state), "demo"]
    assert split_words(sections["Service"]["ExecStart"]) == argv
    assert sections["Service"]["WorkingDirectory"].replace("%%", "%") == str(state)
    (environment,) = split_words(sections["Service"]["Environment"], is_command=False)
    assert environment == f"FT_RUNTIME_DIR={state}/run"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("scope", ["user", "system"])
@pytest.mark.parametrize("folder", ["state", "my 50% $state"])
def test_systemd_itself_finds_nothing_wrong_with_a_unit(tmp_path: Path, scope: str, folder: str) -> None:
    state = tmp_path / folder
    state.mkdir()
    spec = replace(SPEC, scope=scope, python=sys.executable, state_dir=str(state), user="root", uid=0,
                   environment_file=str(state / "demo.env"), runtime_dir=str(state / "run"))  # fmt: skip
    assert verify(tmp_path, make_unit(spec)) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("StartLimitBurst=4", "StartLimitBurst=often"),
        ("KillMode=mixed", "KillMode=gently"),
        (f"ExecStart={sys.executable}", "ExecStart=/nowhere/python"),
        ("[Service]\n", "[Service]\nStartLimitInterval5=1\n"),
    ],
)
def test_systemd_itself_would_find_a_wrong_unit(tmp_path: Path, right: str, wrong: str) -> None:
    spec = replace(SPEC, python=sys.executable, state_dir=str(tmp_path), environment_file=str(tmp_path / "e"))
    text = make_unit(spec)
    assert right in text
    code, said = verify(tmp_path, text.replace(right, wrong))
    assert code != 0 or said != ""


def test_an_environment_file_is_read_back_as_it_was_meant(tmp_path: Path) -> None:
    values = {"KEY": 's3"c\\r$e`t', "PATH": "/usr/bin:/a b", "EMPTY": ""}
    path = tmp_path / "e.env"
    path.write_text(make_environment_file(values))
    # A shell reads what is in double quotes by the same rules.
    script = f'. {path}; printf "%s\\n" "$KEY" "$PATH" "$EMPTY"'
    found = subprocess.run(["/bin/sh", "-c", script], text=True, capture_output=True, check=True).stdout
    assert found.split("\n")[:3] == [values["KEY"], values["PATH"], ""]


def test_words_are_quoted_only_where_that_is_needed() -> None:
    assert [quote_argument(one) for one in ("/opt/ft", "a b", "5%", "$x", 'q"')] == [
        "/opt/ft", '"a b"', "5%%", "$$x", '"q\\""',
    ]  # fmt: skip


def verify(folder: Path, text: str) -> tuple[int, str]:
    path = folder / "ft-demo.service"
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr.strip()


def read_unit(text: str) -> dict[str, dict[str, str]]:
    """Sections and settings; anything that systemd would only warn of is an error here."""
    sections: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if match := re.fullmatch(r"\[(\w+)\]", line):
            assert match[1] in KNOWN
            assert match[1] not in sections
            section = sections.setdefault(match[1], {})
            continue
        name, separator, value = line.partition("=")
        assert separator
        assert name in KNOWN[list(sections)[-1]], line
        assert value.strip() == value != ""
        assert name == "After" or name not in section, f"{name} is there twice"
        section[name] = value
    return sections


def split_words(value: str, *, is_command: bool = True) -> list[str]:
    """A setting's words by systemd's rules: blanks separate, double quotes hold together, C escapes, `%%`, `$$`."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|([^\s"]+)', value)
    found = []
    for quoted, plain in words:
        word = re.sub(r"\\(.)", r"\1", quoted or plain)
        word = word.replace("%%", "%")
        found.append(word.replace("$$", "$") if is_command else word)
    return found
