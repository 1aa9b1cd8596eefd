"""What a recipe from elsewhere may tell an engine beside its settings: flags and variables, each with its values.

An allow-list and not a deny-list: a flag of a version to come is left out until somebody has looked at it. Left out on
purpose is what loads code (templates, plugins, adapters), opens the network wider (hosts, keys, origins, RPC), names a
file or folder, or turns a check off (compatibility, cache versions, pin limits).
"""

from __future__ import annotations

_COUNT, _NUMBER, _WORD, _BOOL = r"\d{1,7}", r"-?\d{1,7}(\.\d{1,6})?", r"[a-z0-9_]{1,24}", r"[01]|true|false"
#: `moe.nvfp4=triton,linear=torch`: names of kernels only.
_KERNEL = r"[a-z0-9_]{1,16}(\.[a-z0-9_]{1,16})?=[a-z0-9_]{1,24}"
_KERNELS = rf"{_KERNEL}(,{_KERNEL}){{0,7}}"

THREADS = {"OMP_NUM_THREADS": _COUNT, "MKL_NUM_THREADS": _COUNT}
NATIVE_ENV = THREADS

FREETOKEN_ARGS = {
    "--anthropic-inline-system": "auto|preserve|fold", "--cuda-graph-max-bs": _COUNT, "--decode-log-interval": _COUNT,
    "--dtype": "auto|float16|bfloat16|float32", "--enable-cache-report": "", "--enable-special-token-ckpt": "",
    "--graph": _COUNT, "--mm-disable": "vision|audio", "--moe-cache-scope": "unified|per-layer",
    "--moe-collect-stats": "", "--moe-hybrid-max-fetch": _NUMBER, "--moe-locked-fetch": _NUMBER,
    "--moe-locked-max-fetch": _COUNT, "--moe-prefill-hit-d2d": "", "--num-tokenizer": r"\d", "--page-size": _COUNT,
    "--ple-backend": "pinned|disk", "--quant-backend": _KERNELS, "--reasoning-parser": _WORD,
    "--sampling-defaults": "model|none", "--swa-decoder-replay": "bounded|exact", "--text-model-only": "",
    "--tokenizer-count": r"\d", "--tool-call-parser": r"[a-z0-9_-]{1,24}",
}  # fmt: skip
FREETOKEN_ENV = {
    **THREADS, "FREETOKEN_HYBRID_FETCH": "recency|lowest_id",
    "FREETOKEN_HYBRID_FETCH_ROUND": "min-wait|stochastic|prefer-fetch", "FREETOKEN_HYBRID_OVERLAP": _BOOL,
    "FREETOKEN_FUSED_COPY": _BOOL, "FREETOKEN_H2D_BLOCKS_PER_BANK": _COUNT, "FREETOKEN_LOCKED_FETCH_THREADS": _COUNT,
    "FREETOKEN_CPU_MOE_SPIN": _COUNT, "FREETOKEN_CPU_MOE_FLAG_SYNC": _BOOL, "FREETOKEN_SWA_EVICTION_INTERVAL": _COUNT,
    "FREETOKEN_UNIFIED_MEMORY": _BOOL, "LOG_LEVEL": "INFO|WARNING|ERROR",
}  # fmt: skip

LLAMACPP_ARGS = {
    "--batch-size": _COUNT, "-b": _COUNT, "--cache-reuse": _COUNT, "--cont-batching": "", "-cb": "",
    "--flash-attn": "on|off|auto", "-fa": "on|off|auto", "--jinja": "", "--mlock": "", "--no-mmap": "",
    "--no-warmup": "", "--numa": "distribute|isolate|numactl", "--prio": "[0-3]", "--threads-batch": _COUNT,
    "-tb": _COUNT, "--reasoning-format": "none|auto|deepseek",
}  # fmt: skip
LLAMACPP_ENV = THREADS
