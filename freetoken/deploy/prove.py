"""Ready means: one real generation and one full prefill chunk succeeded, and the sizes read back equal the plan.

Real text (Python's own standard library), because random tokens take another way through a model of experts. Every
prompt starts differently, so that a prefix cache cannot answer for the engine.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.deploy.values import Proof
from freetoken.errors import FtError, NotReadyError
from freetoken.supervisor.files import format_now

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter
    from freetoken.adapters.control import ControlClient
    from freetoken.adapters.replies import CacheStatus, Completion, Stats
    from freetoken.planner.plan import Plan

PROMPT = 'def read_lines(path):\n    """Return the lines of the file at `path`, without line ends."""\n'
WARM_UP_PROMPT = "import json\n\n\ndef load(path):\n"
OUTPUT_TOKENS, WARM_UP_TOKENS = 32, 8
#: Room kept beside the long prompt for what it generates.
SPARE_TOKENS = 8
#: Without slots there is nothing to read back.
_SLOT_STRATEGIES = ("offload", "hybrid")
_MAX_TRIES = 10


def prove(
    client: ControlClient,
    plan: Plan,
    adapter: EngineAdapter,
    *,
    context_tokens: int,
    log: str = "",
    seed: int = 0,
    most_tokens: int | None = None,
) -> Proof:
    """The proof that the engine behind `client` does what `plan` says; `most_tokens` bounds its longest prompt.

    Raises NotReadyError where sizes differ from the plan, and what the client raises where the engine fails.
    """
    limit = min(plan.settings.kv_tokens, context_tokens or plan.settings.kv_tokens)
    most = max(1, limit // 2)
    # The very first forward pays for what is done once (kernels, allocations): its speed would say nothing.
    warm_up = client.complete(WARM_UP_PROMPT, min(WARM_UP_TOKENS, most))
    # Where the context ends before the chunk does, the prompt must be able to miss the end by a few tokens.
    wanted = max(1, min(plan.settings.prefill_chunk_tokens, limit - max(SPARE_TOKENS, limit // 32)))
    wanted = min(wanted, most_tokens or wanted)
    ratio = len(WARM_UP_PROMPT) / max(1, warm_up.prompt_tokens)
    chunk = fill_chunk(client, wanted, limit, ratio, random.Random(seed))
    first = client.complete(PROMPT, min(OUTPUT_TOKENS, most))
    status, stats = client.cache_status(), client.stats()
    told = adapter.parse_effective(log)
    strategy = read_strategy(status, stats) or told.get("strategy")
    check_effective(plan, status, strategy, told.get("attention"))
    return Proof(
        proven_at=format_now(),
        cold_ttft_s=warm_up.ttft_s,
        ttft_s=first.ttft_s,
        decode_tps=first.decode_tps,
        prompt_tokens=first.prompt_tokens,
        completion_tokens=first.completion_tokens,
        text=first.text,
        chunk_tokens=wanted,
        chunk_prompt_tokens=chunk.prompt_tokens,
        chunk_ttft_s=chunk.ttft_s,
        expert_slots=status.expert_slots,
        kv_tokens=status.kv_tokens,
        strategy=strategy,
        measured_bytes=measure_lines(plan, status, stats),
        vram_bytes=stats.vram_bytes,
        instance_id=stats.instance_id,
        attention=told.get("attention"),
        compile_s=adapter.parse_compile_s(log),
    )


def fill_chunk(
    client: ControlClient, wanted: int, limit: int, characters_per_token: float, rng: random.Random
) -> Completion:
    """One completion whose prompt has at least `wanted` tokens and stays under `limit`. Raises NotReadyError.

    The length in characters is guessed, and corrected by what `usage` counted or the engine refused.
    """
    text = read_text()
    text = text[rng.randrange(len(text)) :] + text
    low, high, characters = 0, None, int(wanted * characters_per_token * 1.02) + 1
    for _ in range(_MAX_TRIES):
        # The first line differs each time: what the prefix cache holds of the last try is of no use.
        prompt = f"# {rng.getrandbits(64):016x}\n" + text * (characters // len(text) + 1)
        try:
            found = client.complete(prompt[:characters], 1)
        except FtError as error:
            if getattr(error, "code", None) != "context_length_exceeded":
                raise
            high = characters
            characters = (low + high) // 2 if low else int(high * 0.6)
            continue
        if found.prompt_tokens >= wanted:
            return found
        low = characters
        aim = min(limit - SPARE_TOKENS // 2, wanted * 1.01 + 1)
        characters = int(characters * aim / max(1, found.prompt_tokens)) + 1
        characters = characters if high is None or characters < high else (low + high) // 2
    raise NotReadyError(f"no prompt of {wanted:,} tokens could be made within a context of {limit:,}")


def read_text() -> str:
    """Source text that every machine with Python has, about 100,000 characters."""
    return Path(argparse.__file__).read_text(encoding="utf-8")


def read_strategy(status: CacheStatus, stats: Stats) -> str | None:
    """The strategy that the API tells, wherever it puts it; None where it does not."""
    places: tuple[dict[str, Any] | None, ...] = (
        stats.model_extra,
        stats.model.model_extra,
        status.model_extra,
        status.geometry.model_extra,
    )
    for place in places:
        for key in ("strategy", "moe_strategy"):
            if isinstance(value := (place or {}).get(key), str):
                return value
    return None


def check_effective(plan: Plan, status: CacheStatus, strategy: str | None, attention: str | None = None) -> None:
    """Raises NotReadyError, naming everything in force that is not the plan's."""
    wrong = list(find_drift(plan, status, strategy))
    planned = plan.settings.attention
    if attention is not None and planned not in (None, "auto", attention):
        wrong.append(f"`attention` is `{attention}`, planned `{planned}`")
    if wrong:
        raise NotReadyError(
            f"it answers, but not as planned: {wrong[0]}" if len(wrong) == 1 else "it answers, but not as planned",
            details=tuple(wrong) if len(wrong) > 1 else (),
            hint="another process may have resized it; `ft ctl cache status` shows what is in force",
        )


def find_drift(plan: Plan, status: CacheStatus, strategy: str | None) -> tuple[str, ...]:
    """Every effective size that is not the plan's, in words. KV may be rounded up to whole pages."""
    settings, wrong = plan.settings, []
    page = max(1, status.geometry.page_size)
    if settings.strategy in _SLOT_STRATEGIES and status.expert_slots != settings.expert_slots:
        wrong.append(f"`expert_slots` is {status.expert_slots:,}, planned {settings.expert_slots:,}")
    if not settings.kv_tokens <= status.kv_tokens < settings.kv_tokens + page:
        wrong.append(f"`kv_tokens` is {status.kv_tokens:,}, planned {settings.kv_tokens:,}")
    if strategy is not None and strategy != settings.strategy:
        wrong.append(f"`strategy` is `{strategy}`, planned `{settings.strategy}`")
    return tuple(wrong)


def measure_lines(plan: Plan, status: CacheStatus, stats: Stats) -> dict[str, int]:
    """Ledger key -> bytes in force: what the engine itself adds up, else unit costs times counts."""
    extra = (stats.model_extra or {}).get("memory")
    told = {str(key): int(value) for key, value in extra.items()} if isinstance(extra, dict) else {}
    unit = status.geometry.unit_bytes
    computed = {"kv_cache": unit.kv_per_token * status.kv_tokens}
    if plan.settings.strategy in _SLOT_STRATEGIES:
        computed["expert_slots"] = unit.moe_per_expert * status.expert_slots
    if unit.mamba_per_slot:
        # One slot more than the usable ones is allocated as padding.
        computed["linear_state"] = unit.mamba_per_slot * (status.geometry.num_mamba_slots + 1)
    return {key: value for key, value in {**computed, **told}.items() if value > 0}
