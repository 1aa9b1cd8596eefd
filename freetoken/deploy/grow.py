"""Starting lean and growing live to the plan, for a recipe that says `grow: true`.

The start is the narrow place: weights, graph capture and the tuner's scratch come together with whatever slots there
are. With the fewest slots that start, and the rest added once it serves, a card holds what it could not start with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from freetoken.deploy.recover import StartFailure
from freetoken.units import format_seconds

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter, Failure
    from freetoken.adapters.control import ControlClient
    from freetoken.planner.plan import Plan

#: Corrections by an exact overshoot; what is rejected more often is not understood.
MOST_TRIES = 4


def make_start_plan(plan: Plan) -> Plan:
    """The plan as the engine is started with it: with `start_slots` where it grows from there."""
    if plan.start_slots is None:
        return plan
    settings = plan.settings.model_copy(update={"expert_slots": plan.start_slots})
    return plan.model_copy(update={"settings": settings})


def grow_live(
    client: ControlClient,
    plan: Plan,
    adapter: EngineAdapter,
    replan: Callable[[Plan, Failure], Plan],
    say: Callable[[str, str], None],
) -> Plan:
    """Resizes what has started to `plan`; back comes the plan in force, with fewer slots where those were rejected.

    `replan` answers a rejection with a plan that allows for its overshoot, or raises StartFailure. StartFailure too
    where the engine fails in growing: it is then started again like after any failed start.
    """
    for _ in range(MOST_TRIES):
        wanted = plan.settings.expert_slots
        say("grow", f"growing live from {plan.start_slots:,} to {wanted:,} expert slots")
        answer = client.rebuild(expert_slots=wanted)
        if answer.is_ok:
            say("grow", f"grown in {format_seconds(answer.duration_s)}")
            return plan
        said = f"growing to {wanted:,} expert slots was answered `{answer.status}`: {answer.error or 'no reason given'}"
        failure = adapter.classify_failure(answer.error or "")
        if answer.status != "rejected" or failure is None:
            raise StartFailure("crash", said, log=answer.error or "")
        plan = replan(plan, failure)
    raise StartFailure("crash", f"growing was rejected {MOST_TRIES} times; {said}")
