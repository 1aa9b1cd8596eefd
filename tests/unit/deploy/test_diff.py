"""Declared against running: what is live, what needs a restart, and what only follows."""

from __future__ import annotations

from typing import Any

from freetoken.adapters.freetoken import FreetokenAdapter
from freetoken.deploy.diff import Current, make_diff
from freetoken.planner.memory import ResolvedSettings
from freetoken.planner.plan import Plan
from freetoken.recipe.model import Recipe
from tests.fakes.fake_adapter import FakeAdapter, make_hardware, make_plan, make_shape

ADAPTER = FakeAdapter()


def make_recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "name": "lab", "model": {"path": "/models/fake"}, "workload": {"prompt_tokens": 512, "output_tokens": 64},
        "settings": {"expert_slots": 16},
    }  # fmt: skip
    return Recipe.model_validate(values | changes)


def plan_of(recipe: Recipe, **settings: Any) -> Plan:
    from freetoken.planner.plan import PlanRequest

    request = PlanRequest(recipe=recipe, hardware=make_hardware(), shape=make_shape(), model_path="/models/fake")
    plan = make_plan(request, ADAPTER, False)
    assert isinstance(plan, Plan)
    changed = ResolvedSettings.model_validate(plan.settings.model_dump() | settings)
    return plan.model_copy(update={"settings": changed})


def diff_of(before: Plan, after: Plan, **facts: Any) -> tuple[str, list[str]]:
    recipe = facts.pop("recipe", make_recipe())
    diff = make_diff(Current(before, make_recipe(), **facts), after, recipe, ADAPTER)
    return diff.action, [change.describe() for change in diff.changes]


def test_nothing_running_is_a_launch() -> None:
    assert make_diff(None, plan_of(make_recipe()), make_recipe(), ADAPTER).action == "launch"


def test_equal_plans_change_nothing() -> None:
    assert diff_of(plan_of(make_recipe()), plan_of(make_recipe())) == ("nothing", [])


def test_live_knobs_alone_are_a_resize() -> None:
    after = plan_of(make_recipe(), expert_slots=20, kv_tokens=4096)
    changes = ["settings.expert_slots: 16 -> 20 (live)", "settings.kv_tokens: 2,048 -> 4,096 (live)"]
    assert diff_of(plan_of(make_recipe()), after) == ("resize", changes)


def test_one_restart_knob_makes_it_a_restart() -> None:
    after = plan_of(make_recipe(), expert_slots=20, strategy="cpu")
    action, changes = diff_of(plan_of(make_recipe()), after)
    assert (action, changes[1]) == ("restart", "settings.strategy: offload -> cpu (restart)")


def test_a_memory_ratio_that_only_follows_does_not_force_a_restart() -> None:
    before = plan_of(make_recipe(), memory_ratio=0.91)
    assert diff_of(before, plan_of(make_recipe(), memory_ratio=0.92, expert_slots=20)) == (
        "resize", ["settings.expert_slots: 16 -> 20 (live)"],
    )  # fmt: skip
    fixed = make_recipe(settings={"expert_slots": 16, "memory_ratio": 0.92})
    action, _ = diff_of(before, plan_of(make_recipe(), memory_ratio=0.92), recipe=fixed)
    assert action == "restart"


def test_what_an_adapter_waives_stays_as_it_was_started() -> None:
    """How experts are loaded follows from what RAM was free: it is no reason to end what runs."""
    adapter, recipe = FreetokenAdapter(), make_recipe()
    before = plan_of(recipe, expert_load="parallel", prefill_overlap=True)
    after = plan_of(recipe, expert_load="serial", prefill_overlap=False, expert_slots=20)
    diff = make_diff(Current(before, recipe), after, recipe, adapter)
    changes = [change.describe() for change in diff.changes]
    assert (diff.action, changes) == ("resize", ["settings.expert_slots: 16 -> 20 (live)"])
    moved = after.model_copy(update={"settings": after.settings.model_copy(update={"prefill_chunk_tokens": 999})})
    assert make_diff(Current(before, recipe), moved, recipe, adapter).action == "restart"


def test_what_the_engine_itself_tells_counts_more_than_its_plan() -> None:
    plan = plan_of(make_recipe())
    assert diff_of(plan, plan, expert_slots=12) == ("resize", ["settings.expert_slots: 12 -> 16 (live)"])


def test_another_model_port_or_argument_is_a_restart() -> None:
    before = plan_of(make_recipe())
    moved = before.model_copy(update={"port": 2000, "model_path": "/models/other"})
    assert diff_of(before, moved)[0] == "restart"
    other = make_recipe(engine={"name": "native", "extra_args": ["--x"]})
    assert diff_of(before, before, recipe=other) == ("restart", ["engine.extra_args: () -> ('--x',) (restart)"])
