"""The search space: the knobs that an adapter declares, within the bounds of the recipe and of this machine.

A value that the recipe fixes is kept and is no knob. Knobs that change answers are turned only where
`allow_quality_changes` lists them. What cannot pay is left to the planner: the memory ratio follows from slots and
KV, the loading mode changes the start alone, and CPU layers do what `hybrid` does better. Requests beyond the
workload's concurrency only take memory: they are there for the engine's own default alone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from freetoken.tuner.values import Point, TunerModel

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from freetoken.adapters.base import EngineAdapter, Knob
    from freetoken.planner.plan import PlanRequest

Scalar = str | int | float | bool
_LEFT_TO_PLANNER = frozenset({"memory_ratio", "expert_load", "cpu_layers"})
#: Strategies under which a knob does anything; all of them where a knob is not named.
_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "expert_slots": ("offload", "hybrid"),
    "fetch_ratio": ("hybrid",),
    "cpu_threads": ("hybrid", "cpu"),
    "prefill_overlap": ("offload", "hybrid", "cpu"),
}
_GRID = 20


class Parameter(TunerModel):
    """One knob with its bounds. `choices` in order; else `low` to `high`."""

    name: str
    cost: Literal["live", "restart"]
    kind: Literal["choice", "integer", "share"]
    choices: tuple[Scalar, ...] = ()
    low: float = 0
    high: float = 0
    is_log: bool = False
    changes_answers: bool = False
    #: Strategies under which the knob does anything; () = all.
    only_with: tuple[str, ...] = ()
    #: A choice that the engine's own default has and that no search tries.
    default_only: Scalar | None = None

    def is_relevant(self, strategy: Any) -> bool:
        """Whether turning the knob can do anything under `strategy`."""
        return strategy is None or not self.only_with or strategy in self.only_with

    def values(self) -> tuple[Scalar, ...]:
        """Values worth a look: all choices, or a grid over the range."""
        if self.kind == "choice":
            return tuple(one for one in self.choices if self.default_only is None or one != self.default_only)
        if self.kind == "share":
            return tuple(round(self.low + (self.high - self.low) * step / _GRID, 4) for step in range(_GRID + 1))
        low, high = int(self.low), int(self.high)
        if high - low <= _GRID:
            return tuple(range(low, high + 1))
        ratio = math.log(high / max(1, low)) / _GRID
        return tuple(sorted({round(max(1, low) * math.exp(ratio * step)) for step in range(_GRID + 1)}))

    def clip(self, value: Any) -> Any:
        """`value` within the bounds; the nearest choice where it is none of them."""
        if self.kind == "choice":
            return value if value in self.choices else _nearest(value, self.choices)
        if self.kind == "share":
            return min(self.high, max(self.low, float(value)))
        return int(min(self.high, max(self.low, round(float(value)))))


class Space(TunerModel):
    """All knobs of a study, in a fixed order, and the concurrency and sizes below which nothing may go."""

    parameters: tuple[Parameter, ...] = Field(min_length=1)

    def __iter__(self) -> Iterator[Parameter]:  # type: ignore[override]
        return iter(self.parameters)

    def __getitem__(self, name: str) -> Parameter:
        return next(one for one in self.parameters if one.name == name)

    def __contains__(self, name: object) -> bool:
        return any(one.name == name for one in self.parameters)

    @property
    def restart_names(self) -> tuple[str, ...]:
        """Knobs that cost a start."""
        return tuple(one.name for one in self.parameters if one.cost == "restart")

    def start_key(self, point: Point) -> tuple[Any, ...]:
        """What two points must share to be measured in one start of the engine."""
        return tuple(point.get(name) for name in self.restart_names)

    def clip(self, point: Point) -> Point:
        """`point` with every knob within its bounds; what is missing gets the first value."""
        return {one.name: one.clip(point.get(one.name, one.values()[0])) for one in self.parameters}

    def searchable(self, point: Point) -> Point:
        """`point` with the first value of a knob in place of what only the engine's default has."""
        only = {one.name: one for one in self.parameters if one.default_only is not None}
        return {
            name: only[name].values()[0] if name in only and value == only[name].default_only else value
            for name, value in point.items()
        }

    def canonical(self, point: Point) -> Point:
        """`point` with knobs that do nothing under its strategy at their first value: equal effects, equal points."""
        strategy = point.get("strategy")
        return {
            one.name: point[one.name] if one.is_relevant(strategy) else first
            for one, first in zip(self.parameters, self._first_values, strict=True)
        }

    def relevant(self, point: Point) -> Point:
        """`point` without the knobs that do nothing under its strategy: what is shown, written and kept of it."""
        strategy = point.get("strategy")
        return {one.name: point[one.name] for one in self.parameters if one.name in point and one.is_relevant(strategy)}

    @cached_property
    def _first_values(self) -> tuple[Scalar, ...]:
        return tuple(one.values()[0] for one in self.parameters)

    def distributions(self) -> dict[str, BaseDistribution]:
        """The space as Optuna has it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        found: dict[str, BaseDistribution] = {}
        for one in self.parameters:
            if one.kind == "choice":
                found[one.name] = CategoricalDistribution(one.choices)
            elif one.kind == "share":
                found[one.name] = FloatDistribution(one.low, one.high)
            else:
                found[one.name] = IntDistribution(int(one.low), int(one.high), log=one.is_log)
        return found


def make_space(request: PlanRequest, adapter: EngineAdapter, lacking: Container[str] = ()) -> Space | None:
    """The knobs that are free for `request`; None where the recipe fixes all that the engine has.

    Choices that need a package of `lacking` (import names) are left out: the engine would not start with them.
    """
    knobs = [_without(knob, lacking) for knob in adapter.knobs]
    parameters = [one for knob in knobs if (one := _make_parameter(request, adapter, knob)) is not None]
    only_with = {one.name: _only_with(request, one.name) for one in parameters}
    if any(one.name == "strategy" for one in parameters):
        parameters = [one.model_copy(update={"only_with": only_with[one.name]}) for one in parameters]
    elif (fixed := request.recipe.settings.strategy) != "auto":
        parameters = [one for one in parameters if not only_with[one.name] or fixed in only_with[one.name]]
    return Space(parameters=tuple(parameters)) if parameters else None


def _only_with(request: PlanRequest, name: str) -> tuple[str, ...]:
    # Without a GPU the CPU's threads do everything, whatever the strategy.
    return () if name == "cpu_threads" and not request.hardware.gpus else _ONLY_WITH.get(name, ())


def _without(knob: Knob, lacking: Container[str]) -> Knob:
    choices = tuple(one for one in knob.choices if knob.packages.get(str(one), "") not in lacking)
    return knob.model_copy(update={"choices": choices})


def _make_parameter(request: PlanRequest, adapter: EngineAdapter, knob: Knob) -> Parameter | None:
    recipe = request.recipe
    if knob.name in _LEFT_TO_PLANNER:
        return None
    value = getattr(recipe.settings, knob.name)
    if knob.changes_answers:
        if knob.name not in recipe.allow_quality_changes or value != "model":
            return None
    elif value != "auto":
        return None
    if knob.name == "expert_slots":
        return _slots(request, adapter, knob)
    if knob.name == "kv_tokens":
        return _kv_tokens(request, knob)
    if knob.name == "max_running_requests":
        return _running(request, adapter, knob)
    if knob.name == "prefix_cache" and not _has_reuse(request):
        # Nothing could be found in it, so that it only takes memory; the engine has it unasked all the same.
        if adapter.default_settings(request).get(knob.name) is not True:
            return None
        return Parameter(name=knob.name, cost=knob.cost, kind="choice", choices=(False, True), default_only=True)
    choices = tuple(knob.choices) or _range_choices(request, knob)
    choices = tuple(_useful_choices(request, knob.name, choices))
    if knob.name == "fetch_ratio":
        return Parameter(name=knob.name, cost=knob.cost, kind="share", low=0.0, high=1.0)
    if len(choices) < 2:
        return None
    return Parameter(
        name=knob.name, cost=knob.cost, kind="choice", choices=choices, changes_answers=knob.changes_answers
    )


def _slots(request: PlanRequest, adapter: EngineAdapter, knob: Knob) -> Parameter | None:
    ranges = [adapter.memory_model.slot_range(request, one) for one in adapter.memory_model.candidates(request)]
    real = [one for one in ranges if one[1] > one[0]]
    if not real:
        return None
    low, high = min(one[0] for one in real), max(one[1] for one in real)
    return Parameter(name=knob.name, cost=knob.cost, kind="integer", low=max(1, low), high=high, is_log=True)


def _kv_tokens(request: PlanRequest, knob: Knob) -> Parameter | None:
    """From the workload's need up to half as much again; more only pays where a shared prefix can be kept."""
    needed = request.recipe.workload.kv_tokens
    if request.recipe.workload.shared_prefix_tokens == 0:
        return None
    return Parameter(name=knob.name, cost=knob.cost, kind="integer", low=needed, high=needed + needed // 2)


def _running(request: PlanRequest, adapter: EngineAdapter, knob: Knob) -> Parameter | None:
    """As many as the workload has at once, and what the engine takes unasked."""
    needed = request.recipe.workload.concurrency
    unasked = adapter.default_settings(request).get(knob.name)
    if not isinstance(unasked, int) or unasked <= needed:
        return None
    return Parameter(
        name=knob.name, cost=knob.cost, kind="choice", choices=(needed, unasked), default_only=unasked
    )  # fmt: skip


def _has_reuse(request: PlanRequest) -> bool:
    """Whether a later prompt of the workload begins as an earlier one did."""
    workload = request.recipe.workload
    return workload.turns > 1 or workload.shared_prefix_tokens > 0


def _range_choices(request: PlanRequest, knob: Knob) -> tuple[Scalar, ...]:
    if knob.name == "cpu_threads":
        # One thread for each core that may be used; hyper-threads add nothing to a job bound by memory.
        cores = max(1, request.hardware.cpu.usable_cores)
        return tuple(sorted({max(1, round(cores * share)) for share in (0.25, 0.5, 0.75, 1.0)}))
    if knob.low is None or knob.high is None:
        return ()
    return tuple(range(int(knob.low), int(knob.high) + 1)) if knob.high - knob.low <= _GRID else ()


def _useful_choices(request: PlanRequest, name: str, choices: Iterable[Scalar]) -> Iterator[Scalar]:
    """Choices that can differ for this workload: chunks up to the first that holds the whole context, and so on."""
    workload = request.recipe.workload
    for one in choices:
        if name == "prefill_chunk_tokens" and int(one) >= 2 * max(256, workload.context_tokens):
            continue
        if name == "embed_on_host" and one is True and (request.shape.tie_embeddings or not request.hardware.gpus):
            continue
        yield one
    if name == "state_dtype":
        yield "model"


def _nearest(value: Any, choices: tuple[Scalar, ...]) -> Scalar:
    numbers = [one for one in choices if isinstance(one, (int, float)) and not isinstance(one, bool)]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and numbers:
        return min(numbers, key=lambda one: abs(one - value))
    return choices[0]
