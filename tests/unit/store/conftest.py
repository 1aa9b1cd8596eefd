import pytest

from freetoken.hardware.model import Cpu, Disk, Gpu, Hardware, Ram
from freetoken.store import open_store


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "ft.db"


@pytest.fixture
def store(path):
    with open_store(path) as opened:
        yield opened


@pytest.fixture
def hardware():
    gpu = Gpu(name="RTX 3060 Laptop", compute_capability="8.6", vram_total_bytes=6 << 30, vram_free_bytes=5 << 30)
    ram = Ram(total_bytes=32 << 30, available_bytes=24 << 30)
    return Hardware(name="laptop", gpus=(gpu,), cpu=Cpu(physical_cores=8), ram=ram, disk=Disk(free_bytes=1 << 40))
