"""`python -m benchmarks.tuner`: all machines, seeds and methods; prints and keeps the table. See `make bench-tuner`."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np

from benchmarks.tuner.compare import METHODS, Case, Trace, run_case

HERE = Path(__file__).resolve().parent
NEAR = 0.97


def main() -> None:
    """Runs what is asked for and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first machine")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path, default=HERE.parent / "tuner.md")
    options = parser.parse_args()
    methods = tuple(options.methods.split(","))
    cases = [
        Case(options.first + machine, seed, options.starts, methods)
        for seed, machine in itertools.product(range(options.seeds), range(options.machines))
    ]
    began_s = time.monotonic()
    traces: dict[str, dict[tuple[int, int], Trace]] = {method: {} for method in methods}
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for number, (case, found) in enumerate(zip(cases, pool.imap(run_case, cases), strict=True), 1):
            for method, trace in found.items():
                traces[method][case.seed, case.machine - options.first] = trace
            if number % options.machines == 0:
                print(f"seed {case.seed}: {time.monotonic() - began_s:.0f} s", flush=True)
    report = make_report(traces, options.machines, options.seeds, options.starts)
    print(report)
    options.out.write_text(report, encoding="utf-8")
    raw = {method: [[*key, *trace] for key, trace in found.items()] for method, found in traces.items()}
    options.out.with_suffix(".json").write_text(json.dumps(raw, separators=(",", ":")) + "\n", encoding="utf-8")


def make_report(traces: dict[str, dict[tuple[int, int], Trace]], machines: int, seeds: int, starts: int) -> str:
    """The table with 95 % intervals, bootstrapped over machines, and the paired comparison by seed."""
    marks = [one for one in (1, 2, 4, 6, 12) if one <= starts]
    lines = [
        "# The tuner on simulated machines",
        "",
        f"`make bench-tuner`: {machines} machines, {seeds} seeds, {starts} starts each. Share of the true best (dense"
        " search) that the setting each method would hand back reaches; 95 % intervals over machines. The tuner is"
        " the code that `ft tune` runs; the truth has another form than its model (`benchmarks/tuner/machines.py`)."
        " The others are Optuna's samplers, given the engine's default first and the planner's refusals for nothing,"
        " slots as a share of those that the planner grants. A start is a start for all of them; live resizes inside a"
        " start, which the tuner alone makes, are not counted.",
        "",
        "| method | " + " | ".join(f"mean @{one}" for one in marks)
        + f" | within 3 % by {min(6, starts)} | by {starts} | crashes a machine |",
        "|---|" + "---:|" * (len(marks) + 3),
    ]  # fmt: skip
    shares = {method: _array(found, machines, seeds) for method, found in traces.items()}
    for method, array in shares.items():
        cells = [_interval(array[:, :, one - 1].mean(axis=0)) for one in marks]
        cells += [
            _interval((array[:, :, one - 1] >= NEAR).mean(axis=0), percent=True) for one in (min(6, starts), starts)
        ]
        crashes = np.array([[traces[method][s, m].crashes for m in range(machines)] for s in range(seeds)], float)
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {_interval(crashes.mean(axis=0))} |")
    if "tuner" in shares and len(shares) > 1:
        lines += ["", "Mean share by seed at the last start, tuner less the other, machines paired:", "",
                  "| seed | " + " | ".join(one for one in shares if one != "tuner") + " |",
                  "|---:|" + "---:|" * (len(shares) - 1)]  # fmt: skip
        for seed in range(seeds):
            differences = [
                f"{(shares['tuner'][seed, :, -1] - array[seed, :, -1]).mean():+.3f}"
                for method, array in shares.items()
                if method != "tuner"
            ]
            lines.append(f"| {seed} | " + " | ".join(differences) + " |")
    return "\n".join(lines) + "\n"


def _array(found: dict[tuple[int, int], Trace], machines: int, seeds: int) -> np.ndarray:
    return np.array([[found[seed, machine].shares for machine in range(machines)] for seed in range(seeds)])


def _interval(values: np.ndarray, *, percent: bool = False) -> str:
    """Mean over machines with a bootstrap interval."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (2000, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    if percent:
        return f"{100 * values.mean():.0f} % ({100 * low:.0f}-{100 * high:.0f})"
    return f"{values.mean():.3f} ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    main()
