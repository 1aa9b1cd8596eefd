"""A small slice of `make bench-tuner`: the same code on a few of its machines."""

from benchmarks.tuner.compare import Case, run_case
from benchmarks.tuner.machines import SimulatedSite, find_best, make_machine


def test_the_tuner_is_near_the_best_within_six_starts_and_no_worse_than_random():
    cases = [run_case(Case(machine, seed=0, starts=6, methods=("tuner", "random"))) for machine in (2, 11)]
    shares = [case["tuner"].shares[-1] for case in cases]
    assert min(shares) > 0.93
    assert sum(shares) / len(shares) > 0.97
    assert sum(shares) >= sum(case["random"].shares[-1] for case in cases)
    assert sum(case["tuner"].crashes for case in cases) <= 1


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
