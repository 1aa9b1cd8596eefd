"""Which flag of `serve` each version of the upstream engine knows, and settings that need a newer one.

Read off the four released parsers; `tests/contract/test_freetoken_parser.py` holds the table against them. A flag that
a version does not know ends its start with exit code 2, so nothing is emitted on a guess.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from freetoken.planner.memory import Finding
from freetoken.planner.plan import PlanRequest

#: Versions whose parsers were read; a version that is not known is taken for the newest.
OLDEST, NEWEST = "0.1.2", "0.2.1"
#: Flag -> the version that brought it.
ADDED: dict[str, str] = {
    **dict.fromkeys(
        (
            "--allowed-local-media-path", "--allowed-media-domains", "--gpu", "--image-max-tokens",
            "--image-min-tokens", "--mm-disable", "--mm-embed-cache-device", "--mm-encoder-weights",
            "--mm-processor-kwargs", "--moe-strategy", "--ple-backend", "--quant-backend", "--text-model-only",
        ),
        "0.1.3",
    ),
    **dict.fromkeys(
        (
            "--anthropic-inline-system", "--api-key", "--hf-overrides", "--moe-cache-mem", "--moe-cache-scope",
            "--moe-cache-split", "--moe-collect-stats", "--moe-locked-fetch", "--moe-locked-max-fetch",
            "--swa-decoder-replay",
        ),
        "0.2.0",
    ),
    **dict.fromkeys(("--embed-weights", "--mmproj"), "0.2.1"),
}  # fmt: skip
#: Flags that every version knows.
ALWAYS: frozenset[str] = frozenset(
    {
        "--attention-backend", "--attn", "--cache-type", "--cors-origins", "--cuda-graph-max-bs",
        "--decode-log-interval", "--disable-moe-prefill-overlap", "--disable-pynccl", "--dtype", "--dummy-weight",
        "--enable-cache-report", "--enable-special-token-ckpt", "--expert-load", "--graph", "--help", "--host",
        "--kv-reserve-tokens", "--max-extend-length", "--max-output-tokens", "--max-prefill-length",
        "--max-running-requests", "--max-seq-len-override", "--memory-ratio", "--model", "--model-path",
        "--model-source", "--moe-backend", "--moe-cache-auto", "--moe-cache-policy", "--moe-cache-rate",
        "--moe-cache-size", "--moe-cpu-layers", "--moe-cpu-threads", "--moe-hybrid-max-fetch",
        "--moe-prefill-hit-d2d", "--num-pages", "--num-tokenizer", "--num-tokens", "--nvfp4-backend", "--page-size",
        "--port", "--reasoning-parser", "--sampling-defaults", "--served-model-name", "--shell-mode",
        "--tensor-parallel-size", "--tokenizer-count", "--tool-call-parser", "--tp-size",
    }
)  # fmt: skip


def has_flag(flag: str, version: str | None) -> bool:
    """Whether `version` (None: the newest known) knows `flag`; a flag that no version has is not known."""
    if flag in ALWAYS:
        return True
    since = ADDED.get(flag)
    return since is not None and parse_version(version) >= Version(since)


def parse_version(version: str | None) -> Version:
    """`version` for comparing; the newest known one where it is not told or not a version."""
    try:
        return Version(version or NEWEST)
    except InvalidVersion:
        return Version(NEWEST)


def list_flags(version: str | None) -> frozenset[str]:
    """Every flag of `version`."""
    return ALWAYS | {flag for flag in ADDED if has_flag(flag, version)}


def check_version(request: PlanRequest) -> Iterator[Finding]:
    """What the recipe asks for and the installed version cannot do. Nothing is said before a version is known."""
    version, recipe = request.engine_version, request.recipe
    if version is None:
        return
    newer = f"`ft engine install freetoken@{NEWEST}`"
    if parse_version(version) < Version(OLDEST):
        yield Finding(
            check="engine_version", message=f"engine `freetoken` {version} is older than {OLDEST}", hint=newer
        )
        return
    asked = (
        ("settings.embed_on_host", recipe.settings.embed_on_host is True, "--embed-weights"),
        ("serve.api_key_env", recipe.serve.api_key_env is not None, "--api-key"),
    )
    for key, is_asked, flag in asked:
        if is_asked and not has_flag(flag, version):
            message = f"`{key}` needs engine `freetoken` {ADDED[flag]} or newer, this is {version}"
            yield Finding(check="engine_version", message=message, hint=newer)
    yield from _check_extra_args(request, version, newer)


def _check_extra_args(request: PlanRequest, version: str, newer: str) -> Iterator[Finding]:
    # What is newer than our table may know more flags than we do.
    if parse_version(version) > Version(NEWEST):
        return
    for argument in request.recipe.engine.extra_args:
        flag = argument.split("=")[0]
        if not flag.startswith("--") or has_flag(flag, version):
            continue
        since = ADDED.get(flag)
        words = f"it came with {since}" if since else "no version has it"
        message = f"`engine.extra_args` holds `{flag}`, which engine `freetoken` {version} does not know: {words}"
        yield Finding(check="extra_args", message=message, hint=newer if since else None)
