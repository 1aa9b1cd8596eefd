"""The check of services that keep deployments over logout and reboot. Pure: the facts come in."""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.doctor.facts import Facts
from freetoken.doctor.model import Check, failed, passed, skipped, warned


def check_services(facts: Facts) -> Iterator[Check]:
    """One check for each installed service; a skip where there is none."""
    if not facts.services:
        yield skipped("service", "no deployment is kept over a reboot (`ft service install NAME` does that)")
    for one in facts.services:
        what = f"`{one.deployment}` ({one.scope} service): {one.condition}"
        if not one.problems and one.condition == "running":
            yield passed("service", f"{what}, starts at boot")
        elif one.condition == "failed":
            yield failed("service", what, "; ".join(one.problems))
        else:
            fix = "; ".join(one.problems) or f"`ft service install {one.deployment}` starts it"
            yield warned("service", what, fix)
