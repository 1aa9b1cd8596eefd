"""`llama.cpp`, for planning: would a GGUF fit, with how many layers' experts on the CPU, and how fast.

Launching it comes later; until then a launch is refused in a sentence that holds the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from freetoken.adapters.base import EngineAdapter, EngineNeeds, Failure, Knob, LaunchSpec
from freetoken.adapters.llamacpp_memory import LlamaCppMemory
from freetoken.adapters.log_patterns import CUDA_OOM, Pattern, classify, make_cuda_oom, say
from freetoken.adapters.shared import LLAMACPP_ARGS, LLAMACPP_ENV
from freetoken.errors import UsageError
from freetoken.planner.memory import Finding
from freetoken.planner.plan import Plan, PlanRequest
from freetoken.planner.repair import model_name
from freetoken.units import MIB


class LlamaCppAdapter(EngineAdapter):
    """llama.cpp's server."""

    name: ClassVar[str] = "llamacpp"
    title: ClassVar[str] = "llama.cpp (GGUF; planned only, not launched by this version)"
    is_launched: ClassVar[bool] = False
    needs: ClassVar[EngineNeeds] = EngineNeeds(compute_capability="5.0")
    shared_args: ClassVar[dict[str, str]] = LLAMACPP_ARGS
    shared_env: ClassVar[dict[str, str]] = LLAMACPP_ENV
    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob(name="cpu_layers", cost="restart", low=0),
        Knob(name="kv_tokens", cost="restart", low=1),
        Knob(name="prefill_chunk_tokens", cost="restart", choices=(512, 1024, 2048)),
        Knob(name="max_running_requests", cost="restart", low=1, high=64),
        Knob(name="cpu_threads", cost="restart", low=1, high=128),
        Knob(name="kv_dtype", cost="restart", choices=("model", "fp8"), changes_answers=True),
    )

    @property
    def memory_model(self) -> LlamaCppMemory:
        """What the engine allocates."""
        return LlamaCppMemory()

    @property
    def limits(self) -> LlamaCppLimits:
        """What the engine can run at all."""
        return LlamaCppLimits()

    def make_launch_spec(self, plan: Plan, *, interpreter: str | None = None, engine_env: dict[str, str] | None = None,
                         extra_args: tuple[str, ...] = (), api_key_env: str | None = None) -> LaunchSpec:  # fmt: skip
        """Never: this version plans for llama.cpp and does not start it. Raises UsageError."""
        raise UsageError(
            "engine `llamacpp` can be planned for, and not yet be started, by this version",
            hint="`llama-server " + " ".join(make_arguments(plan)) + "` is what the plan comes to",
        )

    def classify_failure(self, text: str, exit_code: int | None = None) -> Failure | None:
        """What the log's end means; None where nothing is recognised."""
        found = classify(text, PATTERNS)
        if found is not None:
            return found
        if exit_code in (-9, 137):
            return Failure(kind="killed", cause="killed from outside, most likely for memory", line="expert_banks")
        return Failure(kind="bad_flag", cause="the command line was refused") if exit_code == 2 else None


def make_arguments(plan: Plan) -> tuple[str, ...]:
    """The flags of `llama-server` that carry out `plan`."""
    settings = plan.settings
    arguments = ["-m", plan.model_path or f"{plan.model_name}.gguf", "-ngl", "99", "-c", str(settings.kv_tokens)]
    if settings.cpu_layers:
        arguments += ["--n-cpu-moe", str(settings.cpu_layers)]
    if settings.kv_dtype == "fp8":
        arguments += ["-ctk", "q8_0", "-ctv", "q8_0"]
    arguments += ["-ub", str(settings.prefill_chunk_tokens), "-np", str(settings.max_running_requests)]
    if settings.cpu_threads:
        arguments += ["-t", str(settings.cpu_threads)]
    return (*arguments, "--host", plan.host, "--port", str(plan.port))


class LlamaCppLimits:
    """`Limits` of llama.cpp."""

    def findings(self, request: PlanRequest) -> tuple[Finding, ...]:
        """Everything that keeps llama.cpp from running the request, all at once."""
        return tuple(_findings(request))


def _findings(request: PlanRequest) -> Iterator[Finding]:
    shape, settings = request.shape, request.recipe.settings
    if shape.file_format != "gguf":
        yield Finding(
            check="checkpoint_layout",
            message=f"engine `llamacpp` loads GGUF, `{shape.name}` is {shape.file_format}",
            hint="a GGUF of the same model, or engine `freetoken` or `native`",
        )
    if not request.hardware.gpus:
        message = "planning of engine `llamacpp` needs a GPU; on a CPU alone, engine `native` is planned"
        yield Finding(check="gpu", message=message, hint=f"`ft plan {model_name(request)} --engine native`")
    if settings.strategy in ("offload", "hybrid"):
        yield Finding(
            check="strategy",
            message=f"engine `llamacpp` places experts by layer and has no strategy `{settings.strategy}`",
            hint="`--set settings.strategy=auto`",
        )
    nothing = ("expert_slots", "memory_ratio", "fetch_ratio", "attention", "prefill_overlap", "expert_load")
    for name in (one for one in nothing if getattr(settings, one) != "auto"):
        message = f"`settings.{name}` means nothing to engine `llamacpp`"
        yield Finding(check=name, message=message, hint=f"`--set settings.{name}=auto`")
    if settings.embed_on_host is False:
        message = "engine `llamacpp` keeps the token embedding on the CPU"
        yield Finding(check="embed_on_host", message=message, hint="`--set settings.embed_on_host=auto`")
    if settings.state_dtype != "model":
        message = (
            f"engine `llamacpp` keeps its recurrent state in fp32; `settings.state_dtype` is `{settings.state_dtype}`"
        )
        yield Finding(check="state_dtype", message=message, hint="`--set settings.state_dtype=model`")


def _buffer(match: re.Match[str], text: str) -> Failure:
    return Failure(
        kind="vram_oom",
        cause=f"a buffer of {match[1]} MiB could not be allocated on the GPU",
        line="prefill_transient",
        missing_bytes=int(float(match[1]) * MIB),
        field="settings.cpu_layers",
        hint="more layers on the CPU, or a smaller physical batch",
    )


def _cuda_oom(match: re.Match[str], text: str) -> Failure:
    return make_cuda_oom(
        match, text, line="expert_slots", field="settings.cpu_layers", hint="more layers on the CPU, or fewer KV tokens"
    )


PATTERNS: tuple[Pattern, ...] = (
    Pattern(re.compile(r"allocating ([\d.]+) MiB on device \d+: cudaMalloc failed"), _buffer),
    Pattern(CUDA_OOM, _cuda_oom),
    say(
        r"unknown model architecture: '([^']+)'",
        "unsupported",
        "llama.cpp does not know the architecture `{1}`",
        field="model",
    ),
    say(
        r"(?:failed to load model|invalid magic|tensor '[^']+' data is not within the file bounds)",
        "bad_checkpoint",
        "the GGUF cannot be read",
        field="model",
        hint="`ft model verify` checks the file",
    ),
    say(r"address already in use|couldn't bind", "port_taken", "the port is taken", field="serve.port", flags=re.I),
    say(r"error: invalid argument: (.*)", "bad_flag", "llama.cpp does not know {1}", field="engine.extra_args"),
)
