"""What makes a run incomparable, on machines played by samples."""

import random

from freetoken.bench.guard import judge_machine, judge_requests
from freetoken.bench.metrics import RequestTimes
from freetoken.bench.sample import GpuReading, HostReading, Sample, energy_between, mean_power, peak_ram, peak_vram
from freetoken.units import GIB, MIB


def play(gpus, hosts=None):
    hosts = hosts or [HostReading(engine_pids=frozenset({7}))] * len(gpus)
    return [Sample(float(index), gpu, host) for index, (gpu, host) in enumerate(zip(gpus, hosts, strict=True))]


def words(findings):
    return [(one.kind, one.message, one.is_invalidating) for one in findings]


def test_a_quiet_run_has_no_findings():
    calm = GpuReading(processes={7: GIB, 8: 40 * MIB}, link_width=8, link_generation=4, busy_percent=90)
    assert judge_machine(play([calm] * 20)) == ()


def test_a_machine_without_a_gpu_is_judged_by_its_memory_alone():
    hosts = [HostReading(swap_used_bytes=used) for used in (0, 10 * MIB)]
    assert judge_machine(play([None, None], hosts)) == ()


def test_a_process_that_comes_or_grows_is_found_and_the_engine_is_not():
    gpus = [
        GpuReading(processes={7: GIB, 8: 40 * MIB}),
        GpuReading(processes={7: 3 * GIB, 8: 240 * MIB, 9: 2 * GIB, 10: MIB}),
    ]
    assert words(judge_machine(play(gpus))) == [
        ("other_process", "process 8 took 200 MiB more VRAM during the run", True),
        ("other_process", "process 9 came onto the GPU during the run (2.00 GiB of VRAM)", True),
        ("other_process", "process 10 came onto the GPU during the run (1.00 MiB of VRAM)", False),
    ]


def test_without_its_pid_the_engine_is_who_held_most():
    gpus = [GpuReading(processes={7: GIB, 8: MIB}), GpuReading(processes={7: 3 * GIB, 8: MIB})]
    assert judge_machine(play(gpus, [HostReading()] * 2)) == ()


def test_thermal_throttling_invalidates_and_a_power_cap_is_only_told():
    hot = GpuReading(throttle=frozenset({"hardware thermal", "power cap"}))
    assert words(judge_machine(play([hot, hot, GpuReading(), GpuReading()]))) == [
        ("throttling", "the GPU's clocks were held down (hardware thermal) in 50% of the samples", True),
        ("throttling", "the GPU's clocks were held down (power cap) in 50% of the samples", False),
    ]


def test_a_passing_moment_of_throttling_is_no_finding():
    hot = GpuReading(throttle=frozenset({"hardware thermal"}))
    assert judge_machine(play([hot] + [GpuReading()] * 39)) == ()


def test_a_link_that_loses_lanes_or_speed_under_load_is_found():
    gpus = [GpuReading(link_width=16, link_generation=4, busy_percent=90)] * 5
    gpus += [GpuReading(link_width=8, link_generation=3, busy_percent=90)] * 5
    assert words(judge_machine(play(gpus))) == [
        ("link", "the PCIe link dropped from x16 to x8", True),
        ("link", "the PCIe link ran as generation 3 instead of 4 in 5 busy samples", True),
    ]


def test_a_link_that_rests_between_requests_is_fine():
    gpus = [GpuReading(link_width=16, link_generation=1, busy_percent=0)] * 5
    gpus += [GpuReading(link_width=16, link_generation=4, busy_percent=90)] * 5
    assert judge_machine(play(gpus)) == ()


def test_swap_of_the_engine_is_named_before_that_of_the_machine():
    hosts = [HostReading(engine_swap_bytes=0, swap_used_bytes=0),
             HostReading(engine_swap_bytes=100 * MIB, swap_used_bytes=GIB)]  # fmt: skip
    found = words(judge_machine(play([None, None], hosts)))
    assert found == [("swap", "100 MiB of the engine's memory went to swap during the run", True)]


def test_a_machine_that_is_busy_with_others_is_told():
    own = frozenset({7})
    hosts = [HostReading(engine_pids=own, cpu_busy_s=10.0, cpu_own_s=5.0, cpu_count=2),
             HostReading(engine_pids=own, cpu_busy_s=11.8, cpu_own_s=5.9, cpu_count=2)]  # fmt: skip
    assert words(judge_machine(play([None, None], hosts))) == [
        ("busy", "other processes used 45% of this machine's CPU time during the run", False)
    ]


def test_peaks_and_energy_are_the_engines_own_where_the_driver_tells():
    held = {"vram_used_bytes": 9 * GIB, "processes": {7: 2 * GIB, 8: GIB}}
    gpus = [GpuReading(**held, energy_j=100.0 + 50 * index, power_w=1.0) for index in range(3)]
    hosts = [HostReading(engine_bytes=size, engine_pids=frozenset({7})) for size in (1, 5, 3)]
    samples = play(gpus, hosts)
    assert (peak_vram(samples), peak_ram(samples)) == (2 * GIB, 5)
    assert (energy_between(samples), mean_power(samples)) == (100.0, 50.0)


def test_without_an_energy_counter_power_is_added_up_over_time():
    samples = play([GpuReading(vram_used_bytes=5, power_w=power) for power in (10.0, 20.0, 30.0)])
    assert (energy_between(samples), mean_power(samples), peak_vram(samples)) == (40.0, 20.0, 5)


def make_times(**facts):
    base = {"completion_tokens": 3, "prompt_tokens": 100, "pieces_s": (1.0, 2.0, 3.0), "last_s": 3.0}
    return RequestTimes(repeat=0, conversation=0, turn=0, sent_s=0.0, **(base | facts))


def judge(*times, output=3, prompt=100, reusable=0, texts=()):
    count = len(times)
    return words(judge_requests(
        times, output_tokens=[output] * count, prompt_tokens=[prompt] * count, reusable_tokens=[reusable] * count,
        texts=texts,
    ))  # fmt: skip


def test_answers_as_asked_for_have_no_findings():
    assert judge(make_times(), make_times(cached_tokens=60), reusable=60) == []


def test_a_silently_shortened_answer_invalidates():
    assert judge(make_times(), make_times(), output=4) == [
        ("token_count", "2 of 2 answers were shorter than asked for, one had 3 of 4 tokens", True)
    ]


def test_cache_hits_on_prompts_never_sent_invalidate():
    assert judge(make_times(cached_tokens=900, prompt_tokens=1000), make_times(), prompt=0, reusable=128) == [
        (
            "prefix_cache",
            "the prefix cache answered 900 tokens of a prompt of which this run had sent 128 before: "
            "1 of 2 prompts were not fresh",
            True,
        )
    ]


def test_prompts_that_miss_their_size_are_told():
    assert judge(make_times(prompt_tokens=80), make_times()) == [
        ("sizing", "1 of 2 prompts missed their size, one had 80 instead of 100 tokens", False)
    ]


def test_counts_without_usage_and_chunks_of_many_tokens_are_told():
    assert judge(make_times(is_estimated=True)) == [
        ("token_count", "1 of 1 answers came without `usage`: tokens are counted by chunks", False)
    ]
    assert judge(make_times(completion_tokens=9), output=9) == [
        ("token_count", "9 tokens came in 3 chunks: ITL is the gap between chunks", False)
    ]


def test_answers_that_go_round_in_circles_are_told():
    rng = random.Random(0)
    real = " ".join("".join(rng.choices("etaoinshr", k=5)) for _ in range(200))
    looping = "and so on, " * 100
    assert judge(make_times(), texts=[real, real]) == []
    assert judge(make_times(), texts=[looping, looping, real]) == [
        ("repetition", "2 of 3 answers repeat themselves, so fewer experts are asked than by real text", False)
    ]
