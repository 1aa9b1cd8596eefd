"""What the embedded engine's log and error replies mean."""

from __future__ import annotations

import re

from freetoken.adapters.base import Failure
from freetoken.adapters.log_patterns import CUDA_OOM, Pattern, classify, make_cuda_oom, say


def classify_log(text: str, exit_code: int | None = None) -> Failure | None:
    """The failure at the end of the log; None where nothing is recognised."""
    found = classify(text, PATTERNS)
    if found is not None:
        return found
    if exit_code == 2:
        return Failure(kind="bad_flag", cause="`ft serve` refused its command line or a file (exit code 2)")
    if exit_code in (-9, 137):
        return Failure(
            kind="killed",
            cause="the engine was killed from outside, most likely for memory",
            line="expert_slots",
            field="settings.expert_slots",
            hint="fewer expert slots",
        )
    return None


def _cuda_oom(match: re.Match[str], text: str) -> Failure:
    in_prefill = re.search(
        r"prefill|forward", text[match.start() - 3000 if match.start() > 3000 else 0 : match.start()], re.I
    )
    line, field = (
        ("prefill_transient", "settings.prefill_chunk_tokens")
        if in_prefill
        else ("expert_slots", "settings.expert_slots")
    )
    return make_cuda_oom(match, text, line=line, field=field, hint="fewer expert slots, or a smaller prefill chunk")


PATTERNS: tuple[Pattern, ...] = (
    Pattern(CUDA_OOM, _cuda_oom),
    say(
        r"(?:DefaultCPUAllocator: can't allocate memory|MemoryError|Cannot allocate memory)",
        "ram_oom",
        "the host ran out of memory",
        line="expert_slots",
        field="settings.expert_slots",
        hint="fewer expert slots",
    ),
    say(
        r"address already in use",
        "port_taken",
        "the port is taken",
        field="serve.port",
        hint="`--set serve.port=` another one",
        flags=re.I,
    ),
    say(r"No space left on device", "log_full", "the disk is full"),
    say(
        r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|no CUDA-capable device",
        "no_gpu",
        "torch sees no CUDA device",
        field="settings.gpu",
        hint="`ft probe` shows what the driver sees",
    ),
    say(
        r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old",
        "unsupported",
        "the NVIDIA driver is too old for this torch",
        hint="a newer driver, or a CPU build of torch",
    ),
    say(
        r"error: (\S.*?): the tokenizer cannot be loaded",
        "bad_checkpoint",
        "bad model: the tokenizer in {1} cannot be loaded; is `tokenizer.json` there, and whole?",
        field="model",
        hint="`ft model verify` checks the files",
    ),
    say(
        r"error: (.*(?:safetensors|header|truncated|checksum|config\.json).*)",
        "bad_checkpoint",
        "{1}",
        field="model",
        hint="`ft model verify` checks the files",
    ),
    say(
        r"SafetensorError: (.*)",
        "bad_checkpoint",
        "the checkpoint cannot be read: {1}",
        field="model",
        hint="`ft model verify` checks the files",
    ),
    say(r"Error: No such option:? (.*)", "bad_flag", "`ft serve` does not know {1}", field="engine.extra_args"),
    say(r"^error: (.*)$", "engine_died", "{1}", flags=re.M),
)
