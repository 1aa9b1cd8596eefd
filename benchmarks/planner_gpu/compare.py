"""Hold the planner against what the upstream engine took and did on a GPU, and keep the runs as a test fixture.

    compare.py results.jsonl [more.jsonl ...] --jobs jobs.json --shallow HEADERS --deep HEADERS --write
    compare.py                                      # the table of the fixture again, with today's formulas

The fixture keeps what was measured and how it was started, never what was predicted: every comparison plans afresh.
`measure.py` says what its fields mean.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from freetoken.adapters import get_adapter
from freetoken.checkpoint.header import read_shape
from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Bandwidth, Cpu, Disk, Gpu, Hardware, Ram
from freetoken.planner.budget import Budget, make_budget
from freetoken.planner.memory import Ledger, ResolvedSettings
from freetoken.planner.plan import PlanRequest
from freetoken.planner.rates import resolve_rates
from freetoken.planner.roofline import compute_decode_step, fit_hit_curve
from freetoken.recipe.model import Recipe
from freetoken.units import GIB, MIB

FIXTURE = Path(__file__).parents[2] / "tests" / "fixtures" / "planner_gpu.json"
COMMAND = "benchmarks/planner_gpu/run.sh, then benchmarks/planner_gpu/compare.py --write"
#: What a plan is held to: the peak to the larger of the two, a line likewise.
PEAK_BYTES, PEAK_RATIO = 150 * MIB, 0.02
LINE_BYTES, LINE_RATIO = 300 * MIB, 0.05
#: A refusal counts as one to be tested from here on.
REFUSED_BYTES = 300 * MIB
#: Decode tokens of the long prompt's answer, of each timed request, and of each concurrent one.
LONG_TOKENS, SPEED_TOKENS, CONCURRENT_TOKENS, LOG_STEPS = 24, 96, 32, 40
#: The log prints free memory to a hundredth of a GiB.
PRINTED_BYTES = GIB // 100


class Figure(NamedTuple):
    """One predicted amount beside the measured one, bytes."""

    name: str
    predicted: int
    measured: int

    @property
    def error(self) -> int:
        """Predicted less measured."""
        return self.predicted - self.measured

    def is_within(self, most_bytes: int, most_ratio: float) -> bool:
        """The error is within the larger of the two."""
        return abs(self.error) <= max(most_bytes, most_ratio * self.measured)


class Speed(NamedTuple):
    """Decode at one slot count: hit rate given, tok/s measured, predicted, and predicted after one calibration."""

    slots: int
    hit_ratio: float
    measured_tps: float
    predicted_tps: float
    calibrated_tps: float


def make_machine(run: dict[str, Any]) -> Hardware:
    """An H200 of which the ballast left `free_bytes`; the link and DRAM as the engine's own bench measured them."""
    gpu = Gpu(
        name="NVIDIA H200", compute_capability="9.0", sm_count=132,
        vram_total_bytes=run["free_bytes"], vram_free_bytes=run["free_bytes"],
    )  # fmt: skip
    return Hardware(
        name="H200 under ballast",
        gpus=(gpu,),
        cpu=Cpu(physical_cores=16, logical_cores=16, usable_cores=16, isa=("avx2", "avx512f")),
        ram=Ram(total_bytes=128 * GIB, available_bytes=110 * GIB),
        disk=Disk(free_bytes=60 * GIB),
        bandwidth=Bandwidth(h2d_bytes_per_s=50.0e9, dram_bytes_per_s=92e9, vram_bytes_per_s=4.3e12),
    )


def make_request(run: dict[str, Any], shape: ModelShape) -> PlanRequest:
    """The request whose plan the run carried out."""
    recipe = Recipe.model_validate({
        "name": "sweep", "model": {"path": "model"}, "engine": {"name": "freetoken"}, "headroom": 0,
        "workload": {"prompt_tokens": run["prompt_tokens"], "output_tokens": 192},
    })  # fmt: skip
    return PlanRequest(recipe=recipe, hardware=make_machine(run), shape=shape)


def plan_run(run: dict[str, Any], shape: ModelShape) -> Budget:
    """Ledgers of the run's own settings, with today's formulas; its longest prompt bounds the chunk."""
    settings = ResolvedSettings.model_validate(run["settings"])
    chunk = min(settings.prefill_chunk_tokens, run["prompt_tokens"])
    settings = settings.model_copy(update={"prefill_chunk_tokens": chunk})
    return make_budget(make_request(run, shape), get_adapter("freetoken").memory_model, settings)


def compare_peak(run: dict[str, Any], budget: Budget) -> Figure:
    """The largest amount sampled until every full-length and concurrent prompt was answered.

    A plan has to survive a first start, so it holds the scratch of Triton's tuner; a later start on the same machine
    takes the tuned kernels from their cache, and is compared without that line.
    """
    ledger = budget.vram
    assert ledger is not None
    if not run["has_tuned"]:
        lines = tuple(line for line in ledger.lines if line.key != "autotune_scratch")
        ledger = ledger.model_copy(update={"lines": lines})
        ledger = Ledger.model_validate(ledger.model_dump())
    return Figure("peak", ledger.peak_bytes, max(run["peaks"].values()))


def compare_lines(run: dict[str, Any], budget: Budget) -> tuple[Figure, ...]:
    """Every line that the engine's own figures tell apart."""
    assert budget.vram is not None
    lines = {line.key: line.bytes for line in budget.vram.lines}
    unit, before = run["unit_bytes"], int(run["free_before_gib"] * GIB)
    weights = sum(lines.get(key, 0) for key in ("rope", "dense_weights", "shared_experts", "head", "embedding"))
    taken = int(run["settings"]["memory_ratio"] * before) - run["cache_budget_bytes"]
    found = [
        Figure("context", lines["cuda_context"], run["free_bytes"] - before),
        Figure("weights", weights + lines["allocator"], taken),
        Figure("expert_slots", lines["expert_slots"], unit["moe_per_expert"] * run["slots"]),
        Figure("kv_cache", lines["kv_cache"], unit["kv_per_token"] * (run["pages"] + 1)),
        Figure("linear_state", lines["linear_state"], unit["mamba_per_slot"] * (run["states"] + 1)),
    ]
    if (after := run.get("free_after_init_gib")) is not None:
        pools = budget.vram.phase_bytes("load") + lines["page_tables"]
        found.append(Figure("all before graphs", pools, run["free_bytes"] - int(after * GIB)))
    if (graphs := run.get("graphs_gib")) is not None:
        found.append(Figure("cuda_graphs", lines["cuda_graphs"], int((graphs[0] - graphs[1]) * GIB)))
    if not run["has_tuned"]:
        found.append(Figure("prefill", lines["prefill_transient"], run["peaks"]["prefill"] - run["idle_bytes"]))
    return tuple(found)


def compare_speeds(run: dict[str, Any], shape: ModelShape) -> tuple[Speed, ...]:
    """Decode speed at each live slot count with its hit rate given; the first one calibrates the step's overhead."""
    request = make_request(run, shape)
    settings = ResolvedSettings.model_validate(run["settings"])
    traits = get_adapter("freetoken").memory_model.speed_traits(request, settings)
    rates = resolve_rates(request.hardware, request.hardware.gpus[0])
    found: list[Speed] = []
    overhead = traits.step_overhead_s
    for row in run["speeds"]:
        curve = fit_hit_curve(row["slots"] / traits.experts, row["hit_ratio"]) or 0.0
        step = compute_decode_step(traits, rates, slots=row["slots"], context_tokens=1000, curve=curve)
        rest = step.seconds - traits.step_overhead_s
        if not found:
            overhead = max(0.0, 1 / row["tps"] - rest)
        found.append(Speed(row["slots"], row["hit_ratio"], row["tps"], 1 / step.seconds, 1 / (rest + overhead)))
    return tuple(found)


def make_run(result: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """What the fixture keeps of one measured job."""
    log, settings = result["log"], job["settings"]
    is_up = result["ready"] and "broke" not in result
    run: dict[str, Any] = {
        "name": result["name"], "depth": "deep" if "/deep" in " ".join(job["argv"]) else "shallow",
        "free_bytes": result["free_bytes"], "settings": settings, "prompt_tokens": job["prompt_tokens"],
        "ready": is_up, "ready_s": result["ready_s"], "out_of_memory": bool(log.get("oom") or log.get("needs")),
    }  # fmt: skip
    if result["ready"] and not is_up:
        run["died_in"] = max(result["peaks"], key=list(result["peaks"]).index)
    if log.get("needs"):
        run["refusal"] = [int(figure) for figure in _first(log["needs"])]
    if not is_up:
        return run
    geometry = result["cache"]
    # A rebuild captures its graphs again and prints free memory again: of those runs the first lines are wanted.
    has_first = isinstance(log["free_before_graphs_gib"], list) or not result["resized"]
    run |= {
        "slots": geometry["moe_cache_size"], "pages": geometry["num_pages"], "states": geometry["num_mamba_slots"],
        "unit_bytes": geometry["unit_bytes"], "cache_budget_bytes": geometry["cache_budget_bytes"],
        "free_before_gib": float(_first(log["free_before_gib"])),
        "free_after_init_gib": float(_first(log["free_after_init_gib"])),
        "idle_bytes": result["idle_bytes"], "reserved_bytes": result["vram_bytes"],
        "peaks": {name: peak for name, peak in result["peaks"].items() if not name.startswith("resize")},
        "speeds": make_speeds(result),
    }  # fmt: skip
    if has_first:
        run["graphs_gib"] = [float(_first(log[f"free_{when}_graphs_gib"])) for when in ("before", "after")]
    # The first start on a machine tunes Triton kernels; the allocator keeps that scratch and prefill reuses it.
    unexplained = result["idle_bytes"] - (result["free_bytes"] - int(run["free_after_init_gib"] * GIB))
    run["has_tuned"] = unexplained > 240 * MIB
    return run


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value and not isinstance(value[0], (int, float)) else value


def make_speeds(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean decode tok/s and hit rate of the requests at each slot count.

    Newer results carry the hit rates beside each request. Older ones have the log's alone, one every 40 decode steps;
    which steps belong to which request follows from their lengths.
    """
    if "hits" in result["speed"][0]:
        groups = [(result["cache"]["moe_cache_size"], result["speed"])]
        groups += [(one["slots"], one["speed"]) for one in result["resized"] if one["status"] == "ok"]
        return [_mean_speed(slots, said, _mean([_mean(one["hits"]) for one in said])) for slots, said in groups]
    hits = [float(one) / 100 for one in result["log"]["hits"]]
    groups = [(result["cache"]["moe_cache_size"], result["speed"])]
    groups += [(one["slots"], one["speed"]) for one in result["resized"] if one["status"] == "ok"]
    position, rows = LONG_TOKENS, []
    for index, (slots, answers) in enumerate(groups):
        if index == 1 and "concurrent" in result["peaks"]:
            position += CONCURRENT_TOKENS
        end = position + SPEED_TOKENS * len(answers)
        if (hit := _mean_hit(hits, position, end)) is not None:
            rows.append(_mean_speed(slots, answers, hit))
        position = end
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _mean_speed(slots: int, answers: list[dict[str, Any]], hit: float) -> dict[str, Any]:
    """The mean over equal requests: of seconds a token, not of tokens a second."""
    seconds = _mean([1 / one["decode_tps"] for one in answers])
    return {"slots": slots, "hit_ratio": round(hit, 3), "tps": round(1 / seconds, 1)}


def _mean_hit(hits: list[float], begin: int, end: int) -> float | None:
    total = weight = 0.0
    for index, hit in enumerate(hits):
        overlap = max(0, min(end, LOG_STEPS * (index + 1)) - max(begin, LOG_STEPS * index))
        total, weight = total + overlap * hit, weight + overlap
    return total / weight if weight else None


def print_tables(document: dict[str, Any]) -> None:
    """All runs as Markdown: peaks, lines, verdicts, speeds."""
    shapes = {depth: ModelShape.model_validate(shape) for depth, shape in document["shapes"].items()}
    served = [run for run in document["runs"] if run["ready"]]
    print(
        "| run | layers | free GiB | chunk | at once | embedding | slots | peak predicted | sampled | error MiB | % |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for run in served:
        settings, shape = run["settings"], shapes[run["depth"]]
        peak = compare_peak(run, plan_run(run, shape))
        place = "host" if settings["embed_on_host"] else "GPU"
        print(
            f"| {run['name']} | {shape.layers} | {run['free_bytes'] / GIB:.1f} | {settings['prefill_chunk_tokens']} "
            f"| {settings['max_running_requests']} | {place} | {run['slots']} | {peak.predicted / MIB:.0f} "
            f"| {peak.measured / MIB:.0f} | {peak.error / MIB:+.0f} | {100 * peak.error / peak.measured:+.1f} |"
        )
    print("\n| run | line | predicted MiB | measured MiB | error MiB | % |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for run in served:
        for one in compare_lines(run, plan_run(run, shapes[run["depth"]])):
            share = 100 * one.error / one.measured if one.measured else 0
            print(
                f"| {run['name']} | {one.name} | {one.predicted / MIB:.1f} | {one.measured / MIB:.1f} "
                f"| {one.error / MIB:+.1f} | {share:+.1f} |"
            )
    print("\n| run | planner | engine |\n| --- | --- | --- |")
    for run in document["runs"]:
        budget = plan_run(run, shapes[run["depth"]])
        missing = budget.vram.missing_bytes if budget.vram else 0
        said = f"{missing / MIB:.0f} MiB missing" if missing else "fits"
        did = "out of memory" if run["out_of_memory"] else "served" if run["ready"] else "did not start"
        print(f"| {run['name']} | {said} | {did} |")
    print("\n| run | slots | hit rate | measured tok/s | predicted | % | calibrated on the first | % |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for run in served:
        for row in compare_speeds(run, shapes[run["depth"]]):
            before, after = row.predicted_tps / row.measured_tps - 1, row.calibrated_tps / row.measured_tps - 1
            print(
                f"| {run['name']} | {row.slots} | {row.hit_ratio:.2f} | {row.measured_tps:.0f} "
                f"| {row.predicted_tps:.0f} | {100 * before:+.0f} | {row.calibrated_tps:.0f} | {100 * after:+.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="what measure.py wrote; none = the fixture")
    parser.add_argument("--jobs", type=Path)
    parser.add_argument("--shallow", type=Path, help="headers of the 12-layer checkpoint")
    parser.add_argument("--deep", type=Path, help="headers of the 40-layer checkpoint")
    parser.add_argument("--write", action="store_true", help="add the runs to the fixture, the same names replaced")
    options = parser.parse_args()
    document = json.loads(FIXTURE.read_text(encoding="utf-8")) if FIXTURE.is_file() else {"shapes": {}, "runs": []}
    for depth in ("shallow", "deep"):
        if (folder := getattr(options, depth)) is not None:
            shape = read_shape(folder).model_copy(update={"name": f"qwen3.6-shaped, {depth}"})
            document["shapes"][depth] = shape.model_dump(mode="json", exclude_defaults=True)
    if options.results:
        jobs = {job["name"]: job for job in json.loads(options.jobs.read_text(encoding="utf-8"))}
        lines = [line for path in options.results for line in path.read_text(encoding="utf-8").splitlines() if line]
        measured = [json.loads(line) for line in lines]
        runs = {run["name"]: run for run in document["runs"]}
        told = [one for one in measured if "broke" not in one or one["log"].get("oom")]
        runs |= {one["name"]: make_run(one, jobs[one["name"]]) for one in told}
        document["runs"] = [runs[name] for name in sorted(runs)]
    document = {"command": COMMAND, "engine": "freetoken 0.2.1", "machine": "H200 under ballast", **document}
    if options.write:
        FIXTURE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print_tables(document)


if __name__ == "__main__":
    main()
