"""Turn a covering set of recipes into measuring jobs: our planner decides the settings, the adapter the flags.

    jobs.py --deep HEADERS_40_LAYERS --shallow HEADERS_12_LAYERS --out jobs.json

Writes each job with what was predicted, line by line, so that `compare.py` can hold it against what was measured.
The checkpoints may be headers only here; `--deep-at` and `--shallow-at` say where they lie on the GPU machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.planner_gpu.compare import make_machine
from freetoken.adapters import get_adapter
from freetoken.checkpoint.header import read_shape
from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Hardware
from freetoken.planner.memory import PHASES
from freetoken.planner.plan import Plan, PlanRequest
from freetoken.planner.solve import make_plan
from freetoken.recipe.model import Recipe
from freetoken.units import GIB, MIB

#: name, model, GiB free, chunk, embedding on the host, requests at once; the most informative first. Deep ones are the
#: model's own depth and take a minute more to load.
ADMITTED = [
    ("a10", "deep", 8.0, 2048, True, 1),
    ("a06", "shallow", 7.0, 8192, True, 4),
    ("a01", "shallow", 5.5, 512, True, 1),
    ("a11", "deep", 8.0, 8192, False, 4),
    ("a05", "shallow", 6.5, 512, False, 4),
    ("a08", "deep", 5.5, 2048, True, 1),
    ("a17", "shallow", 7.0, 512, False, 1),
    ("a15", "deep", 16.0, 8192, True, 1),
    ("a14", "deep", 12.0, 512, False, 4),
    ("a18", "shallow", 6.5, 8192, True, 1),
    ("a12", "deep", 10.0, 2048, False, 1),
    ("a09", "deep", 6.0, 512, True, 1),
    ("a13", "deep", 12.0, 8192, True, 4),
    ("a16", "deep", 16.0, 2048, False, 4),
    ("a02", "shallow", 5.5, 2048, True, 4),
    ("a03", "shallow", 6.0, 8192, False, 1),
    ("a04", "shallow", 6.0, 2048, False, 4),
    ("a07", "shallow", 7.0, 2048, True, 1),
]
#: The same, with that many MiB more of slots than our plan admits at no headroom; one follows every two admitted.
REFUSED = [
    ("r01", "shallow", 5.5, 8192, True, 1, 340),
    ("r02", "shallow", 6.0, 2048, False, 4, 340),
    ("r04", "deep", 6.0, 2048, True, 1, 340),
    ("r03", "shallow", 6.5, 8192, False, 1, 400),
    ("r05", "deep", 8.0, 8192, True, 4, 400),
]
RESIZE = {"a02": (0.5, 0.7, 0.85), "a07": (0.3, 0.5, 0.75), "a10": (0.4, 0.6, 0.8), "a15": (0.25, 0.5, 0.75)}


def emulated(cap_gib: float) -> Hardware:
    """An H200 of which `cap_gib` are free."""
    return make_machine({"free_bytes": int(cap_gib * GIB)})


def make_recipe(chunk: int, on_host: bool, running: int, headroom: object, slots: object = "auto") -> Recipe:
    """Everything that decides memory is fixed but the slots."""
    workload = {"prompt_tokens": 8000, "output_tokens": 192, "concurrency": running, "context_tokens": 8192}
    settings = {
        "prefill_chunk_tokens": chunk, "embed_on_host": on_host, "max_running_requests": running,
        "kv_tokens": 8192 * running, "strategy": "offload", "expert_slots": slots, "expert_load": "parallel",
    }  # fmt: skip
    return Recipe.model_validate({
        "name": "sweep", "model": {"path": "model"}, "engine": {"name": "freetoken"}, "workload": workload,
        "settings": settings, "headroom": headroom,
    })  # fmt: skip


def make_job(
    name: str, shape: ModelShape, model_at: str, cap: float, recipe: Recipe, *, force: bool = False
) -> dict[str, Any]:
    """The job that carries out our plan of `recipe`, with the plan's lines. Raises SystemExit for a refusal."""
    adapter = get_adapter("freetoken")
    request = PlanRequest(
        recipe=recipe, hardware=emulated(cap), shape=shape, engine_version="0.2.1", model_path=model_at
    )
    plan = make_plan(request, adapter, force=force)
    if not isinstance(plan, Plan):
        raise SystemExit(f"{name}: {plan.message}")
    spec = adapter.make_launch_spec(plan, interpreter="python3")
    argv, skip = [], False
    for word in spec.argv[1:]:
        if skip:
            skip = False
        elif word in ("--port", "--gpu", "--host"):
            skip = True
        else:
            argv.append(word)
    lines = {line.key: {"bytes": line.bytes, "phases": line.phases} for line in plan.vram.lines}
    return {
        "name": name, "cap_bytes": int(cap * GIB), "argv": argv, "env": spec.env, "prompt_tokens": 8000,
        "concurrent": recipe.settings.max_running_requests, "settings": plan.settings.model_dump(),
        "predicted": {"lines": lines, "peak": plan.vram.peak_bytes, "phase": plan.vram.peak_phase,
                      "phases": {phase: plan.vram.phase_bytes(phase) for phase in PHASES},
                      "missing": plan.vram.missing_bytes, "left": plan.vram.left_bytes,
                      "decode_tps": plan.prediction.decode_tps if plan.prediction else None},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for depth in ("deep", "shallow"):
        parser.add_argument(f"--{depth}", required=True, type=Path)
        parser.add_argument(f"--{depth}-at", default=f"/tmp/{depth}")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shallow-first", action="store_true", help="all 12-layer runs before the first 40-layer one")
    options = parser.parse_args()
    shapes = {depth: read_shape(getattr(options, depth)) for depth in ("deep", "shallow")}
    places = {"deep": options.deep_at, "shallow": options.shallow_at}
    admitted = []
    for name, depth, cap, chunk, on_host, running in ADMITTED:
        job = make_job(name, shapes[depth], places[depth], cap, make_recipe(chunk, on_host, running, "server"))
        job["resize"] = [int(job["settings"]["expert_slots"] * share) for share in RESIZE.get(name, ())]
        admitted.append(job)
    refused = []
    for name, depth, cap, chunk, on_host, running, excess in REFUSED:
        shape, place = shapes[depth], places[depth]
        job = make_job(name, shape, place, cap, make_recipe(chunk, on_host, running, 0))
        slots = job["settings"]["expert_slots"]
        while (short := excess * MIB - job["predicted"]["missing"]) > 0:
            slots += max(4, short // (2 * shape.experts.expert_bytes))
            recipe = make_recipe(chunk, on_host, running, 0, slots)
            job = make_job(name, shape, place, cap, recipe, force=True)
        refused.append(job)
    jobs = []
    for index, job in enumerate(admitted):
        jobs.append(job)
        if index % 2 == 1 and refused:
            jobs.append(refused.pop(0))
    jobs += refused
    if options.shallow_first:
        jobs.sort(key=lambda job: places["deep"] in job["argv"])
    options.out.write_text(json.dumps(jobs, indent=1))
    for job in jobs:
        p, s = job["predicted"], job["settings"]
        print(
            f"{job['name']} cap {job['cap_bytes'] / GIB:4.1f} chunk {s['prefill_chunk_tokens']:5d} "
            f"slots {s['expert_slots']:5d} ratio {s['memory_ratio']} peak {p['peak'] / GIB:.2f} ({p['phase']}) "
            f"missing {p['missing'] / MIB:.0f} MiB"
        )


if __name__ == "__main__":
    main()
