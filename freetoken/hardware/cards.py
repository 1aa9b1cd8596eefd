"""Graphics cards as their vendors specify them: memory, bandwidth, link, multiprocessors, power.

`vram_mib` is what the driver shows as total, which is a little less than the name says from Ada on. A laptop's power
is the top of its vendor's range and its link what laptops wire; both differ from model to model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from freetoken.units import MIB

Form = Literal["desktop", "laptop", "server"]
Vendor = Literal["nvidia", "amd", "intel", "apple"]


class Card(NamedTuple):
    """One card. `name` ends with its memory, as people tell cards apart."""

    name: str
    vram_mib: int
    compute_capability: str | None
    vram_gb_per_s: float
    sm_count: int | None
    pcie_generation: int
    pcie_width: int
    power_w: int
    form: Form = "desktop"
    vendor: Vendor = "nvidia"

    @property
    def vram_bytes(self) -> int:
        """Total memory, bytes."""
        return self.vram_mib * MIB

    @property
    def gigabytes(self) -> int:
        """Memory as the card's box says it, which ends its name."""
        return int(self.name.rsplit(" ", 1)[1].removesuffix("GB"))


def _laptop(
    name: str, vram: int, capability: str, bandwidth: float, sms: int, generation: int, width: int, power: int
) -> Card:
    return Card(name, vram, capability, bandwidth, sms, generation, width, power, "laptop")


def _server(
    name: str, vram: int, capability: str, bandwidth: float, sms: int, generation: int, width: int, power: int
) -> Card:
    return Card(name, vram, capability, bandwidth, sms, generation, width, power, "server")


CARDS: tuple[Card, ...] = (
    # Pascal and Volta
    Card("GTX 1060 3GB", 3072, "6.1", 192, 9, 3, 16, 120),
    Card("GTX 1060 6GB", 6144, "6.1", 192, 10, 3, 16, 120),
    Card("GTX 1070 8GB", 8192, "6.1", 256, 15, 3, 16, 150),
    Card("GTX 1080 8GB", 8192, "6.1", 320, 20, 3, 16, 180),
    Card("GTX 1080 Ti 11GB", 11264, "6.1", 484, 28, 3, 16, 250),
    _server("Tesla P40 24GB", 23040, "6.1", 347, 30, 3, 16, 250),
    _server("Tesla V100 16GB", 16384, "7.0", 900, 80, 3, 16, 300),
    _server("Tesla V100 32GB", 32768, "7.0", 900, 80, 3, 16, 300),
    # Turing
    Card("GTX 1650 4GB", 4096, "7.5", 128, 14, 3, 16, 75),
    _laptop("GTX 1650 Laptop 4GB", 4096, "7.5", 128, 16, 3, 16, 50),
    Card("GTX 1660 SUPER 6GB", 6144, "7.5", 336, 22, 3, 16, 125),
    Card("GTX 1660 Ti 6GB", 6144, "7.5", 288, 24, 3, 16, 120),
    Card("RTX 2060 6GB", 6144, "7.5", 336, 30, 3, 16, 160),
    Card("RTX 2060 12GB", 12288, "7.5", 336, 34, 3, 16, 184),
    _laptop("RTX 2060 Laptop 6GB", 6144, "7.5", 336, 30, 3, 16, 90),
    Card("RTX 2060 SUPER 8GB", 8192, "7.5", 448, 34, 3, 16, 175),
    Card("RTX 2070 8GB", 8192, "7.5", 448, 36, 3, 16, 175),
    Card("RTX 2070 SUPER 8GB", 8192, "7.5", 448, 40, 3, 16, 215),
    Card("RTX 2080 8GB", 8192, "7.5", 448, 46, 3, 16, 215),
    Card("RTX 2080 SUPER 8GB", 8192, "7.5", 496, 48, 3, 16, 250),
    Card("RTX 2080 Ti 11GB", 11264, "7.5", 616, 68, 3, 16, 250),
    Card("Quadro RTX 4000 8GB", 8192, "7.5", 416, 36, 3, 16, 160),
    Card("Quadro RTX 6000 24GB", 24576, "7.5", 672, 72, 3, 16, 295),
    Card("Quadro RTX 8000 48GB", 49152, "7.5", 672, 72, 3, 16, 295),
    _server("Tesla T4 16GB", 15360, "7.5", 320, 40, 3, 16, 70),
    # Ampere
    _laptop("RTX 2050 Laptop 4GB", 4096, "8.6", 112, 16, 3, 8, 45),
    _laptop("RTX 3050 Laptop 4GB", 4096, "8.6", 192, 16, 4, 8, 80),
    _laptop("RTX 3050 Laptop 6GB", 6144, "8.6", 168, 20, 4, 8, 80),
    _laptop("RTX 3050 Ti Laptop 4GB", 4096, "8.6", 192, 20, 4, 8, 80),
    Card("RTX 3050 6GB", 6144, "8.6", 168, 18, 4, 8, 70),
    Card("RTX 3050 8GB", 8192, "8.6", 224, 20, 4, 8, 130),
    _laptop("RTX 3060 Laptop 6GB", 6144, "8.6", 336, 30, 4, 8, 115),
    Card("RTX 3060 8GB", 8192, "8.6", 240, 28, 4, 16, 170),
    Card("RTX 3060 12GB", 12288, "8.6", 360, 28, 4, 16, 170),
    Card("RTX 3060 Ti 8GB", 8192, "8.6", 448, 38, 4, 16, 200),
    Card("RTX 3070 8GB", 8192, "8.6", 448, 46, 4, 16, 220),
    _laptop("RTX 3070 Laptop 8GB", 8192, "8.6", 448, 40, 4, 8, 125),
    Card("RTX 3070 Ti 8GB", 8192, "8.6", 608, 48, 4, 16, 290),
    _laptop("RTX 3070 Ti Laptop 8GB", 8192, "8.6", 448, 46, 4, 8, 125),
    Card("RTX 3080 10GB", 10240, "8.6", 760, 68, 4, 16, 320),
    Card("RTX 3080 12GB", 12288, "8.6", 912, 70, 4, 16, 350),
    _laptop("RTX 3080 Laptop 8GB", 8192, "8.6", 448, 48, 4, 8, 150),
    _laptop("RTX 3080 Laptop 16GB", 16384, "8.6", 448, 48, 4, 8, 150),
    Card("RTX 3080 Ti 12GB", 12288, "8.6", 912, 80, 4, 16, 350),
    _laptop("RTX 3080 Ti Laptop 16GB", 16384, "8.6", 512, 58, 4, 8, 150),
    Card("RTX 3090 24GB", 24576, "8.6", 936, 82, 4, 16, 350),
    Card("RTX 3090 Ti 24GB", 24564, "8.6", 1008, 84, 4, 16, 450),
    Card("RTX A2000 6GB", 6138, "8.6", 288, 26, 4, 16, 70),
    Card("RTX A2000 12GB", 12282, "8.6", 288, 26, 4, 16, 70),
    Card("RTX A4000 16GB", 16376, "8.6", 448, 48, 4, 16, 140),
    Card("RTX A5000 24GB", 24564, "8.6", 768, 64, 4, 16, 230),
    Card("RTX A6000 48GB", 49140, "8.6", 768, 84, 4, 16, 300),
    _server("A10 24GB", 23028, "8.6", 600, 72, 4, 16, 150),
    _server("A100 40GB", 40960, "8.0", 1555, 108, 4, 16, 400),
    _server("A100 80GB", 81920, "8.0", 2039, 108, 4, 16, 400),
    # Ada
    _laptop("RTX 4050 Laptop 6GB", 6141, "8.9", 192, 20, 4, 8, 115),
    _laptop("RTX 4060 Laptop 8GB", 8188, "8.9", 256, 24, 4, 8, 115),
    Card("RTX 4060 8GB", 8188, "8.9", 272, 24, 4, 8, 115),
    Card("RTX 4060 Ti 8GB", 8188, "8.9", 288, 34, 4, 8, 160),
    Card("RTX 4060 Ti 16GB", 16380, "8.9", 288, 34, 4, 8, 165),
    _laptop("RTX 4070 Laptop 8GB", 8188, "8.9", 256, 36, 4, 8, 115),
    Card("RTX 4070 12GB", 12282, "8.9", 504, 46, 4, 16, 200),
    Card("RTX 4070 SUPER 12GB", 12282, "8.9", 504, 56, 4, 16, 220),
    Card("RTX 4070 Ti 12GB", 12282, "8.9", 504, 60, 4, 16, 285),
    Card("RTX 4070 Ti SUPER 16GB", 16376, "8.9", 672, 66, 4, 16, 285),
    _laptop("RTX 4080 Laptop 12GB", 12282, "8.9", 432, 58, 4, 16, 150),
    Card("RTX 4080 16GB", 16376, "8.9", 717, 76, 4, 16, 320),
    Card("RTX 4080 SUPER 16GB", 16376, "8.9", 736, 80, 4, 16, 320),
    _laptop("RTX 4090 Laptop 16GB", 16376, "8.9", 576, 76, 4, 16, 150),
    Card("RTX 4090 24GB", 24564, "8.9", 1008, 128, 4, 16, 450),
    Card("RTX 2000 Ada 16GB", 16380, "8.9", 224, 22, 4, 8, 70),
    Card("RTX 4000 Ada 20GB", 20475, "8.9", 360, 48, 4, 16, 130),
    Card("RTX 4000 SFF Ada 20GB", 20475, "8.9", 280, 48, 4, 16, 70),
    Card("RTX 4500 Ada 24GB", 24570, "8.9", 432, 60, 4, 16, 210),
    Card("RTX 5000 Ada 32GB", 32760, "8.9", 576, 100, 4, 16, 250),
    Card("RTX 6000 Ada 48GB", 49140, "8.9", 960, 142, 4, 16, 300),
    _server("L4 24GB", 23034, "8.9", 300, 58, 4, 16, 72),
    _server("L40S 48GB", 46068, "8.9", 864, 142, 4, 16, 350),
    # Hopper
    _server("H100 80GB", 81559, "9.0", 3350, 132, 5, 16, 700),
    _server("H200 141GB", 143771, "9.0", 4800, 132, 5, 16, 700),
    # Blackwell
    Card("RTX 5050 8GB", 8151, "12.0", 320, 20, 5, 8, 130),
    _laptop("RTX 5050 Laptop 8GB", 8151, "12.0", 384, 20, 5, 8, 100),
    Card("RTX 5060 8GB", 8151, "12.0", 448, 30, 5, 8, 145),
    _laptop("RTX 5060 Laptop 8GB", 8151, "12.0", 384, 26, 5, 8, 100),
    Card("RTX 5060 Ti 8GB", 8151, "12.0", 448, 36, 5, 8, 180),
    Card("RTX 5060 Ti 16GB", 16311, "12.0", 448, 36, 5, 8, 180),
    Card("RTX 5070 12GB", 12227, "12.0", 672, 48, 5, 16, 250),
    _laptop("RTX 5070 Laptop 8GB", 8151, "12.0", 384, 36, 5, 8, 100),
    Card("RTX 5070 Ti 16GB", 16303, "12.0", 896, 70, 5, 16, 300),
    _laptop("RTX 5070 Ti Laptop 12GB", 12227, "12.0", 672, 46, 5, 16, 115),
    Card("RTX 5080 16GB", 16303, "12.0", 960, 84, 5, 16, 360),
    _laptop("RTX 5080 Laptop 16GB", 16303, "12.0", 896, 60, 5, 16, 150),
    Card("RTX 5090 32GB", 32607, "12.0", 1792, 170, 5, 16, 575),
    _laptop("RTX 5090 Laptop 24GB", 24463, "12.0", 896, 82, 5, 16, 150),
    Card("RTX PRO 2000 Blackwell 16GB", 16311, "12.0", 288, 34, 5, 8, 70),
    Card("RTX PRO 4000 Blackwell 24GB", 24467, "12.0", 672, 70, 5, 16, 140),
    Card("RTX PRO 5000 Blackwell 48GB", 48935, "12.0", 1344, 110, 5, 16, 300),
    Card("RTX PRO 6000 Blackwell 96GB", 97887, "12.0", 1792, 188, 5, 16, 600),
    # Others: named so that a plan can say why they do not work, and with what they would
    Card("RX 6700 XT 12GB", 12272, None, 384, None, 4, 16, 230, "desktop", "amd"),
    Card("RX 6800 XT 16GB", 16368, None, 512, None, 4, 16, 300, "desktop", "amd"),
    Card("RX 7600 8GB", 8176, None, 288, None, 4, 8, 165, "desktop", "amd"),
    Card("RX 7800 XT 16GB", 16368, None, 624, None, 4, 16, 263, "desktop", "amd"),
    Card("RX 7900 XT 20GB", 20464, None, 800, None, 4, 16, 315, "desktop", "amd"),
    Card("RX 7900 XTX 24GB", 24560, None, 960, None, 4, 16, 355, "desktop", "amd"),
    Card("RX 9070 XT 16GB", 16304, None, 640, None, 5, 16, 304, "desktop", "amd"),
    Card("Arc A770 16GB", 16288, None, 560, None, 4, 16, 225, "desktop", "intel"),
    Card("Arc B580 12GB", 12216, None, 456, None, 4, 8, 190, "desktop", "intel"),
)
