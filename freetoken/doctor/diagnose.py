"""All checks over one machine. Pure: `Hardware`, `Facts` and the engines' needs come in, a `Diagnosis` goes out."""

from __future__ import annotations

from collections.abc import Mapping

from freetoken.adapters.base import EngineNeeds
from freetoken.doctor.facts import Facts
from freetoken.doctor.gpu_checks import check_gpus
from freetoken.doctor.host_checks import check_host
from freetoken.doctor.model import Diagnosis
from freetoken.doctor.place_checks import check_place
from freetoken.doctor.service_checks import check_services
from freetoken.doctor.wsl_checks import check_wsl
from freetoken.hardware.model import Hardware


def make_diagnosis(hardware: Hardware, facts: Facts, needs: Mapping[str, EngineNeeds]) -> Diagnosis:
    """Every check, in the order GPU, host, WSL, surroundings."""
    return Diagnosis(
        checks=(
            *check_gpus(hardware, facts, needs),
            *check_host(hardware, facts),
            *check_wsl(hardware, facts),
            *check_place(hardware, facts),
            *check_services(facts),
        )
    )
