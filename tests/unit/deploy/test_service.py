"""`ft service` with a systemd of files and recorded answers: install, look, remove, and machines without it."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from freetoken import paths
from freetoken.cli import service as cli
from freetoken.deploy import service
from freetoken.deploy.runs import write_declaration
from freetoken.doctor.facts import Facts, ServiceState
from freetoken.doctor.service_checks import check_services
from freetoken.errors import FtError, UsageError
from freetoken.supervisor.launch import Launch, write_launch
from freetoken.supervisor.systemd import Answer, Systemd, find_user

RUN = "20310504-093000-000-abcdef"
RUNNING = "ActiveState=active\nSubState=running\nUnitFileState=enabled\nResult=success\nNRestarts=0\nMainPID=42\n"
FAILED = "ActiveState=failed\nSubState=failed\nUnitFileState=enabled\nResult=exit-code\nNRestarts=4\nMainPID=0\n"


class Machine:
    """A root folder with systemd in it, a home, and what `systemctl` answers."""

    def __init__(self, folder: Path) -> None:
        self.root, self.home = folder / "root", folder / "home"
        (self.root / "run/systemd/system").mkdir(parents=True)
        self.calls: list[tuple[str, ...]] = []
        self.shown, self.refusal = RUNNING, ""

    def run(self, argv: Sequence[str]) -> Answer:
        self.calls.append(tuple(argv))
        if "show" in argv:
            return Answer(0, self.shown)
        return Answer(1, "", self.refusal) if self.refusal else Answer(0, "")

    def systemd(self, scope: str = "user") -> Systemd:
        return Systemd(scope, run=self.run, root=self.root, home=self.home)  # type: ignore[arg-type]

    def linger(self) -> None:
        path = self.root / "var/lib/systemd/linger" / find_user()
        path.parent.mkdir(parents=True)
        path.touch()


@pytest.fixture(name="machine")
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    run_dir = paths.runs_dir() / RUN
    run_dir.mkdir(parents=True)
    launch = Launch(
        RUN, "lab", "any", ("engine",), 1919, secret_env=("LAB_KEY",), runtime_dir=str(tmp_path / "runtime")
    )
    write_launch(run_dir, launch)
    write_declaration("lab", RUN, is_wanted=True, is_proven=True)
    return Machine(tmp_path)


def test_install_writes_a_unit_without_secrets_and_starts_it(machine: Machine) -> None:
    machine.linger()
    environ = {"LAB_KEY": "sesame", "PATH": "/usr/bin", "EDITOR": "ed"}
    change = service.install(None, machine.systemd(), environ=environ)
    unit, env = Path(change.unit_path), Path(change.environment_file)
    assert unit == machine.home / ".config/systemd/user/ft-lab.service"
    assert "sesame" not in unit.read_text()
    assert (
        f"ExecStart={sys.executable} -m freetoken.supervisor.service --state {paths.state_dir()} lab"
        in unit.read_text()
    )
    assert env.read_text().splitlines()[1:] == ['LAB_KEY="sesame"', 'PATH="/usr/bin"']
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    assert machine.calls == [
        ("systemctl", "--user", "--no-pager", "daemon-reload"),
        ("systemctl", "--user", "--no-pager", "enable", "--now", "ft-lab.service"),
    ]
    assert change.notes == ()
    assert "sesame" not in change.model_dump_json()


def test_a_dry_run_touches_nothing_and_says_what_would_be_done(machine: Machine) -> None:
    change = service.install("lab", machine.systemd("system"), environ={"LAB_KEY": "sesame"}, is_dry_run=True)
    assert change.environment_names == ("LAB_KEY",)
    assert change.commands == (
        "systemctl --no-pager daemon-reload", "systemctl --no-pager enable --now ft-lab.service",
    )  # fmt: skip
    assert machine.calls == []
    assert not machine.home.exists()
    assert not (paths.state_dir() / "services").exists()


def test_without_lingering_it_is_said_what_ends_with_the_session(machine: Machine) -> None:
    (note,) = service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"}).notes
    assert note.endswith(f"`loginctl enable-linger {find_user()}` lets it")
    assert service.install("lab", machine.systemd("system"), environ={"LAB_KEY": "x"}, is_dry_run=True).notes == ()


def test_wsl_is_told_that_windows_ends_the_machine(machine: Machine) -> None:
    pretend_wsl(machine)
    machine.linger()
    (note,) = service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"}, is_dry_run=True).notes
    assert "`vmIdleTimeout=-1` under `[wsl2]`" in note


def test_wsl_without_systemd_is_told_where_it_is_switched_on(machine: Machine) -> None:
    pretend_wsl(machine)
    (machine.root / "run/systemd/system").rmdir()
    with pytest.raises(FtError) as caught:
        service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"})
    expected = "put `systemd=true` under `[boot]` in /etc/wsl.conf; `wsl --shutdown` in Windows, then open it again"
    assert caught.value.hint == expected
    (machine.root / "etc").mkdir(exist_ok=True)
    (machine.root / "etc/wsl.conf").write_text("[boot]\nsystemd=true\n")
    problem = machine.systemd().find_problem()
    assert problem is not None
    assert problem.hint == "it stands in /etc/wsl.conf already; `wsl --shutdown` in Windows, then open it again"


def test_a_machine_without_systemd_is_told_so_in_a_sentence_and_nothing_is_written(machine: Machine) -> None:
    (machine.root / "run/systemd/system").rmdir()
    (machine.root / "proc/1").mkdir(parents=True)
    (machine.root / "proc/1/comm").write_text("runit\n")
    with pytest.raises(FtError) as caught:
        service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"})
    expected = "systemd does not run here (the first process is `runit`), so nothing starts a service at boot"
    assert caught.value.message == expected
    assert machine.calls == []
    assert not machine.systemd().unit_path("lab").exists()


def test_a_secret_that_is_not_set_is_refused_before_anything_is_written(machine: Machine) -> None:
    with pytest.raises(UsageError) as caught:
        service.install("lab", machine.systemd(), environ={})
    assert (caught.value.message, caught.value.hint) == (
        "the engine needs `LAB_KEY`, which is not set", "`export LAB_KEY=...` first",
    )  # fmt: skip


def test_what_was_never_proven_has_no_service(machine: Machine) -> None:
    write_declaration("new", RUN, is_wanted=True)
    with pytest.raises(UsageError, match="`new` was never proven"):
        service.install("new", machine.systemd(), environ={})
    with pytest.raises(UsageError, match="nothing was ever applied as `other` here"):
        service.install("other", machine.systemd(), environ={})
    with pytest.raises(UsageError, match="several deployments are declared: `lab`, `new`"):
        service.install(None, machine.systemd(), environ={})


def test_a_unit_of_somebody_else_is_neither_replaced_nor_removed(machine: Machine) -> None:
    path = machine.systemd().unit_path("lab")
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/bin/true\n")
    for act in (
        lambda: service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"}),
        lambda: service.remove("lab", machine.systemd()),
    ):
        with pytest.raises(UsageError, match="was not written by `ft`"):
            act()
    assert service.read_services((machine.systemd(),)) == ()
    service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"}, is_forced=True)
    assert [one.deployment for one in service.read_services((machine.systemd(),))] == ["lab"]


def test_systemds_refusal_comes_back_in_its_own_words_with_what_to_do(machine: Machine) -> None:
    machine.refusal = "Failed to connect to bus: No medium found"
    with pytest.raises(FtError) as caught:
        service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"})
    expected = "`systemctl --user --no-pager daemon-reload` failed: Failed to connect to bus: No medium found"
    assert caught.value.message == expected
    assert "log in as that user" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("shown", "is_lingering", "condition", "problems"),
    [
        (RUNNING, True, "running", ()),
        (RUNNING, False, "running", ("it ends with your last session: `loginctl enable-linger USER`",)),
        (RUNNING.replace("enabled", "disabled"), True, "running",
         ("it does not start at boot: `systemctl --user enable ft-lab.service`",)),
        (FAILED, True, "failed",
         ("it has failed: `journalctl --user -u ft-lab.service` says why, `ft service install lab` tries again",)),
    ],
)  # fmt: skip
def test_a_services_state_is_told_with_what_is_wrong(
    machine: Machine, shown: str, is_lingering: bool, condition: str, problems: tuple[str, ...]
) -> None:
    service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"})
    machine.shown = shown
    if is_lingering:
        machine.linger()
    (view,) = service.read_services((machine.systemd(), machine.systemd("system")))
    assert (view.condition, view.problems) == (condition, tuple(one.replace("USER", find_user()) for one in problems))
    assert view.is_well == (condition == "running" and not problems)


def test_remove_stops_it_and_leaves_no_file(machine: Machine) -> None:
    change = service.install("lab", machine.systemd(), environ={"LAB_KEY": "x"})
    machine.calls.clear()
    service.remove("lab", machine.systemd(), is_dry_run=True)
    assert machine.calls == []
    service.remove("lab", machine.systemd())
    assert [call[3:] for call in machine.calls] == [("disable", "--now", "ft-lab.service"), ("daemon-reload",)]
    assert not Path(change.unit_path).exists()
    assert not Path(change.environment_file).exists()
    with pytest.raises(UsageError, match="no service is installed for `lab`"):
        service.remove("lab", machine.systemd())


def test_the_commands_print_one_document_and_their_exit_codes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_make_systemd", machine.systemd)
    monkeypatch.setenv("LAB_KEY", "sesame")
    runner = CliRunner()

    def ask(*words: str) -> tuple[int, object]:
        result = runner.invoke(cli.command, [*words, "--json"], standalone_mode=False)
        if result.exception is not None:
            raise result.exception
        return result.return_value, json.loads(result.stdout)

    assert ask("status") == (0, [])
    code, change = ask("install", "lab")
    assert (code, change["unit"]) == (0, "ft-lab.service")  # type: ignore[index]
    assert ask("status")[0] == 6
    machine.linger()
    code, views = ask("status", "lab")
    assert (code, [one["condition"] for one in views]) == (0, ["running"])  # type: ignore[attr-defined]
    assert ask("remove", "lab", "--yes")[0] == 0
    assert ask("status") == (0, [])


def test_doctor_has_one_check_a_service() -> None:
    services = (
        ServiceState(deployment="a", scope="user", condition="running"),
        ServiceState(deployment="b", scope="user", condition="running", problems=("it ends: linger",)),
        ServiceState(deployment="c", scope="system", condition="failed", problems=("it has failed: look",)),
    )
    checks = list(check_services(Facts(services=services)))
    assert [(one.status, one.found, one.fix) for one in checks] == [
        ("pass", "`a` (user service): running, starts at boot", None),
        ("warn", "`b` (user service): running", "it ends: linger"),
        ("fail", "`c` (system service): failed", "it has failed: look"),
    ]
    assert [one.status for one in check_services(Facts())] == ["skip"]


def pretend_wsl(machine: Machine) -> None:
    path = machine.root / "proc/sys/kernel/osrelease"
    path.parent.mkdir(parents=True)
    path.write_text("5.15.167.4-microsoft-standard-WSL2\n")
