"""The cost model: predicted step, prefill and turn time of any setting, corrected by every measurement.

It is the planner's roofline with the machine's unknowns as parameters: the hit curve `c`, the step overhead `t0`, the
effective bandwidths, compute, and one factor for each value of a knob that the roofline is blind to. All of them are
logarithms of a factor on what the planner assumes, with a normal prior around zero, so that the model starts as the
planner and gives way to measurements (regularised least squares, Gauss-Newton; the curvature gives the uncertainty).
Several hundred settings are predicted in one numpy call: the method compares whole neighbourhoods at every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from freetoken.planner.rates import Rates
from freetoken.planner.roofline import computed_prompt_tokens
from freetoken.recipe.workload import Workload
from freetoken.tuner.site import Forecast
from freetoken.tuner.values import Measurement, Point

Array = Any

#: Parameter -> standard deviation of its prior, as a logarithm: 0.15 is about 15 %.
PRIORS: dict[str, float] = {
    "curve": 0.25,
    "step_overhead": 0.5,
    "vram": 0.15,
    "pcie": 0.15,
    "dram": 0.3,
    "disk": 0.4,
    "flops": 0.35,
    "chunk_half": 0.4,
    "chunk_overhead": 0.5,
    "stream": 0.2,
    "thread_half": 0.5,
    "thread_peak": 0.35,
    "thread_fall": 0.7,
    "link_overlap": 0.4,
    "cpu_overlap": 0.4,
}
_INDEX = {name: index for index, name in enumerate(PRIORS)}
#: Knob -> prior deviation of what one of its values does to decode and to prefill beside the roofline.
_BLIND: dict[str, tuple[float, float]] = {
    "strategy": (0.12, 0.1),
    "attention": (0.08, 0.12),
    "cpu_threads": (0.03, 0.01),
    "prefill_overlap": (0.005, 0.08),
    "prefix_cache": (0.02, 0.05),
    "embed_on_host": (0.04, 0.03),
    "state_dtype": (0.05, 0.02),
    "kv_dtype": (0.04, 0.04),
    "prefill_chunk_tokens": (0.01, 0.05),
}
#: Two processors at work at once: published cases are off by -14 % to 40 times.
RISKY = {"hybrid": (0.35, 0.1), "cpu": (0.15, 0.15)}
#: Slower than predicted by so much, as a logarithm, a strategy counts as broken.
BROKEN_LOG = 0.7
#: How sharply the slower side of `hybrid` counts alone: 1 would be the sum, infinity the maximum.
_BALANCE = 4.0
_PATHS = {"none": 0, "pcie": 1, "dram": 2, "hybrid": 3, "disk": 4, "pcie_pageable": 5}
#: What the form itself cannot express, on top of measurement noise.
_FORM_SD = 0.015
#: Where half of the CPU's expert bandwidth is reached, as a share of the cores.
_THREAD_HALF = 0.15
#: Past this share of the cores more threads cost, by this much a core's share.
_THREAD_PEAK, _THREAD_FALL = 0.65, 0.2


class Features(NamedTuple):
    """Settings as arrays: `columns` (n, 20), prefill terms (n, 6) of tokens, past and weights, knob values (n, m)."""

    columns: Array
    tokens: Array
    past: Array
    weights: Array
    longest: Array
    blind: Array


class Predicted(NamedTuple):
    """Predictions, a row for each set of parameters: seconds of a step, of mean and longest prefill, hit ratio."""

    step_s: Array
    prefill_s: Array
    longest_prefill_s: Array
    hit_ratio: Array

    def turn_time_s(self, output_tokens: int) -> Array:
        """Seconds of a mean turn."""
        return self.prefill_s + output_tokens * self.step_s


class CostModel:
    """Fitted to what was measured; predicts what was not."""

    def __init__(self, rates: Rates, workload: Workload, cores: int, concurrency: int = 1) -> None:
        self.rates, self.workload, self.cores, self.concurrency = rates, workload, cores, concurrency
        self.names: list[tuple[str, Any]] = []
        self.broken: set[Any] = set()
        self.reference: Point = {}
        self.theta = np.zeros(len(PRIORS))
        self.covariance = np.diag(np.array(list(PRIORS.values())) ** 2)
        self.residual_sd = 0.0

    # -- fitting ----------------------------------------------------------------------------------------------

    def fit(self, measured: Sequence[tuple[Point, Forecast, int, Measurement]]) -> None:
        """Fits the parameters to (point, forecast, slots, measurement) of every trial that worked."""
        for point, *_ in measured:
            self._learn_names(point)
        self.reference = measured[0][0] if measured else {}
        self._find_broken(measured)
        precision = 1 / self._prior_sds() ** 2
        self.theta = np.zeros(len(precision))
        self.covariance = np.diag(1 / precision)
        self.residual_sd = 0.0
        if not measured:
            return
        features = self.features([one[:3] for one in measured])
        target, sd = self._targets([one[3] for one in measured])
        theta, damping = self.theta, 1e-3
        loss = self._loss(theta, features, target, sd, precision)
        for _ in range(25):
            value, jacobian = self._jacobian(theta, features)
            weight = np.where(np.isnan(target), 0.0, 1 / sd**2)
            residual = np.where(np.isnan(target), 0.0, target - value)
            normal = jacobian.T @ (weight[:, None] * jacobian) + np.diag(precision)
            gradient = jacobian.T @ (weight * residual) - precision * theta
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            fresh = self._loss(theta + step, features, target, sd, precision)
            if fresh < loss:
                done = loss - fresh < 1e-4
                theta, loss, damping = theta + step, fresh, damping / 5
                if done:
                    break
            else:
                damping *= 8
                if damping > 1e6:
                    break
        value, jacobian = self._jacobian(theta, features)
        weight = np.where(np.isnan(target), 0.0, 1 / sd**2)
        self.theta = theta
        self.covariance = np.linalg.inv(jacobian.T @ (weight[:, None] * jacobian) + np.diag(precision))
        left = (target - value)[~np.isnan(target)]
        self.residual_sd = float(np.sqrt(np.mean(left**2))) if len(left) else 0.0

    def _find_broken(self, measured: Sequence[tuple[Point, Forecast, int, Measurement]]) -> None:
        """Strategies that are far slower than any of their parts explains: their own factor takes all of it."""
        self.broken = set()
        risky = [one for one in measured if one[0].get("strategy") in RISKY]
        if not risky:
            return
        self.theta = np.zeros(len(self._prior_sds()))
        expected = self._predict(self.theta[None, :], self.features([one[:3] for one in risky])).step_s[0]
        for one, step_s in zip(risky, expected, strict=True):
            if math.log(1 / one[3].decode_tps / step_s) > BROKEN_LOG:
                self.broken.add(one[0]["strategy"])

    def _loss(self, theta: Array, features: Features, target: Array, sd: Array, precision: Array) -> float:
        value = self._outputs(theta[None, :], features)[0]
        residual = np.where(np.isnan(target), 0.0, (target - value) / sd)
        return float(residual @ residual + precision @ theta**2)

    def _jacobian(self, theta: Array, features: Features) -> tuple[Array, Array]:
        """Outputs at `theta` and their derivatives by each parameter."""
        step = 1e-4
        rows = np.concatenate([theta[None, :], theta[None, :] + step * np.eye(len(theta))])
        outputs = self._outputs(rows, features)
        return outputs[0], (outputs[1:] - outputs[0]).T / step

    def _outputs(self, rows: Array, features: Features) -> Array:
        """What measurements are compared with: log step, log prefill and hit ratio of every setting, in this order."""
        found = self._predict(rows, features)
        return np.concatenate([np.log(found.step_s), np.log(found.prefill_s), found.hit_ratio], axis=1)

    def _targets(self, measured: Sequence[Measurement]) -> tuple[Array, Array]:
        step = np.array([1 / one.decode_tps for one in measured])
        noise = np.array([max(0.005, one.noise_ratio) for one in measured])
        told = [one.noise_ratio if one.decode_noise_ratio is None else one.decode_noise_ratio for one in measured]
        prefill = np.array([max(one.ttft_s - 1 / one.decode_tps, 0.02 * one.ttft_s) for one in measured])
        hits = np.array([np.nan if one.hit_ratio is None else one.hit_ratio for one in measured])
        target = np.concatenate([np.log(step), np.log(prefill), hits])
        decode_sd = np.hypot(np.maximum(0.005, told), _FORM_SD)
        return target, np.concatenate([decode_sd, np.hypot(1.5 * noise, 2 * _FORM_SD), np.full(len(step), 0.015)])

    # -- predicting -------------------------------------------------------------------------------------------

    def predict(self, settings: Sequence[tuple[Point, Forecast, int]]) -> Predicted:
        """Best guesses, one for each (point, forecast, slots)."""
        features = self.features(settings)
        found = self._predict(self.theta[None, :], features)
        return Predicted(*(one[0] for one in found))

    def draw(self, settings: Sequence[tuple[Point, Forecast, int]], count: int) -> Predicted:
        """Predictions under `count` sets of parameters drawn from what is believed: arrays (count, settings).

        Drawn rather than linearised: where the larger of two sides counts, the slope of the other one says nothing.
        """
        features = self.features(settings)
        rng = np.random.default_rng(len(self.theta))
        noise = rng.standard_normal((count // 2, len(self.theta)))
        spread = np.linalg.cholesky(self.covariance + 1e-12 * np.eye(len(self.theta)))
        rows = self.theta + np.concatenate([noise, -noise]) @ spread.T
        return self._predict(rows, features)

    def _learn_names(self, point: Point) -> None:
        for name in _BLIND:
            if name in point and (name, point[name]) not in self.names:
                self.names.append((name, point[name]))

    def _prior_sds(self) -> Array:
        decode, prefill = [], []
        for name, value in self.names:
            sds = RISKY.get(value, _BLIND[name]) if name == "strategy" else _BLIND[name]
            sds = (3.0, 0.3) if name == "strategy" and value in self.broken else sds
            # Factors are relative to the first point that was measured: what it shares with all is the machine's.
            sds = (1e-3, 1e-3) if name != "strategy" and self.reference.get(name) == value else sds
            decode.append(sds[0])
            prefill.append(sds[1])
        return np.array([*PRIORS.values(), *decode, *prefill])

    def _extend(self) -> None:
        """Room for knob values that were named since the fit: they stand at their prior."""
        sds = self._prior_sds()
        base, known = len(PRIORS), (len(self.theta) - len(PRIORS)) // 2
        if known == len(self.names):
            return
        keep = [*range(base), *(base + i for i in range(known)), *(base + len(self.names) + i for i in range(known))]
        theta, covariance = np.zeros(len(sds)), np.diag(sds**2)
        theta[keep] = self.theta
        covariance[np.ix_(keep, keep)] = self.covariance
        self.theta, self.covariance = theta, covariance

    def features(self, settings: Sequence[tuple[Point, Forecast, int]]) -> Features:
        """`settings` as arrays."""
        for point, *_ in settings:
            self._learn_names(point)
        self._extend()
        rows = [self._row(*one) for one in settings]
        blind = np.zeros((len(rows), len(self.names)))
        for index, (point, *_) in enumerate(settings):
            for column, (name, value) in enumerate(self.names):
                blind[index, column] = point.get(name) == value
        return Features(
            np.array([one[0] for one in rows]),
            np.array([one[1] for one in rows], dtype=float),
            np.array([one[2] for one in rows], dtype=float),
            np.array([one[3] for one in rows], dtype=float),
            np.array([one[4] for one in rows], dtype=float),
            blind,
        )

    def _row(self, point: Point, forecast: Forecast, slots: int) -> tuple[list[float], Any, Any, Any, Any]:
        traits, settings, workload = forecast.traits, forecast.settings, self.workload
        context = workload.largest_prompt_tokens // 2 if workload.turns > 1 else workload.largest_prompt_tokens
        on_cpu = traits.miss_path == "dram" and traits.resident_in == "vram"
        read = traits.dense_read_bytes + context * traits.kv_read_bytes_per_token + traits.state_read_bytes
        if not on_cpu:
            read += traits.experts_per_token * traits.expert_bytes
        fetch = point.get("fetch_ratio", settings.fetch_ratio)
        threads = point.get("cpu_threads", settings.cpu_threads) or self.cores
        columns = [
            read, traits.resident_in == "vram", traits.experts_per_token * traits.expert_bytes,
            slots / max(1, traits.experts), _PATHS[traits.miss_path], on_cpu,
            -1.0 if fetch is None else fetch, threads / self.cores, traits.step_overhead_s, traits.efficiency,
            traits.prefill_stream_bytes, _PATHS[traits.stream_path], traits.is_stream_overlapped,
            2.0 * traits.active_parameters, 4.0 * traits.full_attention_layers * traits.attention_width,
            traits.compute_efficiency, traits.chunk_half_tokens, traits.chunk_overhead_s, traits.hit_curve_c,
        ]  # fmt: skip
        chunk = point.get("prefill_chunk_tokens", settings.prefill_chunk_tokens)
        has_cache = point.get("prefix_cache", settings.prefix_cache) is not False
        return [float(one) for one in columns], *_prefill_terms(workload, int(chunk), has_cache)

    def _predict(self, rows: Array, features: Features) -> Predicted:
        """Predictions for every row of parameters: arrays (rows, settings)."""
        base = {name: np.exp(rows[:, index, None]) for name, index in _INDEX.items()}
        count = len(self.names)
        decode_factor = np.exp(rows[:, len(PRIORS) : len(PRIORS) + count] @ features.blind.T)
        prefill_factor = np.exp(rows[:, len(PRIORS) + count :] @ features.blind.T)
        step, hit = self._step(base, features.columns)
        mean, longest = self._prefill(base, features)
        return Predicted(step * decode_factor, mean * prefill_factor, longest * prefill_factor, hit)

    def _step(self, base: dict[str, Array], columns: Array) -> tuple[Array, Array]:
        read, in_vram, unit, share, path, on_cpu, fetch, threads, overhead, efficiency = columns[:, :10].T
        rates = self.rates
        curve = columns[:, 18] * base["curve"]
        hit = np.where(path == 0, 1.0, (1 + curve) * share / (1 + curve * share))
        miss = unit * np.where(on_cpu > 0, 1.0, 1 - hit)
        speed = np.where(in_vram > 0, rates.vram * base["vram"], rates.dram * base["dram"])
        # Bandwidth as it was measured, with all cores, is 1.
        half = _THREAD_HALF * base["thread_half"]
        busy = self._busy(threads, half, base) / self._busy(np.ones(1), half, base)
        pcie, cpu, disk = rates.pcie * base["pcie"], rates.cpu_experts * base["dram"] * busy, rates.disk * base["disk"]
        link = (rates.pcie_overlap or rates.pcie) * base["pcie"] * base["link_overlap"]
        beside = np.maximum(rates.cpu_experts - rates.pcie, rates.cpu_experts / 4)
        left = (rates.cpu_overlap or beside) * base["dram"] * base["cpu_overlap"] * busy
        part = np.where(fetch < 0, link / (link + left), fetch)
        hybrid = _slower(part * miss / link, (1 - part) * miss / left)
        miss_s = np.select(
            [path == 1, path == 2, path == 3, path == 4], [miss / pcie, miss / cpu, hybrid, miss / disk], 0.0
        )
        seconds = read / (efficiency * speed) + miss_s + overhead * base["step_overhead"]
        return seconds, np.where(on_cpu > 0, 0.0, hit)

    def _busy(self, threads: Array, half: Array, base: dict[str, Array]) -> Array:
        """What `threads` (a share of the cores) reach of the bandwidth: it rises, saturates, and falls past a peak.

        Workers that spin while they wait take clocks and memory ports from those that work.
        """
        past = np.maximum(0.0, threads - _THREAD_PEAK * base["thread_peak"])
        return threads / (threads + half) * np.exp(-_THREAD_FALL * base["thread_fall"] * past)

    def _prefill(self, base: dict[str, Array], features: Features) -> tuple[Array, Array]:
        """Seconds of the mean and of the longest prompt."""
        columns, rates = features.columns, self.rates
        stream_bytes, path, overlapped, active, attention, efficiency, half, overhead = columns[:, 10:18].T
        speed = np.select(
            [path == 1, path == 5, path == 2, path == 4],
            [rates.pcie * base["pcie"] * base["stream"], rates.pcie_pageable * base["stream"],
             rates.dram * base["dram"] * base["stream"], rates.disk * base["disk"]], np.inf,
        )  # fmt: skip
        stream = (stream_bytes / speed)[:, :, None]
        tokens, past = features.tokens[None], features.past[None]
        effective = (
            (efficiency * rates.flops * base["flops"])[:, :, None]
            * tokens / (tokens + (half * base["chunk_half"])[:, :, None] + 1e-9)
        )  # fmt: skip
        work = active[None, :, None] * tokens + attention[None, :, None] * tokens * (past + tokens / 2)
        compute = np.where(tokens > 0, work / np.maximum(effective, 1e-9), 0.0)
        total = np.where(overlapped[None, :, None] > 0, np.maximum(stream, compute), stream + compute)
        chunk = total + (overhead * base["chunk_overhead"])[:, :, None]
        return (features.weights[None] * chunk).sum(axis=2), (features.longest[None] * chunk).sum(axis=2)


def _slower(fetch: Array, compute: Array) -> Array:
    """The mean of the slower of two sides whose work is dealt in whole experts, a few in every layer.

    It is the larger one where they are far apart and more than either where they are balanced; and it hangs on both
    everywhere, so that a measurement on one side of the balance also says something of the other.
    """
    return (fetch**_BALANCE + compute**_BALANCE) ** (1 / _BALANCE)


Columns = tuple[list[float], list[float], list[float], list[float]]


def _prefill_terms(workload: Workload, chunk: int, has_cache: bool) -> Columns:
    """Whole and last chunks of the first, middle and last turn: tokens, tokens before, weights in mean and longest."""
    last = workload.turns
    turns = sorted({1, (last + 1) // 2, last}) if last > 3 else list(range(1, last + 1))
    shares = dict.fromkeys(turns, 1 / last)
    if last > 3:
        shares[(last + 1) // 2] = (last - 2) / last
    prompts = {turn: computed_prompt_tokens(workload, turn, has_cache) for turn in turns}
    longest = max(turns, key=lambda turn: prompts[turn] if turn in (1, last) else (0, 0))
    rows: list[tuple[float, float, float, float]] = []
    for turn in turns:
        new, cached = prompts[turn]
        size = max(1, min(chunk, max(1, new)))
        whole, rest = divmod(new, size)
        is_longest = float(turn == longest)
        if whole:
            rows.append((size, cached + int((whole - 1) * size / 2), whole * shares[turn], whole * is_longest))
        if rest:
            rows.append((rest, cached + whole * size, shares[turn], is_longest))
    rows += [(0.0, 0.0, 0.0, 0.0)] * (6 - len(rows))
    return tuple(list(column) for column in zip(*rows, strict=True))  # type: ignore[return-value]
