"""Answers that are known beforehand, through cards, profiles and the command line as a user has them; and nonsense."""

import json
import struct

import pytest

from freetoken.adapters import get_adapter
from freetoken.checkpoint.cards import find_card
from freetoken.checkpoint.shape import Attention
from freetoken.cli.main import main
from freetoken.hardware.catalog import make_what_if
from freetoken.planner.plan import Plan, Refusal
from freetoken.planner.solve import make_plan
from freetoken.units import GIB, MIB
from tests.fakes.checkpoints import qwen3_moe_config, qwen3_moe_tensors, write_checkpoint
from tests.fakes.planner_cases import make_recipe, make_request, make_tiny_shape

NVFP4, Q4 = "qwen3.6-35b-a3b-nvfp4", "qwen3.6-35b-a3b-q4_k_m"
WORK_4K = {"name": "4k", "prompt_tokens": 3584, "output_tokens": 512, "context_tokens": 4096}


@pytest.fixture
def ft(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


def plan(card, gpu, ram, engine="freetoken", **recipe):
    shape = find_card(card)
    request = make_request(make_recipe(engine, workload=WORK_4K, **recipe), make_what_if(gpu, ram), shape)
    return make_plan(request, get_adapter(engine))


def test_32_layers_of_8_heads_of_128_in_fp16_keep_4096_tokens_in_512_mib():
    attention = Attention(kinds=("full",) * 32, heads=32, kv_heads=8, head_dim=128)
    assert make_tiny_shape(attention=attention).kv_bytes_per_token(2) * 4096 == 512 * MIB


@pytest.mark.parametrize("card", [NVFP4, Q4, "qwen3.6-35b-a3b-bf16", "qwen3.6-35b-a3b-fp8", "ornith-1.5-35b-nvfp4"])
def test_qwen36_keeps_a_token_in_20480_bytes_however_it_is_stored(card):
    assert find_card(card).kv_bytes_per_token(2) == 20_480


@pytest.mark.parametrize("gpu", ["GTX 1650 4GB", "RTX 2060 6GB"])
def test_turing_is_refused_for_freetoken_by_generation(gpu):
    answer = plan(NVFP4, gpu, "32GiB")
    assert isinstance(answer, Refusal)
    (fatal,) = [one for one in answer.findings if one.is_fatal]
    assert fatal.check == "gpu_generation"
    assert "has compute capability 7.5; engine `freetoken` needs 8.0 (Ampere) or newer" in fatal.message


def test_16_gb_of_ram_are_refused_for_the_nvfp4_bank_and_30_pass_with_a_word_on_serial_loading():
    answer = plan(NVFP4, "RTX 3060 12GB", "16GiB")
    assert isinstance(answer, Refusal)
    assert (answer.ledger, answer.blamed_line) == ("ram", "expert_banks")
    passed = plan(NVFP4, "RTX 3060 12GB", "30GiB")
    assert isinstance(passed, Plan)
    assert passed.settings.expert_load == "serial"
    assert [one.check for one in passed.findings] == ["expert_load"]
    assert passed.findings[0].message.startswith("experts are loaded serially, which takes longer: 26.2 GiB of RAM are")
    assert plan(NVFP4, "RTX 3060 12GB", "48GiB").findings == ()


def test_q4_k_m_is_whole_on_24_gb_at_4k_with_what_is_left_stated_and_misses_bytes_on_16():
    whole = {"settings": {"strategy": "fused"}}
    passed = plan(Q4, "RTX 4090 24GB", "64GiB", "llamacpp", **whole)
    assert isinstance(passed, Plan)
    assert passed.settings.cpu_layers == 0
    assert 0 < passed.vram.left_bytes < 3 * GIB
    refused = plan(Q4, "RTX 4070 Ti SUPER", "64GiB", "llamacpp", **whole)
    assert isinstance(refused, Refusal)
    assert refused.ledger == "vram"
    assert 4 * GIB < refused.missing_bytes < 8 * GIB
    assert refused.repairs
    assert refused.repairs[0].sets == {"settings.strategy": "cpu"}


def test_planning_the_checkpoint_of_93275_tensors_and_a_card_is_fast(ft):
    import time

    began = time.process_time()
    assert ft("plan", NVFP4, "--engine", "freetoken", "--profile", "rtx-3060-12gb")[0] == 0
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "settings.memory_ratio=1.5"), "memory_ratio"),
        (("--set", "settings.memory_ratio=nan"), "memory_ratio"),
        (("--set", "settings.expert_slots=-4"), "expert_slots"),
        (("--set", "settings.expert_slots=-3GiB"), "expert_slots"),
        (("--set", "settings.kv_tokens=-1"), "kv_tokens"),
        (("--set", "settings.prefill_chunk_tokens=0"), "prefill_chunk_tokens"),
        (("--set", "headroom=-1GiB"), "headroom"),
        (("--set", "workload.output_tokens=0"), "output_tokens"),
        (("--gpu", "RTX 3060 12GB", "--ram", "-8GiB"), "-8GiB"),
        (("--gpu", "RTX 3060 12GB", "--ram", "nanGiB"), "nanGiB"),
    ],
)
def test_nonsense_in_settings_is_refused_in_a_sentence(ft, arguments, message):
    code, out, err = ft("plan", NVFP4, "--engine", "freetoken", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bandwidth: {h2d_bytes_per_s: .nan}", "h2d_bytes_per_s"),
        ("bandwidth: {h2d_bytes_per_s: .inf}", "h2d_bytes_per_s"),
        ("bandwidth: {h2d_bytes_per_s: -5}", "h2d_bytes_per_s"),
        ("cpu: {physical_cores: 0}", "physical_cores"),
        ("gpus: [{name: X, vram_total_bytes: 4GiB, vram_free_bytes: 6GiB}]", "vram_free_bytes"),
        ("gpus: [{name: X, vram_total_bytes: -4GiB, vram_free_bytes: 0}]", "vram_total_bytes"),
    ],
)
def test_nonsense_in_a_profile_is_refused_in_a_sentence(ft, tmp_path, line, message):
    (tmp_path / "odd.yaml").write_text(
        f"ram: {{total_bytes: 32GiB, available_bytes: 28GiB}}\ndisk: {{free_bytes: 100GiB}}\n{line}\n"
    )
    code, out, err = ft("plan", NVFP4, "--engine", "freetoken", "--profile", "odd.yaml")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("length", "message"), [(2 << 30, "header"), (1 << 62, "header"), (3, "header")], ids=["2 GB", "huge", "3 B"]
)
def test_a_header_that_lies_about_its_length_is_refused_in_a_sentence(ft, tmp_path, length, message):
    folder = write_checkpoint(tmp_path / "odd", qwen3_moe_config(), qwen3_moe_tensors())
    with next(folder.glob("*.safetensors")).open("r+b") as file:
        file.write(struct.pack("<Q", length))
    code, out, err = ft("plan", str(folder))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_model_of_0_layers_is_refused_in_a_sentence(ft, tmp_path):
    folder = write_checkpoint(tmp_path / "odd", qwen3_moe_config(), qwen3_moe_tensors())
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    code, out, err = ft("plan", str(folder))
    assert (code, out) == (2, "")
    assert "num_hidden_layers" in err
