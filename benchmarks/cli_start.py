"""How fast `ft` answers: least wall time of several runs, beside an empty interpreter and `import click`.

    python benchmarks/cli_start.py [RUNS]

`ft --help` is to take at most 4x `python -c "import click"`, and `ft plan` on a bundled card under 0.5 s.
"""

from __future__ import annotations

import subprocess
import sys
import time

CASES = {
    'python -c ""': ["-c", ""],
    'python -c "import click"': ["-c", "import click"],
    "ft --help": ["-m", "freetoken", "--help"],
    "ft plan --help": ["-m", "freetoken", "plan", "--help"],
    "ft plan (bundled card, profile)": [
        "-m", "freetoken", "plan", "nvidia/Qwen3.6-35B-A3B-NVFP4", "--engine", "freetoken", "--workload", "agent-8k",
        "--profile", "rtx-3060-12gb",
    ],
    "ft recipe list": ["-m", "freetoken", "recipe", "list"],
}  # fmt: skip


def measure_s(arguments: list[str], runs: int) -> float:
    """Least wall time of `runs` runs after one that warms the caches; seconds."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    found = {name: measure_s(arguments, runs) for name, arguments in CASES.items()}
    click = found['python -c "import click"']
    for name, seconds in found.items():
        print(f"{name:34s} {seconds * 1000:7.0f} ms  {seconds / click:5.2f} x import click")


if __name__ == "__main__":
    main()
