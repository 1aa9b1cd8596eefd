"""`ft bench bw` with meters that answer at once: what is kept, what is doubted, and the upstream engine's profile."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freetoken.adapters import freetoken_profile as upstream
from freetoken.checkpoint.shape import Experts
from freetoken.deploy import bandwidth as module
from freetoken.deploy.bandwidth import Meters, choose_shape, import_profile, measure_machine, write_upstream_profile
from freetoken.errors import BadFileError, UsageError
from freetoken.hardware.expert_kernel import ExpertShape
from freetoken.hardware.measured import read_measured
from freetoken.hardware.model import Bandwidth, Cpu, Disk, ExpertRates, Gpu, GpuHolder, Hardware, Ram
from freetoken.units import GIB

RECORDED = Path(__file__).parents[2] / "fixtures" / "freetoken" / "benchbw.json"
UUID = "GPU-00000000-0000-0000-0000-000000000000"
H200 = Gpu(name="NVIDIA H200", uuid=UUID, vram_total_bytes=139 * GIB, vram_free_bytes=138 * GIB)
MACHINE = Hardware(
    gpus=(H200,),
    cpu=Cpu(model="Xeon", physical_cores=16, usable_cores=16),
    ram=Ram(total_bytes=128 * GIB, available_bytes=100 * GIB),
    disk=Disk(free_bytes=0),
)
SHAPE = ExpertShape("nvfp4", 2048, 512, 8)
GENERAL = Bandwidth(
    h2d_bytes_per_s=50e9, h2d_overlap_bytes_per_s=45e9, cpu_experts_bytes_per_s=60e9, dram_bytes_per_s=80e9,
    cpu_experts_overlap_bytes_per_s=42e9, threads=16, sources={"dram_bytes_per_s": "measured"},
)  # fmt: skip


@pytest.fixture(autouse=True)
def make_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))


def make_meters(load: float = 0.0, **general: Any) -> Meters:
    def experts(shape: ExpertShape, device: str, *, threads: int) -> ExpertRates:
        return ExpertRates(
            engine="native", format=shape.format, hidden=shape.hidden, inter=shape.inter, top_k=shape.top_k,
            threads=threads, expert_bytes=1_769_728, cpu_experts_bytes_per_s=5e9, measured_at="2031-01-01",
        )  # fmt: skip

    rates = GENERAL.model_copy(update=general)
    return Meters(lambda device, piece_bytes, *, threads: rates, experts, lambda: load)


def test_what_is_measured_is_kept_for_this_gpu_and_format_and_later_plans_start_from_it() -> None:
    report = measure_machine(MACHINE, "auto", SHAPE, make_meters())
    assert (report.device, report.doubts, report.is_disturbed) == (UUID, (), False)
    assert report.note == "a prior for planning: which strategy is fastest, a run decides (`ft tune`)"
    kept = read_measured(MACHINE)
    assert kept == report.bandwidth
    planned = MACHINE.model_copy(update={"bandwidth": kept}).for_experts("native", "nvfp4", 2048, 512).bandwidth
    assert (planned.cpu_experts_bytes_per_s, planned.h2d_bytes_per_s) == (5e9, 50e9)
    assert planned.sources["cpu_experts_bytes_per_s"] == "measured"
    for other in (("freetoken", "nvfp4", 2048, 512), ("native", "bf16", 2048, 512), ("native", "nvfp4", 4096, 512)):
        assert kept.for_experts(*other) is kept
    other_card = H200.model_copy(update={"uuid": "GPU-other"})
    assert read_measured(MACHINE, gpu=other_card) is None


def test_figures_taken_under_load_are_shown_and_no_plan_starts_from_them() -> None:
    before = measure_machine(MACHINE, "auto", SHAPE, make_meters()).bandwidth
    report = measure_machine(MACHINE, "auto", SHAPE, make_meters(20.0, dram_bytes_per_s=1e9), threads=8)
    assert report.doubts == ("other programs computed meanwhile: 20.0 were runnable on 16 cores",)
    assert report.is_disturbed
    assert report.bandwidth.dram_bytes_per_s == before.dram_bytes_per_s
    assert set(report.bandwidth.experts) == {"native/nvfp4:2048x512:top8:t16", "native/nvfp4:2048x512:top8:t8"}
    only = Bandwidth(experts={report.rows[0].key: report.rows[0]})
    assert only.for_experts("native", "nvfp4", 2048, 512) is only


def test_other_programs_on_the_gpu_are_named() -> None:
    holder = GpuHolder(pid=42, name="firefox", used_bytes=GIB)
    hardware = MACHINE.model_copy(update={"gpus": (H200.model_copy(update={"holders": (holder,)}),)})
    report = measure_machine(hardware, "auto", SHAPE, make_meters())
    assert report.doubts == ("`firefox` (process 42) was on the GPU with 1.00 GiB of VRAM",)
    assert not report.is_disturbed


def test_a_gpu_that_throttles_makes_the_figures_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    from freetoken.bench.sample import GpuReading

    hot = GpuReading(throttle=frozenset({"hardware thermal"}))
    monkeypatch.setattr(module, "find_gpu_reader", lambda uuid: lambda: hot)
    report = measure_machine(MACHINE, "auto", SHAPE, make_meters())
    assert report.is_disturbed
    assert report.doubts[0].startswith("the GPU's clocks were held down (hardware thermal)")


@pytest.mark.parametrize(
    ("device", "expected"), [("auto", H200), ("cuda", H200), ("cuda:0", H200), (UUID, H200), ("cpu", None)]
)
def test_devices_are_named_by_kind_index_or_uuid(device: str, expected: Gpu | None) -> None:
    assert module.find_gpu(MACHINE, device) == expected


def test_a_device_that_is_not_here_is_named_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"device `cuda:3` is not here; NVIDIA GPUs: cuda:0 \(NVIDIA H200\)"):
        module.find_gpu(MACHINE, "cuda:3")


def test_a_shape_comes_from_the_options_then_the_model_then_the_usual_one() -> None:
    model = Experts(
        layers=4, per_layer=32, top_k=4, hidden_size=256, intermediate_size=128, format="bf16", expert_bytes=1
    )
    assert choose_shape(None, None, None, None, None) == SHAPE
    assert choose_shape(None, None, None, None, model) == ExpertShape("bf16", 256, 128, 4)
    assert choose_shape("nvfp4", None, 512, 2, model) == ExpertShape("nvfp4", 256, 512, 2)
    with pytest.raises(UsageError, match="no routed experts"):
        choose_shape(None, None, None, None, model.model_copy(update={"layers": 0}))


# -- the upstream engine's profile


def test_the_recorded_profile_of_the_engine_becomes_rates_of_that_engine() -> None:
    report = import_profile(MACHINE, "auto", RECORDED)
    (row,) = report.rows
    assert row == ExpertRates(
        engine="freetoken", format="nvfp4", hidden=3072, inter=1536, top_k=8, threads=15,
        cpu_experts_bytes_per_s=61.4e9, h2d_bytes_per_s=50.9e9, cpu_experts_overlap_bytes_per_s=42.73e9,
        h2d_overlap_bytes_per_s=45.49e9, kernel="avx512bf16+avx512vnni(nvfp4-w4a8)",
        measured_at="2026-11-29T15:56:14+00:00",
    )  # fmt: skip
    kept = read_measured(MACHINE)
    assert kept is not None
    assert kept.dram_bytes_per_s == 82.77e9
    assert kept.for_experts("freetoken", "nvfp4", 3072, 1536).h2d_overlap_bytes_per_s == 45.49e9
    assert report.doubts == ()


def test_what_was_measured_here_is_not_replaced_by_the_profiles_ceilings() -> None:
    measure_machine(MACHINE, "auto", SHAPE, make_meters())
    assert import_profile(MACHINE, "auto", RECORDED).bandwidth.dram_bytes_per_s == 80e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 5}, "has version 5, the engine reads 6 alone"),
        ({"gpu": {"name": "NVIDIA H100"}}, "the profile is of `NVIDIA H100`, the GPU here is `NVIDIA H200`"),
        ({"gpu": {}}, "`gpu.name`: field required"),
        ({"layer_kinds": {"x": {"format": "nvfp4", "hidden": -1, "inter": 1, "top_k": 1, "cpu_threads": 1}}},
         "`layer_kinds.x.hidden`: input should be greater than or equal to 1"),
    ],
)  # fmt: skip
def test_a_profile_that_is_none_or_of_another_machine_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(json.loads(RECORDED.read_text()) | change))
    with pytest.raises(BadFileError) as caught:
        import_profile(MACHINE, "auto", path)
    assert message in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": NaN}', "[" * 3000])
def test_nonsense_is_no_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BadFileError):
        upstream.read_profile(path)


def test_another_card_of_the_same_name_is_a_doubt(tmp_path: Path) -> None:
    hardware = MACHINE.model_copy(update={"gpus": (H200.model_copy(update={"uuid": "GPU-1"}),)})
    report = import_profile(hardware, "auto", RECORDED)
    assert report.doubts == (f"it was taken on another card of this name ({UUID})",)


def test_a_written_profile_is_read_back_by_its_own_reader_with_the_executors_key(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "p.json"
    report = write_upstream_profile(MACHINE, measure_machine(MACHINE, "auto", SHAPE, make_meters()), path)
    assert report.profile_path == str(path)
    recorded, written = json.loads(RECORDED.read_text()), json.loads(path.read_text())
    assert list(written) == list(recorded)
    (key, row), (_, theirs) = *written["layer_kinds"].items(), *recorded["layer_kinds"].items()
    assert key == "nvfp4:2048x512:top8:t15"
    assert list(row) == list(theirs)
    figures = ("cpu_moe_gbs", "pcie_gather_gbs", "cpu_moe_overlap_gbs", "pcie_gather_overlap_gbs", "recommended")
    assert [row[name] for name in figures] == [60.0, 50.0, 42.0, 45.0, "offload"]
    assert written["host"] == ""
    # Our own row does not come back as if the engine had measured it.
    assert import_profile(MACHINE, "auto", path).rows == ()


def test_rows_of_the_engine_stay_beside_ours_and_are_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(RECORDED.read_text())
    write_upstream_profile(MACHINE, measure_machine(MACHINE, "auto", SHAPE, make_meters()), path)
    assert set(upstream.read_profile(path).layer_kinds) == {"nvfp4:3072x1536:top8:t15", "nvfp4:2048x512:top8:t15"}
    same = measure_machine(MACHINE, "auto", replace(SHAPE, hidden=3072, inter=1536), make_meters())
    with pytest.raises(UsageError, match="that the engine measured itself"):
        write_upstream_profile(MACHINE, same, path)
    write_upstream_profile(MACHINE, same, path, is_forced=True)
    assert upstream.read_profile(path).layer_kinds["nvfp4:3072x1536:top8:t15"].note == upstream.NOTE


def test_a_profile_is_only_written_for_a_gpu_and_a_format_that_the_engine_computes(tmp_path: Path) -> None:
    report = measure_machine(MACHINE, "cpu", SHAPE, make_meters())
    with pytest.raises(UsageError, match="keeps a profile for each NVIDIA GPU"):
        write_upstream_profile(MACHINE, report, tmp_path / "p.json")
    row = report.rows[0].model_copy(update={"format": "fp8"})
    now = datetime.datetime.now(datetime.UTC)
    with pytest.raises(UsageError, match="computes no `fp8` experts on the CPU"):
        upstream.make_profile(MACHINE, H200, GENERAL, row, engine_version=None, now=now)
    lacking = GENERAL.model_copy(update={"h2d_overlap_bytes_per_s": None})
    with pytest.raises(UsageError, match="were not measured: `h2d_overlap_bytes_per_s`"):
        upstream.make_profile(MACHINE, H200, lacking, report.rows[0], engine_version=None, now=now)


def test_the_engine_looks_where_its_variables_say() -> None:
    assert upstream.find_profile_path(H200, {"FREETOKEN_BENCHBW_PATH": "/x/p.json"}) == Path("/x/p.json")
    assert upstream.find_profile_path(H200, {"XDG_CACHE_HOME": "/c"}) == Path(f"/c/freetoken/benchbw/{UUID}.json")


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 3), (16, 15)])
def test_the_executor_keeps_a_core_back_where_there_are_more_than_two(cores: int, threads: int) -> None:
    assert upstream.count_executor_threads(cores) == threads


def test_a_plan_starts_from_the_rates_of_its_own_experts_and_engine(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from freetoken.deploy.prepare import prepare_request
    from freetoken.recipe.load import load_recipe
    from tests.fakes.fake_adapter import make_shape, make_tools

    recipe = tmp_path / "lab.yaml"
    recipe.write_text("version: 1\nname: lab\nmodel: {path: /models/fake}\nengine: {name: native}\nworkload: chat-2k\n")
    shape = make_shape()
    tools = make_tools(
        locate=lambda ref, base: SimpleNamespace(path=Path("/m"), shape=shape, download_bytes=0, note="")
    )
    experts = ExpertShape(shape.experts.format, shape.experts.hidden_size, shape.experts.intermediate_size, 4)
    measured = measure_machine(MACHINE, "auto", experts, make_meters()).bandwidth
    machine = MACHINE.model_copy(update={"bandwidth": measured})
    request = prepare_request(load_recipe(str(recipe)), hardware=machine, tools=tools)
    assert request.hardware.bandwidth.cpu_experts_bytes_per_s == 5e9
    assert machine.bandwidth.cpu_experts_bytes_per_s == 60e9
