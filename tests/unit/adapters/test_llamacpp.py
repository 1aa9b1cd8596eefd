"""llama.cpp, planned: experts by layer, the compute buffer, KV types, and a launch that is refused in words."""

import pytest

from freetoken.adapters.llamacpp import LlamaCppAdapter, make_arguments
from freetoken.adapters.llamacpp_memory import compute_buffer_bytes, compute_kv
from freetoken.checkpoint.cards import find_card
from freetoken.errors import UsageError
from freetoken.hardware.catalog import make_what_if
from freetoken.planner.memory import ResolvedSettings
from freetoken.planner.plan import Plan, Refusal
from freetoken.planner.solve import make_plan
from freetoken.units import GIB, MIB
from tests.fakes.planner_cases import SMALL_WORKLOAD, make_recipe, make_request, make_tiny_shape

Q4 = find_card("qwen3.6-35b-a3b-q4_k_m")
ADAPTER = LlamaCppAdapter()


def plan(gpu, *, ram="64GiB", shape=Q4, workload=SMALL_WORKLOAD, **changes):
    recipe = make_recipe("llamacpp", workload=workload, **changes)
    return make_plan(make_request(recipe, make_what_if(gpu, ram), shape), ADAPTER)


def test_q4_k_m_whole_on_a_24_gb_card_passes_at_4k_and_says_what_is_left():
    found = plan("RTX 4090 24GB", settings={"strategy": "fused"})
    assert isinstance(found, Plan)
    assert (found.settings.strategy, found.settings.cpu_layers) == ("fused", 0)
    assert found.vram.line("expert_slots").bytes == Q4.experts.bank_bytes
    assert 0 < found.vram.left_bytes - found.vram.headroom_bytes < 3 * GIB


def test_q4_k_m_whole_on_a_16_gb_card_is_refused_with_the_missing_bytes():
    answer = plan("RTX 4060 Ti 16GB", settings={"strategy": "fused"})
    assert isinstance(answer, Refusal)
    assert (answer.ledger, answer.blamed_line) == ("vram", "expert_slots")
    assert 5 * GIB < answer.missing_bytes < 9 * GIB
    repair = answer.repairs[0]
    assert set(repair.sets) == {"settings.strategy"}


def test_layers_move_to_the_cpu_until_the_rest_fits_and_no_further():
    found = plan("RTX 4060 Ti 16GB")
    layers = found.settings.cpu_layers
    assert 0 < layers < 40
    assert found.settings.strategy == "cpu"
    fewer = plan("RTX 4060 Ti 16GB", settings={"cpu_layers": layers - 1, "prefill_chunk_tokens": 512})
    more = plan("RTX 4060 Ti 16GB", settings={"cpu_layers": layers + 1})
    assert isinstance(more, Plan)
    assert more.prediction.decode_tps < found.prediction.decode_tps
    assert isinstance(fewer, Refusal) or fewer.prediction.decode_tps > found.prediction.decode_tps


def test_experts_on_the_cpu_need_the_ram_they_are_read_from():
    assert isinstance(plan("RTX 3060 Laptop 6GB", ram="16GiB"), Refusal)
    answer = plan("RTX 3060 Laptop 6GB", ram="16GiB", settings={"cpu_layers": 40})
    assert isinstance(answer, Refusal)
    assert (answer.ledger, answer.blamed_line) == ("ram", "expert_banks")


@pytest.mark.parametrize(("dtype", "ratio"), [("model", 1), ("fp8", 34 / 64)])
def test_kv_of_a_cache_type(dtype, ratio):
    settings = ResolvedSettings(kv_tokens=8192, kv_dtype=dtype, prefill_chunk_tokens=512)
    assert compute_kv(Q4, settings)[0] == int(8192 * 20_480 * ratio)


def test_kv_of_32_layers_with_8_heads_of_128_is_512_mib_for_4096_tokens():
    attention = Q4.attention.model_copy(update={"kinds": ("full",) * 32, "kv_heads": 8, "head_dim": 128})
    settings = ResolvedSettings(kv_tokens=4096, prefill_chunk_tokens=512)
    assert compute_kv(Q4.model_copy(update={"attention": attention}), settings)[0] == 512 * MIB


def test_sliding_layers_keep_the_window_and_a_batch():
    shape = find_card("gpt-oss-120b")
    settings = ResolvedSettings(kv_tokens=131_072, prefill_chunk_tokens=512)
    each = shape.kv_bytes_per_token() // 2  # half of the layers slide
    assert compute_kv(shape, settings)[0] == each * 131_072 + each * (128 + 512)


def test_compute_buffer_holds_the_logits_of_a_whole_batch():
    # 201,088 tokens of vocabulary x 512 x 4 B: the 398 MiB that gpt-oss logs show, less the rest of the graph.
    shape = find_card("gpt-oss-20b")
    settings = ResolvedSettings(kv_tokens=8192, prefill_chunk_tokens=512, cpu_layers=0)
    assert compute_buffer_bytes(shape, settings)[0] == pytest.approx(398 * MIB, rel=0.02)


def test_the_launch_is_refused_and_the_hint_holds_the_command():
    found = plan("RTX 4060 Ti 16GB", settings={"cpu_layers": 20, "prefill_chunk_tokens": 512, "kv_dtype": "fp8"},
                 allow_quality_changes=["kv_dtype"])  # fmt: skip
    assert make_arguments(found) == (
        "-m", f"{found.model_name}.gguf", "-ngl", "99", "-c", "4096", "--n-cpu-moe", "20", "-ctk", "q8_0",
        "-ctv", "q8_0", "-ub", "512", "-np", "1", "-t", str(found.settings.cpu_threads),
        "--host", "127.0.0.1", "--port", "1919",
    )  # fmt: skip
    with pytest.raises(UsageError, match="can be planned for, and not yet be started") as caught:
        ADAPTER.make_launch_spec(found)
    assert caught.value.hint.startswith("`llama-server -m ")


def test_settings_of_other_engines_are_refused_in_words():
    answer = plan("RTX 4060 Ti 16GB", settings={"strategy": "offload", "expert_slots": 100, "embed_on_host": False})
    assert {finding.check for finding in answer.findings} == {"strategy", "expert_slots", "embed_on_host"}
    safetensors = plan("RTX 4060 Ti 16GB", shape=make_tiny_shape())
    assert safetensors.findings[0].message == "engine `llamacpp` loads GGUF, `tiny` is safetensors"


def test_messages_of_llama_cpp_are_told_in_our_words():
    log = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 14656.12 MiB on device 0: cudaMalloc failed"
    found = ADAPTER.classify_failure(log)
    assert (found.kind, found.missing_bytes) == ("vram_oom", int(14656.12 * MIB))
    found = ADAPTER.classify_failure("error loading model: unknown model architecture: 'qwen4exp'")
    assert (found.kind, found.cause) == ("unsupported", "llama.cpp does not know the architecture `qwen4exp`")
