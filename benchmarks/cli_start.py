"""How fast `ft` answers: least wall and CPU time of several runs, beside an empty interpreter and `import click`.

    python benchmarks/cli_start.py [--runs N] [--checkpoint FOLDER]

`ft --help` is to take at most 4x `python -c "import click"`, and `ft plan` on a bundled card under 0.5 s; with
`--checkpoint` (93,275 tensors, headers only) a plan is to take under 2 s. The cases take turns, so that a load that
comes and goes meets all of them alike; the least of the runs is told, since only other work makes a run slower.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FT = ("-m", "freetoken")
PROFILE = ("--profile", "rtx-4060-laptop-8gb")
CARD = "nvidia/Qwen3.6-35B-A3B-NVFP4"
CASES: dict[str, tuple[str, ...]] = {
    'python -c ""': ("-c", ""),
    'python -c "import click"': ("-c", "import click"),
    "ft --help": (*FT, "--help"),
    "ft plan --help": (*FT, "plan", "--help"),
    "ft plan CARD --profile": (*FT, "plan", CARD, *PROFILE, "--engine", "freetoken"),
    "ft plan RECIPE --profile": (*FT, "plan", "qwen3.6-35b-a3b-8gb", *PROFILE),
    "ft plan CARD --profile --json": (*FT, "plan", CARD, *PROFILE, "--engine", "freetoken", "--json"),
    "ft recipe list": (*FT, "recipe", "list"),
    "ft status": (*FT, "status"),
    "ft apply --dry-run demo": (*FT, "apply", "--dry-run", "recipes/demo.yaml"),
}


def measure_s(arguments: tuple[str, ...], env: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, env=env, cwd=Path(__file__).parents[1]
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--checkpoint", help="a folder of many tensors, to be planned too")
    options = parser.parse_args()
    cases = dict(CASES)
    if options.checkpoint:
        cases["ft plan CHECKPOINT --profile"] = (*FT, "plan", options.checkpoint, *PROFILE, "--engine", "freetoken")
    # As installed: pip compiles a package, an editable one is compiled at its first use.
    compileall.compile_dir(str(Path(__file__).parents[1] / "freetoken"), quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "FT_STATE": f"{folder}/state", "FT_RUNTIME_DIR": f"{folder}/run"}
        runs = [{name: measure_s(arguments, env) for name, arguments in cases.items()} for _ in range(options.runs + 1)]
    walls = {name: min(run[name][0] for run in runs[1:]) for name in cases}
    click = walls['python -c "import click"']
    print(f"{'least of ' + str(options.runs):32s} {'wall ms':>8s} {'CPU ms':>8s} {'x import click':>15s}")
    for name, wall in walls.items():
        cpu = min(run[name][1] for run in runs[1:])
        print(f"{name:32s} {wall * 1000:8.0f} {cpu * 1000:8.0f} {wall / click:15.2f}")


if __name__ == "__main__":
    main()
