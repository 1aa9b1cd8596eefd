"""The probe as a whole, on recorded machines, on a machine that hides everything, and on this one."""

from pathlib import Path

import pytest

from freetoken.hardware.model import Bandwidth, Cpu, Disk, Gpu, GpuHolder, Hardware, Os, PcieLink, Ram, Software
from freetoken.hardware.probe import model_folder, probe_hardware
from freetoken.hardware.reader import Reader
from freetoken.units import GIB, MIB
from tests.fakes.machines import FakePrograms, cpu_only, headless_server, linux_laptop, make_reader, wsl_machine

ISA = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni")


def test_a_laptop_is_described_completely(tmp_path: Path) -> None:
    reader, nvml = linux_laptop(tmp_path)
    gpu = Gpu(
        name="NVIDIA GeForce RTX 4060 Laptop GPU", uuid="GPU-11111111-2222-3333-4444-555555555555",
        compute_capability="8.9", vram_total_bytes=8188 * MIB, vram_free_bytes=7400 * MIB, sm_count=24, is_laptop=True,
        pcie=PcieLink(generation=1, width=8, max_generation=4, max_width=8, card_generation=4), has_display=True,
        holders=(GpuHolder(pid=4242, name="firefox", used_bytes=300 * MIB),),
    )  # fmt: skip
    assert probe_hardware(reader=reader, nvml_loader=lambda: nvml) == Hardware(
        gpus=(gpu,),
        cpu=Cpu(model="13th Gen Intel Core i9-13900H", physical_cores=14, logical_cores=20, usable_cores=14,
                performance_cores=6, efficiency_cores=8, isa=ISA),
        ram=Ram(total_bytes=31 * GIB, available_bytes=22 * GIB, swap_total_bytes=8 * GIB, swap_used_bytes=GIB,
                tmpfs_used_bytes=GIB, memlock_bytes=8 * MIB),
        disk=Disk(path="/home/ann/.cache/huggingface/hub", total_bytes=900 * GIB, free_bytes=200 * GIB, kind="nvme",
                  filesystem="ext4"),
        bandwidth=Bandwidth(vram_bytes_per_s=256e9, sources={"vram_bytes_per_s": "vendor"}),
        os=Os(name="linux", distribution="Ubuntu 24.04.3 LTS", kernel="6.8.0-45-generic"),
        software=Software(driver="580.95.05", cuda_driver="13.0", cuda_toolkit="13.0.2", nvcc="/usr/local/bin/nvcc",
                          gxx="/usr/bin/g++", ninja="/usr/bin/ninja"),
        is_probed=True,
    )  # fmt: skip


def test_wsl_shows_its_pin_cap_windows_own_free_memory_and_a_models_folder_on_a_slow_drive(tmp_path: Path) -> None:
    reader, nvml = wsl_machine(tmp_path)
    hardware = probe_hardware(reader=reader, nvml_loader=lambda: nvml)
    assert hardware.os == Os(
        name="linux",
        distribution="Ubuntu 24.04.2 LTS",
        kernel="6.6.87.2-microsoft-standard-WSL2",
        is_wsl=True,
        wsl_version="2.6.1.0",
    )
    assert hardware.ram == Ram(
        total_bytes=24 * GIB, available_bytes=20 * GIB, swap_total_bytes=6 * GIB, pinnable_bytes=24 * GIB * 2 // 5,
        memlock_bytes=8 * MIB, windows_available_bytes=5 * GIB,
    )  # fmt: skip
    assert hardware.source_of("ram.pinnable_bytes") == "guessed"
    assert hardware.source_of("ram.available_bytes") == "measured"
    assert hardware.disk.kind == "network"
    assert hardware.gpus[0].holders == (GpuHolder(pid=77, name="program77.exe", used_bytes=0),)


def test_a_server_in_a_container_has_what_its_limits_leave_and_the_gpu_in_the_fast_slot_first(tmp_path: Path) -> None:
    reader, nvml = headless_server(tmp_path)
    hardware = probe_hardware(reader=reader, nvml_loader=lambda: nvml)
    cpu = hardware.cpu
    assert (cpu.physical_cores, cpu.usable_cores, cpu.quota_cpus, cpu.numa_nodes) == (32, 8, 8.0, 2)
    assert (hardware.ram.available_bytes, hardware.ram.cgroup_limit_bytes) == (50 * GIB, 64 * GIB)
    assert hardware.os.is_container
    chosen = hardware.pick_gpu()
    assert chosen is not None
    assert chosen.uuid == "GPU-aaaaaaaa-0000-0000-0000-000000000000"


def test_a_machine_without_a_gpu_runs_no_program_and_never_asks_nvml(tmp_path: Path) -> None:
    reader, _ = cpu_only(tmp_path)
    hardware = probe_hardware(reader=reader, nvml_loader=lambda: pytest.fail("nvml was loaded"))
    assert hardware.gpus == ()
    assert hardware.software == Software()
    assert isinstance(reader.run, FakePrograms)
    assert reader.run.asked == []


def test_a_sandbox_that_hides_proc_and_sys_is_described_without_an_error(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, {}, environ={"HF_HOME": "/x"}, memlock=None)
    hardware = probe_hardware(reader=reader)
    assert hardware.cpu == Cpu()
    assert hardware.ram.total_bytes > 0  # psutil's word, where there is no /proc/meminfo
    assert hardware.disk == Disk(path="/x/hub", free_bytes=0)


def test_files_full_of_nonsense_do_not_stop_the_probe(tmp_path: Path) -> None:
    names = ("cpuinfo", "meminfo", "self/mountinfo", "self/cgroup", "driver/nvidia/version", "sys/kernel/osrelease")
    reader = make_reader(tmp_path, {f"/proc/{name}": "\0: - \ud7ff x kB -1:::\n" * 50 for name in names})
    hardware = probe_hardware(reader=reader, nvml_loader=lambda: None)
    assert (hardware.cpu.logical_cores, hardware.gpus, hardware.software.driver) == (1, (), None)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_models_land_where_the_hub_puts_them(environ: dict[str, str], folder: str) -> None:
    assert model_folder(Reader(environ=environ)) == Path(folder)
