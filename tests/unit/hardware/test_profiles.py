"""Profiles: written, read, found by name, and refused in words with file and line."""

from pathlib import Path

import pytest

from freetoken import paths
from freetoken.errors import BadFileError, UsageError
from freetoken.hardware.model import Disk, Gpu, GpuHolder, Hardware, Os, PcieLink, Ram, Software
from freetoken.hardware.probe import probe_hardware
from freetoken.hardware.profiles import anonymous, list_profiles, load_profile, profile_path, write_profile
from freetoken.units import GIB, MIB
from tests.fakes.machines import linux_laptop

SMALL = "ram: {total_bytes: 32GiB, available_bytes: 28GiB}\ndisk: {free_bytes: 100GiB}\n"


@pytest.fixture(autouse=True)
def empty_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(paths, "_override", None)
    return folder


def write(text: str, name: str = "x.yaml") -> Path:
    path = Path("profiles") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def refusal(text: str) -> str:
    with pytest.raises(BadFileError) as caught:
        load_profile(write(text))
    return "\n".join((caught.value.message, *caught.value.details))


def test_a_probed_machine_comes_back_from_its_profile_without_what_is_personal(tmp_path: Path) -> None:
    reader, nvml = linux_laptop(tmp_path / "root")
    hardware = probe_hardware(reader=reader, nvml_loader=lambda: nvml)
    path = write_profile(hardware, Path("profiles/mine.yaml"))
    text = path.read_text()
    assert not [word for word in ("GPU-1111", "firefox", "ann", "4242", "45-generic", "/usr") if word in text]
    assert load_profile("mine") == anonymous(hardware).model_copy(update={"name": "mine"})


def test_the_text_of_a_profile_is_short_and_has_sizes_that_people_can_read(tmp_path: Path) -> None:
    gpu = Gpu(name="RTX 3060", uuid="GPU-1", vram_total_bytes=12 * GIB, vram_free_bytes=11111 * MIB,
              pcie=PcieLink(width=16), holders=(GpuHolder(pid=1, name="x", used_bytes=1),))  # fmt: skip
    hardware = Hardware(
        gpus=(gpu,), ram=Ram(total_bytes=32 * GIB, available_bytes=1025),
        disk=Disk(path="/home/ann", free_bytes=3 * MIB), os=Os(kernel="6.8.0-45-ann"),
        software=Software(nvcc="/home/ann/cuda/bin/nvcc"), is_probed=True, notes=("n",),
    )  # fmt: skip
    assert write_profile(hardware, tmp_path / "new" / "mine.yaml").read_text() == (
        "name: mine\ngpus:\n- name: RTX 3060\n  vram_total_bytes: 12GiB\n  vram_free_bytes: 11111MiB\n"
        "  pcie:\n    width: 16\n"
        "ram:\n  total_bytes: 32GiB\n  available_bytes: 1025\ndisk:\n  free_bytes: 3MiB\nos:\n  kernel: 6.8.0\n"
        "software:\n  nvcc: nvcc\n"
    )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.yaml"]


def test_a_name_is_looked_up_in_the_working_folder_before_the_state_folder_and_the_package(tmp_path: Path) -> None:
    assert load_profile("rtx-3090-24gb").gpus[0].vram_total_bytes == 24 * GIB
    other = tmp_path / "state" / "profiles" / "rtx-3090-24gb.yaml"
    other.parent.mkdir(parents=True)
    other.write_text(SMALL)
    assert load_profile("rtx-3090-24gb").gpus == ()
    write(SMALL + "description: here\n", "rtx-3090-24gb.yaml")
    assert load_profile("rtx-3090-24gb").description == "here"
    assert [one.description for one in list_profiles() if one.name == "rtx-3090-24gb"] == ["here"]


def test_a_misspelt_name_is_met_with_the_nearest_one() -> None:
    with pytest.raises(UsageError) as caught:
        load_profile("rtx-3090-42gb")
    assert caught.value.message == "no profile `rtx-3090-42gb`; did you mean `rtx-3090-24gb`?"
    assert caught.value.hint == "`ft probe --list` lists them"


def test_a_path_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(UsageError, match=r"there is no profile file \./none\.yaml"):
        load_profile("./none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL + "gpu: []\n", "profiles/x.yaml:3: unknown key `gpu`; did you mean `gpus`?"),
        (SMALL + "cpu:\n  model: X\n  cores: 8\n", "profiles/x.yaml:5: unknown key `cpu.cores`"),
        (
            SMALL + "gpus:\n- name: A\n  vram_total_bytes: 6GiB\n  vram_free_byte: 5GiB\n",
            "profiles/x.yaml:4: `gpus.0.vram_free_bytes` is missing\n"
            "profiles/x.yaml:6: unknown key `gpus.0.vram_free_byte`; did you mean `vram_free_bytes`?",
        ),
        ("ram: {total_bytes: 32GiB, available_bytes: 28GiB}\n", "profiles/x.yaml: `disk` is missing"),
        (
            "ram: {total_bytes: -5, available_bytes: 0}\ndisk: {free_bytes: 5 Gib/s}\n",
            "profiles/x.yaml:1: `ram.total_bytes`: `-5` is negative, expected a size such as `6GiB`\n"
            "profiles/x.yaml:2: `disk.free_bytes`: `5 Gib/s` is not a size, expected e.g. `6GiB`",
        ),
        (
            "ram: {total_bytes: 8GiB, available_bytes: 9GiB}\ndisk: {free_bytes: 0}\n",
            "profiles/x.yaml:1: `ram`: `available_bytes` is 9.00 GiB, more than the machine's 8.00 GiB",
        ),
        (
            SMALL + "gpus:\n- {name: A, vram_total_bytes: 6GiB, vram_free_bytes: 7GiB}\n",
            "profiles/x.yaml:4: `gpus.0`: `vram_free_bytes` is 7.00 GiB, more than the card's 6.00 GiB",
        ),
        (
            SMALL + "bandwidth: {dram_bytes_per_s: .nan}\n",
            "profiles/x.yaml:3: `bandwidth.dram_bytes_per_s`: `nan` is not a finite number",
        ),
        (
            SMALL + "bandwidth: {dram_bytes_per_s: 0}\n",
            "profiles/x.yaml:3: `bandwidth.dram_bytes_per_s` is `0`: input should be greater than 0",
        ),
        (SMALL + "name: a\nname: b\n", "profiles/x.yaml:4: `name` stands here and in line 3"),
        ("- a\n", "profiles/x.yaml holds a list, expected `key: value` lines"),
        ("", "profiles/x.yaml holds nothing, expected `key: value` lines"),
        ("ram: [\n", None),
        ("!!python/object/apply:os.system [id]\n", None),
        ("a: &x [*x]\n", "profiles/x.yaml:1: `a.0`: aliases are not read here"),
        ("x: " + "[" * 2000, None),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_line_and_key(text: str, message: str | None) -> None:
    found = refusal(text)
    assert found.startswith("profiles/x.yaml")
    assert message is None or found == message


def test_a_file_that_is_too_large_or_not_text_is_refused() -> None:
    assert refusal("x" * (MIB + 1)) == "profiles/x.yaml has 1,048,577 bytes, a profile has at most 1,048,576"
    write("").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(BadFileError, match=r"profiles/x\.yaml is not UTF-8 text"):
        load_profile("x")


def test_a_folder_in_place_of_a_profile_is_no_profile() -> None:
    Path("profiles/x.yaml").mkdir(parents=True)
    with pytest.raises(UsageError):
        load_profile("profiles/x.yaml")


def test_save_goes_to_the_working_folders_profiles_where_it_has_them_else_to_the_state_folder(tmp_path: Path) -> None:
    assert profile_path("mine") == tmp_path / "state" / "profiles" / "mine.yaml"
    Path("profiles").mkdir()
    assert profile_path("mine") == Path.cwd() / "profiles" / "mine.yaml"


@pytest.mark.parametrize("name", ["../mine", "", "Mine", "a b", ".hidden", "x" * 81])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        profile_path(name)


def test_a_failed_write_leaves_the_old_profile_and_no_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(SMALL)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_profile(Hardware(ram=Ram(total_bytes=1, available_bytes=1), disk=Disk(free_bytes=1)), path)
    assert path.read_text() == SMALL
    assert [one.name for one in path.parent.iterdir()] == ["x.yaml"]
