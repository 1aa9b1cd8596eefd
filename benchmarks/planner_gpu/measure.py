"""Measure what the upstream engine really takes of an emulated small card, and how fast it then is.

    measure.py --jobs jobs.json --site /tmp/site --out results.jsonl [--gpus 2] [--threads 4]

Each job is `{"name", "cap_bytes", "argv": [...], "env": {...}, "prompt_tokens", "concurrent", "resize": [...]}`; `argv`
is what follows the interpreter, as an adapter's launch specification has it, without `--port`. A ballast process holds
the card down to `cap_bytes` of free memory; used memory is read from NVML every 20 ms, less what was used before the
engine started, so the CUDA context counts. One job at a time on each GPU; with several GPUs `--threads` bounds torch's
threads of each engine, else they oversubscribe the CPU and banks take minutes. Jobs that `--out` already holds are
left out, so that the same call goes on where the last one ended. Prompts are bytes of text: the synthetic tokenizer
gives a token a byte.

Result, bytes unless named: `free_bytes` before the engine; `peaks` by phase (load, idle, prefill, decode, concurrent,
resize_N); `idle_bytes` after the start; `vram_bytes` reserved by torch; `cache` the engine's own geometry; `log` what
its log states, first to last; `speed` and `resized[].speed` one entry a request, `hits` the hit rates of its log lines.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

BALLAST = """
import sys, time, torch
want, step = int(sys.argv[1]), 2 * 2**20
held = []
while True:
    free, _ = torch.cuda.mem_get_info()
    size = min(free - want, 8 * 2**30) // step * step
    if size < 4 * step:
        break
    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
print(torch.cuda.mem_get_info()[0], flush=True)
time.sleep(3600)
"""
#: Decode steps between two log lines with the hit rate, and tokens of a timed answer.
LOG_STEPS, SPEED_TOKENS = 16, 256
HIT = r"MoE decode, .*?hit ([\d.]+)%"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Sampler(threading.Thread):
    """Reads the used memory of one GPU every 20 ms and keeps the peak of the current phase, in bytes."""

    def __init__(self, index: int) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.baseline = self.used()
        self.phase, self.peaks, self.stop = "load", {}, False

    def used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def run(self) -> None:
        while not self.stop:
            now = self.used() - self.baseline
            self.peaks[self.phase] = max(now, self.peaks.get(self.phase, 0))
            time.sleep(0.02)


def call(port: int, path: str, body: dict | None = None, timeout: float = 400):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
    return urllib.request.urlopen(request, timeout=timeout)


def ask(port: int, seed: int, prompt_tokens: int, output_tokens: int) -> dict:
    rng = random.Random(seed)
    prompt = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(prompt_tokens))
    sent, first, last, usage = time.time(), None, None, {}
    body = {
        "model": "x", "prompt": prompt, "max_tokens": output_tokens, "temperature": 1.0, "seed": seed,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with call(port, "/v1/completions", body) as reply:
        for line in reply:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            usage = event.get("usage") or usage
            if event.get("choices"):
                last = time.time()
                first = first or last
    out = usage.get("completion_tokens", 0)
    tps = (out - 1) / (last - first) if out > 1 and last and first and last > first else None
    ttft = round(first - sent, 3) if first else None
    return {"ttft_s": ttft, "decode_tps": tps, "prompt_tokens": usage.get("prompt_tokens"), "completion_tokens": out}


def ask_timed(port: int, seed: int, log: Path) -> dict:
    """One timed request with the hit rates that the log states meanwhile."""
    before = len(read_hits(log))
    answer = ask(port, seed, 1000, SPEED_TOKENS)
    time.sleep(0.1)
    return {**answer, "hits": read_hits(log)[before:]}


def read_hits(log: Path) -> list[float]:
    return [float(one) / 100 for one in re.findall(HIT, ANSI.sub("", log.read_text(errors="replace")))]


def log_facts(text: str) -> dict:
    """What the engine's log states, in bytes or GiB as printed, first to last: a rebuild prints some of it again."""
    text = ANSI.sub("", text)
    patterns = {
        "free_before_gib": r"Free memory before loading model: ([\d.]+) GiB",
        "free_after_init_gib": r"Free memory after initialization: ([\d.]+) GiB",
        "free_before_graphs_gib": r"Free GPU memory before capturing CUDA graphs: ([\d.]+) GiB",
        "free_after_graphs_gib": r"Free GPU memory after capturing CUDA graphs: ([\d.]+) GiB",
        "resolved": r"(Resolved config: .*)",
        "auto": r"(--moe-cache-\w+ .*resolved moe_cache_size=.*)",
        "kv": r"(Allocating \d+ tokens for KV cache.*)",
        "needs": r"needs (\d+) B > budget (-?\d+) B",
        "oom": r"(OutOfMemoryError: .*|CUDA out of memory.*|CUBLAS_STATUS_ALLOC_FAILED.*)",
        "error": r"((?:AssertionError|ValueError|RuntimeError|NotImplementedError): .*)",
    }
    found: dict = {}
    for key, pattern in patterns.items():
        hits = re.findall(pattern, text)
        if hits:
            found[key] = hits
    return found


def run_job(job: dict, gpu: int, site: str, logs: Path, threads: int) -> dict:
    port = 2100 + gpu * 10
    place = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": str(threads)}
    env = {**os.environ, **place, **job.get("env", {})}
    env.pop("PYTHONHOME", None)
    hold = [sys.executable, "-c", BALLAST, str(job["cap_bytes"])]
    ballast = subprocess.Popen(hold, stdout=subprocess.PIPE, text=True, env=env)
    result: dict = {"name": job["name"], "cap_bytes": job["cap_bytes"], "argv": job["argv"], "env": job.get("env", {})}
    engine = None
    log_path = logs / f"{job['name']}.log"
    try:
        result["free_bytes"] = int(ballast.stdout.readline())
        sampler = Sampler(gpu)
        sampler.start()
        started = time.time()
        with log_path.open("w") as log:
            argv = [sys.executable, *job["argv"], "--port", str(port), "--decode-log-interval", str(LOG_STEPS)]
            engine = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=tempfile.gettempdir(),
                env={**env, "PYTHONPATH": site},
            )  # fmt: skip
        threading.Thread(target=end_with_its_worker, args=(engine, log_path), daemon=True).start()
        ready = False
        while time.time() - started < job.get("ready_s", 240) and engine.poll() is None and not ready:
            time.sleep(0.5)
            try:
                health = json.load(call(port, "/health", timeout=5))
            except OSError:
                continue
            if health.get("status") == "error":
                result["error"] = health.get("message")
                break
            ready = health.get("status") == "ok" and health.get("maintenance") == "serving"
        result["ready"], result["ready_s"] = ready, round(time.time() - started, 1)
        if ready:
            measure_ready(job, port, sampler, result, log_path)
        sampler.stop = True
        result["peaks"] = sampler.peaks
    except Exception as error:
        result["broke"] = f"{type(error).__name__}: {error} (in phase {sampler.phase if 'sampler' in locals() else ''})"
        if "sampler" in locals():
            result["peaks"] = sampler.peaks
    finally:
        if engine is not None and engine.poll() is None:
            for sign, grace in ((signal.SIGINT, 8), (signal.SIGKILL, 5)):
                try:
                    os.killpg(engine.pid, sign)
                    engine.wait(grace)
                    break
                except (subprocess.TimeoutExpired, ProcessLookupError):
                    continue
        ballast.kill()
        ballast.wait()
        result["log"] = log_facts(log_path.read_text(errors="replace")) if log_path.exists() else {}
        time.sleep(1.0)
    return result


def end_with_its_worker(engine: subprocess.Popen, log: Path) -> None:
    """Kills a server whose worker is gone: it waits for its clients, and they for an answer that never comes."""
    while engine.poll() is None:
        time.sleep(1)
        if log.exists() and "backend worker" in log.read_text(errors="replace"):
            time.sleep(3)  # its traceback is written by then
            os.killpg(engine.pid, signal.SIGKILL)
            return


def measure_ready(job: dict, port: int, sampler: Sampler, result: dict, log: Path) -> None:
    """Full-length prompt, decode at full context, then decode speed at each slot count of `resize`."""
    result["cache"] = json.load(call(port, "/v1/cache/status"))["geometry"]
    sampler.phase = "idle"
    time.sleep(0.1)
    result["idle_bytes"] = sampler.used() - sampler.baseline
    sampler.phase = "prefill"
    result["long"] = ask(port, 1, job.get("prompt_tokens", 8000), 24)
    sampler.phase = "decode"
    result["speed"] = [ask_timed(port, 10 + n, log) for n in range(3)]
    result["after_bytes"] = sampler.used() - sampler.baseline
    result["vram_bytes"] = json.load(call(port, "/v1/stats")).get("vram_bytes")
    if job.get("concurrent", 1) > 1:
        sampler.phase = "concurrent"
        threads = [threading.Thread(target=ask, args=(port, 50 + n, 1500, 32)) for n in range(job["concurrent"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    result["resized"] = []
    for slots in job.get("resize", []):
        sampler.phase = f"resize_{slots}"
        began = time.time()
        try:
            reply = json.load(call(port, "/v1/cache/rebuild", {"moe_cache_size": slots}))
        except urllib.error.HTTPError as error:
            reply = json.load(error)
        row = {"slots": slots, "status": reply.get("status"), "rebuild_s": round(time.time() - began, 2)}
        if reply.get("status") == "ok":
            ask(port, 99 + slots, 1000, 64)  # the first request fills the new slots
            row["speed"] = [ask_timed(port, 100 + slots + n, log) for n in range(3)]
        result["resized"].append(row)


def claim(path: Path) -> bool:
    """Whether this call is the first to want the job."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", required=True, type=Path)
    parser.add_argument("--site", required=True, help="folder with the upstream engine's packages")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/planner_gpu_logs"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--threads", type=int, default=4, help="torch threads of each engine")
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--stop-after-s", type=float, default=520)
    parser.add_argument("--claims", type=Path, help="folder by which several calls at once share the jobs")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    jobs: queue.Queue = queue.Queue()
    held = options.out.read_text().splitlines() if options.out.is_file() else []
    done = {json.loads(line)["name"] for line in held if line}
    for job in json.loads(options.jobs.read_text()):
        if job["name"] not in done:
            jobs.put(job)
    lock, began = threading.Lock(), time.time()

    def work(gpu: int) -> None:
        while time.time() - began < options.stop_after_s:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                return
            if options.claims and not (job.get("again") or claim(options.claims / job["name"])):
                continue
            result = run_job(job, gpu, options.site, options.logs, options.threads)
            log = result["log"]
            if not (result.get("ready") or log.get("oom") or log.get("needs") or job.get("again")):
                # Several first starts compile the same kernels at once; a start lost to that gets one more.
                print("again", job["name"], result.get("error"), log.get("error"), flush=True)
                jobs.put({**job, "again": True})
                continue
            with lock, options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            told = ("name", "ready", "ready_s", "free_bytes", "peaks", "error", "broke")
            print(json.dumps({key: result.get(key) for key in told}), flush=True)

    first = options.first_gpu
    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in range(first, first + options.gpus)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
