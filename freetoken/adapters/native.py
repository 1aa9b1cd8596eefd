"""The embedded engine `native`: torch on `transformers`' modelling code, on the CPU or on CUDA, in this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import ClassVar

from freetoken.adapters.base import Capability, EngineAdapter, EngineNeeds, Failure, Knob, LaunchSpec
from freetoken.adapters.native_limits import LEAST_CAPABILITY, NativeLimits
from freetoken.adapters.native_log import classify_log
from freetoken.adapters.native_memory import NativeMemory, can_use_gpu
from freetoken.adapters.shared import NATIVE_ENV as SHARED_ENV
from freetoken.errors import UsageError
from freetoken.hardware.model import Hardware
from freetoken.planner.plan import Plan


class NativeAdapter(EngineAdapter):
    """The engine that ships in this package."""

    name: ClassVar[str] = "native"
    title: ClassVar[str] = "native (in this package: torch and transformers, CPU or CUDA)"
    known_versions: ClassVar[str] = ""
    capabilities: ClassVar[frozenset[Capability]] = frozenset({"live_resize", "hit_counters", "cache_flush", "cancel"})
    needs: ClassVar[EngineNeeds] = EngineNeeds(compute_capability=LEAST_CAPABILITY)
    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob(name="expert_slots", cost="live", low=1),
        Knob(name="kv_tokens", cost="live", low=1),
        Knob(name="strategy", cost="restart", choices=("fused", "offload", "cpu")),
        Knob(name="prefill_chunk_tokens", cost="restart", choices=(256, 512, 1024, 2048, 4096)),
        Knob(name="max_running_requests", cost="restart", low=1, high=64),
        Knob(name="prefix_cache", cost="restart", choices=(True, False)),
        Knob(name="embed_on_host", cost="restart", choices=(True, False)),
        Knob(name="cpu_threads", cost="restart", low=1, high=128),
    )
    is_embedded: ClassVar[bool] = True
    shared_env: ClassVar[dict[str, str]] = SHARED_ENV

    @property
    def memory_model(self) -> NativeMemory:
        """What the engine allocates."""
        return NativeMemory()

    @property
    def limits(self) -> NativeLimits:
        """What the engine can run at all."""
        return NativeLimits()

    def uses_gpu(self, hardware: Hardware, gpu: int | str) -> bool:
        """Where the driver and our torch both can."""
        return can_use_gpu(hardware, gpu)

    def make_launch_spec(
        self,
        plan: Plan,
        *,
        interpreter: str | None = None,
        engine_env: dict[str, str] | None = None,
        extra_args: tuple[str, ...] = (),
        api_key_env: str | None = None,
    ) -> LaunchSpec:
        """`python -m freetoken serve MODEL ...`. Raises UsageError where the checkpoint is not here."""
        if plan.model_path is None:
            raise UsageError(f"`{plan.model_name}` is not on this machine yet", hint="`ft model fetch` gets it")
        arguments = make_arguments(plan)
        if api_key_env is not None:
            arguments += ("--api-key-env", api_key_env)
        return LaunchSpec(
            argv=(interpreter or sys.executable, "-m", "freetoken", "serve", *arguments, *extra_args),
            env={"PYTHONUNBUFFERED": "1", **_import_path(), **(engine_env or {})},
            secret_env=(api_key_env,) if api_key_env else (),
            host=plan.host,
            port=plan.port,
        )

    def classify_failure(self, text: str, exit_code: int | None = None) -> Failure | None:
        """What the log's end means; see `native_log.py`."""
        return classify_log(text, exit_code)


def make_arguments(plan: Plan) -> tuple[str, ...]:
    """The arguments of `ft serve` that carry out `plan`, all explicit."""
    settings = plan.settings
    arguments = [
        str(plan.model_path),
        "--host",
        plan.host,
        "--port",
        str(plan.port),
        "--device",
        settings.device,
        "--strategy",
        settings.strategy,
        "--kv-tokens",
        str(settings.kv_tokens),
        "--max-running-requests",
        str(settings.max_running_requests),
        "--prefill-chunk-tokens",
        str(settings.prefill_chunk_tokens),
        "--max-output-tokens",
        str(plan.max_output_tokens),
        "--served-model-name",
        plan.served_model_name or plan.model_name,
        "--embed-on-host" if settings.embed_on_host else "--no-embed-on-host",
        "--experts-from",
        settings.experts_from or "auto",
        "--no-prefix-cache" if settings.prefix_cache is False else "--prefix-cache",
    ]
    if settings.strategy == "offload":
        arguments += ["--expert-slots", str(settings.expert_slots)]
    if settings.gpu is not None and settings.device == "cuda":
        arguments += ["--gpu", settings.gpu]
    if settings.cpu_threads is not None:
        arguments += ["--cpu-threads", str(settings.cpu_threads)]
    return tuple(arguments)


def _import_path() -> dict[str, str]:
    """`PYTHONPATH` for a package that runs from a checkout without being installed; the run folder is the cwd.

    What the variable already names stays: packages that this process imports may lie there.
    """
    from importlib import metadata, resources

    try:
        metadata.distribution("freetoken-deploy")
    except metadata.PackageNotFoundError:
        ours = str(Path(str(resources.files("freetoken"))).parent)
        others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != ours]
        return {"PYTHONPATH": os.pathsep.join((ours, *others))}
    return {}
