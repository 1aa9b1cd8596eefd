"""One suite over every adapter: what the rest of the tool relies on, whichever engine it is."""

import pytest

from freetoken.adapters import ADAPTERS, get_adapter
from freetoken.adapters.base import Failure, LaunchSpec
from freetoken.checkpoint.cards import find_card
from freetoken.errors import UsageError
from freetoken.planner.memory import PHASES, Admission, SpeedTraits
from freetoken.planner.plan import Plan
from freetoken.planner.solve import make_plan
from freetoken.recipe.model import Recipe, Settings
from freetoken.units import GIB
from tests.fakes.planner_cases import (
    SMALL_WORKLOAD,
    make_gpu,
    make_machine,
    make_qwen_shape,
    make_recipe,
    make_request,
    make_tiny_shape,
)

VRAM_KEYS = {
    "cuda_context", "dense_weights", "embedding", "head", "shared_experts", "vision", "rope", "attention_workspace",
    "linear_state", "cuda_graphs", "kv_cache", "expert_slots", "prefill_staging", "prefill_transient", "logits",
    "page_tables", "autotune_scratch", "allocator",
}  # fmt: skip
RAM_KEYS = VRAM_KEYS | {"runtime", "expert_banks", "loader_peak", "host_embedding", "side_tables"}
DISK_KEYS = {"download", "checkpoint", "converted", "caches"}


class AdapterContract:
    """Subclasses name the engine, a shape that it loads, and the strategies it plans."""

    name: str
    strategies: tuple[str, ...]
    base_strategy = "offload"
    most_candidates = 64
    can_launch = True

    def make_shape(self):
        return make_qwen_shape()

    @property
    def adapter(self):
        return get_adapter(self.name)

    def request(self, free_gib=11.5, *, ram_gib=64, **settings):
        machine = make_machine(make_gpu(12, free_gib, uuid="GPU-1"), ram_gib=ram_gib)
        recipe = make_recipe(self.name, workload=SMALL_WORKLOAD, settings=settings)
        return make_request(recipe, machine, self.make_shape(), model_path="/models/x")

    def more(self, settings):
        """A change that puts more experts into fast memory."""
        return {"expert_slots": settings.expert_slots + 7}

    def plan(self, **settings):
        plan = make_plan(self.request(**settings), self.adapter)
        assert isinstance(plan, Plan), plan.message
        return plan

    def test_is_registered_under_its_name_and_introduces_itself(self):
        assert self.name in ADAPTERS
        assert self.adapter.name == self.name
        assert self.adapter.title

    def test_knobs_are_settings_with_values_that_a_recipe_takes(self):
        for knob in self.adapter.knobs:
            assert knob.name in Settings.model_fields
            values = knob.choices or [int(knob.low) if knob.low == int(knob.low) else knob.low]
            for value in values:
                document = {"name": "k", "model": {"repo": "a/b"}, "workload": SMALL_WORKLOAD,
                            "settings": {knob.name: value}}  # fmt: skip
                if knob.changes_answers:
                    document["allow_quality_changes"] = [knob.name]
                assert getattr(Recipe.model_validate(document).settings, knob.name) == value

    def test_live_knobs_are_backed_by_the_capability(self):
        if any(knob.cost == "live" for knob in self.adapter.knobs):
            assert "live_resize" in self.adapter.capabilities

    def test_candidates_keep_every_fixed_value(self):
        fixed = {"kv_tokens": 5000, "max_running_requests": 3, "prefill_chunk_tokens": 512}
        found = list(self.adapter.memory_model.candidates(self.request(**fixed)))
        assert found
        assert {tuple(getattr(one, name) for name in fixed) for one in found} == {tuple(fixed.values())}

    def test_candidates_are_distinct_and_few(self):
        found = [one.model_dump_json() for one in self.adapter.memory_model.candidates(self.request())]
        assert len(found) == len(set(found)) <= self.most_candidates

    def test_every_strategy_plans_when_the_recipe_asks_for_it(self):
        for strategy in self.strategies:
            plan = self.plan(strategy=strategy, free_gib=11.9, ram_gib=64)
            assert plan.settings.strategy == strategy
            low, high = self.adapter.memory_model.slot_range(self.request(), plan.settings)
            assert low <= plan.settings.expert_slots <= high

    def test_lines_have_known_keys_phases_and_knobs(self):
        model, request = self.adapter.memory_model, self.request()
        for candidate in model.candidates(request):
            low, _ = model.slot_range(request, candidate)
            settings = model.finish(request, candidate.model_copy(update={"expert_slots": low}))
            for known, lines in (
                (VRAM_KEYS, model.vram_lines(request, settings)),
                (RAM_KEYS, model.ram_lines(request, settings)),
                (DISK_KEYS, model.disk_lines(request, settings)),
            ):
                keys = [line.key for line in lines]
                assert len(keys) == len(set(keys)), keys
                assert set(keys) <= known
                for line in lines:
                    assert line.label
                    assert set(line.phases) <= set(PHASES)
                    assert line.phases
                    if line.knob is not None:
                        section, _, field = line.knob.partition(".")
                        assert field in type(getattr(request.recipe, section)).model_fields

    def test_more_slots_and_more_tokens_never_take_fewer_bytes(self):
        model, request = self.adapter.memory_model, self.request()
        settings = self.plan(strategy=self.base_strategy).settings
        more_slots = model.finish(request, settings.model_copy(update=self.more(settings)))
        more_kv = settings.model_copy(update={"kv_tokens": settings.kv_tokens + 1000})

        def total(one):
            return sum(line.bytes for line in (*model.vram_lines(request, one), *model.ram_lines(request, one)))

        assert total(more_slots) > total(settings)
        assert total(more_kv) > total(settings)

    def test_finish_changes_nothing_the_second_time(self):
        model, request, settings = self.adapter.memory_model, self.request(), self.plan().settings
        assert model.finish(request, settings) == settings

    def test_admission_and_speed_traits_are_values(self):
        model, request, settings = self.adapter.memory_model, self.request(), self.plan().settings
        assert isinstance(model.admission(request, settings), Admission)
        assert isinstance(model.speed_traits(request, settings), SpeedTraits)

    def test_launch_spec_survives_its_file_and_names_the_port(self):
        if not self.can_launch:
            with pytest.raises(UsageError, match="not yet be started"):
                self.adapter.make_launch_spec(self.plan(), interpreter="/engine/python")
            return
        spec = self.adapter.make_launch_spec(self.plan(), interpreter="/engine/python", extra_args=("--x", "1"))
        assert LaunchSpec.model_validate_json(spec.model_dump_json()) == spec
        assert spec.argv[-2:] == ("--x", "1")
        assert spec.argv[spec.argv.index("--port") + 1] == str(spec.port) == "1919"
        assert "1919" not in map(str, spec.extra_ports)

    def test_equal_settings_need_nothing_and_other_strategies_a_restart(self):
        settings = self.plan(strategy=self.base_strategy).settings
        assert self.adapter.live_changes(settings, settings) == ()
        other = settings.model_copy(update={"max_running_requests": settings.max_running_requests + 1})
        assert self.adapter.live_changes(settings, other) is None
        resized = settings.model_copy(update={"kv_tokens": settings.kv_tokens + 1024})
        if "live_resize" in self.adapter.capabilities:
            assert self.adapter.live_changes(settings, resized) == ("kv_tokens",)

    def test_failures_are_recognised_and_nothing_is_invented(self):
        assert self.adapter.classify_failure("INFO: all is well\n", 0) is None
        found = self.adapter.classify_failure("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert isinstance(found, Failure)
        assert (found.kind, found.missing_bytes) == ("vram_oom", 2 * GIB)
        assert self.adapter.classify_failure("OSError: [Errno 98] address already in use").kind == "port_taken"
        assert self.adapter.classify_failure("", -9).kind == "killed"
        assert self.adapter.classify_failure("", 2).kind == "bad_flag"

    def test_limits_answer_for_a_machine_without_anything(self):
        bare = make_machine(ram_gib=2, ram_free_gib=1)
        request = self.request().model_copy(update={"hardware": bare})
        assert all(finding.message for finding in self.adapter.limits.findings(request))
        assert make_plan(request, self.adapter).kind in ("plan", "refusal")


class TestNative(AdapterContract):
    name = "native"
    strategies = ("fused", "offload", "cpu")

    def make_shape(self):
        return make_tiny_shape()


class TestFreetoken(AdapterContract):
    name = "freetoken"
    # A card of 12 GB cannot hold every expert: `fused` is planned on 24 GB in tests/unit/planner.
    strategies = ("offload", "hybrid", "cpu")


class TestLlamaCpp(AdapterContract):
    name = "llamacpp"
    strategies = ("cpu",)
    base_strategy = "cpu"
    # One for each number of layers on the CPU and each physical batch.
    most_candidates = 128
    # Planned in this version and not launched.
    can_launch = False

    def make_shape(self):
        return find_card("qwen3.6-35b-a3b-q4_k_m")

    def more(self, settings):
        return {"cpu_layers": settings.cpu_layers - 1, "expert_slots": settings.expert_slots}

    def test_more_slots_and_more_tokens_never_take_fewer_bytes(self):
        # A layer that moves to the GPU leaves RAM: VRAM alone grows.
        model, request, settings = self.adapter.memory_model, self.request(), self.plan(strategy="cpu").settings

        def total(one):
            return sum(line.bytes for line in model.vram_lines(request, one))

        assert total(settings.model_copy(update=self.more(settings))) > total(settings)
        assert total(settings.model_copy(update={"kv_tokens": settings.kv_tokens + 1000})) > total(settings)
