"""Every shipped profile loads, agrees with the catalogue, and says how each of its figures is known."""

from collections.abc import Iterator
from typing import Any

import pytest

from freetoken import paths
from freetoken.hardware.catalog import find_card
from freetoken.hardware.model import Hardware
from freetoken.hardware.profiles import load_profile
from freetoken.units import GIB, MIB

NAMES = sorted(path.stem for path in paths.shipped_dir("profiles").glob("*.yaml"))
LISTED = (
    "gtx-1650-4gb", "rtx-2050-laptop-4gb", "rtx-2060-6gb", "rtx-3060-laptop-6gb", "rtx-4060-laptop-8gb",
    "rtx-4060-ti-16gb", "rtx-5060-ti-16gb", "rtx-3090-24gb", "rtx-4090-24gb", "rtx-5090-32gb", "rtx-2000-ada-16gb",
    "rtx-a4000-16gb", "rtx-pro-6000-96gb", "h200-141gb", "cpu-only",
)  # fmt: skip


def load(name: str) -> Hardware:
    return load_profile(paths.shipped_dir("profiles") / f"{name}.yaml")


def figures(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of every number in a profile."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from figures(below, f"{path}.{key}" if path else key)
    elif isinstance(value, (list, tuple)):
        for index, below in enumerate(value):
            yield from figures(below, f"{path}.{index}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def test_at_least_24_machines_are_shipped_and_the_promised_ones_among_them() -> None:
    assert len(NAMES) >= 24
    assert set(LISTED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_agrees_with_the_catalogue_and_is_plausible(name: str) -> None:
    hardware = load(name)
    assert hardware.name == name
    assert hardware.description
    assert GIB < hardware.ram.available_bytes < hardware.ram.total_bytes
    assert hardware.cpu.usable_cores == hardware.cpu.physical_cores <= hardware.cpu.logical_cores
    for gpu in hardware.gpus:
        card = find_card(gpu.name, gpu.vram_total_bytes)
        assert card is not None
        assert (gpu.vram_total_bytes, gpu.compute_capability, gpu.sm_count, gpu.vendor) == (
            card.vram_bytes, card.compute_capability, card.sm_count, card.vendor,
        )  # fmt: skip
        assert gpu.is_laptop == (card.form == "laptop")
        assert (gpu.pcie.max_generation or 0) <= card.pcie_generation
        assert hardware.bandwidth.vram_bytes_per_s == card.vram_gb_per_s * 1e9
        assert 128 * MIB < gpu.vram_total_bytes - gpu.vram_free_bytes < 2 * GIB


@pytest.mark.parametrize("name", NAMES)
def test_each_figure_is_marked_and_none_claims_to_be_measured_that_was_not(name: str) -> None:
    hardware = load(name)
    assert hardware.default_source == "guessed"
    tree = hardware.model_dump(exclude={"sources": True, "bandwidth": {"sources"}}, exclude_defaults=True)
    by_source: dict[str, set[str]] = {"measured": set(), "vendor": set(), "guessed": set()}
    for path in figures(tree):
        by_source[hardware.source_of(path)].add(path)
    assert {"cpu.physical_cores"} <= by_source["vendor"]
    assert {"ram.available_bytes", "disk.free_bytes"} <= by_source["guessed"]
    if hardware.gpus:
        assert {"gpus.0.vram_total_bytes", "bandwidth.vram_bytes_per_s"} <= by_source["vendor"]
        assert "gpus.0.vram_free_bytes" in by_source["guessed"]
    allowed = {f"bandwidth.{rate}" for rate in ("piece_bytes", "threads")} | {"ram.pinnable_bytes"}
    rates = {path for path in by_source["measured"] if path.startswith("bandwidth.")}
    assert by_source["measured"] <= rates | allowed
    assert set(hardware.bandwidth.sources) == {path for path in tree["bandwidth"] if path.endswith("_per_s")}
