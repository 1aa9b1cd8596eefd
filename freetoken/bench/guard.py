"""Whether a run may be compared with others: what happened on the machine, and what the engine's answers give away.

Pure: it judges samples and requests. Each finding says what was seen, with numbers; an invalidating one marks the
whole result, because a figure that cannot be compared is worse than none.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from freetoken.bench.metrics import RequestTimes
from freetoken.bench.result import Finding
from freetoken.bench.sample import Sample
from freetoken.units import MIB, format_bytes

#: VRAM by which a foreign process may come or grow: a browser tab does not change a figure, a model does.
FOREIGN_GROWTH_BYTES = 64 * MIB
SWAP_GROWTH_BYTES = 32 * MIB
#: Share of all CPU time that others may use before it is told.
FOREIGN_CPU_SHARE = 0.2
#: Share of the samples in which a slowed clock, or a slower link, is no passing moment.
LASTING_SHARE = 0.05
#: Reasons that mean other clocks next time; a power cap is how a laptop always runs.
INVALID_REASONS = frozenset({"hardware slowdown", "software thermal", "hardware thermal", "power brake"})
#: Pages of a prefix cache are whole: so many tokens more than were sent before are no surprise.
CACHE_SLACK_TOKENS = 256
#: Text that packs to less than this share of itself repeats.
REPEATING_RATIO = 0.12
SHORTEST_JUDGED_CHARACTERS = 400


def judge_machine(samples: Sequence[Sample]) -> tuple[Finding, ...]:
    """Findings on GPU and host between the first and the last sample."""
    found = (*_other_processes(samples), *_throttling(samples), *_link(samples), *_swap(samples))
    return (*found, *_busy_cpu(samples))


def _other_processes(samples: Sequence[Sample]) -> list[Finding]:
    looks = [(one.gpu.processes, one.host.engine_pids) for one in samples if one.gpu is not None]
    if not looks:
        return []
    own = frozenset[int]().union(*(pids for _, pids in looks))
    # Without its pid the engine is whoever held most from the beginning.
    if not own and looks[0][0]:
        own = frozenset({max(looks[0][0], key=lambda pid: looks[0][0][pid])})
    first, found = looks[0][0], []
    for pid in sorted({pid for held, _ in looks for pid in held} - own):
        peak = max(held.get(pid, 0) for held, _ in looks)
        if pid not in first:
            found.append(Finding(
                kind="other_process",
                message=f"process {pid} came onto the GPU during the run ({format_bytes(peak)} of VRAM)",
                is_invalidating=peak == 0 or peak > FOREIGN_GROWTH_BYTES,
            ))  # fmt: skip
        elif peak - first[pid] > FOREIGN_GROWTH_BYTES:
            grown = format_bytes(peak - first[pid])
            found.append(Finding(kind="other_process", message=f"process {pid} took {grown} more VRAM during the run"))
    return found


def _throttling(samples: Sequence[Sample]) -> list[Finding]:
    gpus = [one.gpu for one in samples if one.gpu is not None]
    found = []
    for reason in sorted(frozenset[str]().union(*(gpu.throttle for gpu in gpus))):
        share = sum(reason in gpu.throttle for gpu in gpus) / len(gpus)
        if share > LASTING_SHARE:
            message = f"the GPU's clocks were held down ({reason}) in {share:.0%} of the samples"
            is_invalidating = reason in INVALID_REASONS
            found.append(Finding(kind="throttling", message=message, is_invalidating=is_invalidating))
    return found


def _link(samples: Sequence[Sample]) -> list[Finding]:
    """A link that lost lanes, or that fell back a generation while the GPU worked (at rest it always does)."""
    gpus = [one.gpu for one in samples if one.gpu is not None]
    widths = [gpu.link_width for gpu in gpus if gpu.link_width]
    found = []
    if widths and min(widths) < max(widths):
        message = f"the PCIe link dropped from x{max(widths)} to x{min(widths)}"
        found.append(Finding(kind="link", message=message))
    busy = [gpu.link_generation for gpu in gpus if gpu.link_generation and (gpu.busy_percent or 0) >= 50]
    slow = [one for one in busy if one < max(busy)]
    if busy and len(slow) > max(1, 2 * LASTING_SHARE * len(busy)):
        message = f"the PCIe link ran as generation {min(slow)} instead of {max(busy)} in {len(slow)} busy samples"
        found.append(Finding(kind="link", message=message))
    return found


def _swap(samples: Sequence[Sample]) -> list[Finding]:
    own = [one.host.engine_swap_bytes for one in samples if one.host.engine_swap_bytes is not None]
    machine = [one.host.swap_used_bytes for one in samples if one.host.swap_used_bytes is not None]
    for words, values in (("of the engine's memory went", own), ("went", machine)):
        if values and max(values) - values[0] > SWAP_GROWTH_BYTES:
            grown = format_bytes(max(values) - values[0])
            return [Finding(kind="swap", message=f"{grown} {words} to swap during the run")]
    return []


def _busy_cpu(samples: Sequence[Sample]) -> list[Finding]:
    """CPU time of others, as a note: an engine on the GPU may not mind, and a shared machine is never quite idle."""
    looks = [one for one in samples if one.host.cpu_busy_s is not None]
    # Without the engine's own share its work would be taken for somebody else's.
    if len(looks) < 2 or not looks[0].host.engine_pids or looks[-1].at_s <= looks[0].at_s:
        return []
    first, last = looks[0], looks[-1]
    busy = (last.host.cpu_busy_s or 0.0) - (first.host.cpu_busy_s or 0.0)
    foreign = busy - (last.host.cpu_own_s - first.host.cpu_own_s)
    share = foreign / (last.at_s - first.at_s) / last.host.cpu_count
    if share < FOREIGN_CPU_SHARE:
        return []
    message = f"other processes used {share:.0%} of this machine's CPU time during the run"
    return [Finding(kind="busy", message=message, is_invalidating=False)]


def judge_requests(
    requests: Sequence[RequestTimes], *, output_tokens: Sequence[int], prompt_tokens: Sequence[int],
    reusable_tokens: Sequence[int], texts: Sequence[str],
) -> tuple[Finding, ...]:  # fmt: skip
    """Findings on the answers; the sequences say for each request what was asked, and what a cache may have known."""
    return (
        *_shortened(requests, output_tokens),
        *_prompt_sizes(requests, prompt_tokens),
        *_cache_hits(requests, reusable_tokens),
        *_chunks(requests),
        *_repetition(texts),
    )


def _shortened(requests: Sequence[RequestTimes], output_tokens: Sequence[int]) -> list[Finding]:
    short = [
        (one.completion_tokens, asked)
        for one, asked in zip(requests, output_tokens, strict=True)
        if one.completion_tokens < asked and not one.is_estimated
    ]
    if not short:
        return []
    got, asked = min(short)
    message = (
        f"{len(short)} of {len(requests)} answers were shorter than asked for, one had {got:,} of {asked:,} tokens"
    )
    return [Finding(kind="token_count", message=message)]


def _prompt_sizes(requests: Sequence[RequestTimes], prompt_tokens: Sequence[int]) -> list[Finding]:
    """Prompts more than a tenth off what the workload says."""
    pairs = [(one.prompt_tokens, asked) for one, asked in zip(requests, prompt_tokens, strict=True) if asked]
    off = [(got, asked) for got, asked in pairs if got is not None and abs(got - asked) > max(16, 0.1 * asked)]
    if not off:
        return []
    got, asked = max(off, key=lambda one: abs(one[0] - one[1]) / one[1])
    message = f"{len(off)} of {len(requests)} prompts missed their size, one had {got:,} instead of {asked:,} tokens"
    return [Finding(kind="sizing", message=message, is_invalidating=False)]


def _cache_hits(requests: Sequence[RequestTimes], reusable_tokens: Sequence[int]) -> list[Finding]:
    wrong = [
        (one.cached_tokens, known)
        for one, known in zip(requests, reusable_tokens, strict=True)
        if one.cached_tokens is not None and one.cached_tokens > known + CACHE_SLACK_TOKENS
    ]
    if not wrong:
        return []
    cached, known = max(wrong)
    message = (
        f"the prefix cache answered {cached:,} tokens of a prompt of which this run had sent {known:,} before: "
        f"{len(wrong)} of {len(requests)} prompts were not fresh"
    )
    return [Finding(kind="prefix_cache", message=message)]


def _chunks(requests: Sequence[RequestTimes]) -> list[Finding]:
    estimated = sum(one.is_estimated for one in requests)
    if estimated:
        message = f"{estimated} of {len(requests)} answers came without `usage`: tokens are counted by chunks"
        return [Finding(kind="token_count", message=message, is_invalidating=False)]
    tokens = sum(one.completion_tokens for one in requests)
    chunks = sum(len(one.pieces_s) for one in requests)
    if chunks < 0.95 * tokens:
        message = f"{tokens:,} tokens came in {chunks:,} chunks: ITL is the gap between chunks"
        return [Finding(kind="token_count", message=message, is_invalidating=False)]
    return []


def _repetition(texts: Sequence[str]) -> list[Finding]:
    """Answers that go round in circles route to few experts: their hit rate and speed are those of no real text."""
    judged = [text for text in texts if len(text) >= SHORTEST_JUDGED_CHARACTERS]
    looping = [text for text in judged if len(zlib.compress(text.encode())) < REPEATING_RATIO * len(text.encode())]
    if len(looping) * 2 <= len(judged) or not judged:
        return []
    message = f"{len(looping)} of {len(judged)} answers repeat themselves, so fewer experts are asked than by real text"
    return [Finding(kind="repetition", message=message, is_invalidating=False)]
