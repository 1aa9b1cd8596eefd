"""`make bench-tuner` runs this: machines, seeds and methods; prints the tables of `../tuner.md`."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.tuner.compare import METHODS, Case, Trace, run_case

NEAR = 0.97
MARKS = (1, 2, 4, 6, 12)
#: Traces of every method by seed and machine.
Traces = dict[str, dict[tuple[int, int], Trace]]


def main() -> None:
    """Runs what is asked for and prints the report; `--raw` keeps and joins traces of several runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first machine; 0 to 49 are for development")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--gp-seeds", type=int, help="seeds of the slow GP sampler; else as many as of the others")
    parser.add_argument("--hardship", type=float, default=1.0, help="factor on noise, hidden memory and probes' errors")
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--raw", type=Path, help="file of traces: read where it exists, written with what was added")
    parser.add_argument("--out", type=Path, help="file of the report, beside standard output")
    options = parser.parse_args()
    traces = read_raw(options.raw) if options.raw is not None and options.raw.exists() else {}
    for method in options.methods.split(","):
        traces.setdefault(method, {})
    cases = make_cases(options, traces)
    began_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for done, (case, found) in enumerate(zip(cases, pool.imap(run_case, cases), strict=True), 1):
            for method, trace in found.items():
                traces[method][case.seed, case.machine] = trace
            if done % 50 == 0 or done == len(cases):
                print(f"{done} of {len(cases)} cases: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
                if options.raw is not None:
                    write_raw(options.raw, traces)
    report = make_report(traces, options.starts)
    print(report)
    if options.out is not None:
        options.out.write_text(report, encoding="utf-8")


def make_cases(options: argparse.Namespace, known: Traces) -> list[Case]:
    """What is still to be run: every seed on every machine, with the methods that lack it."""
    cases = []
    for seed, index in itertools.product(range(options.seeds), range(options.machines)):
        machine = options.first + index
        is_gp_done = options.gp_seeds is not None and seed >= options.gp_seeds
        methods = tuple(
            method
            for method in options.methods.split(",")
            if (seed, machine) not in known[method] and not (method == "gp" and is_gp_done)
        )
        if methods:
            cases.append(Case(machine, seed, options.starts, methods, options.hardship))
    return cases


def read_raw(path: Path) -> Traces:
    """Traces that an earlier run kept."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {
        method: {(seed, machine): Trace(tuple(shares), *rest) for seed, machine, shares, *rest in rows}
        for method, rows in kept.items()
    }


def write_raw(path: Path, traces: Traces) -> None:
    """Keeps `traces` for a later run."""
    raw = {method: [[*key, *trace] for key, trace in found.items()] for method, found in traces.items()}
    path.write_text(json.dumps(raw, separators=(",", ":")) + "\n", encoding="utf-8")


def make_report(traces: Traces, starts: int) -> str:
    """The table with 95 % intervals, bootstrapped over machines, and the paired comparison by seed."""
    marks = [one for one in MARKS if one <= starts]
    halves = sorted({min(6, starts), starts})
    near = " | ".join(f"within 3 % by {one}" for one in halves)
    lines = [
        "| method | seeds | " + " | ".join(f"mean @{one}" for one in marks) + f" | {near} | crashes a machine |",
        "|---|" + "---:|" * (len(marks) + len(halves) + 2),
    ]
    shares = {method: Shares(found) for method, found in traces.items() if found}
    for method, one in shares.items():
        cells = [_interval(one.at(start).mean(axis=0)) for start in marks]
        cells += [_interval((one.at(start) >= NEAR).mean(axis=0), percent=True) for start in halves]
        crashes = _interval(one.crashes.mean(axis=0), digits=2)
        lines.append(f"| {method} | {len(one.seeds)} | " + " | ".join([*cells, crashes]) + " |")
    if "tuner" in shares and len(shares) > 1:
        lines += ["", *_compare(shares, halves)]
    return "\n".join(lines) + "\n"


class Shares:
    """Traces of one method as arrays (seeds, machines, starts)."""

    def __init__(self, found: dict[tuple[int, int], Trace]) -> None:
        machines = sorted({machine for _, machine in found})
        # A seed that was run on a part of the machines alone would shift the mean.
        seeds = sorted({seed for seed, _ in found})
        self.seeds = [seed for seed in seeds if all((seed, machine) in found for machine in machines)]
        self.shares = np.array([[found[seed, machine].shares for machine in machines] for seed in self.seeds])
        self.crashes = np.array([[found[seed, machine].crashes for machine in machines] for seed in self.seeds], float)

    def at(self, start: int) -> np.ndarray:
        """Shares after `start` starts: (seeds, machines)."""
        return np.asarray(self.shares[:, :, start - 1])


def _compare(shares: dict[str, Shares], marks: list[int]) -> list[str]:
    """Mean share by seed, the tuner's less the other's, machines paired."""
    others = [one for one in shares if one != "tuner"]
    heads = [f"{method} @{start}" for start in marks for method in others]
    lines = [f"| seed | {' | '.join(heads)} |", "|---:|" + "---:|" * len(heads)]
    ours = shares["tuner"]
    for row, seed in enumerate(ours.seeds):
        cells = []
        for start in marks:
            for method in others:
                other = shares[method]
                if seed in other.seeds:
                    cells.append(f"{(ours.at(start)[row] - other.at(start)[other.seeds.index(seed)]).mean():+.3f}")
                else:
                    cells.append("")
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    return lines


def _interval(values: np.ndarray, *, percent: bool = False, digits: int = 3) -> str:
    """Mean over machines with a bootstrap interval."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (2000, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    if percent:
        return f"{100 * values.mean():.0f} % ({100 * low:.0f}-{100 * high:.0f})"
    return f"{values.mean():.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


if __name__ == "__main__":
    main()
