"""Limits that hold for every engine: what the recipe asks of the machine, the workload, the model and the server.

Every finding is returned at once. What a particular engine can run at all is the adapter's `Limits`.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from freetoken.hardware.model import Gpu
from freetoken.planner.budget import choose_gpu
from freetoken.planner.memory import Finding, Limits
from freetoken.planner.plan import PlanRequest
from freetoken.units import format_bytes

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_limits(request: PlanRequest, limits: Limits) -> tuple[Finding, ...]:
    """Every limit of the recipe and of the engine that is not met, fatal ones first, none twice."""
    findings = (*check_request(request), *limits.findings(request))
    unique = {finding.message: finding for finding in findings}
    return tuple(sorted(unique.values(), key=lambda finding: not finding.is_fatal))


def check_request(request: PlanRequest) -> tuple[Finding, ...]:
    """Findings of the request itself, whatever the engine."""
    return (
        *_check_gpu_needs(request),
        *_check_host_needs(request),
        *_check_workload(request),
        *_check_serve(request),
    )


def is_older(found: str, needed: str) -> bool:
    """Version `found` is older than `needed`; False where `found` cannot be read as a version."""
    try:
        return Version(found) < Version(needed)
    except InvalidVersion:
        return False


def _check_gpu_needs(request: PlanRequest) -> Iterator[Finding]:
    try:
        gpu = choose_gpu(request)
    except KeyError as error:
        known = ", ".join(f"{one.index} ({one.name})" for one in request.hardware.gpus) or "none"
        yield Finding(
            check="gpu_choice",
            message=f"there is no GPU `{error.args[0]}` here; GPUs: {known}",
            hint="`--set settings.gpu=auto`",
        )
        return
    needs = request.recipe.hardware.gpu
    if needs is None:
        return
    if gpu is None:
        yield Finding(check="gpu", message="the recipe asks for a GPU and there is none here")
        return
    yield from _check_card(gpu, request)
    software = request.hardware.software
    for check, found, needed in (
        ("driver", software.driver, needs.driver),
        ("cuda", software.cuda_driver or software.cuda_toolkit, needs.cuda),
    ):
        if needed is None:
            continue
        if found is None:
            yield _unknown(
                check, f"the recipe asks for {check} {needed} or newer, and this machine's is not known", request
            )
        elif is_older(found, needed):
            yield Finding(check=check, message=f"{check} is {found}, the recipe asks for {needed} or newer")


def _check_card(gpu: Gpu, request: PlanRequest) -> Iterator[Finding]:
    needs = request.recipe.hardware.gpu
    assert needs is not None
    if needs.vram is not None and gpu.vram_total_bytes < needs.vram:
        yield Finding(
            check="vram",
            message=f"`{gpu.name}` has {format_bytes(gpu.vram_total_bytes)} of VRAM, the recipe asks for "
            f"{format_bytes(needs.vram)} or more",
        )
    capability = gpu.compute_capability
    if (
        needs.compute_capability is not None
        and capability is not None
        and is_older(capability, needs.compute_capability)
    ):
        yield Finding(
            check="gpu_generation",
            message=f"`{gpu.name}` has compute capability {capability}, the recipe asks for "
            f"{needs.compute_capability} or newer",
        )


def _unknown(check: str, message: str, request: PlanRequest) -> Finding:
    """Unknown on this very machine means absent; in a profile it means that the profile does not say."""
    return Finding(check=check, message=message, is_fatal=request.hardware.is_probed)


def _check_host_needs(request: PlanRequest) -> Iterator[Finding]:
    needs, hardware = request.recipe.hardware, request.hardware
    ram, disk, cpu = hardware.ram, hardware.disk, hardware.cpu
    figures = []
    if needs.ram is not None:
        figures += [
            ("ram", "RAM available", ram.available_bytes, needs.ram.available),
            ("ram", "RAM", ram.total_bytes, needs.ram.total),
        ]
    # The room is for the download: a checkpoint that is here already does not need it twice.
    if needs.disk is not None and request.model_path is None:
        figures.append(("disk", "disk free", disk.free_bytes, needs.disk.free))
    for check, what, found, needed in figures:
        if needed is not None and found < needed:
            yield Finding(
                check=check,
                message=f"{format_bytes(found)} of {what}, the recipe asks for {format_bytes(needed)} or more",
            )
    if needs.cpu is not None:
        missing = [isa for isa in needs.cpu.isa if isa.lower() not in {one.lower() for one in cpu.isa}]
        if missing and cpu.isa:
            yield Finding(check="cpu_isa", message=f"the CPU lacks {', '.join(missing)}, which the recipe asks for")
        elif missing:
            yield _unknown(
                "cpu_isa", f"the recipe asks for {', '.join(missing)}; this CPU's features are not known", request
            )
        if needs.cpu.cores is not None and cpu.usable_cores < needs.cpu.cores:
            yield Finding(
                check="cpu_cores",
                message=f"{cpu.usable_cores} usable cores, the recipe asks for {needs.cpu.cores} or more",
            )


def _check_workload(request: PlanRequest) -> Iterator[Finding]:
    workload, settings, shape = request.recipe.workload, request.recipe.settings, request.shape
    if workload.context_tokens > shape.max_position_tokens:
        yield Finding(
            check="context",
            message=f"workload `{workload.name}` needs {workload.context_tokens:,} tokens of context, "
            f"`{shape.name}` has {shape.max_position_tokens:,}",
            hint="take a shorter workload",
        )
    if isinstance(settings.kv_tokens, int) and settings.kv_tokens < workload.kv_tokens:
        yield Finding(
            check="kv_tokens",
            message=f"`settings.kv_tokens` is {settings.kv_tokens:,}, workload `{workload.name}` needs "
            f"{workload.kv_tokens:,} ({workload.concurrency} x {workload.context_tokens:,})",
            hint=f"`--set settings.kv_tokens={workload.kv_tokens}`",
        )
    most = settings.max_running_requests
    if isinstance(most, int) and most < workload.concurrency:
        yield Finding(
            check="max_running_requests",
            message=f"`settings.max_running_requests` is {most}, workload `{workload.name}` runs "
            f"{workload.concurrency} requests at once",
            hint=f"`--set settings.max_running_requests={workload.concurrency}`",
        )


def _check_serve(request: PlanRequest) -> Iterator[Finding]:
    recipe = request.recipe
    if recipe.serve.host not in LOOPBACK and recipe.serve.api_key_env is None:
        yield Finding(
            check="api_key",
            message=f"`serve.host` is `{recipe.serve.host}`, which others can reach: that needs an API key",
            hint="`--set serve.api_key_env=FREETOKEN_API_KEY`, with the key in that variable",
        )
    for words in request.taken_ports:  # only a word: it may be free by the time of the launch, which looks again
        yield Finding(check="port", message=words, is_fatal=False, hint=request.taken_ports_hint)
    version, wanted = request.engine_version, recipe.engine.version
    if version is not None and wanted and not _is_in_range(version, wanted):
        yield Finding(
            check="engine_version",
            message=f"engine `{recipe.engine.name}` is {version}, the recipe asks for `{wanted}`",
        )


def _is_in_range(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted, prereleases=True).contains(version)
