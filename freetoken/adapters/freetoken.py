"""The upstream engine `freetoken`: MoE offload for NVIDIA cards, in an environment of its own.

It is called by that environment's interpreter, in the run folder and with `PYTHONPATH` and `PYTHONHOME` cleared, so
that our package of the same name never shadows it. Every flag that the plan decides is emitted, none is left to its
automatic rules: those fill VRAM without charging workspace, graphs or prefill. Versions differ in their flags
(`freetoken_flags.py`); what one does not know is said in its older form, or was refused before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from freetoken.adapters.base import Capability, DefaultSlots, EngineAdapter, EngineNeeds, Failure, Knob, LaunchSpec
from freetoken.adapters.freetoken_flags import OLDEST, has_flag
from freetoken.adapters.freetoken_limits import LEAST_CAPABILITY, LEAST_CUDA, LEAST_DRIVER, FreetokenLimits
from freetoken.adapters.freetoken_memory import FreetokenMemory, choose_attention
from freetoken.adapters.log_patterns import ANSI
from freetoken.adapters.shared import FREETOKEN_ARGS, FREETOKEN_ENV
from freetoken.checkpoint.shape import ModelShape
from freetoken.errors import UsageError
from freetoken.planner.memory import ResolvedSettings
from freetoken.planner.plan import Plan, PlanRequest
from freetoken.units import GIB

if TYPE_CHECKING:
    from freetoken.adapters.replies import MoeHits

#: Strategies that decode out of slots, so that their number is told.
SLOT_STRATEGIES = ("offload", "hybrid")
RESOLVED = re.compile(r"Resolved config: moe_strategy='([^']+)', attention_backend='([^']+)'")


class FreetokenAdapter(EngineAdapter):
    """The upstream FreeToken engine."""

    name: ClassVar[str] = "freetoken"
    title: ClassVar[str] = "FreeToken (NVIDIA, experts offloaded to host RAM)"
    #: Its API on `serve.port`, its workers on the next.
    port_count: ClassVar[int] = 2
    known_versions: ClassVar[str] = f">={OLDEST},<0.3"
    distribution: ClassVar[str | None] = "freetoken"
    installable: ClassVar[tuple[str, ...]] = ("0.2.1", "0.2.0", "0.1.3", "0.1.2")
    #: PyTorch with its CUDA 13 libraries is most of it, twice while pip unpacks what it has downloaded.
    install_bytes: ClassVar[dict[str, int]] = {"": 9 * GIB, "accel": 12 * GIB}
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {"live_resize", "cache_flush", "hit_counters", "text_only"}
    )
    needs: ClassVar[EngineNeeds] = EngineNeeds(
        compute_capability=LEAST_CAPABILITY,
        driver=LEAST_DRIVER,
        cuda_toolkit=LEAST_CUDA,
        tools=("nvcc", "g++", "ninja"),
    )
    shared_args: ClassVar[dict[str, str]] = FREETOKEN_ARGS
    shared_env: ClassVar[dict[str, str]] = FREETOKEN_ENV
    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob(name="expert_slots", cost="live", low=1),
        Knob(name="kv_tokens", cost="live", low=1),
        Knob(name="strategy", cost="restart", choices=("fused", "offload", "hybrid", "cpu")),
        Knob(name="prefill_chunk_tokens", cost="restart", choices=(512, 1024, 2048, 4096, 8192)),
        Knob(name="memory_ratio", cost="restart", low=0.5, high=1.0),
        Knob(name="max_running_requests", cost="restart", low=1, high=64),
        # FlashInfer is an extra of the engine's distribution: `ft engine install freetoken --accel`.
        Knob(name="attention", cost="restart", choices=("triton", "fi"), packages={"fi": "flashinfer"}),
        Knob(name="prefill_overlap", cost="restart", choices=(True, False)),
        Knob(name="prefix_cache", cost="restart", choices=(True, False)),
        Knob(name="embed_on_host", cost="restart", choices=(True, False)),
        Knob(name="expert_load", cost="restart", choices=("serial", "parallel")),
        Knob(name="cpu_layers", cost="restart", low=0),
        Knob(name="cpu_threads", cost="restart", low=1, high=128),
        Knob(name="state_dtype", cost="restart", choices=("float32", "bfloat16", "float16"), changes_answers=True),
    )

    @property
    def memory_model(self) -> FreetokenMemory:
        """What the engine allocates."""
        return FreetokenMemory()

    @property
    def limits(self) -> FreetokenLimits:
        """What the engine can run at all."""
        return FreetokenLimits()

    def make_launch_spec(
        self,
        plan: Plan,
        *,
        interpreter: str | None = None,
        engine_env: dict[str, str] | None = None,
        extra_args: tuple[str, ...] = (),
        api_key_env: str | None = None,
    ) -> LaunchSpec:
        """`<interpreter> -m freetoken.cli serve ...`. Raises UsageError without an interpreter or a checkpoint."""
        if interpreter is None:
            raise UsageError(
                "engine `freetoken` has no environment here: its interpreter is not known",
                hint="`ft engine install freetoken`, or name one in <state>/local.yaml: "
                "`engines: {freetoken: {python: /path/to/bin/python}}`",
            )
        if plan.model_path is None:
            raise UsageError(f"`{plan.model_name}` is not on this machine yet", hint="`ft model fetch` gets it")
        return LaunchSpec(
            argv=(interpreter, "-m", "freetoken.cli", "serve", *make_arguments(plan), *extra_args),
            env={"PYTHONUNBUFFERED": "1", **_environment(plan), **(engine_env or {})},
            unset_env=("PYTHONPATH", "PYTHONHOME", *_hiding(plan)),
            # The engine reads its key from FREETOKEN_API_KEY; its limits refuse another name.
            secret_env=(api_key_env,) if api_key_env else (),
            host=plan.host,
            port=plan.port,
            extra_ports=tuple(plan.port + index for index in range(1, self.port_count)),
            # It cuts `max_tokens` down to what the KV pool holds and tells nobody but its log.
            shortened_log=r"Adjust max_tokens to \d+",
        )

    def classify_failure(self, text: str, exit_code: int | None = None) -> Failure | None:
        """What the log's end means; see `freetoken_log.py`."""
        # Here and below: what reads logs is imported for a log, a plan has none.
        from freetoken.adapters.freetoken_log import classify_log

        return classify_log(text, exit_code)

    def measure_lines(self, plan: Plan, log: str, reserved_bytes: int) -> dict[str, int]:
        """Context, allocator, graphs and prefill of a start; see `freetoken_measure.py`."""
        from freetoken.adapters.freetoken_measure import measure_lines

        return measure_lines(plan, log, reserved_bytes)

    def default_attention(self, shape: ModelShape) -> str:
        """As the plan chooses it."""
        return choose_attention(shape)

    def default_settings(self, request: PlanRequest) -> dict[str, object]:
        """As the engine starts without flags: the largest chunk, all on the GPU, a strategy by bandwidth alone."""
        known = request.hardware.bandwidth
        link, cpu = known.h2d_overlap_bytes_per_s, known.cpu_experts_overlap_bytes_per_s
        strategy = "hybrid" if link and cpu and cpu > 2.0 * link else "offload"
        return {
            "strategy": strategy,
            "prefill_chunk_tokens": 8192,
            "prefill_overlap": True,
            "prefix_cache": True,
            "embed_on_host": False,
            "max_running_requests": 4,
        }

    def default_slots(self, request: PlanRequest, settings: ResolvedSettings) -> DefaultSlots | None:
        """By the engine's rule at its own memory ratio: nothing is left for workspace, graphs or a prefill chunk."""
        return self.memory_model.default_slots(request, settings)

    def parse_effective(self, log: str) -> dict[str, str]:
        """Strategy and attention backend as the engine resolved them; the API does not tell them."""
        found = RESOLVED.search(ANSI.sub("", log))
        return {} if found is None else {"strategy": found[1], "attention": found[2]}

    def parse_compile_s(self, log: str) -> float:
        """What a first start spends on kernels: graph capture and warm-up beyond what a cached one takes."""
        from freetoken.adapters.freetoken_log_facts import parse_compile_s

        return parse_compile_s(log)

    def parse_hits(self, log: str, slot_bytes: int = 0) -> MoeHits | None:
        """Lookups of the decode steps whose `--moe-collect-stats` lines are in `log`."""
        from freetoken.adapters.freetoken_log_facts import parse_hits

        return parse_hits(log, slot_bytes)

    def live_changes(self, old: ResolvedSettings, new: ResolvedSettings) -> tuple[str, ...] | None:
        """As for every engine, less what counts at the start alone.

        Loading mode and overlap follow from what was free at the start; a resize is held to the ratio of the start, so
        that a lower one asks for nothing.
        """
        update: dict[str, object] = {"expert_load": old.expert_load, "prefill_overlap": old.prefill_overlap}
        if (old.memory_ratio or 0) >= (new.memory_ratio or 0):
            update["memory_ratio"] = old.memory_ratio
        return super().live_changes(old, new.model_copy(update=update))


def make_arguments(plan: Plan) -> tuple[str, ...]:
    """The flags of `serve` that carry out `plan`, all explicit and known to the plan's engine version."""
    settings, version = plan.settings, plan.engine_version
    pairs = {
        "--model-path": plan.model_path or "",
        "--host": plan.host,
        "--port": str(plan.port),
        "--served-model-name": plan.served_model_name or plan.model_name,
        "--max-output-tokens": str(plan.max_output_tokens),
        "--moe-strategy" if has_flag("--moe-strategy", version) else "--moe-backend": settings.strategy,
        "--num-tokens": str(settings.kv_tokens),
        "--kv-reserve-tokens": str(settings.kv_tokens),
        "--max-prefill-length": str(settings.prefill_chunk_tokens),
        "--max-running-requests": str(settings.max_running_requests),
        "--memory-ratio": f"{settings.memory_ratio or 0.9:g}",
        "--attention-backend": settings.attention or "auto",
        "--embed-weights": "host" if settings.embed_on_host else "gpu",
        "--cache-type": "naive" if settings.prefix_cache is False else "radix",
        "--gpu": settings.gpu,
        **_slot_pairs(settings),
        "--expert-load": settings.expert_load,
        "--moe-cpu-threads": None if settings.cpu_threads is None else str(settings.cpu_threads),
    }
    alone = {
        "--moe-collect-stats": settings.strategy != "fused",
        "--disable-moe-prefill-overlap": settings.strategy in SLOT_STRATEGIES and settings.prefill_overlap is False,
        "--text-model-only": bool(settings.text_only),
    }
    known = [(flag, value) for flag, value in pairs.items() if value is not None and has_flag(flag, version)]
    flags = [flag for flag, is_wanted in alone.items() if is_wanted and has_flag(flag, version)]
    return (*(part for pair in known for part in pair), *flags)


def _slot_pairs(settings: ResolvedSettings) -> dict[str, str | None]:
    if settings.strategy not in SLOT_STRATEGIES:
        return {}
    layers = str(settings.cpu_layers) if settings.cpu_layers else None
    return {"--moe-cache-size": str(settings.expert_slots), "--moe-cpu-layers": layers}


def _hiding(plan: Plan) -> tuple[str, ...]:
    """Variables that would hide the planned GPU: beside a list of indices the engine refuses one named by its uuid."""
    return ("CUDA_VISIBLE_DEVICES",) if plan.settings.gpu is not None and has_flag("--gpu", plan.engine_version) else ()


def _environment(plan: Plan) -> dict[str, str]:
    found: dict[str, str] = {}
    if plan.settings.state_dtype != "model":
        found["FREETOKEN_MAMBA_SSM_DTYPE"] = plan.settings.state_dtype
    if plan.settings.gpu is not None and not has_flag("--gpu", plan.engine_version):
        found["CUDA_VISIBLE_DEVICES"] = plan.settings.gpu
    return found
