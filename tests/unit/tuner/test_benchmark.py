"""A small slice of `make bench-tuner`: the same code on a few of its machines."""

import itertools

from benchmarks.tuner.__main__ import make_report
from benchmarks.tuner.compare import METHODS, Baseline, Case, Trace, run_case
from benchmarks.tuner.machines import SimulatedLauncher, SimulatedSite, find_best, make_machine


def test_the_tuner_is_near_the_best_within_six_starts_and_better_than_random():
    # The first four machines, one of them with a broken `hybrid`; the bounds are wider than those of all fifty.
    cases = [run_case(Case(machine, seed=0, starts=6, methods=("tuner", "random"))) for machine in range(4)]
    shares = [case["tuner"].shares[-1] for case in cases]
    assert min(shares) > 0.92
    assert sum(share >= 0.97 for share in shares) >= 3
    assert sum(shares) > sum(case["random"].shares[-1] for case in cases)
    assert sum(case["tuner"].crashes for case in cases) < len(cases)


def test_every_method_has_as_many_starts_and_the_same_default():
    traces = run_case(Case(machine=11, seed=0, starts=3, methods=tuple(one for one in METHODS if one != "gp")))
    assert {trace.starts for trace in traces.values()} == {3}
    assert {len(trace.shares) for trace in traces.values()} == {3}
    assert traces["random"].shares[0] == traces["tpe"].shares[0] > 0.5


def test_a_baseline_is_refused_for_nothing_and_turns_its_slots_while_the_engine_runs():
    launcher = SimulatedLauncher(make_machine(11), 0)
    site = SimulatedSite(launcher.machine)
    baseline = Baseline("random", site, launcher, 0)
    loaded, load = [], launcher._load
    launcher._load = lambda point: (loaded.append(dict(point)), load(point))[1]
    baseline.run(1.0, 4)
    assert launcher.starts == 4
    assert launcher.machine.workspace_bytes > 0  # so that no measured peak shows room beyond the plan
    forecasts = [site.forecast(point) for point in loaded]
    assert all(not one.missing_bytes for one in forecasts)
    slots = [point["expert_slots"] if one.high else 0 for point, one in zip(loaded, forecasts, strict=True)]
    assert all(one.peak_at(count) <= one.limit_bytes for one, count in zip(forecasts, slots, strict=True))
    assert len(loaded) < len(baseline.study.trials)
    same_start = [{**a, "expert_slots": 0} == {**b, "expert_slots": 0} for a, b in itertools.pairwise(loaded)]
    assert sum(same_start) == len(loaded) - launcher.starts > 0


def test_the_true_best_fits_and_no_neighbour_beats_it():
    for seed in (0, 4):
        site, machine = SimulatedSite(make_machine(seed)), make_machine(seed)
        point, seconds = find_best(site)
        assert machine.peak_bytes(point) <= machine.vram_bytes
        for knob in site.space:
            for value in knob.values():
                near = {**point, knob.name: value}
                if machine.peak_bytes(near) <= machine.vram_bytes - (150 << 20):
                    assert machine.turn_s(near) >= seconds * 0.999


def test_hybrid_is_broken_on_every_fifth_machine():
    broken = [seed for seed in range(50) if make_machine(seed).hybrid_factor > 2]
    assert broken == list(range(0, 50, 5))


def test_the_report_pairs_machines_by_seed_and_leaves_out_a_seed_that_is_not_complete():
    def trace(share):
        return Trace((0.5, share), crashes=1, starts=2)

    traces = {
        "tuner": {(seed, machine): trace(0.98) for seed in (0, 1) for machine in (7, 8)},
        "gp": {(0, 7): trace(0.9), (0, 8): trace(0.94), (1, 7): trace(0.1)},
    }
    assert make_report(traces, 2).splitlines() == [
        "| method | seeds | mean @1 | mean @2 | within 3 % by 2 | crashes a machine |",
        "|---|---:|---:|---:|---:|---:|",
        "| tuner | 2 | 0.500 (0.500-0.500) | 0.980 (0.980-0.980) | 100 % (100-100) | 1.00 (1.00-1.00) |",
        "| gp | 1 | 0.500 (0.500-0.500) | 0.920 (0.900-0.940) | 0 % (0-0) | 1.00 (1.00-1.00) |",
        "",
        "| seed | gp @2 |",
        "|---:|---:|",
        "| 0 | +0.060 |",
        "| 1 |  |",
    ]
