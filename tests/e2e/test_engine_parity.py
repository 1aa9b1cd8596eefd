"""The native engine's logits against an all-resident run of stock transformers, for every strategy and slot count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from freetoken import paths
from freetoken.engine.config import EngineConfig
from freetoken.engine.loader import LoadedModel, load_model
from freetoken.errors import UsageError
from freetoken.residency import HitCounters, compute_hit_curve, read_trace, replay
from tests.fakes.tiny_models import EXPERTS, FAMILIES, TOP_K, make_tiny_checkpoint
from tests.fakes.unpacked import unpack_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
TOLERANCE = 1e-5
LAYERS = 4
ALL = LAYERS * EXPERTS
PROMPT = torch.randint(0, 256, (1, 21), generator=torch.Generator().manual_seed(1))
STEPS = torch.randint(0, 256, (1, 6), generator=torch.Generator().manual_seed(2))
SETTINGS: list[dict[str, Any]] = [
    {"strategy": "fused"},
    {"strategy": "cpu"},
    {"strategy": "cpu", "experts_from": "disk"},
    *({"strategy": "offload", "expert_slots": n, "experts_from": "disk"} for n in (TOP_K, ALL // 2, ALL)),
    {"strategy": "offload", "expert_slots": ALL // 2, "experts_from": "ram"},
]
IDS = ["fused", "cpu", "cpu-disk", "offload-min", "offload-half", "offload-all", "offload-ram"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: threads that wait for each other on a busy machine cost minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_checkpoint(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return make


@pytest.fixture(scope="module")
def stock(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Stock transformers on the same checkpoint; packed ones are unpacked by our own code first."""
    made: dict[str, Any] = {}

    def load(family: str) -> Any:
        if family not in made:
            folder = checkpoint(family)
            if family.endswith(("_nvfp4", "_mxfp4")):
                folder = unpack_checkpoint(folder, tmp_path_factory.mktemp("unpacked"))
            config = AutoConfig.from_pretrained(folder).get_text_config()
            made[family] = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        return made[family]

    return load


@pytest.fixture
def open_model(checkpoint) -> Iterator[Callable[..., LoadedModel]]:
    opened: list[LoadedModel] = []

    def load(family: str | Path, **settings: Any) -> LoadedModel:
        folder = family if isinstance(family, Path) else checkpoint(family)
        opened.append(load_model(EngineConfig(model_path=folder, **settings)))
        return opened[-1]

    yield load
    for loaded in opened:
        loaded.close()


@torch.inference_mode()
def run_stock(model: Any) -> torch.Tensor:
    """Logits of the prompt in one forward, then of each step with the cache: [1, prompt + steps, vocabulary]."""
    cache = DynamicCache(config=model.config)
    logits = [model(PROMPT, past_key_values=cache, use_cache=True).logits]
    logits += [model(STEPS[:, n : n + 1], past_key_values=cache, use_cache=True).logits for n in range(STEPS.shape[1])]
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def run_ours(loaded: LoadedModel, chunk: int = 64, between: Callable[[int], None] | None = None) -> torch.Tensor:
    cache = DynamicCache(config=loaded.config)
    logits = []
    with loaded.experts.prefill():
        for part in PROMPT.split(chunk, dim=1):
            logits.append(loaded.model(part, past_key_values=cache, use_cache=True).logits)
    for step in range(STEPS.shape[1]):
        if between is not None:
            between(step)
        with loaded.experts.decode():
            logits.append(loaded.model(STEPS[:, step : step + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_an_all_resident_stock_run(family: str, settings: dict[str, Any], stock, open_model) -> None:
    expected = run_stock(stock(family))
    loaded = open_model(family, **settings)
    assert expected.std() > 0.5
    assert largest_difference(run_ours(loaded), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_a_chunked_prefill_equals_a_whole_one(family: str, stock, open_model) -> None:
    loaded = open_model(family, strategy="offload", expert_slots=5)
    assert largest_difference(run_ours(loaded, chunk=8), run_stock(stock(family))) < TOLERANCE


@pytest.mark.parametrize("source", ["ram", "disk"])
def test_live_resizes_in_mid_generation_leave_logits_unchanged(source: str, stock, open_model) -> None:
    loaded = open_model("qwen3_moe", strategy="offload", expert_slots=12, experts_from=source)
    plan = {1: TOP_K, 3: ALL + 5, 4: 7}
    answers = []

    def between(step: int) -> None:
        if step in plan:
            answers.append(loaded.experts.resize(plan[step]))
            assert loaded.memory()["expert_slots"] == answers[-1] * loaded.experts.slot_bytes

    assert largest_difference(run_ours(loaded, between=between), run_stock(stock("qwen3_moe"))) < TOLERANCE
    assert answers == [TOP_K, ALL, 7]


def test_a_resize_keeps_the_most_recent_experts_so_that_they_still_hit(open_model) -> None:
    loaded = open_model("qwen3_moe", strategy="offload", expert_slots=ALL)
    token = torch.tensor([[5]])
    with torch.inference_mode(), loaded.experts.decode():
        loaded.model(token)
        loaded.experts.resize(LAYERS * TOP_K)
        before = loaded.experts.counters()
        loaded.model(token)
    assert loaded.experts.counters() - before == HitCounters(LAYERS * TOP_K, LAYERS * TOP_K, 0, 0)


@pytest.mark.parametrize("slots", [TOP_K, 9, ALL])
def test_counted_hits_equal_the_replay_of_the_recorded_routing(slots: int, open_model, tmp_path: Path) -> None:
    path = tmp_path / "routing.trace"
    loaded = open_model("qwen3_moe", strategy="offload", expert_slots=slots, trace_path=path)
    run_ours(loaded)
    counted = loaded.experts.counters()
    loaded.experts.flush_trace()
    trace = read_trace(path)
    replayed = replay(trace)
    assert (counted.lookups, counted.hits, counted.misses) == (replayed.lookups, replayed.hits, replayed.misses)
    assert counted.lookups == STEPS.shape[1] * LAYERS * TOP_K
    assert counted.miss_bytes == counted.misses * loaded.experts.slot_bytes
    assert compute_hit_curve(trace).counters(slots) == replayed


def test_counted_hits_equal_the_replay_across_live_resizes(open_model, tmp_path: Path) -> None:
    path = tmp_path / "routing.trace"
    loaded = open_model("olmoe", strategy="offload", expert_slots=10, trace_path=path)
    run_ours(loaded, between=lambda step: loaded.experts.resize((10, 3, 20, 20, 6, 31)[step]) and None)
    loaded.experts.close()
    counted, replayed = loaded.experts.counters(), replay(read_trace(path))
    assert (counted.lookups, counted.hits, counted.misses) == (replayed.lookups, replayed.hits, replayed.misses)


@pytest.mark.parametrize("slots", [TOP_K, 5, ALL])
def test_one_token_of_each_of_many_sequences_decodes_as_they_do_alone(slots: int, open_model, tmp_path: Path) -> None:
    """Six sequences need more distinct experts than there are slots: the step is split, the answer stays."""
    path = tmp_path / "routing.trace"
    loaded = open_model("mixtral", strategy="offload", expert_slots=slots, trace_path=path)
    tokens = torch.arange(40, 46).unsqueeze(1)
    with torch.inference_mode(), loaded.experts.decode():
        together = loaded.model(tokens).logits
        alone = torch.cat([loaded.model(token.unsqueeze(0)).logits for token in tokens])
    assert largest_difference(together, alone) < TOLERANCE
    loaded.experts.close()
    counted, replayed = loaded.experts.counters(), replay(read_trace(path))
    assert (counted.lookups, counted.hits) == (replayed.lookups, replayed.hits)


def test_fewer_slots_than_a_token_needs_are_refused(open_model) -> None:
    with pytest.raises(UsageError, match="1 expert slots, at least 2 are needed"):
        open_model("qwen3_moe", strategy="offload", expert_slots=1)
    loaded = open_model("qwen3_moe", strategy="offload", expert_slots=4)
    with pytest.raises(UsageError, match="1 expert slots, at least 2 are needed"):
        loaded.experts.resize(1)
    assert loaded.experts.expert_slots == 4
    with pytest.raises(UsageError, match="no expert slots to resize"):
        open_model("qwen3_moe", strategy="cpu").experts.resize(4)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_a_tied_head_is_the_embedding(family: str, open_model, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tied", family, tie=True)
    loaded = open_model(folder, strategy="fused")
    config = AutoConfig.from_pretrained(folder).get_text_config()
    stock = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    assert largest_difference(run_ours(loaded), run_stock(stock)) < TOLERANCE
    assert "head" not in loaded.memory()


def test_bfloat16_differs_from_stock_bfloat16_by_rounding_alone(open_model, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "bf16", "qwen3_moe", dtype=torch.bfloat16)
    loaded = open_model(folder, strategy="offload", expert_slots=9, dtype="bfloat16")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, theirs, truth = run_ours(loaded).float(), run_stock(stock).float(), run_stock(exact)
    assert (ours - truth).abs().mean() < 1.5 * (theirs - truth).abs().mean()


@pytest.fixture(scope="module")
def stock_demo() -> torch.Tensor:
    """Its logits reach 20, where float32's own rounding is near 1e-5: stock implementations of experts differ from each
    other by 1.3e-5 there, so one of them is named. Ours equals it to the last bit."""
    folder = paths.package_data("demo-moe")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return run_stock(model.eval())


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fused"},
        {"strategy": "cpu"},
        *({"strategy": "offload", "expert_slots": slots, "experts_from": "disk"} for slots in (4, 64, 128)),
        {"strategy": "offload", "expert_slots": 64, "experts_from": "ram"},
    ],
    ids=["fused", "cpu", "offload-min", "offload-half", "offload-all", "offload-ram"],
)
def test_the_demo_model_equals_its_stock_run(settings: dict[str, Any], stock_demo, open_model) -> None:
    loaded = open_model(paths.package_data("demo-moe"), **settings)
    assert stock_demo.std() > 0.5
    resize = {1: 4, 3: 100} if settings["strategy"] == "offload" else {}
    between = lambda step: step in resize and loaded.experts.resize(resize[step]) and None  # noqa: E731
    assert largest_difference(run_ours(loaded, between=between), stock_demo) < TOLERANCE


#: Families that no line of ours was written for: what their configs call things, beside the common sizes.
OTHERS: dict[str, dict[str, int]] = {
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 16},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1},
    "nemotron_h": {"n_routed_experts": 8, "num_experts_per_tok": 2},  # experts without a gate
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_of_the_registry_run_without_code_of_their_own(family: str, open_model, tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 64, "moe_intermediate_size": 32, "max_position_embeddings": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **OTHERS[family])).float().eval()
    for parameter in stock.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    stock.save_pretrained(tmp_path / family)
    loaded = open_model(tmp_path / family, strategy="offload", expert_slots=5)
    with torch.inference_mode():
        expected = stock(PROMPT).logits
        with loaded.experts.prefill():
            assert largest_difference(loaded.model(PROMPT).logits, expected) < TOLERANCE
        with loaded.experts.decode():
            assert largest_difference(loaded.model(PROMPT).logits, expected) < TOLERANCE
    assert loaded.experts.counters().lookups > 0
