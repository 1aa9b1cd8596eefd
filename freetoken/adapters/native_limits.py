"""What the embedded engine can run at all, and which settings mean nothing to it: refused in words, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.adapters.native_memory import choose_device, has_prefix_reuse
from freetoken.checkpoint.shape import ModelShape
from freetoken.planner.limits import is_older
from freetoken.planner.memory import Finding
from freetoken.planner.plan import PlanRequest

#: Stored formats that `engine/formats.py` reads.
EXPERT_FORMATS = ("f32", "bf16", "f16", "fp8", "fp8_block", "nvfp4", "mxfp4")
DENSE_FORMATS = ("f32", "bf16", "f16", "fp8", "fp8_block", "nvfp4")
#: Families that the test suite holds against `transformers`.
TESTED_FAMILIES = ("qwen3_moe", "qwen3_5_moe", "mixtral", "olmoe", "gpt_oss")
LEAST_CAPABILITY = "7.5"


class NativeLimits:
    """`Limits` of the embedded engine."""

    def findings(self, request: PlanRequest) -> tuple[Finding, ...]:
        """Everything that keeps the embedded engine from running the request, all at once."""
        return (
            *_check_model(request.shape), *_check_files(request), *_check_device(request), *_check_settings(request)
        )  # fmt: skip


def _check_model(shape: ModelShape) -> Iterator[Finding]:
    if shape.file_format != "safetensors":
        yield Finding(
            check="checkpoint_layout",
            message=f"engine `native` loads safetensors, `{shape.name}` is {shape.file_format.upper()}",
            hint="a safetensors checkpoint of the same model; `llamacpp` is the engine for GGUF",
        )
        return
    if shape.experts.count and shape.experts.format not in EXPERT_FORMATS:
        yield Finding(
            check="checkpoint_layout",
            message=f"engine `native` cannot read {shape.experts.format} experts; it reads {', '.join(EXPERT_FORMATS)}",
        )
    for name, group in (("dense", shape.dense), ("shared expert", shape.shared_experts), ("head", shape.head)):
        unknown = sorted(set(group.by_format or ({group.format: 0} if group.bytes else {})) - {*DENSE_FORMATS, "mixed"})
        if unknown:
            yield Finding(
                check="checkpoint_layout", message=f"engine `native` cannot read {', '.join(unknown)} {name} weights"
            )
    if not shape.family.startswith(TESTED_FAMILIES):
        yield Finding(
            check="family",
            is_fatal=False,
            message=f"`{shape.family}` models run on `transformers`' own classes and are not tested with this engine",
        )


def _check_files(request: PlanRequest) -> Iterator[Finding]:
    if request.has_tokenizer is False:
        yield Finding(
            check="tokenizer",
            message=f"the model in {request.model_path} has no tokenizer: `tokenizer.json` is missing",
            hint="copy it from where the model came from; `ft model fetch` brings a whole one",
        )


def _check_device(request: PlanRequest) -> Iterator[Finding]:
    hardware = request.hardware
    try:
        gpu = hardware.pick_gpu(request.recipe.settings.gpu)
    except KeyError:
        return
    if gpu is None:
        return
    if gpu.vendor != "nvidia":
        yield Finding(check="gpu", message=f"`{gpu.name}` is not used: the engine runs on the CPU here", is_fatal=False)
    elif choose_device(request) == "cpu":
        yield Finding(
            check="torch",
            message=f"`{gpu.name}` is not used: this environment's torch is built without CUDA",
            is_fatal=False,
            hint="install a CUDA build of torch",
        )
    elif gpu.compute_capability is not None and is_older(gpu.compute_capability, LEAST_CAPABILITY):
        yield Finding(
            check="gpu_generation",
            is_fatal=False,
            message=f"`{gpu.name}` has compute capability {gpu.compute_capability}; "
            f"current torch builds start at {LEAST_CAPABILITY}",
        )


def _check_settings(request: PlanRequest) -> Iterator[Finding]:
    recipe, settings = request.recipe, request.recipe.settings
    if settings.strategy == "hybrid":
        yield Finding(
            check="strategy",
            message="engine `native` has no `hybrid` strategy yet; it has fused, offload and cpu",
            hint="`--set settings.strategy=offload`",
        )
    if settings.strategy in ("fused", "cpu") and settings.expert_slots != "auto":
        yield Finding(
            check="expert_slots",
            message=f"strategy `{settings.strategy}` has no expert slots",
            hint="`--set settings.expert_slots=auto`, or strategy `offload`",
        )
    nothing = {
        "memory_ratio": "the embedded engine takes sizes, not a share of VRAM",
        "fetch_ratio": "there is no hybrid strategy yet",
        "attention": "attention runs on torch's own kernels",
        "prefill_overlap": "staging buffers always overlap",
        "expert_load": "experts are read as they are needed",
        "cpu_layers": "strategy `cpu` computes all layers on the CPU",
    }
    for name, reason in nothing.items():
        if getattr(settings, name) != "auto":
            yield Finding(
                check=name,
                message=f"`settings.{name}` means nothing to engine `native`: {reason}",
                hint=f"`--set settings.{name}=auto`",
            )
    for name in ("kv_dtype", "state_dtype"):
        if getattr(settings, name) != "model":
            yield Finding(
                check=name,
                message="engine `native` keeps the model's own types; "
                f"`settings.{name}` is `{getattr(settings, name)}`",
                hint=f"`--set settings.{name}=model`",
            )
    if settings.prefix_cache is True and not has_prefix_reuse(request.shape):
        yield Finding(
            check="prefix_cache",
            message=f"prefixes of `{request.shape.name}` cannot be reused: its linear-attention state has no past",
            hint="`--set settings.prefix_cache=auto`",
        )
    if recipe.serve.text_only is False:
        yield Finding(
            check="text_only", message="engine `native` serves text only", hint="`--set serve.text_only=auto`"
        )
    if recipe.engine.extra_args:
        yield Finding(
            check="extra_args", message="engine `native` takes no extra arguments: every setting is a recipe field"
        )
