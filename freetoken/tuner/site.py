"""What the planner knows of a point before any launch: settings, costs, and how many expert slots fit.

`Site` is what the method asks; `PlannedSite` answers from the planner for this machine, and the benchmark's
simulated machines answer in the same form. A point that the planner refuses never reaches a launcher.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from freetoken.planner.budget import Budget, find_gpu
from freetoken.planner.memory import PHASES, ResolvedSettings, SpeedTraits
from freetoken.planner.rates import Rates, resolve_rates
from freetoken.planner.roofline import apply_calibration
from freetoken.planner.solve import budget_at, search, solve_slots
from freetoken.recipe.workload import Workload
from freetoken.tuner.space import Space
from freetoken.tuner.values import Point
from freetoken.units import MIB

if TYPE_CHECKING:
    from freetoken.adapters.base import DefaultSlots, EngineAdapter
    from freetoken.planner.plan import PlanRequest

_SLOT_STRATEGIES = ("offload", "hybrid")
#: A plan is off by less (benchmarks/planner_gpu): what misses more does not run, whatever the engine thinks of it.
SURE_BYTES = 200 * MIB
#: The engine's default of another day is still its default.
SAME_SLOTS = 0.03


class Forecast(NamedTuple):
    """A restart-bound point as the planner sees it, with the most slots that fit by plan.

    Bytes are those of the ledger that decides: VRAM, or RAM on a CPU-only device.
    """

    settings: ResolvedSettings
    traits: SpeedTraits
    #: Fewest and most slots that the engine accepts; (0, 0) where it has none.
    low: int
    high: int
    slot_bytes: int
    #: Planned peak with `settings.expert_slots`, and what may be used of the device, headroom left out.
    peak_bytes: int
    limit_bytes: int
    #: More than 0 where not even the fewest slots fit.
    missing_bytes: int = 0
    #: Kept free by policy, on top of `limit_bytes`.
    headroom_bytes: int = 0

    def peak_at(self, slots: int) -> int:
        """Planned peak with `slots` instead."""
        return self.peak_bytes + (slots - self.settings.expert_slots) * self.slot_bytes

    def slots_within(self, extra_bytes: float) -> int | None:
        """The most slots when every plan turns out `extra_bytes` larger; None where nothing fits then."""
        spare = self.limit_bytes - self.peak_bytes - extra_bytes
        if not self.high or not self.slot_bytes:
            return 0 if spare >= 0 else None
        slots = self.settings.expert_slots + int(spare // self.slot_bytes)
        return None if slots < self.low else min(self.high, slots)


class Site(Protocol):
    """A machine, an engine and a workload, as far as arithmetic goes."""

    @property
    def space(self) -> Space:
        """The knobs."""
        ...

    @property
    def workload(self) -> Workload:
        """What is asked of the server."""
        ...

    @property
    def rates(self) -> Rates:
        """Bandwidths of the machine, measured or guessed."""
        ...

    @property
    def cores(self) -> int:
        """CPU cores that the engine may use."""
        ...

    def forecast(self, point: Point) -> Forecast | None:
        """What the planner says of `point` with its slots solved; None where the engine has no such thing."""
        ...

    def default_point(self) -> Point:
        """The engine's own default."""
        ...

    def own_verdict(self, point: Point) -> DefaultSlots | None:
        """What the engine's own rule says of its default; None for any other point, and for one without such a rule."""
        ...


class PlannedSite:
    """The planner's answers for one request, each asked once."""

    def __init__(self, request: PlanRequest, adapter: EngineAdapter, space: Space) -> None:
        self.request, self.adapter = request, adapter
        self._space = space
        self._known: dict[tuple[Any, ...], Forecast | None] = {}
        self.plan_attempt = search(request, adapter.memory_model)
        settings = self.plan_attempt.budget.settings if self.plan_attempt else None
        self._rates = resolve_rates(request.hardware, find_gpu(request, settings) if settings else None)

    @property
    def space(self) -> Space:
        """The knobs."""
        return self._space

    @property
    def workload(self) -> Workload:
        """The recipe's workload."""
        return self.request.recipe.workload

    @property
    def rates(self) -> Rates:
        """Bandwidths of the device that the plan chose."""
        return self._rates

    @property
    def device(self) -> str:
        """The GPU of the plan by uuid or index, or `cpu`."""
        return (self.plan_attempt.budget.settings.gpu if self.plan_attempt is not None else None) or "cpu"

    @property
    def cores(self) -> int:
        """Cores that this process may use."""
        return max(1, self.request.hardware.cpu.usable_cores)

    def describe_doubt(self) -> str:
        """What the predictions rest on that nobody has measured, in a sentence; "" where that changes nothing."""
        if "strategy" not in self._space or "hybrid" not in self._space["strategy"].choices:
            return ""
        if self._rates.cpu_overlap is not None:
            return ""
        return (
            "PCIe link and CPU experts were never measured at once, so what `hybrid` can do is a guess, and it waits "
            "for `offload`; `ft bench bw` measures them"
        )

    def forecast(self, point: Point) -> Forecast | None:
        """The planner's answer with everything but the slots taken from `point`."""
        key = tuple(point.get(one.name) for one in self._space if one.name != "expert_slots")
        if key not in self._known:
            self._known[key] = self._ask(point)
        return self._known[key]

    def default_point(self) -> Point:
        """The engine's own defaults where its adapter tells them, the planner's choice for the rest."""
        return dict(self._own_default[0])

    @cached_property
    def _own_default(self) -> tuple[Point, DefaultSlots | None]:
        """The default, and what the engine's own rule says of it; None without such a rule."""
        planned = self.plan_attempt.budget.settings.model_dump() if self.plan_attempt else {}
        told = self.adapter.default_settings(self.request)
        if planned.get("cpu_threads") is None:
            planned["cpu_threads"] = self.cores
        point = self._space.clip({**planned, **told})
        found = self.forecast(point)
        if "expert_slots" not in point or found is None or not found.high:
            return point, None
        own = self.adapter.default_slots(self.fix(point), found.settings)
        slots = own.slots if own is not None and own.slots else found.settings.expert_slots
        point["expert_slots"] = self._space["expert_slots"].clip(slots)
        return point, self._doubt(point, own) if own is not None else None

    def _doubt(self, point: Point, own: DefaultSlots) -> DefaultSlots:
        """`own`, refused where it surely runs out of memory with no more than the workload's own prompts to prefill."""
        budget = self.budget(point, own.slots) if own.slots else None
        if budget is None or budget.vram is None:
            return own
        ledger, chunk = budget.vram, budget.settings.prefill_chunk_tokens
        asked = min(chunk, self.workload.first_prompt_tokens)
        transient = ledger.line("prefill_transient")
        spared = transient.bytes * (chunk - asked) // chunk if transient is not None else 0
        peak = max(ledger.phase_bytes(one) - (spared if one == "prefill" else 0) for one in PHASES)
        missing = peak - ledger.available_bytes
        if missing <= SURE_BYTES:
            return own
        words = f"its own rule grants {own.slots:,} expert slots, {missing:,} bytes more than there are by plan"
        return own.model_copy(update={"missing_bytes": missing, "words": words})

    def own_verdict(self, point: Point) -> DefaultSlots | None:
        """What the engine's own rule says of its default, whose slots may differ by what is free from hour to hour."""
        space, (default, own) = self._space, self._own_default
        if own is None or space.start_key(space.canonical(point)) != space.start_key(space.canonical(default)):
            return None
        slots = int(default["expert_slots"])
        return own if abs(int(point["expert_slots"]) - slots) <= SAME_SLOTS * slots else None

    def planned_point(self) -> Point:
        """The planner's own choice."""
        settings = self.plan_attempt.budget.settings.model_dump() if self.plan_attempt else {}
        return self._space.clip(settings)

    def fix(self, point: Point, *, slots: int | None = None) -> PlanRequest:
        """The request with `point` in place of every `auto`; `slots` None leaves them to the planner."""
        recipe = self.request.recipe
        update = {one.name: point[one.name] for one in self._space if one.name != "expert_slots"}
        if slots is not None:
            update["expert_slots"] = slots
        settings = type(recipe.settings).model_validate(recipe.settings.model_dump() | update)
        calibration = self.request.calibration.model_copy(update={"tuned": {}, "tuned_from": None})
        fixed = recipe.model_copy(update={"settings": settings})
        return self.request.model_copy(update={"recipe": fixed, "calibration": calibration})

    def _ask(self, point: Point) -> Forecast | None:
        request, model = self.fix(point), self.adapter.memory_model
        best: tuple[int, Budget] | None = None
        for candidate in model.candidates(request):
            if not self._obeys(candidate, point):
                continue
            attempt = solve_slots(request, model, candidate, self._rates)
            if best is None or attempt.budget.missing_bytes < best[0]:
                best = attempt.budget.missing_bytes, attempt.budget
        return self._forecast(request, best[1]) if best is not None else None

    def _obeys(self, candidate: ResolvedSettings, point: Point) -> bool:
        """The engine has the value that `point` asks for, and did not put another in its place."""
        return all(
            getattr(candidate, one.name) == point[one.name]
            for one in self._space
            if one.name != "expert_slots" and getattr(candidate, one.name) is not None
        )

    def _forecast(self, request: PlanRequest, budget: Budget) -> Forecast:
        model, settings = self.adapter.memory_model, budget.settings
        ledger = budget.vram or budget.ram
        low, high = model.slot_range(request, settings) if settings.strategy in _SLOT_STRATEGIES else (0, 0)
        line = ledger.line("expert_slots")
        slot_bytes = line.bytes // settings.expert_slots if line is not None and settings.expert_slots else 0
        traits = apply_calibration(model.speed_traits(request, settings), request.calibration)
        # What the engine's own rule or another ledger misses counts as if the device's memory missed it.
        missing = budget.missing_bytes
        limit = ledger.available_bytes - ledger.headroom_bytes
        return Forecast(
            settings, traits, low, high, slot_bytes, ledger.peak_bytes, limit, missing, ledger.headroom_bytes
        )

    def budget(self, point: Point, slots: int) -> Budget | None:
        """The exact ledgers of `point` with `slots`; None where the engine has no such thing."""
        found = self.forecast(point)
        if found is None:
            return None
        return budget_at(self.fix(point), self.adapter.memory_model, found.settings, slots)
