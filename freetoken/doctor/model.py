"""`Check` and `Diagnosis`: what was looked at, what was found, and what to type."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["pass", "warn", "fail", "skip"]


class DoctorModel(BaseModel):
    """Base of the doctor's values: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Check(DoctorModel):
    """One thing that was looked at. `fix` is there for every warn and fail, and can be typed or done as it stands."""

    name: str  # stable, e.g. `driver`
    status: Status
    found: str  # one sentence with the numbers
    fix: str | None = None


class Diagnosis(DoctorModel):
    """All checks of one machine, in the order in which a person should read them."""

    checks: tuple[Check, ...]

    @property
    def has_failed(self) -> bool:
        """True when one check failed."""
        return any(check.status == "fail" for check in self.checks)

    def count(self, status: Status) -> int:
        """How many checks ended as `status`."""
        return sum(check.status == status for check in self.checks)


def passed(name: str, found: str) -> Check:
    """A check with nothing to do."""
    return Check(name=name, status="pass", found=found)


def skipped(name: str, reason: str) -> Check:
    """A check that does not apply here, or that could not be made."""
    return Check(name=name, status="skip", found=reason)


def warned(name: str, found: str, fix: str) -> Check:
    """Something costs speed or safety."""
    return Check(name=name, status="warn", found=found, fix=fix)


def failed(name: str, found: str, fix: str) -> Check:
    """Something is in the way."""
    return Check(name=name, status="fail", found=found, fix=fix)
