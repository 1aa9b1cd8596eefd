"""Simulated machines for the tuner's benchmark: 6 to 16 GB cards with a Qwen3.6-shaped NVFP4 checkpoint in host RAM.

The truth differs from the tuner's model in form, not only in numbers:

* the hit curve is that of a two-part mixture (hot and cold experts), not `(1 + c) f / (1 + c f)`;
* a decode step is a sum over layers, each with its own miss share, launch gap and latency per transfer; `hybrid` deals
  with whole experts, so its fetched share is rounded for every count of misses that a layer can have, and its sides
  slow each other down by contention for DRAM;
* CPU bandwidth over threads rises, saturates and falls again (spin-waiting, hyper-threads);
* prefill overlaps only in part, its compute efficiency is a power of the chunk; the other attention backend changes
  compute alone, more or less by chunk, and adds or saves a time per step: nowhere a factor on the whole;
* memory has a hidden workspace (or a plan that is too careful), a hidden part per chunk token and fragmentation by
  slots, none of which is planned;
* figures carry noise of their own and a slow drift of the machine, which repeats do not average out;
* `hybrid` is broken on every fifth machine (3 to 40 times slower), as published for two releases.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from freetoken.planner.memory import ResolvedSettings, SpeedTraits
from freetoken.planner.rates import Rates
from freetoken.recipe.workload import Workload
from freetoken.tuner.site import Forecast
from freetoken.tuner.space import Parameter, Space
from freetoken.tuner.values import Measurement, Outcome, Point

MIB, GIB = 1 << 20, 1 << 30
LAYERS, EXPERTS, TOP_K = 40, 10_240, 8
SLOT = 1_769_472
EMBEDDING = 970 * MIB
DENSE = int(2.65 * GIB)
KV_PER_TOKEN = 20_480
CHUNKS = (512, 1024, 2048, 4096, 8192)
ATTENTION = ("triton", "fi")
#: 6k prompt tokens and 500 decoded ones, as one turn.
WORKLOAD = Workload(name="sim", turns=1, prompt_tokens=6144, output_tokens=500, context_tokens=8192)
HEADROOM = 150 * MIB


#: Early and late layers miss more: factor on the misses -> layers that have it.
SKEW = Counter(round(1 + 0.35 * math.cos(2 * math.pi * layer / (LAYERS - 1)), 9) for layer in range(LAYERS))
#: Correlation of the drift from one measurement to the next.
DRIFT_MEMORY = 0.8


@lru_cache(maxsize=100_000)
def _hit_ratio(hot: float, weight: float, share: float) -> float:
    # Each part fills like an LRU under independent references, at rates in the ratio of its weights.
    rate_hot, rate_cold = weight / hot, (1 - weight) / (1 - hot)
    low, high = 0.0, 400.0
    for _ in range(40):
        middle = (low + high) / 2
        filled = hot * -math.expm1(-rate_hot * middle) + (1 - hot) * -math.expm1(-rate_cold * middle)
        low, high = (middle, high) if filled < share else (low, middle)
    return weight * -math.expm1(-rate_hot * low) + (1 - weight) * -math.expm1(-rate_cold * low)


@lru_cache(maxsize=100_000)
def _miss_counts(miss: float) -> tuple[float, ...]:
    """How likely a layer misses 0, 1, ... of its experts."""
    return tuple(math.comb(TOP_K, n) * miss**n * (1 - miss) ** (TOP_K - n) for n in range(TOP_K + 1))


@dataclass(frozen=True)
class Machine:
    """Hidden truth, and what a probe would tell of it."""

    seed: int
    vram_bytes: int
    cores: int
    rates: Rates  # as probed, each off by a few percent
    vram: float
    pcie: float
    cpu: float
    flops: float
    hot_share: float
    hot_weight: float
    layer_gap_s: float
    transfer_latency_s: float
    contention: float
    thread_peak: float
    hybrid_factor: float
    hybrid_layer_s: float
    overlap: float
    compute_power: float
    vram_ratio: float
    fi_step_s: float
    fi_work: float
    fi_chunk_power: float
    workspace_bytes: int
    chunk_bytes: int
    fragmentation: float
    host_embed_s: float
    noise: float
    drift: float

    # -- time ---------------------------------------------------------------------------------------------------

    def hit_ratio(self, slots: int) -> float:
        """Share of look-ups that are resident: hot experts first, cold ones by their share."""
        return _hit_ratio(self.hot_share, self.hot_weight, min(1.0, slots / EXPERTS))

    def cpu_rate(self, threads: int) -> float:
        """CPU expert bandwidth with `threads`."""
        x = threads / self.cores / self.thread_peak
        return self.cpu * (x * math.exp(1 - x)) ** 0.7 if x < 1 else self.cpu * (1 - 0.25 * (x - 1))

    def step_s(self, point: Point) -> float:
        """Seconds of one decode step without noise."""
        strategy, slots = point["strategy"], point["expert_slots"]
        context = 6400
        read = (DENSE - EMBEDDING + context * KV_PER_TOKEN + 60 * MIB) / LAYERS
        experts = TOP_K * SLOT
        base = self.layer_gap_s
        miss = 1 - self.hit_ratio(slots) if strategy in ("offload", "hybrid") else (0.0 if strategy == "fused" else 1.0)
        total = 0.0
        for skew, layers in SKEW.items():
            missed = min(1.0, miss * skew) if 0 < miss < 1 else miss
            bytes_missed = missed * experts
            on_gpu = experts if strategy != "cpu" else 0
            gpu = (read + on_gpu) / (self.vram_ratio * self.vram)
            if strategy == "offload":
                extra = bytes_missed / self.pcie + missed * TOP_K * self.transfer_latency_s
            elif strategy == "cpu":
                extra = bytes_missed / self.cpu_rate(point["cpu_threads"]) + 20e-6
            elif strategy == "hybrid":
                extra = self._hybrid_s(missed, point["fetch_ratio"], self.cpu_rate(point["cpu_threads"]))
                extra = (extra + self.hybrid_layer_s) * self.hybrid_factor
            else:
                extra = 0.0
            total += layers * (gpu + extra + base)
        if point["attention"] == "fi":
            total += self.fi_step_s
        return total + (self.host_embed_s if point["embed_on_host"] else 0.0)

    def _hybrid_s(self, missed: float, share: float, cpu_rate: float) -> float:
        """Mean seconds in which a layer's misses are fetched and computed beside each other, in whole experts."""
        total = 0.0
        for count, chance in enumerate(_miss_counts(missed)):
            fetched = math.floor(share * count + 0.5)
            if not count:
                continue
            part = fetched / count
            link = self.pcie * (1 - self.contention * (1 - part))
            side = cpu_rate * (1 - self.contention * part)
            total += chance * max(fetched * (SLOT / link + self.transfer_latency_s), (count - fetched) * SLOT / side)
        return total

    def prefill_s(self, point: Point) -> float:
        """Seconds of the whole prompt without noise."""
        prompt, chunk = WORKLOAD.prompt_tokens, point["prefill_chunk_tokens"]
        stream = 0.0 if point["strategy"] == "fused" else EXPERTS * SLOT / (0.97 * self.pcie)
        total, done = 0.0, 0
        while done < prompt:
            size = min(chunk, prompt - done)
            speed = self.flops * 0.45 * min(1.0, (size / 8192) ** self.compute_power)
            work = (2 * 3.0e9 * size + 4 * 10 * 4096 * size * (done + size / 2)) / speed
            if point["attention"] == "fi":
                work *= self.fi_work * (size / 8192) ** self.fi_chunk_power
            hidden = min(stream, work) * (self.overlap if point["prefill_overlap"] else 0.0)
            total += stream + work - hidden + 0.015
            done += size
        return total

    def turn_s(self, point: Point) -> float:
        """Seconds of a turn without noise: what the tuner minimises."""
        return self.prefill_s(point) + WORKLOAD.output_tokens * self.step_s(point)

    # -- memory -------------------------------------------------------------------------------------------------

    def planned_bytes(self, point: Point) -> int:
        """The planner's peak: all that it knows of."""
        chunk, slots = point["prefill_chunk_tokens"], point["expert_slots"]
        fixed = DENSE - (EMBEDDING if point["embed_on_host"] else 0) + 420 * MIB + 8192 * KV_PER_TOKEN + 60 * MIB
        experts = (
            EXPERTS if point["strategy"] == "fused" else slots if point["strategy"] in ("offload", "hybrid") else 0
        )
        return fixed + chunk * 132 * 1024 + experts * SLOT

    def peak_bytes(self, point: Point) -> int:
        """The true peak."""
        slots = point["expert_slots"] if point["strategy"] in ("offload", "hybrid") else 0
        hidden = self.workspace_bytes + point["prefill_chunk_tokens"] * self.chunk_bytes
        return int(self.planned_bytes(point) + hidden + self.fragmentation * slots * SLOT)


def make_machine(seed: int, hardship: float = 1.0) -> Machine:
    """The machine with this seed; every fifth has a broken `hybrid`.

    `hardship` times as large are noise, drift, what memory hides and the errors of what was probed.
    """
    rng = random.Random(f"tuner machine {seed}")

    def spread(value: float, ratio: float) -> float:
        return value * math.exp(rng.gauss(0, ratio * hardship))

    vram_gib = rng.choice((6, 8, 8, 10, 12, 12, 16))
    pcie = rng.uniform(11e9, 27e9)
    cpu = rng.uniform(28e9, 75e9)
    vram = {6: 330e9, 8: 270e9, 10: 600e9, 12: 430e9, 16: 480e9}[vram_gib] * rng.uniform(0.85, 1.25)
    flops = {6: 45e12, 8: 60e12, 10: 90e12, 12: 100e12, 16: 120e12}[vram_gib] * rng.uniform(0.7, 1.3)
    cores = rng.choice((6, 8, 8, 12, 16))
    rates = Rates(
        vram=spread(vram, 0.05), pcie=spread(pcie, 0.04), pcie_pageable=pcie / 2, dram=spread(cpu * 1.2, 0.05),
        cpu_experts=spread(cpu, 0.12), disk=3e9, flops=spread(flops, 0.15),
        pcie_overlap=spread(pcie * 0.9, 0.05), cpu_overlap=spread(cpu * 0.75, 0.15),
    )  # fmt: skip
    return Machine(
        seed=seed,
        vram_bytes=int(vram_gib * GIB - rng.uniform(100, 500) * MIB),
        cores=cores,
        rates=rates,
        vram=vram,
        pcie=pcie,
        cpu=cpu,
        flops=flops,
        hot_share=rng.uniform(0.08, 0.32),
        hot_weight=rng.uniform(0.55, 0.85),
        layer_gap_s=rng.uniform(2e-3, 6e-3) / LAYERS,
        transfer_latency_s=rng.uniform(2e-6, 12e-6),
        contention=rng.uniform(0.05, 0.35),
        thread_peak=rng.uniform(0.4, 1.0),
        hybrid_factor=math.exp(rng.uniform(math.log(3), math.log(40))) if seed % 5 == 0 else rng.uniform(1.0, 1.15),
        hybrid_layer_s=rng.uniform(15e-6, 60e-6),
        overlap=rng.uniform(0.7, 0.98),
        compute_power=rng.uniform(0.12, 0.3),
        vram_ratio=rng.uniform(0.68, 0.88),
        fi_step_s=rng.uniform(-0.6e-3, 0.7e-3),
        fi_work=rng.uniform(0.75, 1.15),
        fi_chunk_power=rng.uniform(-0.08, 0.08),
        workspace_bytes=int(rng.uniform(-150, 350) * hardship * MIB),
        chunk_bytes=int(rng.uniform(0, 40) * hardship * 1024),
        fragmentation=rng.uniform(0.0, 0.01) * hardship,
        host_embed_s=rng.uniform(0.1e-3, 0.5e-3),
        noise=rng.uniform(0.01, 0.02) * hardship,
        drift=rng.uniform(0.0, 0.008) * hardship,
    )


class SimulatedSite:
    """What the planner would say of a machine: nominal costs and probed bandwidths; nothing of what is hidden."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.workload, self.rates, self.cores = WORKLOAD, machine.rates, machine.cores
        threads = tuple(sorted({max(1, round(machine.cores * share)) for share in (0.25, 0.5, 0.75, 1.0)}))
        self.space = Space(parameters=(
            Parameter(name="expert_slots", cost="live", kind="integer", low=TOP_K * 4, high=EXPERTS, is_log=True,
                      only_with=("offload", "hybrid")),
            Parameter(name="strategy", cost="restart", kind="choice", choices=("fused", "offload", "hybrid", "cpu")),
            Parameter(name="fetch_ratio", cost="restart", kind="share", low=0.0, high=1.0, only_with=("hybrid",)),
            Parameter(name="cpu_threads", cost="restart", kind="choice", choices=threads, only_with=("hybrid", "cpu")),
            Parameter(name="prefill_chunk_tokens", cost="restart", kind="choice", choices=CHUNKS),
            Parameter(name="attention", cost="restart", kind="choice", choices=ATTENTION),
            Parameter(name="prefill_overlap", cost="restart", kind="choice", choices=(True, False),
                      only_with=("offload", "hybrid", "cpu")),
            Parameter(name="embed_on_host", cost="restart", kind="choice", choices=(False, True)),
        ))  # fmt: skip
        self._known: dict[tuple[object, ...], Forecast | None] = {}

    def forecast(self, point: Point) -> Forecast | None:
        """The plan of `point` with the most slots that fit."""
        key = tuple(value for name, value in sorted(point.items()) if name != "expert_slots")
        if key not in self._known:
            self._known[key] = self._plan(point)
        return self._known[key]

    def default_point(self) -> Point:
        """The engine's default: the largest chunk, a strategy by its bandwidth rule, slots from its ratio."""
        rates = self.rates
        strategy = "hybrid" if (rates.cpu_overlap or 0) > 2 * (rates.pcie_overlap or 1) else "offload"
        link, side = rates.pcie_overlap or 1, rates.cpu_overlap or 1
        point = {
            "strategy": strategy, "fetch_ratio": round(link / (link + side), 2), "cpu_threads": self.machine.cores,
            "prefill_chunk_tokens": 8192, "attention": "triton", "prefill_overlap": True, "embed_on_host": False,
            "expert_slots": TOP_K * 4,
        }  # fmt: skip
        # Its rule fills the ratio without charging workspace, graphs or prefill.
        budget = int(0.9 * (self.machine.vram_bytes - 420 * MIB)) - DENSE - 8192 * KV_PER_TOKEN
        return self.space.clip({**point, "expert_slots": max(TOP_K * 4, min(EXPERTS, budget // SLOT))})

    def own_verdict(self, point: Point) -> None:
        """The planner judges the default like any other point."""

    def _plan(self, point: Point) -> Forecast:
        strategy = point["strategy"]
        limit = self.machine.vram_bytes - HEADROOM
        least = {**point, "expert_slots": TOP_K * 4}
        has_slots = strategy in ("offload", "hybrid")
        planned = self.machine.planned_bytes(least)
        missing = max(0, planned - limit)
        slots = 0
        if has_slots:
            slots = TOP_K * 4 + max(0, min(EXPERTS - TOP_K * 4, (limit - planned) // SLOT))
            planned = self.machine.planned_bytes({**point, "expert_slots": slots})
        settings = ResolvedSettings(
            expert_slots=slots, kv_tokens=8192, strategy=strategy, prefill_chunk_tokens=point["prefill_chunk_tokens"],
            cpu_threads=point["cpu_threads"], fetch_ratio=point["fetch_ratio"], attention=point["attention"],
            prefill_overlap=point["prefill_overlap"], embed_on_host=point["embed_on_host"],
        )  # fmt: skip
        low, high = (TOP_K * 4, EXPERTS) if has_slots else (0, 0)
        return Forecast(
            settings, _traits(settings), low, high, SLOT if has_slots else 0, planned, limit, missing, HEADROOM
        )


def _traits(settings: ResolvedSettings) -> SpeedTraits:
    """As the upstream engine's adapter would have them."""
    streams = settings.strategy != "fused"
    return SpeedTraits(
        experts=EXPERTS, experts_per_token=LAYERS * TOP_K, expert_bytes=SLOT, dense_read_bytes=DENSE - EMBEDDING,
        kv_read_bytes_per_token=KV_PER_TOKEN, state_read_bytes=60 * MIB, active_parameters=3.0e9,
        full_attention_layers=10, attention_width=4096,
        miss_path={"fused": "none", "offload": "pcie", "hybrid": "hybrid", "cpu": "dram"}[settings.strategy],
        step_overhead_s={"fused": 0.0025, "offload": 0.003, "hybrid": 0.005, "cpu": 0.005}[settings.strategy],
        prefill_stream_bytes=SLOT * EXPERTS if streams else 0,
        is_stream_overlapped=settings.prefill_overlap is not False,
        stream_path="pcie" if streams else "none", hit_curve_c=9.0, hit_curve_range=(8.0, 10.0),
    )  # fmt: skip


class SimulatedLauncher:
    """Starts points on a machine: out of memory is a crash, everything measured is noisy."""

    def __init__(self, machine: Machine, seed: int, *, can_resize: bool = True) -> None:
        self.machine, self.can_resize = machine, can_resize
        self.rng = random.Random(f"launcher {machine.seed} {seed}")
        self.point: Point | None = None
        self.starts = self.crashes = 0
        self._drift = self.rng.gauss(0, machine.drift)

    def start(self, point: Point) -> Outcome:
        """Proven, or out of memory; the message tells by how much half of the time."""
        self.starts += 1
        return self._load(point)

    def resize(self, point: Point) -> Outcome:
        """As a start, without being one."""
        return self._load(point)

    def _load(self, point: Point) -> Outcome:
        over = self.machine.peak_bytes(point) - self.machine.vram_bytes
        if over > 0:
            self.crashes += 1
            self.point = None
            known = int(over) if self.rng.random() < 0.5 else 1
            return Outcome(kind="crash", violation_bytes=known, words="out of memory")
        self.point = dict(point)
        return Outcome(kind="ok")

    def measure(self, *, is_unseen: bool = False) -> Outcome:
        """Figures with the machine's noise, one draw for prefill and one for decode, and its drift on both."""
        assert self.point is not None
        noise, fresh = self.machine.noise, math.sqrt(1 - DRIFT_MEMORY**2) * self.machine.drift
        self._drift = DRIFT_MEMORY * self._drift + self.rng.gauss(0, fresh)
        step = self.machine.step_s(self.point) * math.exp(self._drift + self.rng.gauss(0, noise))
        prefill = self.machine.prefill_s(self.point) * math.exp(self._drift + self.rng.gauss(0, noise))
        has_slots = self.point["strategy"] in ("offload", "hybrid")
        hit = self.machine.hit_ratio(self.point["expert_slots"]) if has_slots else None
        measurement = Measurement(
            decode_tps=1 / step, ttft_s=prefill + step, turn_time_s=prefill + WORKLOAD.output_tokens * step,
            hit_ratio=hit, peak_bytes=self.machine.peak_bytes(self.point) + int(self.rng.gauss(0, 5 * MIB)),
            noise_ratio=noise,
        )  # fmt: skip
        return Outcome(kind="ok", measurement=measurement)

    def stop(self) -> None:
        """Ends what runs."""
        self.point = None


def find_best(site: SimulatedSite) -> tuple[Point, float]:
    """The true best by dense search over everything that really fits and keeps the planner's headroom."""
    machine, best = site.machine, (None, math.inf)
    limit = machine.vram_bytes - HEADROOM
    threads = site.space["cpu_threads"].choices
    for strategy, chunk, embed in itertools.product(("fused", "offload", "hybrid", "cpu"), CHUNKS, (False, True)):
        # Overlap only ever helps, and what the attention backend does hangs on the chunk alone.
        point: Point = {
            "strategy": strategy, "prefill_chunk_tokens": chunk, "attention": "triton", "prefill_overlap": True,
            "embed_on_host": embed, "fetch_ratio": 0.5, "cpu_threads": machine.cores, "expert_slots": TOP_K * 4,
        }  # fmt: skip
        if machine.peak_bytes(point) > limit:
            continue
        if strategy in ("offload", "hybrid"):
            each = SLOT * (1 + machine.fragmentation)
            point["expert_slots"] = min(EXPERTS, TOP_K * 4 + int((limit - machine.peak_bytes(point)) // each))
        # Only the strategies that compute on the CPU look at threads and the fetched share.
        sides = {
            "hybrid": [(count, one / 20) for count in threads for one in range(21)],
            "cpu": [(count, 0.5) for count in threads],
        }.get(strategy, [(machine.cores, 0.5)])
        tried = [{**point, "cpu_threads": count, "fetch_ratio": share} for count, share in sides]
        fastest = min(tried, key=machine.step_s)
        for attention in ATTENTION:
            found = {**fastest, "attention": attention}
            if (seconds := machine.turn_s(found)) < best[1]:
                best = found, seconds
    assert best[0] is not None
    return best
