"""Laws of the hardware room over random cases."""

from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.hardware.cards import CARDS
from freetoken.hardware.catalog import make_what_if
from freetoken.hardware.cgroup import read_cgroup_limits
from freetoken.hardware.model import Bandwidth, Cpu, Disk, Gpu, Hardware, PcieLink, Ram, Software
from freetoken.hardware.profiles import anonymous, load_profile, write_profile
from freetoken.hardware.reader import parse_cpu_list
from freetoken.hardware.yaml_file import format_exact_bytes
from freetoken.units import GIB, parse_bytes
from tests.fakes.machines import make_reader

SIZES = st.integers(0, 1 << 44)
RATES = st.none() | st.floats(1e6, 1e13, allow_nan=False)
QUOTAS = st.none() | st.floats(0.1, 99)
DRIVERS = st.none() | st.from_regex(r"\A\d{3}\.\d{2}\Z")
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=30)


@given(SIZES)
def test_an_exact_size_parses_back_to_itself(count: int) -> None:
    assert parse_bytes(format_exact_bytes(count)) == count


@st.composite
def gpus(draw: st.DrawFn) -> Gpu:
    total = draw(SIZES)
    return Gpu(
        index=draw(st.integers(0, 15)), name=draw(WORDS), vendor=draw(st.sampled_from(["nvidia", "amd"])),
        compute_capability=draw(st.none() | st.sampled_from(["7.5", "8.6", "12.0"])), vram_total_bytes=total,
        vram_free_bytes=draw(st.integers(0, total)), vram_free_spread_bytes=draw(SIZES),
        pcie=PcieLink(generation=draw(st.none() | st.integers(1, 6)), max_width=draw(st.none() | st.integers(1, 16))),
        sm_count=draw(st.none() | st.integers(1, 200)), is_laptop=draw(st.booleans()),
        power_limit_w=draw(st.none() | st.floats(1, 1000)),
    )  # fmt: skip


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    total = draw(SIZES)
    return Hardware(
        name=draw(WORDS), description=draw(WORDS), gpus=tuple(draw(st.lists(gpus(), max_size=3))),
        cpu=Cpu(model=draw(WORDS), physical_cores=draw(st.integers(1, 256)), quota_cpus=draw(QUOTAS)),
        ram=Ram(total_bytes=total, available_bytes=draw(st.integers(0, total)), pinnable_bytes=draw(st.none() | SIZES)),
        disk=Disk(free_bytes=draw(SIZES), total_bytes=draw(st.none() | SIZES)),
        bandwidth=Bandwidth(h2d_bytes_per_s=draw(RATES), dram_bytes_per_s=draw(RATES),
                            sources={"dram_bytes_per_s": "vendor"}),
        software=Software(driver=draw(DRIVERS), nvcc=draw(st.none() | st.just("nvcc"))),
        sources={"ram.total_bytes": "guessed"}, default_source=draw(st.sampled_from(["measured", "guessed"])),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(machines())
def test_a_profile_reads_back_as_the_machine_that_was_written(machine: Hardware) -> None:
    with TemporaryDirectory() as folder:
        path = write_profile(machine, Path(folder) / "law.yaml")
        assert load_profile(path) == anonymous(machine).model_copy(update={"name": "law"})
        assert isinstance(yaml.safe_load(path.read_text()), dict)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.none() | st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=5))
def test_the_memory_left_is_the_least_over_all_nested_groups(levels: list[tuple[int | None, int]]) -> None:
    files = {"/proc/self/mountinfo": "1 0 0:2 / /cg rw - cgroup2 c rw\n"}
    files["/proc/self/cgroup"] = "0::" + "".join(f"/g{n}" for n in range(1, len(levels))) + "\n"
    folder = "/cg"
    for depth, (limit, used) in enumerate(levels):
        folder = folder if depth == 0 else f"{folder}/g{depth}"
        files[f"{folder}/memory.max"] = "max" if limit is None else str(limit * GIB)
        files[f"{folder}/memory.current"] = str(used * GIB)
    left = [max(0, limit - used) * GIB for limit, used in levels if limit is not None]
    with TemporaryDirectory() as root:
        memory = read_cgroup_limits(make_reader(Path(root), files)).memory
    assert (memory.left_bytes if memory else None) == min(left, default=None)


@given(st.frozensets(st.integers(0, 500), max_size=40))
def test_a_cpu_list_parses_back_to_its_cpus(cpus: frozenset[int]) -> None:
    assert parse_cpu_list(",".join(map(str, sorted(cpus)))) == cpus


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CARDS), st.integers(1, 2048))
def test_any_card_with_any_ram_is_a_valid_machine_that_survives_a_profile(card: object, gigabytes: int) -> None:
    machine = make_what_if(card.name, f"{gigabytes}GiB")  # type: ignore[attr-defined]
    assert Hardware.model_validate(machine.model_dump()) == machine
    assert machine.gpus[0].vram_free_bytes + machine.gpus[0].vram_free_spread_bytes <= machine.gpus[0].vram_total_bytes
