"""Decode steps of few launches and their graphs against the model's own: wiring on the CPU, the whole on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from freetoken.adapters.native_lines import has_graphs
from freetoken.engine import fast_modules, quicken
from freetoken.engine.config import EngineConfig
from freetoken.engine.decode_graphs import DecodeGraphs
from freetoken.engine.decode_layers import Layer, Tensors
from freetoken.engine.loader import LoadedModel, load_model
from freetoken.engine.rehearsal import rehearse
from freetoken.engine.request import GenerationRequest
from freetoken.engine.scheduler import Engine
from freetoken.residency import HitCounters
from tests.fakes.tiny_models import FAMILIES, TOP_K, make_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
LAYERS, SLOTS = 4, 12
OPENED: list[LoadedModel] = []
FAST = ("qwen3_moe", "qwen3_5_moe", "olmoe", "mixtral", "qwen3_5_moe_nvfp4")
#: Norms, delta nets and expert blocks of each tiny model that get a forward of few launches.
COUNTS = {
    "qwen3_moe": (17, 0, 4), "qwen3_5_moe": (13, 2, 4), "mixtral": (9, 0, 4), "olmoe": (17, 0, 4),
    "gpt_oss": (9, 0, 0), "qwen3_5_moe_nvfp4": (13, 2, 4), "gpt_oss_mxfp4": (9, 0, 0),
}  # fmt: skip


class Replay:
    """What a captured graph does: the same steps on the same tensors, into the same tensors."""

    def __init__(self, function: Any, static: Tensors, outputs: Tensors) -> None:
        self.function, self.static, self.outputs = function, static, outputs

    def replay(self) -> None:
        for kept, fresh in zip(self.outputs, self.function(*self.static), strict=True):
            kept.copy_(fresh)


class PlainGraphs(DecodeGraphs):
    """Graphs that any device has: all but the capture is as on a GPU, where a capture runs nothing yet."""

    def begin(self, cache: Any, dtype: torch.dtype) -> bool:
        self.cache, self.dtype = cache, dtype
        return super().begin(cache, dtype)

    def row(self, layer: Layer) -> Any:
        assert layer.delta is not None
        return layer.delta.states_in(self.cache, self.dtype, 1)

    def _record(self, function: Any, static: Tensors) -> tuple[Any, Tensors]:
        deltas = [layer.delta for layer in self.layers if layer.delta is not None]
        states = [state for delta in deltas for state in delta.states_in(self.cache, self.dtype, 1) or ()]
        before = [state.clone() for state in states]
        outputs = tuple(torch.full_like(one, -1) for one in function(*static))
        for state, old in zip(states, before, strict=True):
            state.copy_(old)
        return Replay(function, static, outputs), outputs

    @staticmethod
    def can_run_delta_nets(device: torch.device) -> bool:
        return True


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def closed_models() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def open_model(folder: Path, family: str, dtype: str = "float32", **settings: Any) -> LoadedModel:
    path = folder / family
    if not path.exists():
        make_tiny_checkpoint(path, family, dtype=getattr(torch, dtype))
    settings = {"strategy": "offload", "expert_slots": SLOTS, "device": "cpu"} | settings
    loaded = load_model(EngineConfig(model_path=path, dtype=dtype, **settings))
    OPENED.append(loaded)
    return loaded


def open_in_steps(folder: Path, family: str, **settings: Any) -> tuple[LoadedModel, PlainGraphs]:
    loaded = open_model(folder, family, **settings)
    found = fast_modules.install(loaded.model, loaded.device, loaded.dtype)
    notes: list[str] = []
    graphs = PlainGraphs.install(loaded.model, loaded.experts, found, notes.append)
    assert isinstance(graphs, PlainGraphs), notes
    assert notes == []
    return loaded, graphs


class Run:
    """A sequence: its cache, and the logits of every step."""

    def __init__(self, loaded: LoadedModel, seed: int = 0) -> None:
        self.loaded = loaded
        self.cache = DynamicCache(config=loaded.config)
        self.generator = torch.Generator().manual_seed(seed)
        with loaded.experts.prefill():
            self._forward(9)

    def _forward(self, tokens: int) -> None:
        ids = torch.randint(0, 200, (1, tokens), generator=self.generator).to(self.loaded.device)
        with torch.inference_mode():
            out = self.loaded.model(ids, past_key_values=self.cache, use_cache=True).logits[0, -1]
        self.logits = out.float().cpu().clone()

    def step(self) -> torch.Tensor:
        with self.loaded.experts.decode():
            self._forward(1)
        return self.logits


def decode(loaded: LoadedModel, steps: int = 8, seed: int = 0) -> torch.Tensor:
    run = Run(loaded, seed)
    return torch.stack([run.step() for _ in range(steps)])


def difference(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got - right).abs().max())


# ---------------------------------------------------------------------- on the CPU: do the steps add up?


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_modules_answer_as_the_models_own(family: str, tmp_path: Path) -> None:
    loaded = open_model(tmp_path, family)
    right = decode(loaded)
    found = fast_modules.install(loaded.model, loaded.device, loaded.dtype)
    assert tuple(found.counts.get(kind, 0) for kind in ("norms", "delta nets", "expert blocks")) == COUNTS[family]
    assert found.notes == []
    assert difference(decode(loaded), right) < 2e-5


@pytest.mark.parametrize("settings", [{}, {"strategy": "fused"}, {"strategy": "cpu"}, {"expert_slots": TOP_K}])
@pytest.mark.parametrize("family", FAST)
def test_layers_cut_into_steps_answer_as_the_models_own(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    plain = open_model(tmp_path, family, **settings)
    loaded, graphs = open_in_steps(tmp_path, family, **settings)
    assert difference(decode(loaded), decode(plain)) < 2e-5
    assert graphs.problem is None
    assert graphs.replayed_count == 7 * graphs.captured_count > 0
    assert loaded.experts.counters() == plain.experts.counters()


@pytest.mark.parametrize(
    "settings", [{}, {"strategy": "fused"}, {"strategy": "cpu"}, {"experts_from": "disk"}, {"expert_slots": TOP_K}]
)
@pytest.mark.parametrize("family", ["qwen3_5_moe", "olmoe", "qwen3_5_moe_nvfp4"])
def test_a_rehearsed_model_has_all_its_graphs_and_has_counted_nothing(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    plain = open_model(tmp_path, family, **settings)
    loaded, graphs = open_in_steps(tmp_path, family, **settings)
    rehearse(loaded.model, graphs)
    captured = graphs.captured_count
    assert captured >= LAYERS
    assert (graphs.problem, graphs.replayed_count, loaded.experts.counters()) == (None, 0, HitCounters())
    assert difference(decode(loaded), decode(plain)) < 2e-5
    assert (graphs.captured_count, graphs.replayed_count) == (captured, 8 * captured)
    assert loaded.experts.counters() == plain.experts.counters()


def test_a_rehearsal_that_fails_leaves_a_model_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode(open_model(tmp_path, "qwen3_5_moe"))
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe")

    def fail(*_: Any) -> Any:
        raise RuntimeError("no reading today")

    with monkeypatch.context() as patched:
        patched.setattr(loaded.experts, "lend", fail)
        rehearse(loaded.model, graphs)
    assert graphs.problem == "RuntimeError: no reading today"
    assert difference(decode(loaded), right) < 2e-5


@pytest.mark.parametrize("settings", [{}, {"experts_from": "disk"}, {"experts_from": "ram"}, {"expert_slots": TOP_K}])
def test_a_rehearsal_after_use_leaves_all_slots_as_they_were(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = open_model(tmp_path, "qwen3_5_moe", **settings)
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe", **settings)
    assert difference(decode(loaded, seed=3), decode(plain, seed=3)) < 2e-5
    replayed = graphs.replayed_count
    rehearse(loaded.model, graphs)
    assert graphs.replayed_count == replayed
    assert difference(decode(loaded), decode(plain)) < 2e-5
    assert loaded.experts.counters() == plain.experts.counters()


def test_slots_that_cannot_be_given_back_count_as_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode(open_model(tmp_path, "qwen3_5_moe"))
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe")
    decode(loaded, seed=3)
    fetcher = loaded.experts._fetcher  # type: ignore[attr-defined]

    def fail() -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(fetcher, "hold", fail)
        rehearse(loaded.model, graphs)
    assert graphs.problem == "OSError: the disk is gone"
    assert len(loaded.experts._table) == 0  # type: ignore[attr-defined]
    assert difference(decode(loaded), right) < 2e-5


@pytest.mark.parametrize(("family", "is_cut"), [("qwen3_moe", 4), ("qwen3_5_moe", 2), ("mixtral", 4), ("olmoe", 0)])
def test_attention_is_cut_where_its_parts_are_known(family: str, is_cut: int, tmp_path: Path) -> None:
    _, graphs = open_in_steps(tmp_path, family)
    assert sum(layer.attention is not None for layer in graphs.layers) == is_cut


def answer_requests(loaded: LoadedModel) -> list[list[int]]:
    """Three requests, two at a time, and one more after a live resize of slots and KV."""
    engine = Engine(loaded, loaded.engine_config)
    prompts: list[tuple[int, ...]] = [(3, 14, 15, 92, 65), (35, 89, 79), (32, 38, 46, 26), (43, 38)]

    def ask(*asked: tuple[int, ...]) -> list[list[int]]:
        requests = [GenerationRequest(prompt_ids=prompt, max_tokens=12, ignore_eos=True) for prompt in asked]
        return [list(handle) for handle in [engine.submit(request) for request in requests]]

    answers = ask(*prompts[:3])
    assert engine.rebuild(expert_slots=8, kv_tokens=200).status == "ok"
    answers += ask(prompts[3])
    engine.close()
    return answers


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_moe"])
def test_the_engine_answers_the_same_requests_by_steps(family: str, tmp_path: Path) -> None:
    settings = {"max_running_requests": 2, "kv_tokens": 256}
    right = answer_requests(open_model(tmp_path, family, **settings))
    loaded, graphs = open_in_steps(tmp_path, family, **settings)
    assert answer_requests(loaded) == right
    assert graphs.replayed_count > 0


def answer(engine: Engine) -> list[int]:
    request = GenerationRequest(prompt_ids=(3, 14, 15, 92, 65), max_tokens=6, ignore_eos=True)
    return list(engine.submit(request))


def graph_counts(engine: Engine) -> tuple[int, int]:
    told = engine.stats().graphs
    assert told is not None
    assert told.problem is None
    return told.captured, told.replayed


def test_no_request_waits_for_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the load, and not after a resize, in the middle of a request or between two."""
    plain = Engine(
        open_model(tmp_path, "qwen3_5_moe", kv_tokens=256), open_model(tmp_path, "qwen3_5_moe").engine_config
    )
    right = answer(plain)
    plain.close()
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe", kv_tokens=256)
    rehearse(loaded.model, graphs)  # what the load does
    loaded.graphs, recorded = graphs, []
    record = graphs._record
    monkeypatch.setattr(graphs, "_record", lambda *given: (recorded.append(1), record(*given))[1])
    engine = Engine(loaded, loaded.engine_config)
    captured, replayed = graph_counts(engine)
    assert (captured > LAYERS, replayed) == (True, 0)
    assert answer(engine) == right
    assert graph_counts(engine) == (captured, 5 * captured)
    assert recorded == []
    assert engine.rebuild(kv_tokens=200).status == "ok"  # keys and values are in no graph
    assert recorded == []
    assert engine.rebuild(expert_slots=8).status == "ok"
    assert len(recorded) == captured
    assert answer(engine) == right
    assert graph_counts(engine) == (captured, 10 * captured)
    tokens = iter(engine.submit(GenerationRequest(prompt_ids=(3, 14, 15, 92, 65), max_tokens=60, ignore_eos=True)))
    long = [next(tokens)]
    assert engine.rebuild(expert_slots=14, kv_tokens=256).status == "ok"
    long += tokens
    assert long[: len(right)] == right
    assert graph_counts(engine) == (captured, 69 * captured)
    assert len(recorded) == 2 * captured
    engine.close()


def test_graphs_are_captured_anew_for_old_slots_that_came_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe", kv_tokens=256)
    rehearse(loaded.model, graphs)
    loaded.graphs, captured = graphs, graphs.captured_count
    engine = Engine(loaded, loaded.engine_config)

    def grow(tokens: int) -> None:
        raise MemoryError(f"no room for {tokens}")

    monkeypatch.setattr(engine.pool, "resize", grow)
    assert engine.rebuild(expert_slots=8, kv_tokens=300).status == "rejected"
    assert loaded.experts.expert_slots == SLOTS
    assert not graphs.is_stale
    answer(engine)
    assert graph_counts(engine) == (captured, 5 * captured)
    engine.close()


def test_a_capture_that_fails_in_a_resize_is_told_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe", kv_tokens=256)
    rehearse(loaded.model, graphs)
    loaded.graphs = graphs
    engine = Engine(loaded, loaded.engine_config)
    right = answer(engine)
    monkeypatch.setattr(graphs, "_record", refuse)
    assert engine.rebuild(expert_slots=8).status == "ok"
    assert "decode steps are replayed as graphs no more, which is slower: RuntimeError: no capture today" in caplog.text
    assert answer(engine) == right
    told = engine.stats().graphs
    assert told is not None
    assert told.problem == "RuntimeError: no capture today"
    engine.close()


def test_what_does_not_agree_keeps_its_own_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = open_model(tmp_path, "qwen3_5_moe")
    right = decode(loaded)
    monkeypatch.setattr(fast_modules.decode, "rms_norm", lambda inputs, *_: inputs * 1.01)
    monkeypatch.setattr(fast_modules.decode, "delta_step", lambda mixed, gate, *_: gate)
    monkeypatch.setattr(fast_modules.decode, "add_gated", lambda routed, shared, gate: routed + shared)
    found = fast_modules.install(loaded.model, loaded.device, loaded.dtype)
    assert found.counts == {}
    assert len(found.notes) == 3
    assert torch.equal(decode(loaded), right)


def test_layers_that_cannot_be_cut_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    def install(family: str) -> DecodeGraphs | None:
        loaded = open_model(tmp_path, family)
        found = fast_modules.install(loaded.model, loaded.device, loaded.dtype)
        graphs = PlainGraphs.install(loaded.model, loaded.experts, found, notes.append)
        changed = [name for name, module in loaded.model.model.layers.named_children() if "forward" in vars(module)]
        assert changed == ([] if graphs is None else [str(number) for number in range(LAYERS)])
        return graphs

    assert install("gpt_oss") is None
    assert "0 of 4 layers are of a known kind" in notes.pop()
    with monkeypatch.context() as patched:
        patched.setattr(Layer, "add", lambda layer, hidden, routed, shared: hidden)
        assert install("qwen3_5_moe") is None
        assert "layer Qwen3_5MoeDecoderLayer by its parts is off by" in notes.pop()
    with monkeypatch.context() as patched:
        patched.setattr(
            fast_modules.Attention, "finish", lambda attention, out, *gate: attention.module.o_proj(out) * 2
        )
        graphs = install("qwen3_5_moe")
        assert graphs is not None
        assert not any(layer.attention for layer in graphs.layers)
        assert "attention is not replayed as graphs" in notes.pop()
    with monkeypatch.context() as patched:
        patched.setattr(PlainGraphs, "can_run_delta_nets", DecodeGraphs.can_run_delta_nets)
        assert install("qwen3_5_moe") is None
        assert "`delta_step`" in notes.pop()
    assert notes == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_counts_on_graphs_for_the_families_that_can_be_cut(family: str, tmp_path: Path) -> None:
    loaded, notes = open_model(tmp_path, family), []
    found = fast_modules.install(loaded.model, loaded.device, loaded.dtype)
    graphs = PlainGraphs.install(loaded.model, loaded.experts, found, notes.append)
    assert (graphs is not None) == has_graphs(loaded.shape, "cuda")
    assert not has_graphs(loaded.shape, "cpu")


def test_the_load_says_when_steps_are_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quicken, "DecodeGraphs", PlainGraphs)

    def make(notes: list[str]) -> DecodeGraphs | None:
        loaded = open_model(tmp_path, "qwen3_5_moe")
        found = fast_modules.install(loaded.model, loaded.device, loaded.dtype)
        return quicken._make_graphs(loaded.model, loaded.experts, found, notes)

    notes: list[str] = []
    graphs = make(notes)
    assert graphs is not None
    assert graphs.captured_count > 0
    assert notes == []
    monkeypatch.setattr(fast_modules.DeltaNet, "states_in", keep_first_calls(fast_modules.DeltaNet.states_in))
    assert make(notes) is not None
    assert notes == ["decode steps are not replayed as graphs so far: at the load none could be captured"]
    monkeypatch.undo()
    monkeypatch.setattr(quicken, "DecodeGraphs", PlainGraphs)
    monkeypatch.setattr(PlainGraphs, "_record", refuse)
    assert make(notes) is not None
    assert notes[1:] == ["decode steps are not replayed as graphs, which is slower: RuntimeError: no capture today"]


def refuse(*_: Any) -> Any:
    raise RuntimeError("no capture today")


@pytest.fixture
def a_gpu_of_plain_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`quicken` for a GPU, with the CPU in its place."""
    install = fast_modules.install
    monkeypatch.setattr(
        quicken.fast_modules, "install", lambda model, _, dtype: install(model, torch.device("cpu"), dtype)
    )
    monkeypatch.setattr(quicken.decode, "describe", lambda _: None)
    monkeypatch.setattr(quicken, "DecodeGraphs", PlainGraphs)


def quicken_for(device: str, loaded: LoadedModel, setting: str) -> list[str]:
    """Decode steps of a loaded model made quick as for `device`; the sentences that tell what could not be had."""
    notes: list[str] = []
    config = loaded.engine_config.model_copy(update={"decode_graphs": setting})
    loaded.graphs = quicken.quicken(loaded.model, loaded.experts, torch.device(device), loaded.dtype, config, notes)
    return notes


def changed_modules(loaded: LoadedModel) -> set[str]:
    return {type(module).__name__ for module in loaded.model.modules() if "forward" in vars(module)}


@pytest.mark.usefixtures("a_gpu_of_plain_graphs")
@pytest.mark.parametrize(("setting", "has_graphs", "is_changed"), [
    ("auto", True, True), ("on", True, True), ("eager", False, True), ("off", False, False),
])  # fmt: skip
def test_graphs_are_captured_on_a_gpu_unless_they_are_switched_off(
    setting: str, has_graphs: bool, is_changed: bool, tmp_path: Path
) -> None:
    right = decode(open_model(tmp_path, "qwen3_5_moe"))
    loaded = open_model(tmp_path, "qwen3_5_moe")
    assert quicken_for("cuda", loaded, setting) == []
    assert (loaded.graphs is not None, bool(changed_modules(loaded))) == (has_graphs, is_changed)
    assert loaded.graphs is None or loaded.graphs.captured_count > LAYERS
    assert difference(decode(loaded), right) < 2e-5


@pytest.mark.usefixtures("a_gpu_of_plain_graphs")
@pytest.mark.parametrize("setting", ["auto", "on", "eager", "off"])
def test_a_cpu_has_nothing_to_capture(setting: str, tmp_path: Path) -> None:
    loaded = open_model(tmp_path, "qwen3_5_moe")
    assert quicken_for("cpu", loaded, setting) == []
    assert (loaded.graphs, changed_modules(loaded)) == (None, set())


@pytest.mark.usefixtures("a_gpu_of_plain_graphs")
def test_a_capture_that_fails_at_the_load_leaves_steps_of_few_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decode(open_model(tmp_path, "qwen3_5_moe"))
    loaded = open_model(tmp_path, "qwen3_5_moe")
    monkeypatch.setattr(PlainGraphs, "_record", refuse)
    assert quicken_for("cuda", loaded, "auto") == [
        "decode steps are not replayed as graphs, which is slower: RuntimeError: no capture today"
    ]
    assert loaded.graphs is not None
    assert (loaded.graphs.captured_count, loaded.graphs.replayed_count) == (0, 0)
    assert "Qwen3_5MoeSparseMoeBlock" in changed_modules(loaded)
    assert difference(decode(loaded), right) < 2e-5


def keep_first_calls(states_in: Any) -> Any:
    """States that the checks of a load find, and that no step finds."""

    def found(delta: Any, cache: Any, dtype: torch.dtype, sequences: int) -> Any:
        is_step = any(frame.function == "begin" for frame in inspect.stack(0)[1:3])
        return None if is_step else states_in(delta, cache, dtype, sequences)

    return found


def test_an_engine_tells_of_its_graphs(tmp_path: Path) -> None:
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe")
    engine = Engine(loaded, loaded.engine_config)
    assert engine.stats().graphs is None
    loaded.graphs = graphs
    list(engine.submit(GenerationRequest(prompt_ids=(3, 14, 15), max_tokens=6, ignore_eos=True)))
    told = engine.stats().graphs
    assert told is not None
    assert told.replayed == 4 * told.captured > 0
    assert (told.problem, told.held_bytes) == (None, 0)
    engine.close()


def test_what_cannot_be_compared_waits_for_another_step(tmp_path: Path) -> None:
    plain, (loaded, graphs) = open_model(tmp_path, "qwen3_5_moe"), open_in_steps(tmp_path, "qwen3_5_moe")
    right = decode(plain)
    embedding = loaded.model.get_input_embeddings()
    row = embedding.weight[7].clone()
    with torch.inference_mode():
        run = Run(loaded)
        embedding.weight[7] = torch.nan
        with loaded.experts.decode():
            logits = loaded.model(torch.tensor([[7]]), past_key_values=run.cache, use_cache=True).logits
        embedding.weight[7] = row
    assert logits.isnan().any()
    assert (graphs.problem, graphs.captured_count) == (None, 0)
    assert difference(decode(loaded), right) < 2e-5
    assert graphs.captured_count > 0


def test_nothing_is_captured_behind_a_gap(tmp_path: Path) -> None:
    loaded, graphs = open_in_steps(tmp_path, "qwen3_moe")
    run, layer = Run(loaded), graphs.layers[0]
    given = (torch.ones(3),)
    with torch.inference_mode(), loaded.experts.decode():
        assert graphs.begin(run.cache, torch.float32)
        assert graphs.run(layer, "one", lambda one: (one + torch.nan,), given)[0].isnan().all()
        assert torch.equal(graphs.run(layer, "two", lambda one: (one + 1,), given)[0], torch.full((3,), 2.0))
        assert layer.segments == {}
        assert graphs.begin(run.cache, torch.float32)
        graphs.run(layer, "two", lambda one: (one + 1,), given)
    assert list(layer.segments) == ["two"]


def test_graphs_that_hold_too_much_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode(open_model(tmp_path, "qwen3_5_moe"))
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe")
    reserved = iter(range(0, 1 << 40, 3 << 20))
    monkeypatch.setattr(graphs, "_reserved_bytes", lambda: next(reserved))
    rehearse(loaded.model, graphs)
    assert graphs.problem == "MemoryError: they hold 42.0 MiB of VRAM, more than is set aside"
    assert difference(decode(loaded), right) < 2e-5


def test_an_input_of_another_shape_at_a_kept_address_is_copied(tmp_path: Path) -> None:
    _, graphs = open_in_steps(tmp_path, "qwen3_moe")
    kept = torch.zeros(2, 6)
    graphs._kept[kept.data_ptr()] = kept
    assert graphs._is_kept(kept)
    assert not any(graphs._is_kept(one) for one in (kept.view(3, 4), kept[:, :3], kept.view(torch.int32)))
    one, two = (torch.zeros(1, 1, 8), torch.ones(1, 1, 8)), (torch.zeros(1, 1, 4), torch.ones(1, 1, 4))
    first, second = graphs.keep_angles(one), graphs.keep_angles(two)
    assert [tensor.shape[-1] for tensor in (*first, *second)] == [8, 8, 4, 4]
    assert graphs.keep_angles((torch.ones(1, 1, 8), torch.zeros(1, 1, 8))) is first
    assert bool(first[0].all())


def test_a_cpu_keeps_the_models_own_forwards(tmp_path: Path) -> None:
    loaded = open_model(tmp_path, "qwen3_5_moe")
    assert loaded.graphs is None
    assert not [name for name, module in loaded.model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_moe"])
def test_steps_serve_sequences_by_turns(family: str, tmp_path: Path) -> None:
    loaded, graphs = open_in_steps(tmp_path, family)
    right = [decode(open_model(tmp_path, family), 6, seed) for seed in (1, 2)]
    runs = [Run(loaded, seed) for seed in (1, 2)]
    by_turns = [[run.step() for run in runs] for _ in range(6)]
    assert graphs.problem is None
    for number in range(2):
        assert difference(torch.stack([step[number] for step in by_turns]), right[number]) < 2e-5


def test_steps_survive_live_resizes(tmp_path: Path) -> None:
    right = decode(open_model(tmp_path, "qwen3_5_moe"), 12)
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe")
    run, got = Run(loaded), []
    for slots in (SLOTS, 6, 20):
        loaded.experts.resize(slots)
        got += [run.step() for _ in range(4)]
    assert graphs.problem is None
    assert difference(torch.stack(got), right) < 2e-5


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("kind", ["raises", "is wrong"])
def test_a_step_that_cannot_be_captured_changes_no_answer(
    kind: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decode(open_model(tmp_path, "qwen3_5_moe"))
    loaded, graphs = open_in_steps(tmp_path, "qwen3_5_moe")
    record, calls = graphs._record, []

    def fail(function: Any, static: Tensors) -> tuple[Any, Tensors]:
        calls.append(1)
        graph, outputs = record(function, static)
        if len(calls) > after and kind == "raises":
            raise RuntimeError("no capture today")
        if len(calls) > after:
            graph.function = lambda *given: tuple(one + 1 for one in function(*given))
        return graph, outputs

    monkeypatch.setattr(graphs, "_record", fail)
    assert difference(decode(loaded), right) < 2e-5
    assert graphs.problem is not None
    assert len(calls) == after + 1


# ---------------------------------------------------------------------- on a GPU


def on_gpu(folder: Path, family: str, decode_graphs: str, dtype: str = "float32", **settings: Any) -> LoadedModel:
    return open_model(folder, family, dtype, device="cuda", decode_graphs=decode_graphs, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_gets_its_fast_forward_on_the_gpu(family: str, dtype: str, tmp_path: Path) -> None:
    needs_gpu()
    loaded = on_gpu(tmp_path, family, "off", dtype)
    found = fast_modules.install(loaded.model, loaded.device, loaded.dtype)
    assert (found.counts, found.notes) == (
        {kind: n for kind, n in zip(("norms", "delta nets", "expert blocks"), COUNTS[family], strict=True) if n},
        [],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "on"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_and_greedy_tokens_are_as_before_on_the_gpu(family: str, mode: str, tmp_path: Path) -> None:
    needs_gpu()
    right, got = (decode(on_gpu(tmp_path, family, one)) for one in ("off", mode))
    assert difference(got, right) < 1e-3
    assert torch.equal(got.argmax(-1), right.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "on"])
@pytest.mark.parametrize("family", FAST)
def test_bfloat16_logits_are_close_on_the_gpu(family: str, mode: str, tmp_path: Path) -> None:
    needs_gpu()
    right, got = (decode(on_gpu(tmp_path, family, one, "bfloat16")) for one in ("off", mode))
    # Another order of sums may send a token to another expert: most steps are held, not the worst one.
    assert float((got - right).abs().amax(-1).median()) < 0.15


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"strategy": "fused"}, {"strategy": "cpu"}, {"experts_from": "disk"}])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_nvfp4", "qwen3_moe"])
def test_graphs_are_captured_and_answer_as_without_them(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    needs_gpu()
    right = decode(on_gpu(tmp_path, family, "eager", "bfloat16", **settings))
    loaded = on_gpu(tmp_path, family, "on", "bfloat16", **settings)
    got = decode(loaded)
    graphs = loaded.graphs
    assert graphs is not None, loaded.notes
    assert graphs.problem is None
    assert [sentence for sentence in loaded.notes if "graphs" in sentence] == []
    assert 0 < graphs.held_bytes <= 8 << 20
    per_layer = 1 + ("qwen3_5" in family) + (settings.get("strategy") != "cpu")
    attention = LAYERS // 2 if "qwen3_5" in family else LAYERS
    assert graphs.captured_count == LAYERS * per_layer + attention
    assert graphs.replayed_count == 8 * graphs.captured_count  # they were captured at the load
    assert difference(got, right) < 0.05


@pytest.mark.gpu
def test_graphs_serve_sequences_by_turns(tmp_path: Path) -> None:
    needs_gpu()
    loaded = on_gpu(tmp_path, "qwen3_5_moe", "on")
    alone = [decode(loaded, 6, seed) for seed in (1, 2)]
    runs = [Run(loaded, seed) for seed in (1, 2)]
    by_turns = [[run.step() for run in runs] for _ in range(6)]
    assert loaded.graphs is not None, loaded.notes
    assert loaded.graphs.problem is None
    for number in range(2):
        assert difference(torch.stack([step[number] for step in by_turns]), alone[number]) < 1e-3


@pytest.mark.gpu
def test_graphs_survive_live_resizes(tmp_path: Path) -> None:
    needs_gpu()
    right = decode(on_gpu(tmp_path, "qwen3_5_moe", "off"), 12)
    loaded = on_gpu(tmp_path, "qwen3_5_moe", "on")
    run, got = Run(loaded), []
    for slots in (SLOTS, 6, 20):
        loaded.experts.resize(slots)
        got += [run.step() for _ in range(4)]
    assert loaded.graphs is not None, loaded.notes
    assert loaded.graphs.problem is None
    assert difference(torch.stack(got), right) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failed_capture_turns_graphs_off_and_changes_no_answer(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_gpu()
    right = decode(on_gpu(tmp_path, "qwen3_5_moe", "off"))
    loaded = on_gpu(tmp_path, "qwen3_5_moe", "on")
    graphs, calls = loaded.graphs, []
    assert graphs is not None, loaded.notes
    graphs.reset()
    record = graphs._record

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("no capture today")
        return record(*arguments)

    monkeypatch.setattr(graphs, "_record", fail)
    got = decode(loaded)
    assert graphs.problem == "RuntimeError: no capture today"
    assert difference(got, right) < 1e-3


@pytest.mark.gpu
def test_a_wait_inside_a_capture_is_survived(tmp_path: Path) -> None:
    needs_gpu()
    right = decode(on_gpu(tmp_path, "qwen3_5_moe", "off"))
    loaded = on_gpu(tmp_path, "qwen3_5_moe", "on")
    assert loaded.graphs is not None, loaded.notes
    loaded.graphs.reset()
    layer = loaded.graphs.layers[1]
    share = layer.share
    layer.share = lambda flat: (share(flat), flat.sum().item())[0]  # type: ignore[method-assign]
    got = decode(loaded)
    assert loaded.graphs.problem is not None
    assert difference(got, right) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_moe"])
def test_the_engine_answers_the_same_requests_with_graphs(family: str, tmp_path: Path) -> None:
    needs_gpu()
    settings = {"max_running_requests": 2, "kv_tokens": 256}
    right = answer_requests(on_gpu(tmp_path, family, "off", **settings))
    loaded = on_gpu(tmp_path, family, "on", **settings)
    got = answer_requests(loaded)
    assert loaded.graphs is not None, loaded.notes
    assert loaded.graphs.problem == "closed"
    assert loaded.graphs.replayed_count > 0
    assert got == right
