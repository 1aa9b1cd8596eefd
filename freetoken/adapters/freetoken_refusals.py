"""Further refusals of the upstream engine and of what it stands on: host locking, paging, toolchain, files, ports.

Beside the messages of its own sources these are the ones that users met and reported.
"""

from __future__ import annotations

import re

from freetoken.adapters.log_patterns import Pattern, say

#: Read before the engine's own memory messages: these name the cause, what follows them only its consequence.
HOST_PATTERNS: tuple[Pattern, ...] = (
    say(
        r"paging file (?:is )?too small|(?:WinError|os error|Windows error) 1455|commit limit",
        "ram_oom",
        "Windows ran out of memory that it may commit (RAM and paging file together)",
        line="expert_banks",
        field="settings.expert_load",
        hint="enlarge the paging file, or `--set settings.expert_load=serial`",
        flags=re.I,
    ),
    say(
        r"VirtualLock|Lock pages in memory|(?:WinError|Windows error) 1453|mlock\S* failed|RLIMIT_MEMLOCK"
        r"|page-lock limit|caps page-locked",
        "pin_refused",
        "the system locks less host memory than the experts take",
        line="expert_banks",
        field="settings.cpu_layers",
        hint="`ulimit -l unlimited` (Windows: the right to lock pages), or `--set settings.cpu_layers=auto`",
        flags=re.I,
    ),
    say(
        r"earlyoom",
        "killed",
        "earlyoom ended the engine before the kernel ran out of host memory",
        line="expert_banks",
        field="settings.expert_load",
        hint="free host memory and /tmp, or `--set settings.expert_load=serial`",
    ),
)

#: What the engine, its kernels or its toolchain cannot do here.
REFUSALS: tuple[Pattern, ...] = (
    say(
        r"[Mm]ixe[sd]?[- ](?:ggml types|type GGUFs?)|uniform quant type|one slot stride",
        "unsupported",
        "the file's experts are of several quantisation types, and every slot has one size",
        field="model",
        hint="a GGUF whose expert tensors are all of one type",
    ),
    say(
        r"expert banks were packed for (\S+) but the model binds (\S+)",
        "bad_checkpoint",
        "the converted checkpoint was packed for the kernel `{1}`, this start takes `{2}`",
        field="model",
        hint="the original checkpoint, or convert it again on this machine",
    ),
    say(
        r"--dtype float16\b.*",
        "bad_flag",
        "these weights cannot be computed in float16",
        field="engine.extra_args",
        hint="leave `--dtype` out of `engine.extra_args`",
    ),
    say(
        r"supports TP=1 only|tensor parallelism is not supported",
        "unsupported",
        "this model runs on one GPU for each server",
        field="engine.extra_args",
        hint="leave `--tensor-parallel-size` out; a deployment for each GPU, ports two apart",
    ),
    say(r"(no usable kernel in table\b.*)", "unsupported", "no kernel: {1}", field="engine.extra_args"),
    say(
        r"triton expert kernel has no TP|marlin needs vLLM",
        "unsupported",
        "no expert kernel runs on this GPU as it was asked for",
        field="engine.extra_args",
        hint="leave the kernel and `--tensor-parallel-size` to the engine",
    ),
    say(
        r"out of resource: shared memory, Required: (\d+), Hardware limit: (\d+)",
        "unsupported",
        "a kernel needs {1} B of shared memory, this GPU has {2}: it is older than the engine supports",
        field="settings.gpu",
        hint="a GPU of compute capability 8.0 or newer",
    ),
    say(
        r"Turing 64 KB shared memory|sm_75",
        "unsupported",
        "this GPU is older than the engine supports",
        field="settings.gpu",
        hint="a GPU of compute capability 8.0 or newer",
    ),
    say(
        r"ptxas.*Unsupported \.version|Unsupported \.version|nvcc fatal|ninja: build stopped|[Ff]ailed to load kernel"
        r"|Could not find nvcc|CUDA_HOME environment variable is not set",
        "unsupported",
        "the engine's kernels could not be compiled: nvcc, g++ and ninja of one CUDA 13 are needed",
        hint="`ft doctor` names what is missing; install the distribution's CUDA 13 toolkit rather than pip's nvcc",
    ),
    say(
        r"dense weights cannot be offloaded",
        "unsupported",
        "only experts can be offloaded, and this model's weights are dense",
        field="model",
        hint="`ft plan --suggest` lists models that this machine runs",
    ),
)

#: Read after everything that names a cause.
LATE_PATTERNS: tuple[Pattern, ...] = (
    say(
        r"WDDM (?:-> )?pag\w+|shared GPU memory|sysmem fallback",
        "paging",
        "Windows moves VRAM to host memory and back: what is planned does not fit beside what the desktop holds",
        line="prefill_transient",
        field="settings.prefill_chunk_tokens",
        hint="half the prefill chunk, and `headroom: wsl`; a higher memory_ratio makes it worse",
        flags=re.I,
    ),
    say(
        r"\bport \d+ (?:is )?already (?:taken|in use)",
        "port_taken",
        "the port, or the one after it, is taken",
        field="serve.port",
        hint="`--set serve.port=` another one",
        flags=re.I,
    ),
    say(
        r"exits the worker|Backend worker is gone and cannot be restarted|backend worker (\S+) exited",
        "engine_died",
        "the engine's worker died",
        flags=re.I,
    ),
)
