"""What the checks need beyond `Hardware`, as typed values, so that a laptop or WSL can be written down in a test."""

from __future__ import annotations

from typing import Literal

from freetoken.doctor.model import DoctorModel


class Power(DoctorModel):
    """Where the power comes from. None where the machine does not say."""

    on_battery: bool | None = None
    #: `low-power`, `balanced`, `performance`: the firmware's own profile.
    platform_profile: str | None = None
    #: Windows' active scheme, where this is WSL.
    windows_scheme: Literal["saver", "balanced", "performance", "other"] | None = None


class WslSettings(DoctorModel):
    """What `.wslconfig` says; None where it says nothing."""

    path: str | None = None
    vm_idle_timeout_ms: int | None = None
    memory: str | None = None
    auto_memory_reclaim: str | None = None


class FoundFt(DoctorModel):
    """An `ft` on PATH: where, and whether its environment holds this distribution or the upstream engine."""

    path: str
    is_ours: bool
    is_upstream: bool


class PortState(DoctorModel):
    """A port that a server would take: who has it now; `holder` is None when it is free."""

    port: int
    holder: str | None = None


class StaleDeployment(DoctorModel):
    """A run that is registered and whose processes are gone."""

    name: str
    words: str


class ServiceState(DoctorModel):
    """A systemd service of ours, and what is wrong with it, each with its fix."""

    deployment: str
    scope: str
    condition: str
    problems: tuple[str, ...] = ()


class Facts(DoctorModel):
    """Everything that was gathered. Defaults stand for a machine that says nothing."""

    power: Power = Power()
    has_systemd: bool | None = None
    wsl: WslSettings = WslSettings()
    #: Bytes that could really be page-locked; None where it was not tried.
    pinnable_probed_bytes: int | None = None
    ports: tuple[PortState, ...] = ()
    ft_on_path: tuple[FoundFt, ...] = ()
    #: The upstream distribution is installed in our own environment, where it overwrites our package.
    upstream_in_our_environment: bool = False
    state_dir: str = ""
    #: Why the state folder cannot be written; None when it can.
    state_problem: str | None = None
    state_free_bytes: int | None = None
    database_version: int | None = None
    database_problem: str | None = None
    database_fix: str | None = None
    stale: tuple[StaleDeployment, ...] = ()
    services: tuple[ServiceState, ...] = ()
    #: Programs that end processes before RAM is full, e.g. `earlyoom`.
    oom_daemons: tuple[str, ...] = ()
    #: Engine name -> its own environment here; None where it is not installed.
    engines: dict[str, str | None] = {}
