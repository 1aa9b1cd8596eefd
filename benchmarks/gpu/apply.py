"""`ft apply` of a recipe on an emulated small card, step by step, each timed and held against the plan. JSON lines.

    python benchmarks/gpu/apply.py --recipe recipes/qwen3.6-35b-a3b-8gb.yaml --model DIR --free-gib 8 \
        --steps start,again,grow,strategy,stop --out FILE

Steps: `start` from nothing to a proven answer; `again` changes nothing; `grow` to `--grow-slots` live; `strategy`
restarts with `--other-strategy`; `speed` measures decode with `ft bench run`; `oom` starts while `--less-mib` of the
planned VRAM go away after the plan was made; `stop` ends it and looks whether all VRAM came back. With several GPUs
CUDA_VISIBLE_DEVICES names the one to use. Without a GPU
`--free-gib 0` holds nothing and VRAM is left out: the steps of the demo recipe can be tried so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent


class Bench:
    """One deployment on one card, and what is written of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ft = shlex.split(options.ft)
        self.sets = [f"--set={one}" for one in options.set]
        if options.model:
            self.sets.append(f"--set=model.path={Path(options.model).absolute()}")
        self.holder: subprocess.Popen[str] | None = None
        self.slots = 0

    def emit(self, step: str, **fields: Any) -> None:
        rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}
        line = json.dumps({"step": step, "recipe": Path(self.options.recipe).stem, "free_gib": self.options.free_gib,
                           **rounded})  # fmt: skip
        print(line, flush=True)
        if self.options.out:
            with open(self.options.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def call(self, *arguments: str, timeout_s: float = 400.0) -> tuple[int, dict[str, Any], str, float]:
        """Exit code, the JSON document, stderr and wall time of one `ft`."""
        began_s = time.monotonic()
        done = subprocess.run([*self.ft, *arguments], capture_output=True, text=True, timeout=timeout_s, cwd=REPO)
        took_s = time.monotonic() - began_s
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = {"stdout": done.stdout[-2000:]}
        return done.returncode, document, done.stderr, took_s

    # -- the card

    def hold(self, after_file: Path | None = None) -> None:
        if not self.options.free_gib:
            return
        argv = [sys.executable, str(HERE / "hold.py"), "--free-gib", str(self.options.free_gib)]
        if after_file is not None:
            argv += ["--less-mib", str(self.options.less_mib), "--after-file", str(after_file)]
        self.holder = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.emit("card", said=self.holder.stdout.readline().strip())  # type: ignore[union-attr]

    def release(self) -> None:
        if self.holder is not None:
            self.holder.kill()
            self.holder.wait()
            self.holder = None

    def used_mib(self) -> float | None:
        """VRAM in use on the GPU, MiB; None without a driver."""
        try:
            query = ["nvidia-smi", "-i", gpu(), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
            return float(done.stdout.strip())
        except (OSError, ValueError):
            return None

    # -- the steps

    def apply(self, step: str, *arguments: str) -> dict[str, Any]:
        peak, began_at = Peak(self.used_mib), time.time()
        with peak:
            code, document, stderr, took_s = self.call(
                "apply", self.options.recipe, "--yes", "--json", *self.sets, *arguments
            )
        if code:
            self.emit(step, code=code, seconds=took_s, error=document, stderr=stderr[-1500:])
            return document
        plan, settings = document.get("plan") or {}, (document.get("plan") or {}).get("settings") or {}
        fields = {key: settings.get(key) for key in ("strategy", "expert_slots", "kv_tokens", "prefill_chunk_tokens",
                                                     "attention", "memory_ratio", "embed_on_host")}  # fmt: skip
        self.slots = int(settings.get("expert_slots") or 0)
        self.emit(
            step, code=code, kind=document.get("kind"), action=(document.get("diff") or {}).get("action"),
            seconds=took_s, **fields, vram_used_mib=self.used_mib(), vram_peak_mib=peak.highest,
            planned_vram=_ledger(plan.get("vram")), predicted_tps=(plan.get("prediction") or {}).get("decode_tps"),
            proof=document.get("proof"), recovered=document.get("recoveries") or document.get("attempts"),
            times=_times(document.get("run_dir"), began_at, began_at + took_s), stderr=stderr[-600:],
        )  # fmt: skip
        return document

    def start(self) -> None:
        self.apply("start")

    def again(self) -> None:
        self.apply("again")

    def grow(self) -> None:
        slots = self.options.grow_slots or int(self.slots * 1.05)
        self.apply("grow", f"--set=settings.expert_slots={slots}")

    def shrink(self) -> None:
        self.apply("shrink", f"--set=settings.expert_slots={int(self.slots * 0.8)}")

    def strategy(self) -> None:
        self.apply("strategy", f"--set=settings.strategy={self.options.other_strategy}")

    def speed(self) -> None:
        code, document, stderr, took_s = self.call("bench", "run", "--json", *shlex.split(self.options.bench))
        self.emit("speed", code=code, seconds=took_s, result=document, stderr=stderr[-600:])

    def status(self) -> None:
        _, document, _, _ = self.call("status", "--json")
        rows = [row for one in document.get("deployments", []) for row in one.get("rows", [])]
        self.emit("status", rows={row["field"]: [row["planned"], row["measured"]] for row in rows})

    def oom(self) -> None:
        """The plan is made with the memory of before; the rest goes away as soon as the launch is intended."""
        self.call("stop", "--all", "--json")
        self.release()
        flag = Path(os.environ.get("TMPDIR", "/tmp")) / f"ft-bench-{os.getpid()}"
        self.hold(after_file=flag)
        state = Path(os.environ["FT_STATE"])
        before = set((state / "runs").glob("*/launch.json"))

        def watch() -> None:
            while not flag.exists():
                if set((state / "runs").glob("*/launch.json")) - before:
                    flag.touch()
                time.sleep(0.01)

        threading.Thread(target=watch, daemon=True).start()
        self.apply("oom")
        flag.touch()
        events = sorted(state.glob("runs/*/events.jsonl"))[-3:]
        said = [json.loads(line) for one in events for line in one.read_text().splitlines()]
        self.emit("oom_events", events=[f"{one['kind']}: {one['message']}"[:400] for one in said])
        flag.unlink(missing_ok=True)

    def stop(self) -> None:
        code, document, stderr, took_s = self.call("stop", "--all", "--json")
        self.emit("stop", code=code, seconds=took_s, vram_used_mib=self.used_mib(), said=document, stderr=stderr[-300:])


class Peak:
    """The highest VRAM in use while a block runs, looked at every 50 ms (nvidia-smi: every 0.5 s or so)."""

    def __init__(self, look: Any) -> None:
        self.look, self.highest, self._is_over = look, None, threading.Event()

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(30)

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            chosen = gpu()
            by_index = pynvml.nvmlDeviceGetHandleByIndex
            handle = by_index(int(chosen)) if chosen.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(chosen)
            # The second version leaves out what the driver keeps for itself, as nvidia-smi does.
            ask, version = pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2
            look = lambda: ask(handle, version=version).used / 2**20  # noqa: E731
        except Exception:
            look = self.look
        while not self._is_over.wait(0.05):
            used = look()
            if used is None:
                return
            self.highest = max(self.highest or 0.0, used)


def gpu() -> str:
    """Index or uuid of the one GPU that this bench and its engine use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") or "0"


def _ledger(ledger: dict[str, Any] | None) -> dict[str, Any] | None:
    if not ledger:
        return None
    phases: dict[str, int] = {}
    for line in ledger["lines"]:
        for phase in line["phases"]:
            phases[phase] = phases.get(phase, 0) + line["bytes"]
    return {
        "available_mib": ledger["available_bytes"] / 2**20, "headroom_mib": ledger["headroom_bytes"] / 2**20,
        "phases_mib": {phase: round(count / 2**20, 1) for phase, count in phases.items()},
        "lines_mib": {line["key"]: round(line["bytes"] / 2**20, 1) for line in ledger["lines"]},
    }  # fmt: skip


def _times(run_dir: str | None, began_at: float, ended_at: float) -> dict[str, float]:
    """Seconds between the beginning of `ft`, the events of its run, and its end: what of it is the engine's load."""
    if not run_dir or not (path := Path(run_dir) / "events.jsonl").exists():
        return {}
    at = {"began": began_at, "ended": ended_at}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        at[event["kind"]] = datetime.fromisoformat(event["at"]).timestamp()
    names = ("began", "intended", "engine_started", "engine_ready", "proven", "ended")
    found = [(name, at[name]) for name in names if name in at]
    return {f"{a}_to_{b}": round(later - first, 3) for (a, first), (b, later) in itertools.pairwise(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--free-gib", type=float, default=8.0)
    parser.add_argument("--less-mib", type=float, default=700.0)
    parser.add_argument("--steps", default="start,again,grow,status,strategy,stop")
    parser.add_argument("--grow-slots", type=int, default=0)
    parser.add_argument("--other-strategy", default="hybrid")
    parser.add_argument("--bench", default="--repeats 1", help="arguments of `ft bench run`")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--ft", default=f"{sys.executable} -m freetoken")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    bench = Bench(options)
    bench.emit("before", vram_used_mib=bench.used_mib())
    bench.hold()
    bench.emit("held", vram_used_mib=bench.used_mib())
    try:
        for step in options.steps.split(","):
            getattr(bench, step)()
    finally:
        bench.call("stop", "--all", "--json")
        bench.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
