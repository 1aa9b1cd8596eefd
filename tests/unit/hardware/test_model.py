"""Choosing a GPU, and how a figure is known."""

import pytest

from freetoken.hardware.model import Bandwidth, Disk, Gpu, Hardware, PcieLink, Ram
from freetoken.units import GIB


def card(index: int, free_gib: int, *, link: tuple[int, int] | None = (4, 16), **fields: object) -> Gpu:
    pcie = PcieLink(max_generation=link[0], max_width=link[1]) if link else PcieLink()
    known = {
        "name": f"card {index}",
        "vram_total_bytes": 96 * GIB,
        "vram_free_bytes": free_gib * GIB,
        "uuid": f"GPU-{index}",
    }
    return Gpu.model_validate({"index": index, "pcie": pcie, **known, **fields})


def machine(*gpus: Gpu) -> Hardware:
    return Hardware(gpus=gpus, ram=Ram(total_bytes=GIB, available_bytes=0), disk=Disk(free_bytes=0))


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [
        ((card(0, 11), card(1, 23)), 1),
        ((card(0, 24, link=(3, 4)), card(1, 23, link=(4, 16))), 1),  # the display card in the fast slot
        ((card(0, 24, link=(3, 4)), card(1, 8, link=(4, 16))), 0),
        ((card(0, 24), card(1, 24)), 0),
        ((card(0, 24, vendor="amd"), card(1, 6)), 1),
        ((card(0, 90, is_integrated=True), card(1, 6)), 1),
        ((card(0, 12, link=None), card(1, 12, link=(5, 16))), 1),
        ((card(0, 16, vendor="amd"),), 0),
    ],
)
def test_auto_takes_the_card_that_runs_fastest(gpus: tuple[Gpu, ...], chosen: int) -> None:
    found = machine(*gpus).pick_gpu()
    assert found is not None
    assert found.index == chosen


def test_a_gpu_is_named_by_index_or_uuid_and_an_unknown_one_is_an_error() -> None:
    hardware = machine(card(0, 1), card(1, 2))
    picked = [hardware.pick_gpu(choice) for choice in (0, "1", "GPU-0")]
    assert [gpu.index for gpu in picked if gpu] == [0, 1, 0]
    for choice in ("GPU-9", 2, ""):
        with pytest.raises(KeyError):
            hardware.pick_gpu(choice)
    assert machine().pick_gpu() is None


def test_the_longest_path_tells_how_a_figure_is_known() -> None:
    hardware = machine(card(0, 1)).model_copy(
        update={
            "default_source": "guessed",
            "sources": {"gpus.0": "vendor", "gpus.0.vram_free_bytes": "measured"},
            "bandwidth": Bandwidth(dram_bytes_per_s=1e9, sources={"dram_bytes_per_s": "measured"}),
        }
    )
    paths = ("gpus.0.vram_free_bytes", "gpus.0.pcie.width", "gpus.1.name", "bandwidth.dram_bytes_per_s", "ram")
    assert [hardware.source_of(path) for path in paths] == ["measured", "vendor", "guessed", "measured", "guessed"]
