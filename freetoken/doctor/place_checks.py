"""Checks of what surrounds `ft`: systemd, ports, PATH, state folder, database, deployments, engines. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.doctor.facts import Facts
from freetoken.doctor.model import Check, failed, passed, skipped, warned
from freetoken.hardware.model import Hardware
from freetoken.units import GIB, format_bytes


def check_place(hardware: Hardware, facts: Facts) -> Iterator[Check]:
    """Everything around `ft`, one check after the other."""
    yield check_systemd(hardware, facts)
    yield check_ports(facts)
    yield check_path(facts)
    yield check_state(facts)
    yield check_database(facts)
    yield check_deployments(facts)
    yield check_engines(facts)


def check_systemd(hardware: Hardware, facts: Facts) -> Check:
    """systemd, which keeps a server alive beyond the session."""
    if facts.has_systemd:
        return passed("systemd", "systemd runs")
    if hardware.os.is_wsl:
        fix = "put `systemd=true` under `[boot]` in /etc/wsl.conf, then `wsl.exe --shutdown`"
        return warned("systemd", "systemd is off: a server cannot be kept across sessions", fix)
    if hardware.os.is_container or facts.has_systemd is None:
        return skipped("systemd", "not expected in a container" if hardware.os.is_container else "cannot be told here")
    return warned("systemd", "systemd does not run here", "start servers from your own init, or by hand after a reboot")


def check_ports(facts: Facts) -> Check:
    """The default port and the next one, which the upstream engine takes too."""
    taken = [state for state in facts.ports if state.holder is not None]
    numbers = " and ".join(str(state.port) for state in facts.ports)
    if not facts.ports:
        return skipped("ports", "no port was looked at")
    if not taken:
        return passed("ports", f"ports {numbers} are free")
    found = "; ".join(str(state.holder) for state in taken)
    return warned("ports", found, f"`--set serve.port={facts.ports[0].port + 10}`, or end that program")


def check_path(facts: Facts) -> Check:
    """Which `ft` a shell would start, and whether the upstream package overwrites ours."""
    if facts.upstream_in_our_environment:
        return failed(
            "ft_on_path",
            "the upstream package `freetoken` is installed in this environment and overwrites ours of the same name",
            "`pip uninstall -y freetoken && pip install --force-reinstall --no-deps freetoken-deploy`",
        )
    if not facts.ft_on_path:
        return warned("ft_on_path", "no `ft` on PATH", "activate the environment, or use `python -m freetoken`")
    first, *others = facts.ft_on_path
    if first.is_ours:
        shadowed = ", ".join(other.path for other in others if other.is_upstream)
        return passed(
            "ft_on_path", f"{first.path}" + (f"; the upstream one comes after it: {shadowed}" if shadowed else "")
        )
    kind = "the upstream engine's" if first.is_upstream else "another program's"
    ours = next((other.path for other in others if other.is_ours), None)
    fix = f"put {ours.rsplit('/', 1)[0]} first on PATH" if ours else "put this environment's bin folder first on PATH"
    return warned("ft_on_path", f"`ft` on PATH is {kind}: {first.path}", f"{fix}, or use `python -m freetoken`")


def check_state(facts: Facts) -> Check:
    """The state folder can be written."""
    if facts.state_problem is not None:
        return failed("state", f"{facts.state_dir}: {facts.state_problem}", "`ft --state FOLDER`, or set FT_STATE")
    free = facts.state_free_bytes
    room = "" if free is None else f", {format_bytes(free)} free"
    if free is not None and free < GIB:
        return warned("state", f"{facts.state_dir}{room}", "make room, or choose another folder: `ft --state FOLDER`")
    return passed("state", f"{facts.state_dir}{room}")


def check_database(facts: Facts) -> Check:
    """`ft.db` is of this version or an older one, and undamaged."""
    if facts.database_problem is not None:
        fix = facts.database_fix or "`ft results --rebuild` makes a new one from the run folders"
        return failed("database", facts.database_problem, fix)
    if facts.database_version is None:
        return passed("database", "there is none yet")
    return passed("database", f"ft.db has version {facts.database_version}")


def check_deployments(facts: Facts) -> Check:
    """Runs that are registered and whose processes are gone."""
    if not facts.stale:
        return passed("deployments", "no stale record")
    words = "; ".join(f"`{one.name}`: {one.words}" for one in facts.stale)
    return warned("deployments", words, "`ft status` closes or adopts them")


def check_engines(facts: Facts) -> Check:
    """Which engines are here."""
    if not facts.engines:
        return skipped("engines", "no engine was looked for")
    words = [f"{name} {version}" if version else f"{name} not installed" for name, version in facts.engines.items()]
    return passed("engines", ", ".join(words))
