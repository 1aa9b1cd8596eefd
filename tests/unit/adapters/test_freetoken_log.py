"""What the upstream engine's messages mean, over texts as it prints them."""

import pytest

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.units import GIB, MIB

PREFIX = "\x1b[32m[2026-11-29|16:23:49|core|rank=0]\x1b[0m INFO     "
REFUSED = (
    "[2026-11-29|16:09:37|FrontendAPI] ERROR    Backend supervisor: AssertionError: cache budget too small: "
    "minimum plan (moe=512 slots, kv=8192 pages) needs 1080033280 B > budget 670302208 B "
    "(raise memory_ratio, lower kv_reserve_tokens, or free GPU memory)"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 5.78 GiB "
    "of which 101.50 MiB is free. Including non-PyTorch memory, this process has 5.60 GiB memory in use."
)


def classify(text, exit_code=None):
    return FreetokenAdapter().classify_failure(text, exit_code)


def test_a_plan_floor_carries_the_exact_bytes_and_not_the_engines_advice():
    found = classify(REFUSED)
    assert found.kind == "plan_floor"
    assert found.missing_bytes == 1_080_033_280 - 670_302_208
    assert found.cause == (
        "the least plan (512 slots, 8192 KV pages) needs 1.01 GiB, the budget is 639 MiB: 391 MiB are missing"
    )
    assert (found.line, found.field) == ("expert_slots", "settings.max_running_requests")
    assert "raise memory_ratio" not in found.hint
    assert found.excerpt == REFUSED


def test_a_negative_budget_is_said_to_be_beyond_any_ratio():
    found = classify("minimum plan (moe=1024 slots, kv=64 pages) needs 2705326080 B > budget -2040754172 B")
    assert found.missing_bytes == 2_705_326_080 + 2_040_754_172
    assert found.hint.endswith("no memory_ratio helps, since weights and state alone exceed the budget")


@pytest.mark.parametrize(
    ("before", "after", "line", "field"),
    [
        ("Allocating 8259 tokens for KV cache, K + V = 0.16 GiB\n", '\n  File "fi.py", self.float_workspace_buffer =',
         "attention_workspace", "settings.attention"),
        ("Start capturing CUDA graphs with sizes: [1, 2, 4]\n", "", "cuda_graphs", "settings.expert_slots"),
        ("Prefill batch, #new-seq: 1, #new-token: 8192\n", "", "prefill_transient", "settings.prefill_chunk_tokens"),
        ("Allocating 131141 tokens for KV cache, K + V = 2.50 GiB\n", "", "kv_cache", "settings.kv_tokens"),
        ("Free memory before loading model: 3.42 GiB\n", "", "dense_weights", "settings.embed_on_host"),
        ("", "", "expert_slots", "settings.expert_slots"),
    ],
)  # fmt: skip
def test_out_of_memory_is_blamed_on_what_was_being_allocated(before, after, line, field):
    found = classify(PREFIX + before + OOM + after)
    assert (found.kind, found.line, found.field) == ("vram_oom", line, field)
    assert found.missing_bytes == 256 * MIB - int(101.5 * MIB)
    assert found.cause == "the GPU ran out of memory: 256.00 MiB were asked for"


def test_a_higher_ratio_is_contradicted_where_it_would_make_things_worse():
    found = classify("Prefill batch, #new-token: 8192\n" + OOM)
    assert found.hint.endswith("a higher memory_ratio makes it worse")


def test_device_not_ready_under_wsl_is_out_of_memory():
    assert classify("RuntimeError: CUDA driver error: device not ready").kind == "vram_oom"


@pytest.mark.parametrize(
    ("text", "kind", "field", "cause"),
    [
        ("moe_cache_size=100 is too small: need at least num_experts=256", "plan_floor", "settings.expert_slots",
         "100 expert slots are fewer than the 256 experts of a layer"),
        ("Prefill overlap borrows two full expert-layer buffers", "plan_floor", "settings.prefill_overlap",
         "prefill overlap borrows two layers of expert slots and there are fewer"),
        ("RuntimeError: Not enough memory for KV cache, try reducing --num-pages", "kv_floor", "settings.expert_slots",
         "no memory is left for the KV cache after the expert slots"),
        ("cudaHostRegister failed: 2", "pin_refused", "settings.cpu_layers",
         "the system refused to page-lock host memory"),
        ("KernelSelectionError: no usable kernel in table", "unsupported", "engine.extra_args",
         "no kernel: no usable kernel in table"),
        ("ValueError: Model architecture OlmoeForCausalLM not supported", "unsupported", "model",
         "the engine does not know the architecture `OlmoeForCausalLM`"),
        ("quantization method 'awq' is not supported", "unsupported", "model", "the engine cannot load `awq` weights"),
        ("WeightLoadError: missing tensor model.norm.weight", "bad_checkpoint", "model",
         "the checkpoint cannot be read: missing tensor model.norm.weight"),
        ("found 92160 expert tensors, expected 122880", "bad_checkpoint", "model",
         "92160 expert tensors found, 122880 expected"),
        ("RuntimeError: cannot use CUDA device 0: only 0 device(s) visible", "no_gpu", "settings.gpu",
         "the engine sees 0 CUDA devices"),
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 1919): in use", "port_taken",
         "serve.port", "the port, or the one after it, is taken"),
        ("freetoken serve: error: unrecognized arguments: --moe-slots", "bad_flag", "engine.extra_args",
         "the engine refused its command line: unrecognized arguments: --moe-slots"),
        ("backend worker freetoken-TP0-scheduler exited during load", "ram_oom", "settings.expert_load",
         "the engine's worker was killed while loading, most likely for memory"),
        ("backend worker freetoken-TP0-scheduler exited", "engine_died", None,
         "the engine's worker `freetoken-TP0-scheduler` died"),
        ("OSError: [Errno 28] No space left on device", "log_full", None, "the disk is full"),
    ],
)  # fmt: skip
def test_known_messages_are_told_in_our_words(text, kind, field, cause):
    found = classify(PREFIX + "Scheduler is idle\n" + text + "\n")
    assert (found.kind, found.field, found.cause) == (kind, field, cause)
    assert found.excerpt.startswith(text[:40])


def test_a_pin_budget_carries_its_bytes():
    found = classify("expert banks need 16.99 GiB of pinned host RAM but the pin budget is 8.44 GiB")
    assert (found.kind, found.line) == ("pin_refused", "expert_banks")
    assert found.missing_bytes == int(16.99 * GIB) - int(8.44 * GIB)


def test_a_rejected_resize_carries_the_overshoot():
    found = classify(
        "requested cache (moe=1800 slots, kv=8263 pages, mamba=8 slots) needs 3.14 GiB > budget 2.70 GiB; old kept"
    )
    # The figures are rounded to a hundredth of a GiB, so one hundredth is added.
    assert found.missing_bytes == int(3.14 * GIB) - int(2.70 * GIB) + int(0.01 * GIB)


def test_exit_codes_speak_where_the_log_does_not():
    assert classify("", 2).kind == "bad_flag"
    assert classify("", -9).kind == "killed"
    assert classify("all is well", 0) is None


def test_the_last_of_several_attempts_counts():
    text = REFUSED + "\n" + REFUSED.replace("670302208", "900000000")
    assert classify(text).missing_bytes == 1_080_033_280 - 900_000_000


def test_what_the_engine_resolved_is_read_from_its_log():
    log = (
        PREFIX
        + "Resolved config: moe_strategy='offload', attention_backend='triton', cache_type='hybrid_radix', page_size=1"
    )
    assert FreetokenAdapter().parse_effective(log) == {"strategy": "offload", "attention": "triton"}
    assert FreetokenAdapter().parse_effective("nothing") == {}
