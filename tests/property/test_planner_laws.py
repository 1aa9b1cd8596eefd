"""Laws of the planner over random machines and recipes."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.adapters.native import NativeAdapter
from freetoken.planner.plan import Plan, Refusal
from freetoken.planner.repair import apply_sets
from freetoken.planner.solve import make_plan
from freetoken.units import GIB
from tests.fakes.planner_cases import (
    make_gpu,
    make_machine,
    make_qwen_shape,
    make_recipe,
    make_request,
    make_tiny_shape,
)

QUIET = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FREE = st.floats(3.0, 31.0).map(lambda gib: round(gib, 3))
POLICIES = st.sampled_from(["server", "desktop", "wsl", "256MiB"])
CHUNKS = st.sampled_from(["auto", 512, 1024, 2048, 4096, 8192])
CONTEXTS = st.sampled_from([4096, 8192, 16_384, 65_536])
SHAPES = {"freetoken": make_qwen_shape(), "native": make_tiny_shape(max_position_tokens=131_072)}
ADAPTERS = {"freetoken": FreetokenAdapter(), "native": NativeAdapter()}


@st.composite
def cases(draw, engine=None):
    """(engine, free GiB, RAM GiB, recipe document)."""
    name = engine or draw(st.sampled_from(["freetoken", "native"]))
    context = draw(CONTEXTS)
    work = {"name": "drawn", "prompt_tokens": context - 512, "output_tokens": 512, "context_tokens": context,
            "concurrency": draw(st.integers(1, 3))}  # fmt: skip
    fixed = {"prefill_chunk_tokens": draw(CHUNKS)}
    if draw(st.booleans()):
        fixed["expert_slots"] = draw(st.integers(4, 128) if name == "native" else st.integers(256, 10_240))
        fixed["strategy"] = "offload"
    if name == "freetoken":
        fixed["embed_on_host"] = draw(st.sampled_from(["auto", True, False]))
        fixed["memory_ratio"] = draw(st.sampled_from(["auto", 0.8, 0.9, 0.95]))
    return name, draw(FREE), draw(st.sampled_from([8, 24, 32, 64])), {
        "workload": work, "settings": fixed, "headroom": draw(POLICIES),
    }  # fmt: skip


def plan(name, free, ram, document):
    machine = make_machine(make_gpu(32, free), ram_gib=ram)
    return make_plan(make_request(make_recipe(name, **document), machine, SHAPES[name]), ADAPTERS[name])


@QUIET
@given(cases())
def test_parts_never_exceed_the_budget_and_fixed_values_are_never_changed(case):
    name, _, _, document = case
    answer = plan(*case)
    if isinstance(answer, Refusal):
        assert answer.missing_bytes > 0 or any(finding.is_fatal for finding in answer.findings)
        return
    for ledger in filter(None, (answer.vram, answer.ram, answer.disk)):
        assert ledger.peak_bytes + ledger.headroom_bytes <= ledger.available_bytes
        assert all(line.bytes >= 0 for line in ledger.lines)
        assert ledger.peak_bytes == max(ledger.phase_bytes(phase) for phase in ("load", "capture", "prefill", "decode"))
    assert answer.admission.is_admitted
    work = document["workload"]
    assert answer.settings.kv_tokens >= work["context_tokens"] * work["concurrency"]
    assert answer.settings.max_running_requests >= work["concurrency"]
    given_values = {key: value for key, value in document["settings"].items() if value != "auto"}
    assert {key: getattr(answer.settings, key) for key in given_values} == given_values
    assert name == answer.engine


@QUIET
@given(cases(), st.floats(0.01, 8.0))
def test_more_vram_never_gives_fewer_slots_under_the_same_settings(case, more):
    name, free, ram, document = case
    document = document | {
        "settings": {key: value for key, value in document["settings"].items() if key != "expert_slots"}
    }
    # One candidate, so that the number of slots alone is solved.
    fixed = {"strategy": "offload", "prefill_chunk_tokens": 1024, "embed_on_host": True}
    document["settings"] |= fixed if name == "freetoken" else {"strategy": "offload", "prefill_chunk_tokens": 1024}
    poor, rich = plan(name, free, ram, document), plan(name, min(32.0, free + more), ram, document)
    if isinstance(poor, Plan):
        assert isinstance(rich, Plan)
        assert rich.settings.expert_slots >= poor.settings.expert_slots


@QUIET
@given(cases("freetoken"), st.integers(1, 100_000))
def test_more_kv_never_gives_more_slots(case, more):
    name, free, ram, document = case
    needed = document["workload"]["context_tokens"] * document["workload"]["concurrency"]
    base = {"strategy": "offload", "prefill_chunk_tokens": 1024, "embed_on_host": True}
    few = plan(name, free, ram, document | {"settings": base | {"kv_tokens": needed}})
    many = plan(name, free, ram, document | {"settings": base | {"kv_tokens": needed + more}})
    if isinstance(many, Plan):
        assert isinstance(few, Plan)
        assert few.settings.expert_slots >= many.settings.expert_slots


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("freetoken"))
def test_a_repair_that_is_offered_plans(case):
    name, free, ram, document = case
    answer = plan(*case)
    if isinstance(answer, Plan):
        return
    machine = make_machine(make_gpu(32, free), ram_gib=ram)
    for repair in answer.repairs:
        sets = {path: _typed(value) for path, value in repair.sets.items()}
        recipe = apply_sets(make_recipe(name, **document), sets)
        assert isinstance(make_plan(make_request(recipe, machine, SHAPES[name]), ADAPTERS[name]), Plan)


def _typed(text):
    if text.startswith("["):
        return [one.strip() for one in text.strip("[]").split(",")]
    return {"true": True, "false": False}.get(text, text)


@QUIET
@given(cases())
def test_answers_round_trip_through_json(case):
    answer = plan(*case)
    assert type(answer).model_validate_json(answer.model_dump_json()) == answer


@QUIET
@given(FREE, POLICIES)
def test_headroom_is_never_below_what_a_plan_is_held_to(free, policy):
    answer = plan("freetoken", free, 64, {"headroom": policy})
    assert answer.vram.headroom_bytes >= (GIB // 4 if policy == "256MiB" else 150 * 2**20)
