"""The upstream engine's own bench profile: read as rates, and written from ours where that is asked for.

Version 6: a file for each GPU, a row for each `FORMAT[options]:HxI:topK:tTHREADS`. The engine's hybrid strategy takes
its fetch share from the row's overlapped pair, and fetches one miss a layer where it finds no row of its key, so a row
has to name exactly the thread count that the executor will use. Rates there are GB/s of 10^9 bytes.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from freetoken.errors import BadFileError, FtError, UsageError
from freetoken.hardware.model import Bandwidth, ExpertRates, Gpu, Hardware

VERSION = 6
ENGINE = "freetoken"
#: The engine's own rule: hybrid where the CPU computes experts this much faster than the link brings them.
THRESHOLD = 2.0
#: Rows that we write say so, and are replaced by ours without asking.
NOTE = "written by ft from streaming rates, not by the engine's own kernel"
_MOST_BYTES = 1 << 20
#: The engine knows these formats in its CPU executor.
CPU_FORMATS = ("bf16", "fp8_block", "nvfp4", "mxfp4", "ds_fp4", "gguf")


class _Loose(BaseModel):
    # Newer engines may add keys; what is known of version 6 is checked.
    model_config = ConfigDict(frozen=True, extra="ignore")


class ProfileGpu(_Loose):
    """The GPU that a profile was taken on."""

    index: int = 0
    name: str
    uuid: str = ""


class ProfileRow(_Loose):
    """One layer kind. GB/s."""

    format: str
    hidden: int = Field(ge=1)
    inter: int = Field(ge=1)
    top_k: int = Field(ge=1)
    cpu_threads: int = Field(ge=1)
    measured_at: str | None = None
    cpu_moe_gbs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cpu_moe_isa: str | None = None
    pcie_gather_gbs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cpu_moe_overlap_gbs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    pcie_gather_overlap_gbs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    note: str | None = None


class ProfileCeilings(_Loose):
    """Linear rates. GB/s."""

    cpu_stream_read_gbs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cpu_stream_threads: int | None = None
    pcie_linear_h2d_gbs: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class BenchProfile(_Loose):
    """A whole file."""

    version: int
    timestamp: str | None = None
    gpu: ProfileGpu
    ceilings: ProfileCeilings = ProfileCeilings()
    layer_kinds: dict[str, ProfileRow] = {}


def read_profile(path: Path) -> BenchProfile:
    """The profile at `path`. Raises BadFileError where it is none, or of another version."""
    document = _read_document(path)
    if document.get("version") != VERSION:
        raise BadFileError(f"{path} has version {document.get('version')!r}, the engine reads {VERSION} alone")
    try:
        return BenchProfile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadFileError(f"{path}: `{place}`: {first['msg'].lower()}") from error


def make_rates(profile: BenchProfile, gpu: Gpu | None) -> tuple[Bandwidth, tuple[str, ...]]:
    """The profile's rows as rates of the upstream engine, and doubts. BadFileError for another machine's GPU.

    Rows that `ft` wrote itself are passed over: they would come back as if the engine had measured them.
    """
    if gpu is None:
        raise BadFileError(f"the profile is of `{profile.gpu.name}`, and there is no GPU here")
    if gpu.name != profile.gpu.name:
        raise BadFileError(
            f"the profile is of `{profile.gpu.name}`, the GPU here is `{gpu.name}`",
            hint="`ft bench bw` measures this machine",
        )
    doubts = []
    if gpu.uuid and profile.gpu.uuid != gpu.uuid:
        doubts.append(f"it was taken on another card of this name ({profile.gpu.uuid or 'no uuid'})")
    own = [row for row in profile.layer_kinds.values() if row.note != NOTE]
    rows = [_make_row(row, profile, tuple(doubts)) for row in own]
    stream = profile.ceilings.cpu_stream_read_gbs
    return Bandwidth(
        dram_bytes_per_s=_bytes(stream),
        sources={"dram_bytes_per_s": "measured"} if stream else {},
        experts={row.key: row for row in rows},
    ), tuple(doubts)


def _make_row(row: ProfileRow, profile: BenchProfile, doubts: tuple[str, ...]) -> ExpertRates:
    return ExpertRates(
        engine=ENGINE,
        format=row.format,
        hidden=row.hidden,
        inter=row.inter,
        top_k=row.top_k,
        threads=row.cpu_threads,
        cpu_experts_bytes_per_s=_bytes(row.cpu_moe_gbs),
        h2d_bytes_per_s=_bytes(row.pcie_gather_gbs),
        cpu_experts_overlap_bytes_per_s=_bytes(row.cpu_moe_overlap_gbs),
        h2d_overlap_bytes_per_s=_bytes(row.pcie_gather_overlap_gbs),
        kernel=row.cpu_moe_isa or "",
        measured_at=row.measured_at or profile.timestamp,
        doubts=doubts,
    )


def _bytes(gbs: float | None) -> float | None:
    return gbs * 1e9 if gbs is not None else None


def find_profile_path(gpu: Gpu, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the engine looks for the profile of `gpu`."""
    if named := environ.get("FREETOKEN_BENCHBW_PATH"):
        return Path(named).expanduser()
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "freetoken" / "benchbw" / f"{gpu.uuid}.json"


def count_executor_threads(physical_cores: int) -> int:
    """Worker threads of the engine's CPU executor by default: one core is kept back where there are more than two."""
    return physical_cores - 1 if physical_cores > 2 else physical_cores


def make_key(row: ExpertRates) -> str:
    """`nvfp4:2048x512:top8:t7`."""
    return f"{row.format}:{row.hidden}x{row.inter}:top{row.top_k}:t{row.threads}"


def make_profile(
    hardware: Hardware,
    gpu: Gpu,
    rates: Bandwidth,
    row: ExpertRates,
    *,
    engine_version: str | None,
    now: datetime.datetime,
) -> dict[str, Any]:
    """A version 6 document with one row, from streaming rates of this machine. UsageError where a rate is missing.

    `row` says format, shape and threads. Its own CPU rate is not used: another engine's kernel says nothing of this
    one's, while both are bound by how fast memory is read.
    """
    if row.format not in CPU_FORMATS:
        raise UsageError(f"the engine computes no `{row.format}` experts on the CPU; it does {', '.join(CPU_FORMATS)}")
    needed = {
        "h2d_bytes_per_s": row.h2d_bytes_per_s or rates.h2d_bytes_per_s,
        "cpu_experts_bytes_per_s": rates.cpu_experts_bytes_per_s,
        "h2d_overlap_bytes_per_s": rates.h2d_overlap_bytes_per_s,
        "cpu_experts_overlap_bytes_per_s": rates.cpu_experts_overlap_bytes_per_s,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise UsageError(f"a profile needs rates that were not measured: {', '.join(f'`{one}`' for one in missing)}")
    link, cpu, link_both, cpu_both = (round(float(value or 0) / 1e9, 2) for value in needed.values())
    stamp = now.isoformat(timespec="seconds")
    written = {
        "format": row.format, "options": {}, "hidden": row.hidden, "inter": row.inter, "top_k": row.top_k,
        "cpu_threads": row.threads, "activation": "silu", "sources": [f"dtype:{row.format}"], "threshold": THRESHOLD,
        "measured_at": stamp, "freetoken": {"version": engine_version, "commit": None}, "cpu_moe_gbs": cpu,
        "cpu_moe_isa": None, "cpu_cores": list(range(row.threads)), "isa_sweep": None, "pcie_gather_gbs": link,
        "cpu_moe_overlap_gbs": cpu_both, "pcie_gather_overlap_gbs": link_both,
        "recommended": "hybrid" if cpu > THRESHOLD * link else "offload", "note": NOTE,
    }  # fmt: skip
    stream = rates.dram_bytes_per_s
    return {
        "version": VERSION, "timestamp": stamp, "epoch": int(now.timestamp()), "host": "",
        "gpu": {"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid},
        "cpu": {"model": hardware.cpu.model, "physical_cores": hardware.cpu.physical_cores,
                "numa_nodes": hardware.cpu.numa_nodes},
        "ceilings": {"cpu_stream_read_gbs": round(stream / 1e9, 2) if stream else None,
                     "cpu_stream_threads": rates.threads, "pcie_linear_h2d_gbs": link, "pcie_linear_d2h_gbs": None},
        "layer_kinds": {make_key(row): written},
    }  # fmt: skip


def write_profile(path: Path, document: dict[str, Any], *, is_forced: bool = False) -> None:
    """Writes the row into the profile at `path`, beside the rows that it has already.

    Raises UsageError where the engine itself has measured that row (`is_forced` replaces it), BadFileError where the
    file is of another GPU or version, FtError where it cannot be written.
    """
    if path.exists():
        there = read_profile(path)
        if there.gpu.name != document["gpu"]["name"]:
            raise BadFileError(f"{path} is of `{there.gpu.name}`, not of `{document['gpu']['name']}`")
        for key in document["layer_kinds"]:
            row = there.layer_kinds.get(key)
            if row is not None and row.note != NOTE and not is_forced:
                raise UsageError(
                    f"{path} has a row `{key}` that the engine measured itself", hint="`--yes` replaces it"
                )
        before = _read_document(path)
        document = {**before, "layer_kinds": {**before.get("layer_kinds", {}), **document["layer_kinds"]}}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FtError(f"cannot write {path}: {error.strerror or error}") from error


def _read_document(path: Path) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.loads(file.read(_MOST_BYTES + 1))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON document below 1 MiB"
        raise BadFileError(f"{path} cannot be read: {reason}") from error
    if not isinstance(value, dict):
        raise BadFileError(f"{path} is no bench profile: it holds no object")
    return value
