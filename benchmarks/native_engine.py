"""Loads a checkpoint into the native engine and times it: one JSON line for the load, one for each run and resize.

    python benchmarks/native_engine.py --model DIR --device cuda --strategy offload --slots 2000,1000 \
        --prompt-tokens 2000 --decode-tokens 128

Slot counts after the first are reached by live resizes. Prompts are fresh random ids of the vocabulary's lower half
and the next token is sampled, because greedy decoding of noise loops and fakes a high hit rate. With real weights
give `--text FILE`, whose tokens are used instead. `decode_tps` is of one sequence, `--batch N` decodes N at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from freetoken.engine.config import EngineConfig
from freetoken.engine.loader import LoadedModel, load_model
from freetoken.engine.quicken import renew
from freetoken.errors import FtError


def main() -> int:
    options = parse_options()
    slots = [int(part) for part in options.slots.split(",")]
    config = EngineConfig(
        model_path=Path(options.model).absolute(), device=options.device, dtype=options.dtype,
        strategy=options.strategy,
        expert_slots=slots[0], kv_tokens=options.prompt_tokens + options.decode_tokens, cpu_threads=options.threads,
        prefill_chunk_tokens=options.chunk, embed_on_host=options.embed_on_host, experts_from=options.experts_from,
        trace_path=Path(options.trace) if options.trace else None, max_running_requests=options.batch,
        decode_graphs="eager" if options.no_graphs else options.decode_graphs,
    )  # fmt: skip
    started = time.perf_counter()
    loaded = load_model(config, make_progress(options.quiet))
    emit("load", seconds=time.perf_counter() - started, notes=loaded.notes, **describe_memory(loaded),
         planned=plan_lines(config, loaded), slot_bytes=loaded.experts.slot_bytes,
         decode_graphs=config.decode_graphs)  # fmt: skip
    tokens = read_tokens(options, loaded)
    for number, count in enumerate(slots):
        if number:
            resize(loaded, count)
        for repeat in range(options.repeats):
            with torch.inference_mode():
                run(loaded, options, tokens, seed=1000 * number + repeat)
    if options.profile:
        with torch.inference_mode():
            profile(loaded, options, tokens)
    loaded.close()
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--strategy", choices=("fused", "offload", "cpu"), default="offload")
    parser.add_argument(
        "--slots", default="0", help="expert slots; several, comma separated, are reached by live resize"
    )
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048, help="prefill chunk in tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded at once")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--embed-on-host", action="store_true")
    parser.add_argument("--experts-from", choices=("auto", "ram", "disk"), default="auto")
    parser.add_argument("--decode-graphs", choices=("auto", "on", "eager", "off"), default="auto")
    parser.add_argument("--no-graphs", action="store_true", help="the same as --decode-graphs eager")
    parser.add_argument("--text", help="file whose tokens are the prompts")
    parser.add_argument("--trace", help="record the routing of decode to this file")
    parser.add_argument("--profile", action="store_true", help="end with torch's profile of 8 decode steps, on stderr")
    parser.add_argument("--quiet", action="store_true")
    return parser.parse_args()


def emit(event: str, **fields: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()}
    print(json.dumps({"event": event, **rounded}), flush=True)


def make_progress(quiet: bool) -> Any:
    last = [0.0]

    def progress(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not quiet and (now - last[0] > 2 or done == total):
            last[0] = now
            print(f"{stage} {done / 2**30:.2f} / {total / 2**30:.2f} GiB", file=sys.stderr, flush=True)

    return progress


def describe_memory(loaded: LoadedModel) -> dict[str, Any]:
    found: dict[str, Any] = {"memory": loaded.memory(), "rss_bytes": psutil.Process().memory_info().rss}
    bank = loaded.experts.bank
    found["bank"] = {"bytes": bank.nbytes, "pinned_bytes": bank.pinned_bytes, "in_ram": bank.is_resident}
    if loaded.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(loaded.device)
        found["vram"] = {
            "allocated": torch.cuda.memory_allocated(), "peak_allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(), "peak_reserved": torch.cuda.max_memory_reserved(),
            "free": free, "total": total,
        }  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
    return found


def plan_lines(config: EngineConfig, loaded: LoadedModel) -> dict[str, Any]:
    """What the native adapter's memory model says for these settings, by ledger key."""
    from freetoken.adapters.native_memory import NativeMemory
    from freetoken.deploy.prepare import prepare_request
    from freetoken.planner.memory import ResolvedSettings
    from freetoken.recipe.load import make_model_recipe

    try:
        request = prepare_request(make_model_recipe(str(config.model_path)))
        settings = ResolvedSettings(
            device=config.device, expert_slots=loaded.experts.expert_slots, kv_tokens=config.kv_tokens,
            strategy=config.strategy, prefill_chunk_tokens=config.prefill_chunk_tokens,
            embed_on_host=config.embed_on_host, max_running_requests=config.max_running_requests,
            experts_from="ram" if loaded.experts.bank.is_resident else "disk",
        )  # fmt: skip
        model = NativeMemory()
        lines = {"vram": model.vram_lines(request, settings), "ram": model.ram_lines(request, settings)}
    except (FtError, ValueError) as error:
        return {"error": str(error)}
    left_out = () if config.decode_graphs in ("auto", "on") else ("cuda_graphs",)  # a plan counts on graphs
    return {
        place: {line.key: line.bytes for line in found if line.key not in left_out} for place, found in lines.items()
    }


def read_tokens(options: argparse.Namespace, loaded: LoadedModel) -> list[int] | None:
    if options.text is None:
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids: list[int] = tokenizer(Path(options.text).read_text())["input_ids"]
    if len(ids) < options.prompt_tokens:
        raise SystemExit(f"{options.text} has {len(ids)} tokens, {options.prompt_tokens} are wanted")
    return ids


def make_prompt(options: argparse.Namespace, loaded: LoadedModel, tokens: list[int] | None, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (options.batch, options.prompt_tokens)
    if tokens is None:
        return torch.randint(0, loaded.config.vocab_size // 2, shape, generator=generator).to(loaded.device)
    starts = torch.randint(0, len(tokens) - options.prompt_tokens + 1, (options.batch,), generator=generator).tolist()
    return torch.tensor([tokens[at : at + options.prompt_tokens] for at in starts]).to(loaded.device)


def synchronize(loaded: LoadedModel) -> None:
    if loaded.device.type == "cuda":
        torch.cuda.synchronize(loaded.device)


def prefill(loaded: LoadedModel, options: argparse.Namespace, prompt: torch.Tensor, cache: Any) -> torch.Tensor:
    logits = prompt
    for part in prompt.split(options.chunk, dim=1):
        with loaded.experts.prefill():
            logits = loaded.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits


def decode(loaded: LoadedModel, logits: torch.Tensor, cache: Any) -> torch.Tensor:
    token = torch.multinomial(torch.softmax(logits.float() / 0.8, dim=-1), 1)
    with loaded.experts.decode():
        step: torch.Tensor = loaded.model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return step


def run(loaded: LoadedModel, options: argparse.Namespace, tokens: list[int] | None, seed: int) -> None:
    torch.manual_seed(seed)
    prompt = make_prompt(options, loaded, tokens, seed)
    cache = DynamicCache(config=loaded.config)
    synchronize(loaded)
    started = time.perf_counter()
    logits = prefill(loaded, options, prompt, cache)
    synchronize(loaded)
    prefilled = time.perf_counter()
    before = loaded.experts.counters()
    for _ in range(options.decode_tokens):
        logits = decode(loaded, logits, cache)
    synchronize(loaded)
    ended = time.perf_counter()
    counted = loaded.experts.counters() - before
    emit(
        "run", strategy=options.strategy, slots=loaded.experts.expert_slots, seed=seed, batch=options.batch,
        prompt_tokens=options.prompt_tokens, prefill_s=prefilled - started,
        prefill_tps=prompt.numel() / (prefilled - started), decode_tokens=options.decode_tokens,
        decode_tps=options.decode_tokens / (ended - prefilled), lookups=counted.lookups, hit_ratio=counted.hit_ratio,
        miss_bytes_per_token=counted.miss_bytes / options.decode_tokens, is_finite=bool(torch.isfinite(logits).all()),
        **describe_graphs(loaded), **describe_memory(loaded),
    )  # fmt: skip


def describe_graphs(loaded: LoadedModel) -> dict[str, Any]:
    graphs = loaded.graphs
    if graphs is None:
        return {"graphs": None}
    counts = {"captured": graphs.captured_count, "replayed": graphs.replayed_count, "held_bytes": graphs.held_bytes,
              "problem": graphs.problem}  # fmt: skip
    return {"graphs": counts}


def resize(loaded: LoadedModel, slots: int) -> None:
    before = loaded.experts.expert_slots
    started = time.perf_counter()
    try:
        got = loaded.experts.resize(slots)
    except FtError as error:
        emit("resize", slots_before=before, asked=slots, error=str(error), slots=loaded.experts.expert_slots)
        return
    renew(loaded.model, loaded.graphs)
    synchronize(loaded)
    emit("resize", slots_before=before, asked=slots, slots=got, seconds=time.perf_counter() - started)


def profile(loaded: LoadedModel, options: argparse.Namespace, tokens: list[int] | None) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if loaded.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    cache = DynamicCache(config=loaded.config)
    logits = prefill(loaded, options, make_prompt(options, loaded, tokens, 99), cache)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(8):
            logits = decode(loaded, logits, cache)
        synchronize(loaded)
    key = "self_cuda_time_total" if loaded.device.type == "cuda" else "self_cpu_time_total"
    for sort in (key, "self_cpu_time_total"):
        print(profiler.key_averages().table(sort_by=sort, row_limit=25), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
