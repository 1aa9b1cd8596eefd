"""What the upstream engine can run at all: GPU generation, driver and toolchain, checkpoint layout, host, ports."""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.adapters.freetoken_flags import check_version
from freetoken.adapters.freetoken_memory import choose_expert_load
from freetoken.adapters.freetoken_sizes import largest_shard, pin_limit, slot_bytes
from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Gpu
from freetoken.planner.budget import available_ram
from freetoken.planner.limits import is_older
from freetoken.planner.memory import Finding, ResolvedSettings
from freetoken.planner.plan import PlanRequest
from freetoken.planner.repair import model_name
from freetoken.units import format_bytes

LEAST_CAPABILITY, LEAST_DRIVER, LEAST_CUDA = "8.0", "580", "13.0"
MOST_TOP_K = 16
HEAD_DIMS = (64, 128, 256, 512)
#: `config.json` architectures with a MoE that 0.2.1 builds, by the prefix of our family name.
ARCHITECTURES = frozenset(
    {
        "Qwen3MoeForCausalLM",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "GptOssForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Glm5NextForCausalLM",
        "Glm5NextForConditionalGeneration",
        "MiniMaxM2ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "DeepseekV4ForCausalLM",
        "DeepseekV41ForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "FlintForCausalLM",
    }
)
#: Families whose routed experts have a reader, by stored format; bf16 has one everywhere.
EXPERT_READERS: dict[str, tuple[str, ...]] = {
    "nvfp4": (
        "qwen3_5_moe",
        "qwen4_exp",
        "gemma4",
        "glm4_moe",
        "glm_moe_dsa",
        "glm5_next",
        "minimax_m2",
        "minimax_m3",
        "flint",
    ),
    "fp8_block": ("qwen3_5_moe", "glm5_next"),
    "mxfp4": ("gpt_oss",),
    "ds_fp4": ("deepseek_v4",),
}
#: A checkpoint of the same model that loads, where one is known.
WORKING_CHECKPOINT = {
    "qwen3_5_moe": "nvidia/Qwen3.6-35B-A3B-NVFP4 (NVFP4 experts)",
    "qwen3_moe": "the bf16 checkpoint of the same model",
    "gpt_oss": "openai/gpt-oss-20b (MXFP4)",
}
#: The card of a GGUF of the same model.
GGUF_CARD = {"qwen3_5_moe": "qwen3.6-35b-a3b-q4_k_m"}
#: Where the embedded engine's torch starts.
NATIVE_CAPABILITY = "7.5"
CPU_EXPERT_FORMATS = ("bf16", "fp8_block", "nvfp4", "mxfp4", "ds_fp4", "gguf")


class FreetokenLimits:
    """`Limits` of the upstream engine."""

    def findings(self, request: PlanRequest) -> tuple[Finding, ...]:
        """Everything that keeps this engine from running the request here, all at once."""
        return (
            *_check_gpu(request),
            *_check_software(request),
            *_check_model(request.shape),
            *_check_settings(request),
            *check_version(request),
            *_check_host(request),
        )


def _check_gpu(request: PlanRequest) -> Iterator[Finding]:
    try:
        gpu = request.hardware.pick_gpu(request.recipe.settings.gpu)
    except KeyError:
        return  # the request's own check names it
    other = describe_other_engine(request, gpu)
    if gpu is None:
        yield Finding(check="gpu", message="engine `freetoken` needs an NVIDIA GPU and there is none here", hint=other)
    elif gpu.vendor != "nvidia":
        yield Finding(check="gpu", message=f"engine `freetoken` needs an NVIDIA GPU, this is `{gpu.name}`", hint=other)
    else:
        yield from _check_generation(gpu, other)
    if request.hardware.os.name != "linux" or request.hardware.os.arch not in ("x86_64", "amd64"):
        where = f"{request.hardware.os.name} {request.hardware.os.arch}"
        yield Finding(check="os", message=f"engine `freetoken` runs on Linux x86_64 (WSL2 included), this is {where}")


def describe_other_engine(request: PlanRequest, gpu: Gpu | None) -> str:
    """The engine that does work on a card (or without one) that this one cannot use, as a command that plans for it.

    Not a `--set`: what the recipe asks of the machine may stand in the way of another engine too.
    """
    model = model_name(request)
    native = f"`ft plan {model} --engine native` plans for the engine that runs anywhere"
    if gpu is None or gpu.vendor != "nvidia" or gpu.compute_capability is None:
        return native if gpu is None else f"{native}, on the CPU here; llama.cpp has builds for such a card"
    if not is_older(gpu.compute_capability, NATIVE_CAPABILITY):
        return native
    # Before Turing there is no torch build any more; llama.cpp's kernels go back to Maxwell.
    gguf = next((name for family, name in GGUF_CARD.items() if request.shape.family.startswith(family)), None)
    if request.shape.file_format == "gguf":
        gguf = model
    if gguf is None:
        return f"llama.cpp with a GGUF of the same model runs on this card; {native}, on the CPU here"
    return f"`ft plan {gguf} --engine llamacpp` plans for llama.cpp, whose GGUF kernels run on this card"


def _check_generation(gpu: Gpu, hint: str) -> Iterator[Finding]:
    if gpu.compute_capability is not None and is_older(gpu.compute_capability, LEAST_CAPABILITY):
        yield Finding(
            check="gpu_generation",
            message=f"`{gpu.name}` has compute capability {gpu.compute_capability}; engine `freetoken` needs "
            f"{LEAST_CAPABILITY} (Ampere) or newer",
            hint=hint,
        )
    elif gpu.compute_capability is None:
        yield Finding(
            check="gpu_generation", message=f"compute capability of `{gpu.name}` is not known", is_fatal=False
        )


def _check_software(request: PlanRequest) -> Iterator[Finding]:
    """Absent on this very machine is a no for the driver; the toolchain and a silent profile deserve a word."""
    software, is_here = request.hardware.software, request.hardware.is_probed
    if not any(gpu.vendor == "nvidia" for gpu in request.hardware.gpus):
        return  # no driver and no toolkit would help
    if software.driver is None:
        if is_here:
            yield Finding(
                check="driver", message=f"no NVIDIA driver found; engine `freetoken` needs r{LEAST_DRIVER} or newer"
            )
        else:
            yield Finding(
                check="driver",
                message=f"needs driver r{LEAST_DRIVER} or newer; the profile does not say",
                is_fatal=False,
            )
    elif is_older(software.driver, LEAST_DRIVER):
        yield Finding(
            check="driver",
            message=f"driver {software.driver} is too old; engine `freetoken` needs r{LEAST_DRIVER} (CUDA 13) or newer",
            hint="install driver 580 or newer",
        )
    if software.cuda_toolkit is not None and is_older(software.cuda_toolkit, LEAST_CUDA):
        yield Finding(
            check="cuda",
            message=f"nvcc is of CUDA {software.cuda_toolkit}; the engine compiles kernels with CUDA 13",
            is_fatal=False,
            hint="install the CUDA 13 toolkit, or set CUDA_HOME to it",
        )
    tools = {"nvcc": software.nvcc, "g++": software.gxx, "ninja": software.ninja}
    missing = [name for name, found in tools.items() if found is None]
    if missing:
        where = "on this machine" if is_here else "in the profile"
        yield Finding(
            check="toolchain",
            is_fatal=False,
            message=f"{', '.join(missing)} not found {where}; the engine compiles kernels at its first start",
            hint="install the CUDA 13 toolkit, g++ and ninja",
        )


def _check_model(shape: ModelShape) -> Iterator[Finding]:
    experts, attention = shape.experts, shape.attention
    working = next((name for family, name in WORKING_CHECKPOINT.items() if shape.family.startswith(family)), None)
    hint = f"a checkpoint that works: {working}" if working else "engine `native`, where it knows the format"
    if experts.count == 0:
        yield Finding(
            check="model", message=f"`{shape.name}` has no routed experts: it is not a Mixture-of-Experts model"
        )
        return
    is_gguf = shape.file_format == "gguf"
    if not is_gguf and shape.architecture not in ARCHITECTURES:
        yield Finding(
            check="architecture",
            message=f"engine `freetoken` does not know the architecture `{shape.architecture}`",
            hint=hint,
        )
    elif not is_gguf and not _has_reader(shape):
        yield Finding(
            check="checkpoint_layout",
            message=f"engine `freetoken` has no reader for {experts.format} experts of `{shape.family}` models",
            hint=hint,
        )
    if experts.top_k > MOST_TOP_K:
        yield Finding(
            check="top_k", message=f"{experts.top_k} experts a token; the slot cache takes at most {MOST_TOP_K}"
        )
    if attention.head_dim not in HEAD_DIMS and not attention.count("mla"):
        known = ", ".join(str(one) for one in HEAD_DIMS)
        yield Finding(check="head_dim", message=f"head dimension {attention.head_dim}; the kernels know {known}")


def _has_reader(shape: ModelShape) -> bool:
    stored = shape.experts.format
    if stored in ("bf16", "f16", "f32"):
        return True
    return shape.family.startswith(EXPERT_READERS.get(stored, ("\0",)))


def _check_settings(request: PlanRequest) -> Iterator[Finding]:
    settings, shape, engine = request.recipe.settings, request.shape, request.recipe.engine
    if settings.kv_dtype != "model":
        yield Finding(
            check="kv_dtype",
            message=f"engine `freetoken` never quantises its KV cache; `settings.kv_dtype` is `{settings.kv_dtype}`",
            hint="`--set settings.kv_dtype=model`",
        )
    if settings.embed_on_host is True and shape.tie_embeddings:
        yield Finding(
            check="embed_on_host",
            message="the embedding is tied to the output head and cannot live on the host",
            hint="`--set settings.embed_on_host=auto`",
        )
    if settings.strategy in ("cpu", "hybrid") and shape.experts.format not in CPU_EXPERT_FORMATS:
        yield Finding(
            check="strategy",
            message=f"strategy `{settings.strategy}` cannot compute {shape.experts.format} experts on the CPU",
            hint="`--set settings.strategy=offload`",
        )
    if settings.fetch_ratio != "auto" and settings.strategy not in ("auto", "hybrid"):
        yield Finding(
            check="fetch_ratio",
            message=f"`settings.fetch_ratio` means nothing with strategy `{settings.strategy}`",
            hint="`--set settings.fetch_ratio=auto`",
        )
    elif settings.fetch_ratio != "auto":
        yield Finding(
            check="fetch_ratio",
            message="a fixed `settings.fetch_ratio` needs a bench file that this version does not write yet",
            hint="`--set settings.fetch_ratio=auto`",
        )
    if settings.strategy == "hybrid":
        yield Finding(
            check="hybrid",
            is_fatal=False,
            message="without a row of this shape in the engine's own bench file, hybrid fetches one miss a layer only: "
            "a third of the speed",
        )
    key = request.recipe.serve.api_key_env
    if key not in (None, "FREETOKEN_API_KEY"):
        yield Finding(
            check="api_key",
            message=f"engine `freetoken` reads its key from FREETOKEN_API_KEY, the recipe names `{key}`",
            hint="`--set serve.api_key_env=FREETOKEN_API_KEY`",
        )
    ours = sorted({"PYTHONPATH", "PYTHONHOME"} & set(engine.env))
    if ours:
        yield Finding(
            check="engine_env",
            message=f"`engine.env` may not set {', '.join(f'`{one}`' for one in ours)}: that is a fact of one machine",
            hint="`engines: {freetoken: {python: PATH, pythonpath: PATH}}` in <state>/local.yaml",
        )
    reserved = ("--host", "--port", "--model", "--model-path", "--api-key")
    for argument in engine.extra_args:
        if argument.split("=")[0] in reserved:
            yield Finding(
                check="extra_args", message=f"`engine.extra_args` may not hold `{argument}`: a recipe field sets it"
            )


def _check_host(request: PlanRequest) -> Iterator[Finding]:
    isa = {one.lower() for one in request.hardware.cpu.isa}
    wants_cpu = request.recipe.settings.strategy in ("cpu", "hybrid")
    if isa and "avx2" not in isa and wants_cpu:
        yield Finding(
            check="cpu_isa", message=f"strategy `{request.recipe.settings.strategy}` needs AVX2, which this CPU lacks"
        )
    limit, bank = pin_limit(request), slot_bytes(request.shape) * request.shape.experts.count
    if limit is not None and bank > limit:
        yield Finding(
            check="pin_ceiling",
            is_fatal=False,
            message=f"{format_bytes(bank)} of experts are to be page-locked, about {format_bytes(limit)} may be; "
            "the layers beyond that are computed on the CPU",
        )
    yield from _check_loading(request)
    if request.recipe.serve.port + 1 > 65535:
        yield Finding(check="port", message="`serve.port` + 1 is taken too and does not exist")


def _check_loading(request: PlanRequest) -> Iterator[Finding]:
    """A word where RAM makes the start a slow one; the rule is the one that the plan follows."""
    wanted, shape = request.recipe.settings, request.shape
    if wanted.expert_load != "auto" or wanted.strategy == "fused" or not shape.experts.count:
        return
    settings = ResolvedSettings(kv_tokens=1, strategy="offload", embed_on_host=wanted.embed_on_host is True)
    if shape.experts.is_stacked or choose_expert_load(request, settings) != "serial":
        return
    yield Finding(
        check="expert_load",
        is_fatal=False,
        message=f"experts are loaded serially, which takes longer: {format_bytes(available_ram(request))} of RAM are "
        f"available, the parallel loader holds the banks and up to four files of {format_bytes(largest_shard(shape))}",
    )
