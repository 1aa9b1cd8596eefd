"""Cards by spoken names, and machines that are not here."""

import pytest

from freetoken.errors import UsageError
from freetoken.hardware.cards import CARDS
from freetoken.hardware.catalog import find_card, make_gpu, make_what_if, pick_card
from freetoken.hardware.model import Bandwidth, Cpu, Disk, Gpu, Hardware, PcieLink, Ram, Software
from freetoken.units import GIB, MIB


def test_names_are_unique_and_every_card_is_found_by_its_own_and_by_its_drivers_name() -> None:
    assert len({card.name for card in CARDS}) == len(CARDS) >= 80
    assert [pick_card(card.name) for card in CARDS] == list(CARDS)
    assert [find_card(make_gpu(card).name, card.vram_bytes) for card in CARDS] == list(CARDS)


@pytest.mark.parametrize(
    ("spoken", "name"),
    [
        ("4090", "RTX 4090 24GB"),
        ("rtx3060 laptop", "RTX 3060 Laptop 6GB"),
        ("RTX 3060 12G", "RTX 3060 12GB"),
        ("geforce rtx 4060ti 16 gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4070 SUPER", "RTX 4070 SUPER 12GB"),
        ("4070 ti super", "RTX 4070 Ti SUPER 16GB"),
        ("RTX 2050", "RTX 2050 Laptop 4GB"),
        ("RTX 2060 Mobile", "RTX 2060 Laptop 6GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell 96GB"),
        ("NVIDIA RTX 2000 Ada Generation", "RTX 2000 Ada 16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("h200", "H200 141GB"),
        ("rx7900xtx", "RX 7900 XTX 24GB"),
    ],
)
def test_a_card_is_known_by_what_people_and_drivers_call_it(spoken: str, name: str) -> None:
    assert pick_card(spoken).name == name


@pytest.mark.parametrize(
    ("spoken", "message", "hint"),
    [
        (
            "RTX 3060", "`RTX 3060` stands for several cards: `RTX 3060 8GB`, `RTX 3060 12GB`",
            'e.g. `--gpu "RTX 3060 12GB"`',
        ),
        (
            "RTX 4090 48GB", "no card `RTX 4090 48GB` in the catalogue; did you mean `RTX 4090 24GB`?",
            "nearest known: RTX 4090 24GB, RTX 4060 8GB, RTX 3090 24GB",
        ),
        ("banana", "no card `banana` in the catalogue", "describe the machine in a profile instead"),
        ("", "no card `` in the catalogue", "describe the machine in a profile instead"),
        (
            "NVIDIA GeForce RTX", "no card `NVIDIA GeForce RTX` in the catalogue",
            "describe the machine in a profile instead",
        ),
    ],
)  # fmt: skip
def test_an_unknown_or_ambiguous_card_is_met_with_candidates(spoken: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        pick_card(spoken)
    assert caught.value.message == message
    assert caught.value.hint == hint


def test_memory_tells_cards_of_one_name_apart_and_without_it_there_is_no_guess() -> None:
    assert find_card("NVIDIA GeForce RTX 4060 Ti") is None
    found = find_card("NVIDIA GeForce RTX 4060 Ti", 8188 * MIB)
    assert found is not None
    assert found.name == "RTX 4060 Ti 8GB"
    assert find_card("NVIDIA Something New") is None


def test_a_what_if_machine_is_complete_and_marks_its_guesses() -> None:
    machine = make_what_if("RTX 3060 Laptop 6GB", "32GiB")
    total = int(32 * GIB * 0.975) // MIB * MIB
    assert machine.model_dump(exclude={"sources": True, "bandwidth": {"sources"}}) == Hardware(
        name="what if: RTX 3060 Laptop 6GB, 31 GiB RAM",
        description="A machine that is not here; everything but the card's specification is a guess.",
        gpus=(
            Gpu(name="NVIDIA GeForce RTX 3060 Laptop GPU", compute_capability="8.6", vram_total_bytes=6 * GIB,
                vram_free_bytes=5760 * MIB, vram_free_spread_bytes=150 * MIB, sm_count=30, is_laptop=True,
                pcie=PcieLink(max_generation=4, max_width=8), power_limit_w=115),
        ),
        cpu=Cpu(physical_cores=8, logical_cores=16, usable_cores=8, isa=("sse4_2", "avx", "f16c", "fma", "avx2")),
        ram=Ram(total_bytes=total, available_bytes=total - 3 * GIB),
        disk=Disk(total_bytes=1000 * GIB, free_bytes=500 * GIB, kind="nvme"),
        bandwidth=Bandwidth(h2d_bytes_per_s=12.4e9, h2d_pageable_bytes_per_s=6e9, dram_bytes_per_s=38e9,
                            vram_bytes_per_s=336e9, disk_bytes_per_s=2.5e9, cpu_experts_bytes_per_s=32e9),
        software=Software(driver="580.95.05", cuda_driver="13.0", cuda_toolkit="13.0", nvcc="nvcc", gxx="g++",
                          ninja="ninja"),
        default_source="guessed",
    ).model_dump(exclude={"sources": True, "bandwidth": {"sources"}})  # fmt: skip
    known = {path: machine.source_of(path) for path in (
        "gpus.0.vram_total_bytes", "gpus.0.vram_free_bytes", "bandwidth.vram_bytes_per_s", "bandwidth.h2d_bytes_per_s",
        "cpu.physical_cores", "ram.available_bytes",
    )}  # fmt: skip
    assert known == {
        "gpus.0.vram_total_bytes": "vendor", "gpus.0.vram_free_bytes": "guessed",
        "bandwidth.vram_bytes_per_s": "vendor", "bandwidth.h2d_bytes_per_s": "guessed",
        "cpu.physical_cores": "guessed", "ram.available_bytes": "guessed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cpu", "model", "cores"),
    [(None, "unknown", 8), ("16", "unknown", 16), ("12 cores", "unknown", 12),
     ("Ryzen 7 5800X, 8 cores", "Ryzen 7 5800X", 8), ("Ryzen 9 7950X", "Ryzen 9 7950X", 8)],
)  # fmt: skip
def test_a_cpu_is_a_name_a_count_or_both(cpu: str | None, model: str, cores: int) -> None:
    found = make_what_if("4090", "64GiB", cpu).cpu
    assert (found.model, found.physical_cores, found.usable_cores) == (model, cores, cores)


@pytest.mark.parametrize("gpu", [None, "none", "CPU"])
def test_without_a_card_the_machine_has_no_gpu_and_no_driver(gpu: str | None) -> None:
    machine = make_what_if(gpu)
    assert (machine.gpus, machine.software.driver, machine.bandwidth.vram_bytes_per_s) == ((), None, None)


@pytest.mark.parametrize(
    ("ram", "cpu", "message"),
    [
        ("many", None, "`many` is not a size, expected e.g. `6GiB`"),
        ("512MiB", None, "`512MiB` of RAM is less than 1 GiB"),
        ("-5GiB", None, "`-5GiB` is negative, expected a size such as `6GiB`"),
        ("32GiB", "0 cores", "`0 cores` asks for 0 cores, expected 1 to 1024"),
        ("32GiB", "99999", "`99999` asks for 99999 cores, expected 1 to 1024"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(ram: str, cpu: str | None, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_what_if("4090", ram, cpu)
    assert caught.value.message == message


def test_an_amd_card_is_described_so_that_it_can_be_refused_in_words() -> None:
    machine = make_what_if("RX 9070 XT", "64GiB")
    gpu = machine.gpus[0]
    assert (gpu.vendor, gpu.name, gpu.compute_capability) == ("amd", "AMD Radeon RX 9070 XT", None)
    assert machine.software.driver is None
