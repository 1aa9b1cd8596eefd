"""What each engine can run: every limit in a sentence, with the checkpoint or engine that does work."""

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.adapters.native import NativeAdapter
from freetoken.checkpoint.files import has_tokenizer
from freetoken.checkpoint.shape import Attention, Experts, TensorGroup
from freetoken.hardware.model import Cpu, Os, Ram, Software
from freetoken.units import GIB
from tests.fakes.planner_cases import (
    make_gpu,
    make_machine,
    make_qwen_shape,
    make_recipe,
    make_request,
    make_tiny_shape,
)


def findings(engine="freetoken", machine=None, shape=None, *, fatal=True, **recipe):
    adapter = {"freetoken": FreetokenAdapter, "native": NativeAdapter}[engine]()
    request = make_request(make_recipe(engine, **recipe), machine or make_machine(make_gpu(8, 7.6)), shape)
    return {one.check: one.message for one in adapter.limits.findings(request) if one.is_fatal is fatal}


def test_a_supported_machine_and_model_have_no_findings():
    assert findings() == {}
    assert findings(fatal=False) == {}
    assert findings("native", shape=make_tiny_shape()) == {}


@pytest.mark.parametrize(
    ("name", "capability"), [("GeForce GTX 1650", "7.5"), ("GeForce RTX 2060", "7.5"), ("GTX 1060", "6.1")]
)
def test_cards_before_ampere_are_refused_by_generation(name, capability):
    found = findings(machine=make_machine(make_gpu(6, 5.6, name=name, compute_capability=capability)))
    assert found == {
        "gpu_generation": f"`{name}` has compute capability {capability}; "
        "engine `freetoken` needs 8.0 (Ampere) or newer"
    }


def test_machines_without_an_nvidia_card_are_told_what_runs_there():
    assert findings(machine=make_machine()) == {"gpu": "engine `freetoken` needs an NVIDIA GPU and there is none here"}
    amd = make_machine(make_gpu(16, 15, name="RX 9070 XT", vendor="amd", compute_capability=None))
    assert findings(machine=amd) == {"gpu": "engine `freetoken` needs an NVIDIA GPU, this is `RX 9070 XT`"}
    mac = make_machine(make_gpu(16, 15), os=Os(name="darwin", arch="arm64"))
    assert findings(machine=mac) == {
        "os": "engine `freetoken` runs on Linux x86_64 (WSL2 included), this is darwin arm64"
    }


@pytest.mark.parametrize(
    ("card", "hint"),
    [
        ({"compute_capability": "7.5"},
         "`ft plan owner/model --engine native` plans for the engine that runs anywhere"),
        ({"compute_capability": "6.1"},
         "`ft plan qwen3.6-35b-a3b-q4_k_m --engine llamacpp` plans for llama.cpp, whose GGUF kernels run on this card"),
        ({"vendor": "amd", "compute_capability": None},
         "`ft plan owner/model --engine native` plans for the engine that runs anywhere, on the CPU here; "
         "llama.cpp has builds for such a card"),
        ({"vendor": "apple", "compute_capability": None},
         "`ft plan owner/model --engine native` plans for the engine that runs anywhere, on the CPU here; "
         "llama.cpp has builds for such a card"),
    ],
)  # fmt: skip
def test_cards_of_other_generations_and_makers_get_the_engine_that_does_work(card, hint):
    request = make_request(make_recipe(), make_machine(make_gpu(8, 7.6, **card)))
    (fatal,) = [one for one in FreetokenAdapter().limits.findings(request) if one.is_fatal]
    assert fatal.hint == hint


def test_a_machine_without_an_nvidia_card_is_not_asked_for_a_driver():
    for machine in (make_machine(software=Software()), make_machine(make_gpu(8, 7, vendor="amd"), software=Software())):
        assert {"driver", "cuda", "toolchain"}.isdisjoint(
            findings(machine=machine) | findings(machine=machine, fatal=False)
        )


def test_an_old_driver_is_refused_and_a_missing_toolchain_is_a_word():
    old = make_machine(make_gpu(8, 7.6), software=Software(driver="575.57", nvcc="nvcc"))
    assert findings(machine=old) == {
        "driver": "driver 575.57 is too old; engine `freetoken` needs r580 (CUDA 13) or newer"
    }
    assert findings(machine=old, fatal=False) == {
        "toolchain": "g++, ninja not found in the profile; the engine compiles kernels at its first start"
    }
    cuda12 = Software(driver="580.1", cuda_toolkit="12.8", nvcc="nvcc", gxx="g++", ninja="ninja")
    assert findings(machine=make_machine(make_gpu(8, 7.6), software=cuda12), fatal=False) == {
        "cuda": "nvcc is of CUDA 12.8; the engine compiles kernels with CUDA 13"
    }


def test_no_driver_on_this_very_machine_is_a_no_and_in_a_profile_a_word():
    silent = make_machine(make_gpu(8, 7.6), software=Software(nvcc="n", gxx="g", ninja="j"))
    assert findings(machine=silent) == {}
    assert "driver" in findings(machine=silent, fatal=False)
    here = silent.model_copy(update={"is_probed": True})
    assert findings(machine=here) == {"driver": "no NVIDIA driver found; engine `freetoken` needs r580 or newer"}


def with_experts(stored, **more):
    experts = Experts(layers=40, per_layer=256, top_k=8, hidden_size=2048, intermediate_size=512, format=stored,
                      expert_bytes=3_146_000)  # fmt: skip
    return make_qwen_shape(experts=experts.model_copy(update=more))


def test_formats_without_a_reader_are_refused_and_a_checkpoint_that_works_is_named():
    adapter = FreetokenAdapter()
    request = make_request(make_recipe(), make_machine(make_gpu(8, 7.6)), with_experts("fp8"))
    found = [one for one in adapter.limits.findings(request) if one.is_fatal]
    assert [(one.check, one.message, one.hint) for one in found] == [(
        "checkpoint_layout", "engine `freetoken` has no reader for fp8 experts of `qwen3_5_moe_text` models",
        "a checkpoint that works: nvidia/Qwen3.6-35B-A3B-NVFP4 (NVFP4 experts)",
    )]  # fmt: skip


@pytest.mark.parametrize(("family", "stored", "loads"), [
    ("qwen3_5_moe_text", "fp8_block", True), ("qwen3_5_moe_text", "nvfp4", True), ("qwen3_5_moe_text", "bf16", True),
    ("qwen3_moe", "bf16", True), ("qwen3_moe", "nvfp4", False), ("qwen3_moe", "fp8_block", False),
    ("gpt_oss", "mxfp4", True), ("glm4_moe", "nvfp4", True), ("gemma4_text", "nvfp4", True),
    ("gemma4_text", "mxfp4", False),
    ("qwen3_5_moe_text", "mxfp8", False),
])  # fmt: skip
def test_the_format_table_of_the_engine(family, stored, loads):
    shape = with_experts(stored).model_copy(update={"family": family, "architecture": "Qwen3MoeForCausalLM"})
    assert ("checkpoint_layout" not in findings(shape=shape)) is loads


def test_unknown_architectures_wide_routing_and_odd_heads_are_refused():
    attention = make_qwen_shape().attention.model_copy(update={"head_dim": 96})
    shape = with_experts("nvfp4", top_k=22).model_copy(
        update={"architecture": "OlmoeForCausalLM", "attention": attention}
    )
    assert findings(shape=shape) == {
        "architecture": "engine `freetoken` does not know the architecture `OlmoeForCausalLM`",
        "top_k": "22 experts a token; the slot cache takes at most 16",
        "head_dim": "head dimension 96; the kernels know 64, 128, 256, 512",
    }


def test_settings_that_freetoken_cannot_carry_out_are_refused_in_words():
    assert findings(settings={"kv_dtype": "fp8", "fetch_ratio": 0.5}, allow_quality_changes=["kv_dtype"]) == {
        "kv_dtype": "engine `freetoken` never quantises its KV cache; `settings.kv_dtype` is `fp8`",
        "fetch_ratio": "a fixed `settings.fetch_ratio` needs a bench file that this version does not write yet",
    }
    assert findings(engine="freetoken", serve={"api_key_env": "MY_KEY"}) == {
        "api_key": "engine `freetoken` reads its key from FREETOKEN_API_KEY, the recipe names `MY_KEY`"
    }
    tied = make_qwen_shape(tie_embeddings=True)
    assert "embed_on_host" in findings(shape=tied, settings={"embed_on_host": True})


def test_cpu_strategies_need_avx2():
    machine = make_machine(make_gpu(8, 7.6), cpu=Cpu(isa=("sse4_2", "avx")))
    assert findings(machine=machine) == {}
    assert findings(machine=machine, settings={"strategy": "cpu"}) == {
        "cpu_isa": "strategy `cpu` needs AVX2, which this CPU lacks"
    }


def test_a_pin_ceiling_is_told_with_both_sizes():
    machine = make_machine(
        make_gpu(8, 7.6), ram=Ram(total_bytes=32 * GIB, available_bytes=30 * GIB, pinnable_bytes=8 * GIB)
    )
    assert findings(machine=machine, fatal=False)["pin_ceiling"] == (
        "17.0 GiB of experts are to be page-locked, about 8.00 GiB may be; "
        "the layers beyond that are computed on the CPU"
    )


def test_reserved_arguments_cannot_be_smuggled_in():
    recipe = {"engine": {"name": "freetoken", "extra_args": ["--port=80", "--decode-log-interval", "10"]}}
    request = make_request(make_recipe(**recipe), make_machine(make_gpu(8, 7.6)))
    found = [one.message for one in FreetokenAdapter().limits.findings(request) if one.is_fatal]
    assert found == ["`engine.extra_args` may not hold `--port=80`: a recipe field sets it"]


def test_native_refuses_what_it_does_not_have_and_never_ignores_it():
    found = findings("native", shape=make_tiny_shape(), settings={
        "strategy": "hybrid", "memory_ratio": 0.9, "attention": "triton", "expert_load": "serial",
        "prefill_overlap": True,
        "cpu_layers": 3,
    })  # fmt: skip
    assert found["strategy"] == "engine `native` has no `hybrid` strategy yet; it has fused, offload and cpu"
    assert set(found) == {"strategy", "memory_ratio", "attention", "expert_load", "prefill_overlap", "cpu_layers"}


def test_native_names_formats_that_it_cannot_read():
    assert findings("native", shape=make_tiny_shape(file_format="gguf")) == {
        "checkpoint_layout": "engine `native` loads safetensors, `tiny` is GGUF"
    }
    dense = TensorGroup(bytes=100, elements=100, by_format={"mxfp8": 100})
    assert findings("native", shape=make_tiny_shape(dense=dense)) == {
        "checkpoint_layout": "engine `native` cannot read mxfp8 dense weights"
    }


def test_native_says_that_a_recurrent_state_has_no_prefix_to_reuse():
    shape = make_tiny_shape(attention=Attention(kinds=("linear", "full"), heads=4, kv_heads=2, head_dim=32))
    assert set(findings("native", shape=shape, settings={"prefix_cache": True})) == {"prefix_cache"}


def test_native_tells_why_a_gpu_stays_unused():
    probed = make_machine(make_gpu(8, 7.6, name="RTX"), is_probed=True)
    assert findings("native", machine=probed, shape=make_tiny_shape(), fatal=False) == {
        "torch": "`RTX` is not used: this environment's torch is built without CUDA"
    }


def test_a_model_without_a_tokenizer_is_refused_before_it_is_launched(tmp_path):
    assert has_tokenizer(tmp_path) is False
    request = make_request(
        make_recipe("native"), make_machine(), make_tiny_shape(), model_path=str(tmp_path), has_tokenizer=False
    )
    found = {one.check: one.message for one in NativeAdapter().limits.findings(request) if one.is_fatal}
    assert found == {"tokenizer": f"the model in {tmp_path} has no tokenizer: `tokenizer.json` is missing"}
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert has_tokenizer(tmp_path) is False
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert has_tokenizer(tmp_path) is True
    assert has_tokenizer(tmp_path / "tokenizer.model") is None


def test_the_log_of_an_engine_without_a_tokenizer_names_the_model_and_the_file():
    log = (
        "loading /models/odd ...\nerror: /models/odd: the tokenizer cannot be loaded: Couldn't instantiate the "
        "backend tokenizer from one of: \n(1) a `tokenizers` library serialization file, \n"
    )
    found = NativeAdapter().classify_failure(log, 1)
    assert found is not None
    words = "bad model: the tokenizer in /models/odd cannot be loaded; is `tokenizer.json` there, and whole?"
    assert (found.kind, found.cause, found.field) == ("bad_checkpoint", words, "model")
