"""What a bundle says, typed: manifest, evidence, signature. Frozen; unknown keys and versions are rejected.

Figures are in the units of their names. A machine is told by its class, never by its identity.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from freetoken.recipe.model import NAME_PATTERN, TextLike

#: Version of the bundle's own form; a reader refuses others.
BUNDLE_VERSION = 1

Sha256 = Annotated[str, TextLike(r"^[0-9a-f]{64}$")]
SettingName = Annotated[str, TextLike(r"^[a-z][a-z0-9_]{0,39}$")]
MetricName = Annotated[str, TextLike(r"^[a-z][a-z0-9_]{0,59}$")]
Day = Annotated[str, TextLike(r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
#: A figure in any unit: times, rates and bytes, none of them negative.
FigureValue = Annotated[float, Field(ge=0, le=1e18)]


def _setting(value: Any) -> bool | int | float | str:
    # One function rather than a union, which tells an error for each of its members: a flood of them costs memory.
    if isinstance(value, bool) or (isinstance(value, (int, float)) and abs(value) <= _LARGEST):
        return value
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.,:+-]{0,40}", value):
        return value
    raise ValueError("a setting is a boolean, a number, or a short plain text")


_LARGEST = 1 << 60
SettingValue = Annotated[bool | int | float | str, PlainValidator(_setting)]


def _plain_text(value: str) -> str:
    if not value.isprintable():
        raise ValueError("holds characters that cannot be printed")
    return value


Text = Annotated[str, Field(max_length=120), AfterValidator(_plain_text)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]


class ShareModel(BaseModel):
    """Base: frozen, unknown keys rejected, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ManifestFile(ShareModel):
    """A file's size and SHA-256."""

    bytes: Bytes
    sha256: Sha256


class Manifest(ShareModel):
    """`bundle.json`: what the bundle is and what is in it. A signature is made over its bytes."""

    format: Literal["ft-bundle"] = "ft-bundle"
    version: Literal[1] = 1
    name: Annotated[str, TextLike(NAME_PATTERN)]
    files: dict[Literal["recipe.yaml", "lock.yaml", "evidence.json"], ManifestFile]


class Signature(ShareModel):
    """`signature.json`: an ed25519 signature over the manifest's bytes. Hexadecimal."""

    algorithm: Literal["ed25519"] = "ed25519"
    public_key: Annotated[str, TextLike(r"^[0-9a-f]{64}$")]
    signature: Annotated[str, TextLike(r"^[0-9a-f]{128}$")]


class MachineClass(ShareModel):
    """The class of the machine that the figures are from; memory sizes rounded to what is sold."""

    fingerprint: Annotated[str, TextLike(r"^[0-9a-f]{16}$")] | None = None
    gpu: Text | None = None
    compute_capability: Annotated[str, TextLike(r"^[0-9]{1,2}\.[0-9]$")] | None = None
    vram_bytes: Bytes = 0
    pcie_generation: Annotated[int, Field(ge=1, le=9)] | None = None
    pcie_width: Annotated[int, Field(ge=1, le=32)] | None = None
    cpu: Text = "unknown"
    cores: Annotated[int, Field(ge=1, le=4096)] = 1
    ram_bytes: Bytes = 0
    disk: Text = "unknown"
    os: Text = "linux"
    driver: Text | None = None


class Figure(ShareModel):
    """A figure over all measurements of one setting: median with an interval, and on how many it rests."""

    median: FigureValue
    low: FigureValue
    high: FigureValue
    n: Annotated[int, Field(ge=1, le=1 << 40)]

    @model_validator(mode="after")
    def _median_lies_between(self) -> Figure:
        if not self.low <= self.median <= self.high:
            raise ValueError("a median lies outside its interval")
        return self


class Measured(ShareModel):
    """What one set of settings came to. Expert slots are told in bytes; `invalid_because` means: do not compare."""

    kind: Annotated[str, TextLike(r"^[a-z_]{1,20}$")]
    day: Day
    settings: dict[SettingName, SettingValue]
    figures: dict[MetricName, Figure]
    is_estimated: bool = False
    is_invalid: bool = False


class Failed(ShareModel):
    """Settings that did not work, with the kind of the failure and how many bytes were missing."""

    kind: Annotated[str, TextLike(r"^[a-z_]{1,20}$")]
    day: Day
    settings: dict[SettingName, SettingValue]
    missing_bytes: Bytes = 0


class StudyPoint(ShareModel):
    """One trial of a tuner: settings, the outcome's kind, its figures."""

    settings: dict[SettingName, SettingValue]
    kind: Annotated[str, TextLike(r"^[a-z_]{1,20}$")]
    figures: dict[MetricName, FigureValue] = {}
    missing_bytes: Bytes = 0


class WorkloadRef(ShareModel):
    """What was asked of the server: name, counts, and a hash over the counts."""

    name: Annotated[str, Field(max_length=80), TextLike(r"^[A-Za-z0-9_.-]+$")]
    sha256: Sha256


#: How far kinds of measurements are believed; those that are not named stand at 1.
_WEIGHTS = {"proof": 0, "confirm": 2, "tuned": 3}


class Evidence(ShareModel):
    """`evidence.json`: what was measured with the recipe, on what, and what failed."""

    version: Literal[1] = 1
    engine: Annotated[str, TextLike(r"^[a-z0-9]{1,40}$")]
    engine_version: Annotated[str, TextLike(r"^[A-Za-z0-9_.+!-]{1,60}$")] | None = None
    workload: WorkloadRef
    machine: MachineClass | None = None
    #: Settings of the plan that the author ran, expert slots in bytes.
    planned: dict[SettingName, SettingValue] = {}
    measured: Annotated[tuple[Measured, ...], Field(max_length=200)] = ()
    failed: Annotated[tuple[Failed, ...], Field(max_length=200)] = ()
    study: Annotated[tuple[StudyPoint, ...], Field(max_length=500)] = ()

    def best(self) -> Measured | None:
        """The valid measurement with the most tokens per second; None where there is none.

        What a tuner confirmed comes before what a single trial happened to show, and the one answer that proves a
        start counts only where nothing else was measured.
        """
        valid = [one for one in self.measured if not one.is_invalid and "decode_tps" in one.figures]
        return max(
            valid,
            key=lambda one: (_WEIGHTS.get(one.kind, 1), one.figures["decode_tps"].median, len(one.settings)),
            default=None,
        )


def compact(settings: dict[str, Any], slot_bytes: int) -> dict[str, Any]:
    """Settings as they travel: slots as bytes where the size of one is known, nothing that names a device."""
    found = {}
    for name, value in settings.items():
        if value is None or name in ("gpu", "device") or not isinstance(value, (bool, int, float, str)):
            continue
        if name == "expert_slots" and slot_bytes:
            found["expert_slots_bytes"] = value * slot_bytes
        else:
            found[name] = value
    return dict(sorted(found.items()))


def expand(settings: dict[str, Any], slot_bytes: int) -> dict[str, Any]:
    """`compact` taken back: bytes as slots of `slot_bytes` each."""
    found = dict(settings)
    size = found.pop("expert_slots_bytes", None)
    if size is not None and slot_bytes:
        found["expert_slots"] = int(size) // slot_bytes
    return found
