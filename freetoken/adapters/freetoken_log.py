"""What the upstream engine's log and error replies mean: cause, ledger line, exact bytes, recipe field.

The engine's own advice is not repeated where the ledger contradicts it: it tells users to raise the memory ratio,
which makes a workspace or prefill failure worse and cannot mend a negative budget.
"""

from __future__ import annotations

import re

from freetoken.adapters.base import Failure
from freetoken.adapters.freetoken_refusals import HOST_PATTERNS, LATE_PATTERNS, REFUSALS
from freetoken.adapters.log_patterns import CUDA_OOM, Pattern, classify, gib, make_cuda_oom, say
from freetoken.units import format_bytes

#: Where in the start the last known message stands -> (ledger line, recipe field, what to do).
STAGES: tuple[tuple[str, str, str, str], ...] = (
    (
        r"float_workspace|flashinfer|workspace_buffer",
        "attention_workspace",
        "settings.attention",
        "`--set settings.attention=triton`; a higher memory_ratio makes it worse",
    ),
    (
        r"Prefill batch|Decode batch|(?<!after )prefill(?! warmup)|extend|GatedDeltaNet|GDN|causal_conv",
        "prefill_transient",
        "settings.prefill_chunk_tokens",
        "a smaller chunk or fewer slots; a higher memory_ratio makes it worse",
    ),
    (
        r"LinearStatePool|linear_state|mamba pool",
        "linear_state",
        "settings.max_running_requests",
        "`--set settings.max_running_requests=1`",
    ),
    (r"Prefill warmup|autotun|do_bench", "autotune_scratch", "settings.expert_slots", "fewer expert slots"),
    (
        r"capturing CUDA graphs|Capturing graphs|cuda_graph",
        "cuda_graphs",
        "settings.expert_slots",
        "fewer expert slots, or fewer requests at once",
    ),
    (
        r"Allocating \d+ tokens for KV cache|kv_cache|KV pool",
        "kv_cache",
        "settings.kv_tokens",
        "fewer slots or KV tokens",
    ),
    (
        r"MoE slot pools|slot_cache|set_bank_sources|moe_cache",
        "expert_slots",
        "settings.expert_slots",
        "fewer expert slots",
    ),
    (
        r"Loading weights|load_weights|Free memory before loading model",
        "dense_weights",
        "settings.embed_on_host",
        "`--set settings.embed_on_host=true`",
    ),
)


def classify_log(text: str, exit_code: int | None = None) -> Failure | None:
    """The failure at the end of the engine's log or in its error reply; None where nothing is recognised."""
    found = classify(text, PATTERNS)
    if found is not None:
        return found
    if exit_code == 2:
        return Failure(
            kind="bad_flag", cause="the engine refused its command line (exit code 2)", field="engine.extra_args"
        )
    if exit_code in (-9, 137):
        return Failure(
            kind="killed", cause="the engine was killed from outside, most likely for memory", line="expert_banks"
        )
    return None


def _cuda_oom(match: re.Match[str], text: str) -> Failure:
    after = text[match.start() :]
    before = text[max(0, match.start() - 6000) : match.start()]
    line, field, hint = _stage(before, after)
    return make_cuda_oom(match, text, line=line, field=field, hint=hint)


def _stage(before: str, after: str) -> tuple[str, str, str]:
    """Which allocation died: by what the message or its traceback names, else by the last milestone before it."""
    workspace = STAGES[0]
    if re.search(workspace[0], after[:3000], re.I) or re.search(workspace[0], before[-3000:], re.I):
        return workspace[1:]
    # The innermost frame that says something; indented lines are the traceback's.
    trace = "\n".join(line for line in after[:6000].splitlines() if line.startswith("  "))
    for text in (trace, before):
        best = max(STAGES[1:], key=lambda stage: _last(stage[0], text))
        if _last(best[0], text) >= 0:
            return best[1:]
    return "expert_slots", "settings.expert_slots", "fewer expert slots"


def _last(pattern: str, text: str) -> int:
    position = -1
    for found in re.finditer(pattern, text, re.I):
        position = found.start()
    return position


def _plan_floor(match: re.Match[str], text: str) -> Failure:
    slots, pages, needed, budget = (int(match[i]) for i in range(1, 5))
    missing = needed - budget
    advice = "a smaller state pool (`--set settings.max_running_requests=1`), or `--set settings.embed_on_host=true`"
    if budget >= 0:
        advice += "; a higher memory_ratio, as the engine advises, takes the room of workspace, graphs and prefill"
    else:
        advice += "; no memory_ratio helps, since weights and state alone exceed the budget"
    return Failure(
        kind="plan_floor",
        line="expert_slots",
        missing_bytes=missing,
        field="settings.max_running_requests",
        hint=advice,
        cause=f"the least plan ({slots} slots, {pages} KV pages) needs {format_bytes(needed)}, the budget is "
        f"{format_bytes(budget)}: {format_bytes(missing)} are missing",
    )


def _kv_floor(match: re.Match[str], text: str) -> Failure:
    return Failure(
        kind="kv_floor",
        line="kv_cache",
        field="settings.expert_slots",
        hint="fewer expert slots leave room for the KV cache; fewer pages, as the engine advises, cut the context",
        cause="no memory is left for the KV cache after the expert slots",
    )


def _rejected(match: re.Match[str], text: str) -> Failure:
    # Both figures are rounded to a hundredth: what is missing may be that much more.
    missing = gib(match[3]) - gib(match[4]) + gib("0.01")
    return Failure(
        kind="plan_floor",
        line="expert_slots",
        missing_bytes=max(0, missing),
        field="settings.expert_slots",
        cause=f"{match[1]} slots and {match[2]} KV tokens need {match[3]} GiB, the budget is {match[4]} GiB; "
        "the old cache was kept",
        hint="fewer expert slots or KV tokens",
    )


def _few_slots(match: re.Match[str], text: str) -> Failure:
    return Failure(
        kind="plan_floor",
        line="expert_slots",
        field="settings.expert_slots",
        cause=f"{match[1]} expert slots are fewer than the {match[2]} experts of a layer",
        hint=f"`--set settings.expert_slots={match[2]}`",
    )


def _overlap(match: re.Match[str], text: str) -> Failure:
    return Failure(
        kind="plan_floor",
        line="expert_slots",
        field="settings.prefill_overlap",
        hint="`--set settings.prefill_overlap=false`",
        cause="prefill overlap borrows two layers of expert slots and there are fewer",
    )


def _pin(match: re.Match[str], text: str) -> Failure:
    needed, budget = gib(match[1]), gib(match[2])
    return Failure(
        kind="pin_refused",
        line="expert_banks",
        missing_bytes=max(0, needed - budget),
        field="settings.cpu_layers",
        cause=f"{match[1]} GiB of experts are to be page-locked, {match[2]} GiB may be",
        hint="`--set settings.cpu_layers=auto` computes the layers beyond the limit on the CPU",
    )


PATTERNS: tuple[Pattern, ...] = (
    Pattern(r"minimum plan \(moe=(\d+) slots, kv=(\d+) pages\) needs (-?\d+) B > budget (-?\d+) B", _plan_floor),
    Pattern(r"moe_cache_size=(\d+) is too small: need at least num_experts=(\d+)", _few_slots),
    Pattern(r"Prefill overlap borrows two full expert-layer buffers", _overlap),
    Pattern(r"not enough memory for KV cache|Not enough memory for KV cache", _kv_floor),
    Pattern(
        r"requested cache \(moe=(\d+) slots, kv=(\d+) pages.*?\) needs ([\d.]+) GiB > budget (-?[\d.]+) GiB",
        _rejected,
    ),
    Pattern(r"expert banks need ([\d.]+) GiB of pinned host RAM but the pin budget is ([\d.]+) GiB", _pin),
    *HOST_PATTERNS,
    say(
        r"PinFailed|cudaHostRegister failed",
        "pin_refused",
        "the system refused to page-lock host memory",
        line="expert_banks",
        field="settings.cpu_layers",
        hint="`--set settings.cpu_layers=auto`, or raise WSL's memory",
    ),
    say(
        r"slot cap .*below the minimum",
        "plan_floor",
        "the expert kernel indexes fewer slots than one layer needs",
        line="expert_slots",
        field="engine.extra_args",
        hint="leave the kernel to the engine",
    ),
    say(
        r"exceeds the expert kernel's slot limit",
        "plan_floor",
        "more slots than the expert kernel can index",
        line="expert_slots",
        field="settings.expert_slots",
        hint="fewer expert slots, or leave the kernel to the engine",
    ),
    Pattern(CUDA_OOM, _cuda_oom),
    say(
        r"cannot use CUDA device \d+: only (\d+) device\(s\) visible",
        "no_gpu",
        "the engine sees {1} CUDA devices",
        field="settings.gpu",
        hint="`ft probe` shows what the driver sees",
    ),
    say(
        r"--gpu (\S+?): (not found or not a unique prefix|only \d+ GPU\(s\)|not one of the GPUs)",
        "no_gpu",
        "the engine cannot use the GPU `{1}`: {2}",
        field="settings.gpu",
        hint="`ft probe` shows what the driver sees",
    ),
    say(
        r"GPU (\S+) is not visible to CUDA in this process",
        "no_gpu",
        "the GPU `{1}` is hidden from the engine by CUDA_VISIBLE_DEVICES",
        field="settings.gpu",
        hint="leave CUDA_VISIBLE_DEVICES unset: the plan names the GPU",
    ),
    say(r"KernelSelectionError: (.*)", "unsupported", "no kernel: {1}", field="engine.extra_args"),
    say(
        r"kernel '([^']+)' was requested but cannot run here: (.*)",
        "unsupported",
        "kernel `{1}` cannot run here: {2}",
        field="engine.extra_args",
    ),
    say(
        r"Model architecture (\S+) not supported",
        "unsupported",
        "the engine does not know the architecture `{1}`",
        field="model",
    ),
    say(
        r"quantization method '([^']+)' is not supported",
        "unsupported",
        "the engine cannot load `{1}` weights",
        field="model",
        hint="a checkpoint in bf16, FP8 or NVFP4",
    ),
    say(
        r"ModelOpt quant_algo '([^']+)' is not supported",
        "unsupported",
        "the engine cannot load `{1}` weights",
        field="model",
    ),
    say(
        r"ModelOpt MIXED_PRECISION without quantized_layers",
        "bad_checkpoint",
        "the checkpoint's quantization config names no layers",
        field="model",
    ),
    say(
        r"compressed-tensors .*is not supported",
        "unsupported",
        "this compressed-tensors layout cannot be loaded",
        field="model",
        hint="an NVFP4 checkpoint of the same model",
    ),
    say(
        r"fp8 checkpoint with weight_block_size=(\S+) is not supported",
        "unsupported",
        "FP8 blocks of {1} cannot be loaded",
        field="model",
    ),
    say(
        r"fused module .* mixes quantization schemes",
        "unsupported",
        "projections that the engine fuses are stored in different formats",
        field="model",
    ),
    say(
        r"provides no (?:nvfp4_expert_spec|expert reader for (\S+))",
        "unsupported",
        "this family has no reader for its experts' format",
        field="model",
        hint="a bf16 checkpoint of the same model",
    ),
    say(
        r"found (\d+) expert tensors, expected (\d+)",
        "bad_checkpoint",
        "{1} expert tensors found, {2} expected",
        field="model",
        hint="`ft model verify` checks the files",
    ),
    say(r"mxfp8 experts are not served yet", "unsupported", "MXFP8 experts cannot be loaded", field="model"),
    say(
        r"(\S+) experts require --moe-strategy offload or cpu",
        "unsupported",
        "{1} experts cannot be resident without slots",
        field="settings.strategy",
        hint="`--set settings.strategy=offload`",
    ),
    say(
        r"does not support this model's expert activation",
        "unsupported",
        "the CPU expert kernels lack this model's activation",
        field="settings.strategy",
        hint="`--set settings.strategy=offload`",
    ),
    say(
        r"WeightLoadError: (.*)",
        "bad_checkpoint",
        "the checkpoint cannot be read: {1}",
        field="model",
        hint="`ft model verify` checks the files",
    ),
    say(
        r"holds no vision encoder tensors",
        "bad_checkpoint",
        "the converted checkpoint has no vision tower",
        field="serve.text_only",
        hint="`--set serve.text_only=true`",
    ),
    say(
        r"--max-seq-len-override (\d+) exceeds the model's rope table",
        "bad_flag",
        "{1} tokens exceed the model's context",
        field="settings.kv_tokens",
    ),
    say(
        r"--num-tokens (\d+) is not a multiple of the resolved page size (\d+)",
        "bad_flag",
        "{1} KV tokens are not a multiple of {2}",
        field="settings.kv_tokens",
    ),
    say(
        r"(?:address already in use|EADDRINUSE|error while attempting to bind on address)",
        "port_taken",
        "the port, or the one after it, is taken",
        field="serve.port",
        hint="`--set serve.port=` another one",
        flags=re.I,
    ),
    say(r"No space left on device", "log_full", "the disk is full"),
    say(
        r"error: (unrecognized arguments: .*|argument .*: .*)",
        "bad_flag",
        "the engine refused its command line: {1}",
        field="engine.extra_args",
    ),
    *REFUSALS,
    say(
        r"backend worker \S+ exited during load",
        "ram_oom",
        "the engine's worker was killed while loading, most likely for memory",
        line="expert_banks",
        field="settings.expert_load",
        hint="`--set settings.expert_load=serial`",
    ),
    say(
        r"(?:MemoryError|Cannot allocate memory|std::bad_alloc|WinError 1455)",
        "ram_oom",
        "the host ran out of memory",
        line="expert_banks",
        field="settings.expert_load",
        hint="`--set settings.expert_load=serial`",
    ),
    say(r"NotImplementedError: (.*)", "unsupported", "not supported by the engine: {1}"),
    say(r"backend worker (\S+) exited", "engine_died", "the engine's worker `{1}` died"),
    *LATE_PATTERNS,
)
